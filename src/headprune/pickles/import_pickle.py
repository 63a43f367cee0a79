"""headprune import-pickle: from pickled weights to a folder with safetensors."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from headprune._version import __version__
from headprune.errors import CheckpointError
from headprune.io import hub
from headprune.io.markup import sentence
from headprune.io.outputs import claims_output, whole_folder
from headprune.io.ownership import IMPORTED
from headprune.io.streaming import bytes_of, describe
from headprune.model.refusals import refuse_links
from headprune.model.ties import tied_names
from headprune.pickles.pickles import SAFE, SAFE_INDEX, WEIGHTS, survey
from headprune.pickles.sandbox import converse

Stage = Callable[[str], None]

# of a repository of the hub: code, and weights of other frameworks
_NOT_FETCHED = ["*.py", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.tflite", "onnx/*", "openvino/*"]
READER = "headprune.pickles.unpickling"  # what runs in the confined process


@dataclass(frozen=True)
class Imported:
    """What came over.

    Attributes:
        output: The new folder.
        files: Pickle to safetensors file.
        modules: Folders inside, of sentence-transformers, whose pickles were converted as well.
        tensors: How many; those of modules are not counted.
        weight_bytes: Bytes of their numbers.
        dtypes: Tensors of each element type.
        tied: Names left out, as loading ties them to others: to which.
        wrapper: The key under which the tensors were found; None if there was none.
        left_out: Other pickles, weights of other frameworks and code, which stayed behind.
        protections: What held the process that read the pickles.
    """

    output: Path
    files: dict[str, str]
    modules: tuple[str, ...]
    tensors: int
    weight_bytes: int
    dtypes: dict[str, int]
    tied: dict[str, str]
    wrapper: str | None
    left_out: tuple[str, ...]
    protections: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "output": str(self.output)}


@claims_output("model")
def import_pickle(
    model: str | Path,
    output: Path,
    overwrite: bool = False,
    on_stage: Stage = lambda stage: None,
) -> Imported:
    """Turns a model folder whose weights are pickles into one with safetensors.

    The pickles are read by torch's restricted unpickler (``weights_only``) in a process of its own
    that gave up its privileges before; see ``headprune.pickles.sandbox``. Names, element types
    and numbers stay as they are. What else belongs to the model is copied; code is not.

    Args:
        model: Folder with config.json and pytorch_model.bin, its shards, or one other pickle; or a
            hub id.
        output: Folder to write; it appears whole or not at all.
        overwrite: Replace an existing output.
        on_stage: Called with a few words before every stage.

    Raises:
        CheckpointError: If there is nothing to import, a pickle is damaged or asks for more than
            tensors, or the folder cannot be read or written.
    """
    folder = _on_this_machine(model, on_stage)
    _check_folder(folder)
    contents = survey(folder)
    with whole_folder(output) as new:
        for name in contents.kept:
            (new / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, new / name)
        told = _convert(folder, new, contents.weights, tied_names(folder), output, on_stage)
        if contents.names:
            _refuse_missing(folder, contents.names, told)
            _write_index(new, told["written"])
        for module in contents.modules:
            (new / module).mkdir(exist_ok=True)
            _convert(folder / module, new / module, {WEIGHTS: SAFE}, {}, output, on_stage)
        _write_record(new)
    described = [facts for tensors in told["written"].values() for facts in tensors.values()]
    return Imported(
        output=output,
        files=contents.weights,
        modules=contents.modules,
        tensors=len(described),
        weight_bytes=sum(map(_bytes_of, described)),
        dtypes=dict(Counter(dtype for dtype, *_ in described).most_common()),
        tied=told["tied"],
        wrapper=told["wrapper"],
        left_out=contents.left_out,
        protections=("weights_only", "process of its own", *told["protections"]),
    )


def _on_this_machine(model: str | Path, on_stage: Stage) -> Path:
    """The folder itself, or where the hub's cache has the files of an id."""
    if not hub.may_be_id(model):
        return Path(model)
    on_stage("asking the hub")
    try:
        with hub.asked_once(model):
            return Path(snapshot_download(str(model), ignore_patterns=_NOT_FETCHED))
    except MemoryError:
        raise
    except Exception as error:  # of whichever client this version of huggingface_hub has
        why = "there is none of that name in its cache" if hub.why_not() else str(error)
        raise CheckpointError(
            f"'{model}' is no folder, and the hub did not give it ({sentence(why)}). Check the "
            "name and the network."
        ) from None


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"'{folder}' is no folder; give one with the pickled weights and their config.json."
        )
    refuse_links(folder)
    try:
        described = isinstance(json.loads((folder / "config.json").read_text("utf-8")), dict)
    except OSError:
        raise CheckpointError(
            f"'{folder}' has no config.json, so it is no model folder. Copy it there from the "
            "model that the weights belong to."
        ) from None
    except (ValueError, RecursionError):
        described = False
    if not described:
        raise CheckpointError(f"'{folder / 'config.json'}' is damaged; get it again.")


def _convert(
    folder: Path,
    target: Path,
    weights: dict[str, str],
    tied: dict[str, str],
    output: Path,
    on_stage: Stage,
) -> dict[str, Any]:
    """Has the pickles of one state dict converted, and checks every tensor that was written."""
    files = [(str(folder.absolute() / p), str(target.absolute() / s)) for p, s in weights.items()]
    told: dict[str, Any] = {}
    on_stage("starting a process without privileges")
    for message in converse(READER, {"files": files, "tied": tied, "output": str(output)}):
        if "stage" in message:
            on_stage(sentence(message["stage"]))
        told |= message
    if told.get("written", {}).keys() != set(weights.values()):
        raise CheckpointError(f"The process that read '{folder}' said nothing of its weights.")
    for name, expected in told["written"].items():
        on_stage(f"checking {name}")
        check_written(target / name, expected)
        if not expected:
            (target / name).unlink()  # a shard that held nothing but tied names
    return told


def check_written(file: Path, expected: dict[str, list[Any]]) -> None:
    """Compares a safetensors file with what was read, tensor by tensor and bit by bit.

    Args:
        file: As safetensors reads it.
        expected: What ``describe`` said of every tensor of the pickle.

    Raises:
        CheckpointError: Naming the first tensor that differs.
    """
    try:
        with safe_open(str(file), framework="pt") as opened:
            names = set(opened.keys())
            for name in sorted(names | expected.keys()):
                tensor = opened.get_tensor(name) if name in names else None
                found = None if tensor is None else describe(tensor, bytes_of(tensor))
                if found != expected.get(name):
                    raise CheckpointError(
                        f"'{sentence(name)}' is not in '{file.name}' as it was in the pickle: "
                        f"{found}, not {expected.get(name)}. Nothing was kept; is the disk sound?"
                    )
    except SafetensorError as error:
        raise CheckpointError(f"'{file.name}' was written and does not load: {error}.") from None


def _bytes_of(facts: list[Any]) -> int:
    dtype, shape, _ = facts
    elements: int = math.prod(shape)
    return elements * cast(torch.dtype, getattr(torch, dtype)).itemsize


def _refuse_missing(folder: Path, names: frozenset[str], told: dict[str, Any]) -> None:
    found = {name for tensors in told["written"].values() for name in tensors}
    missing = sorted(names - found - told["tied"].keys())
    if missing:
        raise CheckpointError(
            f"The shards of '{folder}' lack {len(missing)} tensors of their index, "
            f"'{sentence(missing[0])}' the first. Get the folder again."
        )


def _write_record(folder: Path) -> None:
    """Writes what the new folder is known by."""
    files = sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )
    record = {"schema_version": 1, "headprune_version": __version__, "files": files}
    (folder / IMPORTED).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _write_index(folder: Path, written: dict[str, dict[str, list[Any]]]) -> None:
    where = {name: file for file, tensors in written.items() for name in sorted(tensors)}
    total = sum(_bytes_of(facts) for tensors in written.values() for facts in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
