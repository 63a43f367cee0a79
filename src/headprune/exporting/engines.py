"""The commands that serve a result, for each engine that holds its shape."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from headprune.config import Target
from headprune.errors import HeadpruneError
from headprune.exporting.source import open_source
from headprune.io.shell import command
from headprune.planning.targets import EMPTY, EVEN, RAGGED, TARGETS, shapes_of
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape
from headprune.schemas.records import Heads


def shapes_in(manifest: Manifest) -> frozenset[str]:
    """Return the shapes that an engine must hold for a result."""
    groups = [_groups(heads) for heads in manifest.layout.values()]
    return shapes_of(groups, manifest.shape is Shape.NATIVE)


def _groups(heads: Heads) -> tuple[int, ...]:
    if heads.group_sizes is not None:
        return heads.group_sizes
    count = len(heads.kv_heads)
    return (len(heads.query_heads) // count,) * count if count else ()


def serving(manifest: Manifest, folder: Path, called: Path) -> Iterator[tuple[str, str]]:
    """Yield the engines that serve a result which generates text, each with its command.

    Args:
        manifest: The record of the result.
        folder: The folder of the result.
        called: The folder as the command names it.
    """
    if manifest.auto_class != "AutoModelForCausalLM":
        return
    try:
        net = open_source(folder).net
    except HeadpruneError:  # it needs code of its own, which no engine here was tried with
        return
    shapes = shapes_in(manifest)
    if shapes <= TARGETS[Target.LLAMA_CPP].holds(net):
        out = called.with_name(f"{called.name}-gguf")
        export = command("export", called, out, to="gguf")
        yield "llama.cpp", f"{export} && llama-server -m {shlex.quote(str(out / 'model.gguf'))}"
    if shapes <= TARGETS[Target.VLLM].holds(net):
        yield "vLLM", _vllm(called, shapes)


def _vllm(folder: Path, shapes: frozenset[str]) -> str:
    quoted = shlex.quote(str(folder))
    if shapes == {EVEN}:
        return f"vllm serve {quoted}"
    flags = "--model-impl transformers --trust-remote-code"
    if not shapes & {RAGGED, EMPTY}:
        return f"vllm serve {quoted} {flags}"
    out = folder.with_name(f"{folder.name}-vllm")
    export = command("export", folder, out, to="vllm")
    return f"{export} && vllm serve {shlex.quote(str(out))} {flags}"
