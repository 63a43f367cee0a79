"""Try every model type of transformers on a tiny twin, and write docs/reference/recognised.md.

    python scripts/try_families.py [TYPE ...]

Every type that generates text, fills in masks or answers to images is built from its default
config. Its heads are recognised, gated, cut and read back; a wrong cut must fail. With names, only
these are tried and nothing is written.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from headprune.family import FAMILIES
from headprune.model.attention import attention_of
from headprune.model.skeleton import without_weights
from headprune.result.twins import prove

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recognised.md"
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
SECONDS = 90  # for one type
# for settings that some classes leave at None
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 4, "intermediate_size": 256, "vocab_size": 256, "pad_token_id": 0},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 8},
    **{"num_experts": 8, "moe_intermediate_size": 64, "default_language": "en_XX"},
}
WITHOUT = "no attention with heads"


class TooLong(BaseException):
    """The time of one type is up."""


def stop(*_: Any) -> None:
    """Raise ``TooLong``."""
    raise TooLong


def default(name: str, task: str) -> PreTrainedModel:
    """Return a model of a type for a task, by its default config and without weights."""
    try:
        return built(name, task, {})
    except Exception:  # some defaults are None
        cls: Any = CONFIG_MAPPING[name]
        unset = {f.name for f in dataclasses.fields(cls) if f.default is None}
        if hasattr(cls(), "qk_rope_head_dim"):
            unset -= {"head_dim", "num_key_value_heads"}  # latent attention has its own
        return built(name, task, {key: SIZES[key] for key in SIZES if key in unset})


def built(name: str, task: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Return a model of a type for a task, by a config and without weights."""
    cls: Any = CONFIG_MAPPING[name]
    if task == "CAUSAL_LM" and hasattr(cls(), "is_decoder") and not cls().is_encoder_decoder:
        settings = {**settings, "is_decoder": True}
    config = cls(**settings)
    model: Any = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    if model.config_class is not type(config):
        config = config.get_text_config()
    config.architectures = [model.__name__]
    return without_weights(model, config)


def tried(job: tuple[str, str]) -> tuple[str, str]:
    """Return a type, and "" if it is proven, or else the reason."""
    name, task = job
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        skeleton = default(name, task)
        attention_of(skeleton)
        prove(skeleton)
    except TooLong:
        return name, f"its twin takes more than {SECONDS} s on one core"
    except Exception as error:  # whatever a class does to itself
        said = " ".join(str(error).split())
        missing = "no module of its" in said or "no class for it" in said
        return name, WITHOUT if missing else f"{type(error).__name__}: {said}"
    finally:
        signal.alarm(0)
    return name, ""


def page(results: dict[str, str]) -> str:
    """Return the page: how many, which, and why the others are not."""
    proven = [name for name, why in results.items() if not why]
    without = [name for name, why in results.items() if why == WITHOUT]
    others = {n: why for n, why in results.items() if why and why != WITHOUT}
    rows = "\n".join(f"| {name} | {_short(why)} |" for name, why in sorted(others.items()))
    read = _block(name for name in proven if name not in FAMILIES)
    share = f"{len(proven)} of {len(proven) + len(others)}"
    return f"""# Model types that were tried

`python scripts/try_families.py` takes every type of transformers {transformers.__version__} that
generates text, fills in masks or answers to images. It builds the default config, and proves a tiny
twin: gated = cut = reloaded, with a cache, padded, and with a wrong cut that must fail.

{share} types with heads are proven. {len(FAMILIES)} types have a [row](families.md).
These are recognised by structure:

{read}

These are not proven:

| type | reason |
| --- | --- |
{rows}

{len(without)} types have no attention with heads that headprune knows:

{_block(without)}
"""


def _block(names: Iterable[str]) -> str:
    lines = textwrap.fill(" ".join(sorted(names)), 100, break_on_hyphens=False)
    return f"```text\n{lines}\n```"


def _short(why: str) -> str:
    for long in ("FamilyError: ", "CheckpointError: ", "It needs a row in headprune's table."):
        why = why.replace(long, "")
    _, _, why = why.rpartition("no tiny twin of it could be cut ")
    return why.strip("( )").replace("|", "\\|")[:200]


def main() -> None:
    """Try the types, and write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    only = sys.argv[1:]
    jobs = [
        (name, task)
        for task in TASKS
        for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if not only or name in only
    ]
    results: dict[str, str] = {}
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=20) as pool:
        for number, (name, why) in enumerate(pool.imap_unordered(tried, jobs), 1):
            print(f"{number} of {len(jobs)}  {name}: {why or 'proven'}", flush=True)
            # one task of a type is enough
            if results.get(name, WITHOUT) and (why != WITHOUT or name not in results):
                results[name] = why
    if not only:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
