"""The commands that serve a result, of the engines that hold its shape."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from headprune.config import Target
from headprune.engines.targets import EMPTY, EVEN, RAGGED, TARGETS, EngineShapes, shapes_of
from headprune.errors import HeadpruneError
from headprune.exporting.llama_cpp.tokenizer import vocabulary
from headprune.exporting.source import ExportSource, open_source
from headprune.io.shell import command
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape
from headprune.schemas.records import Heads


def _vllm(source: ExportSource, folder: Path, shapes: frozenset[str]) -> str:
    quoted = shlex.quote(str(folder))
    if shapes == {EVEN}:
        return f"vllm serve {quoted}"
    flags = "--model-impl transformers --trust-remote-code"
    if not shapes & {RAGGED, EMPTY}:
        return f"vllm serve {quoted} {flags}"
    out = folder.with_name(f"{folder.name}-vllm")
    export = command("export", folder, out, to="vllm")
    return f"{export} && vllm serve {shlex.quote(str(out))} {flags}"


def _llama_cpp(source: ExportSource, folder: Path, shapes: frozenset[str]) -> str:
    like = None
    try:
        vocabulary(source, like)
    except HeadpruneError:  # its tokenizer is none that is recognised
        like = "ORIGINAL.gguf"
    out = folder.with_name(f"{folder.name}-gguf")
    export = command("export", folder, out, to="gguf", like=like)
    return f"{export} && llama-server -m {shlex.quote(str(out / 'model.gguf'))}"


SERVERS: tuple[tuple[EngineShapes, Callable[[ExportSource, Path, frozenset[str]], str]], ...] = (
    (TARGETS[Target.LLAMA_CPP], _llama_cpp),
    (TARGETS[Target.VLLM], _vllm),
)


def shapes_in(manifest: Manifest) -> frozenset[str]:
    """What an engine must be able to hold for a result."""
    groups = [_groups(heads) for heads in manifest.layout.values()]
    return shapes_of(groups, manifest.shape is Shape.NATIVE)


def _groups(heads: Heads) -> tuple[int, ...]:
    if heads.group_sizes is not None:
        return heads.group_sizes
    count = len(heads.kv_heads)
    return (len(heads.query_heads) // count,) * count if count else ()


def serving(manifest: Manifest, folder: Path, called: Path) -> Iterator[tuple[str, str]]:
    """Engines that take a result that generates text, each with the command that serves it.

    Args:
        manifest: Its record.
        folder: Where it lies.
        called: What the command calls it.
    """
    if manifest.auto_class != "AutoModelForCausalLM":
        return
    try:
        source = open_source(folder)
    except HeadpruneError:  # it needs code of its own, which no engine here was tried with
        return
    shapes = shapes_in(manifest)
    for engine, line in SERVERS:
        if shapes <= engine.holds(source.net):
            yield engine.name.partition(" (")[0].partition(",")[0], line(source, called, shapes)
