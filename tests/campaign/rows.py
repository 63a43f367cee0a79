"""Damaged rows: JSONL, CSV, TSV and parquet, compressed as well."""

from __future__ import annotations

import gzip
import io
import random
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.campaign.trees import CONTROL, Mutator, damaged_bytes, damaged_json


def damaged_jsonl(content: bytes, draw: random.Random) -> bytes:
    """Lines with something wrong in one of them, or between them."""
    if draw.random() < 0.3:
        return damaged_bytes(content, draw)
    lines = content.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = damaged_json(lines[at], draw)
    return b"\n".join(lines) + draw.choice((b"\n", b"", b"\n\n\n", b"\r\n", b"{"))


def damaged_rows(content: bytes, draw: random.Random) -> bytes:
    """CSV or TSV with something wrong in its header, a row or a cell."""
    if draw.random() < 0.3:
        return damaged_bytes(content, draw)
    lines = content.split(b"\n")
    at = draw.choice((0, 0, draw.randrange(len(lines))))
    line = lines[at]
    lines[at] = draw.choice(
        (
            *(b"", b'"' + line, line + b',"', line * 2, b",,,,,", line.replace(b"text", b"words")),
            *(b"text,text", b"text\tlabel,x", line.replace(b" ", b"\x00", 1), b"x" * 300_000),
            *(b"\xff\xfe" + line, CONTROL.encode() + line, b"NaN,1e999", b"nan", line + b"\r"),
        )
    )
    return b"\n".join(lines)


def damaged_parquet(content: bytes, draw: random.Random) -> bytes:
    """Damaged bytes, or a sound table of other columns and types."""
    if draw.random() < 0.6:
        return damaged_bytes(content, draw)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(20)]
    columns: tuple[dict[str, Any], ...] = (
        {},
        {"text": []},
        {"text": [None] * 20, "label": [1] * 20},
        {"text": [*texts[:-1], None], "label": [0, 1] * 10},
        {"text": list(range(20)), "label": [1.5] * 20},
        {"text": [[text] for text in texts]},
        {"text": [{"a": text} for text in texts]},
        {"text": [text.encode() for text in texts]},
        {"text": [float("nan")] * 20},
        {"label": [1] * 20},
        {"text": texts, "label": [None] * 20},
        {"text": texts, CONTROL: texts},
        {"text": [""] * 20},
        {"text": [True] * 20},
    )
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(draw.choice(columns)), out)
    return out.getvalue()


def damaged_gz(inside: Mutator) -> Mutator:
    """Damaged as compressed bytes, or in what is compressed."""

    def damaged(content: bytes, draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.5:
            return damaged_bytes(content, draw)
        plain = gzip.decompress(content)
        if kind < 0.53:  # many MB from some tens of kB
            return gzip.compress(plain * (20_000_000 // len(plain)), compresslevel=1, mtime=0)
        if kind < 0.6:
            return content + draw.choice((content, b"x", bytes(100), content[:-9]))
        return gzip.compress(inside(plain, draw), mtime=0)

    return damaged
