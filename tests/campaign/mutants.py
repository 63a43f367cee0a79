"""Damaged files of every kind; those with tensors here, the others beside."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from tests.campaign.rows import damaged_gz, damaged_jsonl, damaged_parquet, damaged_rows
from tests.campaign.trees import (
    CONTROL,
    Mutator,
    damaged_bytes,
    damaged_json,
    damaged_tree,
    damaged_yaml,
    dump,
)


def damaged_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Damaged bytes, a damaged header, a wrong length of it, or numbers that are none."""
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length], content[8 + length :]
    kind = draw.choice(("bytes", "header", "header", "header", "length", "numbers"))
    if kind == "bytes":
        return damaged_bytes(content, draw)
    if kind == "length":
        wrong = draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + header + body
    if kind == "numbers":
        strange = draw.choice(
            (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", bytes(4))
        )
        start = 4 * draw.randrange(max(1, len(body) // 4))
        count = draw.choice((1, 16, len(body) // 4))
        return (
            content[: 8 + length]
            + body[:start]
            + (strange * count)[: len(body) - start]
            + (body[start + 4 * count :])
        )
    tree = json.loads(header)
    if draw.random() < 0.5:
        tree = damaged_tree(tree, draw)
    else:
        _damage_tensor(tree, draw)
    made = dump(tree).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(made)) + made + body


def _damage_tensor(header: dict[str, Any], draw: random.Random) -> None:
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    facts = header[name]
    kind = draw.choice(("dtype", "shape", "offsets", "swap", "drop", "rename", "metadata"))
    if kind == "dtype":
        facts["dtype"] = draw.choice(("F16", "I32", "BOOL", "U8", "F64", "F8_E4M3", "X", "I64"))
    elif kind == "shape":
        shape = facts["shape"]
        facts["shape"] = draw.choice(
            (shape[::-1], [*shape, 1], shape[:-1], [1, *shape], [2**40, 2**40], [-1], [0], [2.5])
        )
    elif kind == "offsets":
        start, end = facts["data_offsets"]
        facts["data_offsets"] = draw.choice(
            ([end, start], [start, end + 4], [start + 1, end], [0, 0], [start, 2**62], [-4, end])
        )
    elif kind == "swap":
        header[name], header[other] = header[other], header[name]
    elif kind == "drop":
        del header[name]
    elif kind == "rename":
        header[draw.choice((f"{name}x", f"../{name}", CONTROL, ""))] = header.pop(name)
    else:
        header["__metadata__"] = draw.choice(({"format": "tf"}, {"format": CONTROL}, {}, {"a": 1}))


MUTATORS: dict[str, Mutator] = {
    "json": damaged_json,
    "yaml": damaged_yaml,
    "jsonl": damaged_jsonl,
    "csv": damaged_rows,
    "tsv": damaged_rows,
    "parquet": damaged_parquet,
    "txt": damaged_bytes,
    "txt.gz": damaged_gz(damaged_bytes),
    "jsonl.gz": damaged_gz(damaged_jsonl),
    "safetensors": damaged_safetensors,
    "bin": damaged_bytes,
}


def mutator_of(name: str) -> Mutator:
    """The mutator for a file, by its ending; bytes where nothing better is known."""
    lowered = name.lower()
    if lowered.endswith(".gz"):
        return MUTATORS["txt.gz" if lowered.endswith("txt.gz") else "jsonl.gz"]
    return MUTATORS.get(lowered.rpartition(".")[2], damaged_bytes)
