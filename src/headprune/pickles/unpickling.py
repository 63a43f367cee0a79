"""Reads pickled state dicts and writes them as safetensors: the work of a confined process.

Every name of the pickle comes over, each with its own contiguous copy of the numbers, bit for bit:
safetensors knows no sharing, and a view of a larger storage must not bring all of it along. Only
where the model's class ties one name to another, both are there and hold the same bytes, the first
is left out: loading ties it again. ``save_pretrained`` does the same. Names that share their
storage and that no class ties are kept, for nothing would bring them back.
"""

from __future__ import annotations

import re
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.io.markup import sentence
from headprune.io.streaming import DTYPES, bytes_of, equal_bytes, write
from headprune.io.writing import write_error
from headprune.pickles.sandbox import Say, confine

# A file of honest weights is as large as its tensors, or smaller by names that share a storage.
_MOST_TIMES_LARGER = 16
_CPU_S, _CPU_S_PER_GIB = 300, 120  # several times what it takes


def main(job: dict[str, Any], say: Say) -> None:
    """Reads the pickles of one state dict and writes a safetensors file for each.

    Args:
        job: "files", pairs of a pickle and the safetensors file to write; "tied", names that are
            left out if they hold the same as another name; "output", the folder to name in errors.
        say: Told "protections"; "stage" before every file; "written" at the end, what ``describe``
            says of every tensor by file and name; "tied", which names were left out; "wrapper",
            the key under which the tensors were found, or None.

    Raises:
        CheckpointError: If a file is damaged, asks for more than tensors, or holds other things.
    """
    sources, targets = [Path(s) for s, _ in job["files"]], [Path(t) for _, t in job["files"]]
    read_bytes = sum(source.stat().st_size for source in sources)
    written = {}
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(target.open("wb")) for target in targets]
            say({"protections": confine(_CPU_S + _CPU_S_PER_GIB * read_bytes // 2**30)})
            shards = _read_all(sources, say)
            tied = _leave_out_tied(_holders(shards, [s.name for s in sources]), job["tied"])
            tensors = [tensor for shard in shards for tensor in shard.values()]
            _refuse_larger(sum(t.numel() * t.element_size() for t in tensors), read_bytes)
            for target, file, shard in zip(targets, files, shards, strict=True):
                say({"stage": f"writing {target.name}"})
                written[target.name] = write(shard, file)
    except OSError as error:  # reading has its own
        raise write_error(Path(job["output"]), error) from None
    say({"written": written, "tied": tied})


def _read_all(sources: list[Path], say: Say) -> list[dict[str, Tensor]]:
    shards = []
    for source in sources:
        say({"stage": f"reading {source.name}"})
        wrapper, tensors = tensors_in(read(source), source.name)
        shards.append(tensors)
    say({"wrapper": wrapper})
    return shards


def read(file: Path) -> Any:
    """Unpickles a file of ``torch.save``, new or old, with tensors and plain containers only.

    Raises:
        CheckpointError: If it asks for anything else, or is damaged.
    """
    try:
        mappable = _stored_in_zip(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mappable)
    except CheckpointError:
        raise
    except Exception as error:  # bytes without meaning fail in any way, and may ask for any memory
        asks = re.search(r"GLOBAL ([^\s`]+)", str(error))
        if asks:
            raise CheckpointError(
                f"'{file.name}' asks for '{sentence(asks[1])}' when it is read, and plain weights "
                "need no such thing; nothing of it was run. Where you trust the file, load it and "
                "save the state_dict() of its model; else get the model from elsewhere."
            ) from None
        why = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
        raise CheckpointError(
            f"'{file.name}' could not be read: {sentence(why.splitlines()[0]).rstrip('.')}. It is "
            "damaged, or no file of torch.save; get it again."
        ) from None


def _stored_in_zip(file: Path) -> bool:
    """Whether tensors can be mapped from the file. Checks the sums of a zip, as torch does not.

    Raises:
        CheckpointError: If a part of it is not what was written, or far larger than the file.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        _refuse_larger(sum(part.file_size for part in parts), file.stat().st_size)
        for part in parts:
            if part.CRC:  # 0: written without sums
                with archive.open(part) as stream:
                    while stream.read(1 << 20):  # raises BadZipFile at the end
                        pass
        return all(part.compress_type == zipfile.ZIP_STORED for part in parts)


def tensors_in(content: Any, name: str) -> tuple[str | None, dict[str, Tensor]]:
    """The tensors of a state dict, or of the only one that a dict around it holds.

    Args:
        content: What a file holds.
        name: Name of the file.

    Returns:
        The key that it was found under, None if there is none; and the tensors by name.

    Raises:
        CheckpointError: Naming what else was found.
    """
    if _is_state_dict(content):
        return None, dict(content)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"'{name}' holds a {type(content).__name__}, and a state dict is needed: tensors by "
            "name."
        )
    inside = [key for key, value in content.items() if _is_state_dict(value)]
    tensors = [key for key, value in content.items() if isinstance(value, Tensor)]
    if len(inside) == 1 and not tensors:
        return sentence(str(inside[0])), dict(content[inside[0]])
    if tensors:
        others = [key for key in content if key not in tensors or not isinstance(key, str)]
        raise CheckpointError(
            f"'{name}' holds {len(tensors)} tensors and beside them {_listed(others)}, which "
            "safetensors cannot hold. Save a state dict without them."
        )
    raise CheckpointError(
        f"'{name}' holds {len(inside) or 'no'} dicts of tensors, and exactly one is needed; its "
        f"keys are {_listed(list(content))}. Save the state dict alone."
    )


def _is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    )


def _listed(keys: list[Any]) -> str:
    shown = [f"'{sentence(key)}'" if isinstance(key, str) else type(key).__name__ for key in keys]
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return (", ".join(shown[:8]) or "none") + more


def _holders(shards: list[dict[str, Tensor]], files: list[str]) -> dict[str, dict[str, Tensor]]:
    """The shard of every name; refuses what safetensors cannot hold, and names given twice."""
    holders: dict[str, dict[str, Tensor]] = {}
    for shard, file in zip(shards, files, strict=True):
        for name, tensor in shard.items():
            if name in holders:
                raise CheckpointError(f"'{sentence(name)}' is in '{file}' and in another shard.")
            if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"'{sentence(name)}' of '{file}' is a tensor that safetensors cannot hold: "
                    f"{tensor.layout}, {tensor.dtype}, on {tensor.device}."
                )
            holders[name] = shard
    return holders


def _leave_out_tied(holders: dict[str, dict[str, Tensor]], tied: dict[str, str]) -> dict[str, str]:
    """Takes out, in place, names that say the same as those that they are tied to."""
    left_out = {}
    for target, source in tied.items():
        if {target, source} <= holders.keys() and target != source:
            one, other = holders[target][target], holders[source][source]
            if one.dtype == other.dtype and one.shape == other.shape and _same(one, other):
                del holders.pop(target)[target]
                left_out[target] = source
    return left_out


def _same(one: Tensor, other: Tensor) -> bool:
    same_view = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_view or equal_bytes(bytes_of(one), bytes_of(other))


def _refuse_larger(unpacked: int, packed: int) -> None:
    if unpacked > _MOST_TIMES_LARGER * packed + (1 << 20):
        raise CheckpointError(
            f"The pickle has {packed:,} bytes and would unpack to {unpacked:,}: no weights are "
            "packed like that."
        )
