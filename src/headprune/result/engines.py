"""The commands that serve a result, for each engine that holds its shape."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedModel

from headprune.config import Target
from headprune.io.shell import command
from headprune.model.loading import task_of
from headprune.planning.targets import (
    EMPTY,
    EVEN,
    HEAD_WINDOWS,
    LAYER_WINDOWS,
    RAGGED,
    TARGETS,
    shapes_of,
)
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape
from headprune.schemas.records import Heads

_NAMES = {Target.LLAMA_CPP: "llama.cpp", Target.VLLM: "vLLM"}


def shapes_in(layout: Mapping[str, Heads], shape: Shape) -> frozenset[str]:
    """Return the shapes that an engine must hold for a result."""
    plain, windows = shape is Shape.NATIVE, None
    if any(heads.window_heads for heads in layout.values()):
        windows = LAYER_WINDOWS if plain else HEAD_WINDOWS
    return shapes_of([heads.groups for heads in layout.values()], plain, windows)


def engines_of(net: PreTrainedModel, layout: Mapping[str, Heads], shape: Shape) -> tuple[str, ...]:
    """Return the engines of generated text that hold a result."""
    if task_of(net) != "causal-lm":
        return ()
    shapes = shapes_in(layout, shape)
    return tuple(name for one, name in _NAMES.items() if shapes <= TARGETS[one].holds(net))


def serving(manifest: Manifest, called: Path) -> Iterator[tuple[str, str]]:
    """Yield the engines that serve a result, each with its command.

    Args:
        manifest: The record of the result.
        called: The folder as the command names it.
    """
    if "llama.cpp" in manifest.engines:
        out = called.with_name(f"{called.name}-gguf")
        export = command("export", called, out, to="gguf")
        yield "llama.cpp", f"{export} && llama-server -m {shlex.quote(str(out / 'model.gguf'))}"
    if "vLLM" in manifest.engines:
        yield "vLLM", _vllm(called, shapes_in(manifest.layout, manifest.shape))


def _vllm(folder: Path, shapes: frozenset[str]) -> str:
    quoted = shlex.quote(str(folder))
    if shapes == {EVEN}:
        return f"vllm serve {quoted}"
    if shapes == {LAYER_WINDOWS}:  # classes of vLLM itself ignore some windows
        return f"vllm serve {quoted} --model-impl transformers"
    flags = "--model-impl transformers --trust-remote-code"
    if not shapes & {RAGGED, EMPTY}:
        return f"vllm serve {quoted} {flags}"
    out = folder.with_name(f"{folder.name}-vllm")
    export = command("export", folder, out, to="vllm")
    return f"{export} && vllm serve {shlex.quote(str(out))} {flags}"
