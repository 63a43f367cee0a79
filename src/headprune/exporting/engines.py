"""Which engine takes a result of which shape, and by which command. The docs' table is this one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headprune.exporting.llama_cpp.layout import ARCHES
from headprune.io.shell import command
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape

EVEN, KV_COUNTS, QUERY_COUNTS = "plain config", "KV heads per layer", "query heads per layer"
RAGGED, EMPTY = "ragged groups", "layer without attention"
SHAPES = (EVEN, KV_COUNTS, QUERY_COUNTS, RAGGED, EMPTY)
_CAUSAL = "AutoModelForCausalLM"


@dataclass(frozen=True)
class Server:
    """An engine that serves results.

    Attributes:
        name: The engine, and the way into it.
        tested: The version that the cells were tried with.
        cells: Per shape: "yes", "no", or what is written for it.
        models: Model types that it takes; empty for all that generate text.
        serve: The command for a folder and the shapes that it has; None where one does not fit.
    """

    name: str
    tested: str
    cells: dict[str, str]
    models: tuple[str, ...]
    serve: Callable[[Path, frozenset[str]], str | None]


def _vllm(folder: Path, shapes: frozenset[str]) -> str:
    quoted = shlex.quote(str(folder))
    if shapes == {EVEN}:
        return f"vllm serve {quoted}"
    flags = "--model-impl transformers --trust-remote-code"
    if not shapes & {RAGGED, EMPTY}:
        return f"vllm serve {quoted} {flags}"
    out = folder.with_name(f"{folder.name}-vllm")
    export = command("export", folder, to="vllm", output=out)
    return f"{export} && vllm serve {shlex.quote(str(out))} {flags}"


def _llama_cpp(folder: Path, shapes: frozenset[str]) -> str:
    out = folder.with_name(f"{folder.name}-gguf")
    export = command("export", folder, to="gguf", output=out)
    return f"{export} && llama-server -m {shlex.quote(str(out / 'model.gguf'))}"


def _decilm(folder: Path, shapes: frozenset[str]) -> str | None:
    if shapes == {EVEN}:
        return None
    out = folder.with_name(f"{folder.name}-decilm")
    export = command("export", folder, to="decilm", output=out)
    serve = f"python -m sglang.launch_server --model-path {shlex.quote(str(out))}"
    return f"{export} && {serve} --trust-remote-code"


_ALL = dict.fromkeys(SHAPES, "yes")
ENGINES = (
    Server(
        "llama.cpp (`export --to gguf`)",
        "xllamacpp 2026.10.11549",
        {**_ALL, RAGGED: "zero query heads", EMPTY: "yes; a zero head in layer 0"},
        tuple(ARCHES),
        _llama_cpp,
    ),
    Server(
        "vLLM, transformers backend",
        "0.32.0, CPU",
        {**_ALL, RAGGED: "`export --to vllm`", EMPTY: "`export --to vllm`"},
        (),
        _vllm,
    ),
    Server(
        "DeciLM: SGLang, vLLM's own class (`export --to decilm`)",
        "vLLM 0.32.0, CPU; not SGLang",
        {
            **_ALL,
            EVEN: "not needed",
            QUERY_COUNTS: "zero query heads",
            RAGGED: "zero query heads",
            EMPTY: "yes; a zero head in layer 0",
        },
        ("llama", "mistral"),
        _decilm,
    ),
)


def shapes_of(manifest: Manifest) -> frozenset[str]:
    """What an engine must be able to hold for a result."""
    if manifest.shape is Shape.NATIVE:
        return frozenset({EVEN})
    heads = list(manifest.layout.values())
    found = {RAGGED} if any(h.group_sizes for h in heads) else set()
    found |= {EMPTY} if any(not h.query_heads for h in heads) else set()
    found |= {KV_COUNTS} if len({len(h.kv_heads) for h in heads}) > 1 else set()
    return frozenset(found | {QUERY_COUNTS})


def serving(manifest: Manifest, folder: Path) -> Iterator[tuple[str, str]]:
    """Engines that take a result, each with the command that serves it."""
    if manifest.auto_class != _CAUSAL:
        return
    shapes = shapes_of(manifest)
    for engine in ENGINES:
        if engine.models and manifest.source.model_type not in engine.models:
            continue
        line = engine.serve(folder, shapes)
        if line is not None:
            yield engine.name.partition(" (")[0].partition(",")[0].partition(":")[0], line
