"""What lies in a model folder with pickles: weights, what belongs to a model, what does not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headprune.errors import CheckpointError

WEIGHTS, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# of a training that was cut short; what the Trainer, accelerate and DeepSpeed call them
_TRAINING = (
    *("training_args*", "optimizer*", "scheduler*", "rng_state*", "random_states*", "scaler*"),
    "*_states.pt",
)
_OTHER_WEIGHTS = (
    *("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite"),
    "*.index.json",  # of shards
)
_MODULES = "[0-9]*_*"  # folders of sentence-transformers: pooling and dense layers
_CODE = ("*.py", "*.pyc", "*.so", "*.sh")


@dataclass(frozen=True)
class PickleContents:
    """The files of a folder, by name; of its folders those of sentence-transformers only.

    Attributes:
        weights: Pickles of the state dict, in order, each with the safetensors file for it.
        names: Tensors that the index of the shards lists; empty without one.
        modules: Folders of sentence-transformers with pickled weights of their own.
        kept: Other files of the model.
        left_out: Other pickles, weights of other frameworks and code.
    """

    weights: dict[str, str]
    names: frozenset[str]
    modules: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


def survey(folder: Path) -> PickleContents:
    """Finds the pickled weights of a folder, and what else belongs to the model.

    Args:
        folder: With pytorch_model.bin, its shards and their index, or one other pickle.

    Raises:
        CheckpointError: If there are none, safetensors as well, or several that may be meant.
    """
    files = (*folder.iterdir(), *folder.glob(f"{_MODULES}/*"))
    visible = (f.relative_to(folder).as_posix() for f in files if f.is_file() and f.name[0] != ".")
    everything = sorted(visible)
    present = [name for name in everything if "/" not in name]
    safe = [name for name in present if name.endswith(".safetensors")]
    if safe:
        raise CheckpointError(
            f"'{folder}' has safetensors already ({safe[0]}): there is nothing to import."
        )
    pickles = [name for name in present if _matches(name, PICKLES)]
    candidates = [name for name in pickles if not _matches(name, _TRAINING)]
    names: frozenset[str] = frozenset()
    if WEIGHTS in candidates:
        weights = [WEIGHTS]
    elif INDEX in present:
        names, weights = _shards(folder)
    elif len(candidates) == 1:
        weights = candidates
    else:
        raise CheckpointError(_not_one(folder, candidates, pickles))
    # the module's own safetensors are taken where it has both
    modules = [
        name.removesuffix(f"/{WEIGHTS}")
        for name in everything
        if name.endswith(f"/{WEIGHTS}") and name.replace(WEIGHTS, SAFE) not in everything
    ]
    read = {*weights, INDEX, *(f"{module}/{WEIGHTS}" for module in modules)}
    other = [n for n in everything if _matches(n, (*PICKLES, *_OTHER_WEIGHTS, *_CODE))]
    return PickleContents(
        weights={name: _safe_name(name, bool(names)) for name in weights},
        names=names,
        modules=tuple(modules),
        kept=tuple(name for name in everything if name not in other),
        left_out=tuple(name for name in other if name not in read),
    )


def _not_one(folder: Path, candidates: list[str], pickles: list[str]) -> str:
    if candidates:
        return (
            f"'{folder}' has {len(candidates)} pickles that may be its weights: "
            f"{', '.join(candidates)}. Leave one of them there, or call it {WEIGHTS}."
        )
    training = f"; {', '.join(pickles)} hold the state of a training" if pickles else ""
    return f"'{folder}' has no pickled weights, such as {WEIGHTS}{training}."


def _shards(folder: Path) -> tuple[frozenset[str], list[str]]:
    """Names of tensors and of the files that hold them, in order."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        where: dict[str, str] = dict(index["weight_map"])
        files = sorted(set(where.values()))
        strange = next((f for f in files if Path(f).name != f or not _matches(f, PICKLES)), None)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"'{folder / INDEX}' is damaged: {error!r}.") from None
    if strange is not None or not files:
        raise CheckpointError(
            f"'{folder / INDEX}' must name pickles of its own folder, and names {strange!r}."
        )
    lost = [file for file in files if not (folder / file).is_file()]
    if lost:
        raise CheckpointError(f"'{folder}' lacks '{lost[0]}', which {INDEX} names; get it again.")
    return frozenset(where), files


def _safe_name(pickle: str, sharded: bool) -> str:
    """``pytorch_model-00001-of-00002.bin`` becomes ``model-00001-of-00002.safetensors``."""
    stem = Path(pickle).stem.removeprefix("pytorch_")
    return f"{stem}.safetensors" if sharded else SAFE


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(Path(name).match(pattern) for pattern in patterns)
