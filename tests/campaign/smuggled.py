"""Code where a stranger can put it: in model folders and trainings to go on with."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.cases import Case
from tests.campaign.facts import link_originals
from tests.campaign.originals import MEASURING, REFITTING, RESUME, SCORING, TRAINING
from tests.campaign.watched import Outcome, command

CANARY = "pwned"  # the folder that the code makes where it runs


class _Bomb:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def _bomb(file: Path) -> None:
    file.write_bytes(pickle.dumps({"model.weight": _Bomb(file.parent / CANARY)}))


def _script(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import os\nos.mkdir({str(file.parent / CANARY)!r})\ngenerate = Evil = None\n")


def _edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _auto_map(model: Path) -> None:
    _script(model / "evil.py")
    named = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    _edit(model / "config.json", auto_map=dict.fromkeys(named, "evil.Evil"))


def _unknown_type(model: Path) -> None:
    _auto_map(model)
    _edit(model / "config.json", model_type="evil", architectures=["Evil"])


def _tokenizer(model: Path) -> None:
    _script(model / "evil.py")
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    _edit(model / "tokenizer_config.json", **code)


def _custom_generate(model: Path) -> None:
    _script(model / "custom_generate" / "generate.py")
    (model / "custom_generate" / "requirements.txt").touch()


def _runtime(model: Path) -> None:
    """Code under the name of the file that travels with results."""
    _script(model / "modeling_headprune.py")
    named = {
        "AutoModelForCausalLM": "modeling_headprune.Evil",
        "AutoModel": "modeling_headprune.Evil",
    }
    _edit(model / "config.json", auto_map=named)


def _runtime_imports(model: Path) -> None:
    """A neighbour that the runtime file might import."""
    for name in ("torch.py", "transformers.py", "headprune.py", "sitecustomize.py", "__init__.py"):
        _script(model / name)


def _pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    _bomb(model / "pytorch_model.bin")


def _pickle_beside(model: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        _bomb(model / name)


def _pickle_in_index(model: Path) -> None:
    _bomb(model / "evil.bin")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "evil.bin"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").rename(model / "other.safetensors")


def _adapter(model: Path) -> None:
    _auto_map(model)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(model), "auto_mapping": {}}
    (model / "adapter_config.json").write_text(json.dumps(adapter))


def _template(model: Path) -> None:
    code = "{{ cycler.__init__.__globals__.os.mkdir('" + str(model / CANARY) + "') }}"
    (model / "chat_template.jinja").write_text(code)
    _edit(model / "tokenizer_config.json", chat_template=code)


def _kernel(model: Path) -> None:
    _edit(model / "config.json", _attn_implementation="evil/kernel", quantization_config={"a": 1})


CARRIERS: dict[str, Callable[[Path], None]] = {
    **{"auto_map": _auto_map, "unknown type": _unknown_type, "tokenizer": _tokenizer},
    **{"custom_generate": _custom_generate, "runtime": _runtime, "imports": _runtime_imports},
    **{"pickle": _pickle, "pickle beside": _pickle_beside, "pickle in index": _pickle_in_index},
    **{"adapter": _adapter, "template": _template, "kernel": _kernel},
}
_DATA = "--data text.txt"
_TRAIN = TRAINING.replace("--steps 6", "--steps 2")
_COMMANDS = (
    "inspect evil",
    "verify evil",
    "prune evil --plan plan.json out",
    f"prune evil --plan plan.json --refit text.txt {REFITTING} out",
    "convert-gqa evil --kv-heads 1 out",
    f"score evil {_DATA} --criterion fisher {SCORING} out",
    f"evaluate evil {_DATA} --no-speed {MEASURING}",
    f"evaluate llama {_DATA} --against evil --no-speed {MEASURING}",
    f"check evil {_DATA} {MEASURING} --limit 'perplexity <= 1e9'",
    f"train-gates evil {_DATA} --target-heads 0.5 {_TRAIN} out",
    f"heal evil --teacher llama {_DATA} {_TRAIN} out",
    f"heal llama --teacher evil {_DATA} {_TRAIN} out",
    "migrate evil out",
    "report evil out.html",
    "verify result --against evil",
)


def code(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    link_originals(here, originals)
    name = list(CARRIERS)[case.number % len(CARRIERS)]
    at = case.number // len(CARRIERS) * 5 + case.number + 7 * case.seed
    line = _COMMANDS[at % len(_COMMANDS)]
    # results are loaded by another route than other models
    source = "result" if line.startswith(("verify", "report")) or case.number % 4 == 3 else "llama"
    shutil.copytree(originals / source, here / "evil")
    CARRIERS[name](here / "evil")
    return f"{name} in a copy of {source}, {line}", command(line, here)


def resume(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    """A training that goes on with what a stranger left."""
    name = list(RESUME)[case.number % 2]
    shutil.copytree(originals / f"resume-{name}", here / "work", symlinks=True)
    names = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "training_args.bin"}
    folders = sorted(here.glob("work/out*/**/checkpoint-*"))
    names |= {file.name for folder in folders for file in folder.iterdir()}
    chosen = sorted(names) if case.number < 2 else [case.random().choice(sorted(names))]
    for folder in folders:
        for file in chosen:
            _bomb(folder / file)
    return f"{chosen}, {RESUME[name]}", command(RESUME[name], here / "work")
