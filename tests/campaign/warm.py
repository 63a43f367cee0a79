"""Everything that commands import, imported once, so that a forked process starts at once."""

import gc
import importlib
import pkgutil

# what is imported on first use, deep inside a command
_LATE = (
    *("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.pyplot"),
    *(
        "pandas",
        "pyarrow.parquet",
        "datasets.packaged_modules.json.json",
        "evaluate",
        "scipy.optimize",
    ),
    *("transformers.trainer", "transformers.integrations", "accelerate", "peft", "jinja2", "git"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gpt2", "t5")),
    "transformers.models.auto.modeling_auto",
)


def up():
    """Imports headprune and what it imports."""
    import torch

    import headprune
    from headprune import terminal

    torch.set_num_threads(1)
    terminal.quiet_libraries()
    for found in pkgutil.walk_packages(headprune.__path__, "headprune."):
        # a script for another process, and one that registers itself with pytest
        if found.name in ("headprune.__main__", "headprune.pytest_plugin"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as missing:
            if (missing.name or "headprune").startswith("headprune"):
                raise  # others are of an engine that is not installed
    for name in _LATE:
        try:
            importlib.import_module(name)
        except ImportError:  # another version, or not installed: it comes when it is needed
            continue
    # what is here stays: a forked process then shares its memory, and looks through none of it
    gc.collect()
    gc.freeze()
