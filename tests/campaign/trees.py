"""Damaged bytes, JSON and YAML: pure functions of what a file holds and of draws."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

Mutator = Callable[[bytes, random.Random], bytes]


class Raw(str):
    """Text that stands in a file as it is."""


DEEP = 100_000
CONTROL = "\x1b]0;pwned\x07\x1b[2J"
# what may stand where something else is meant
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e300),
    *("", "x", "0", "-1", "cpu", "../../../etc/passwd", "/etc/passwd", "__class__", "a" * 5000),
    *(CONTROL, "\n::error ::pwned", "##[error]pwned", "<script>pwned</script>", "\ud800", "\x00"),
    *([], {}, [[]], [1.5], [-1], [0, 0], [None], ["x"], {"a": 1}, {"": None}, [[1.5]], [True]),
    *(Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("9" * 5000), Raw("-0")),
    *(Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * DEEP)),
)


def _hostile(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(HOSTILE))  # what is put into a file may be damaged again


def dump(node: Any) -> str:
    """JSON, in which raw text stands as it is."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {dump(v)}" for k, v in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(dump, node)) + "]"
    return json.dumps(node)


# ---- bytes


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits flipped, a piece cut off, doubled, taken out, zeroed, moved or made up; or nothing."""
    data, size = bytearray(content), max(len(content), 1)
    start = draw.randrange(size)
    end = min(size, start + draw.choice((1, 4, 16, 64, 512)))
    piece = bytes(data[start:end])
    kind = draw.choice(
        ("flip", "flip", "cut", "cut", "double", "out", "zero", "move", "made", "no")
    )
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(size)
            if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[start:]
    elif kind == "double":
        data[start:start] = piece
    elif kind == "out":
        del data[start:end]
    elif kind == "zero":
        data[start:end] = bytes(len(piece))
    elif kind == "move":
        del data[start:end]
        at = draw.randrange(len(data) + 1)
        data[at:at] = piece
    elif kind == "made":
        data[start:end] = draw.randbytes(len(piece))
    else:
        data = bytearray(
            draw.choice((b"", b"\n", b"\x00", b"\xff\xfe", b"null", b"{", b"\xef\xbb\xbf"))
        )
    return bytes(data)


# ---- JSON and YAML


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside."""
    inside: Any = ()
    if isinstance(node, dict):
        inside = list(node.items())
    elif isinstance(node, list):
        inside = list(enumerate(node[:40]))
    for key, child in inside:
        yield (*above, key)
        yield from places(child, (*above, key))


def damaged_tree(tree: Any, draw: random.Random) -> Any:
    """The same content with one to three things wrong."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        everywhere = list(places(tree))
        if not everywhere:
            return _hostile(draw)
        *above, key = draw.choice(everywhere)
        parent = tree
        for step in above:
            parent = parent[step]
        _damage(parent, key, draw)
    return tree


def _damage(parent: Any, key: Any, draw: random.Random) -> None:
    value = parent[key]
    kind = draw.choice(
        ("other", "other", "other", "drop", "rename", "near", "list", "twice", "add")
    )
    if kind == "drop":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        del parent[key]
        parent[draw.choice((f"{key}x", str(key).upper(), "", CONTROL, "__proto__"))] = value
    elif kind == "near" and isinstance(value, (int, float)):
        parent[key] = draw.choice((value + 1, value - 1, -value, value * 10, value / 2, str(value)))
    elif kind == "near" and isinstance(value, str):
        parent[key] = draw.choice((value[:-1], value * 2, value + "\u202e", "../" + value, [value]))
    elif kind == "list" and isinstance(value, list) and value:
        at, to = draw.randrange(len(value)), draw.randrange(len(value))
        value[at], value[to] = value[to], value[at]
        draw.choice((value.reverse, value.pop, lambda: value.append(value[at]), lambda: None))()
    elif kind == "twice" and isinstance(parent, dict):
        again = {key: _hostile(draw)}
        parent[key] = Raw(f"{dump(value)}, {dump(again)[1:-1]}")
    elif kind == "add" and isinstance(parent, dict):
        parent[draw.choice(("extra", "auto_map", "schema_version", "x\n::error ::"))] = _hostile(
            draw
        )
    else:
        parent[key] = _hostile(draw)


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON file with something wrong: in its content, or in its bytes."""
    if draw.random() < 0.2:
        return damaged_bytes(content, draw)
    return dump(damaged_tree(json.loads(content), draw)).encode("utf-8", "surrogatepass")


_YAML = (
    b"!!python/object/apply:os.system ['touch pwned']\n",
    b"&a [*a]\n",
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\n",
    b"\tkey: value\n",
    b"key: 'open\n",
    b"? [a, b]\n: c\n",
    b"<<: 1\n",
    b"--- 1\n--- 2\n",
    b"key: 2001-13-45\n",
    b"key: 1:1:1:1:1\n",
    b"key: .nan\n",
    b"[" * DEEP,
    b"- " * 20_000,
)


def damaged_yaml(content: bytes, draw: random.Random) -> bytes:
    """A YAML file with something wrong."""
    kind = draw.random()
    if kind < 0.15:
        return damaged_bytes(content, draw)
    if kind < 0.25:
        piece, lines = draw.choice(_YAML), content.splitlines(keepends=True)
        at = draw.randrange(len(lines) + 1)
        return draw.choice((piece, b"".join([*lines[:at], piece, *lines[at:]])))
    tree = damaged_tree(yaml.safe_load(content), draw)
    text = dump(tree)  # JSON is YAML; names of strange numbers differ
    return text.replace("NaN", ".nan").replace("Infinity", ".inf").encode("utf-8", "surrogatepass")
