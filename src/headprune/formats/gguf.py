"""GGUF, for llama.cpp, Ollama and LM Studio."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from headprune.config import ExportConfig, ExportDtype, ExportProofBy
from headprune.formats.checkpoint import OnStep, write_facts
from headprune.formats.format import ExportProof, Format
from headprune.formats.gguf_tokenizer import has_tokenizer
from headprune.formats.regularise import regularise
from headprune.formats.source import ExportSource
from headprune.io.shards import Piece
from headprune.packages import missing
from headprune.planning.targets import (
    ARCHES,
    WINDOWED_ARCH,
    llama_cpp_refusal,
    uneven_refusal,
    windowed_layers,
)
from headprune.surgery.sink_logits import NO_SINK

FILE = "model.gguf"
_ENGINE = "xllamacpp"


def arch_of(source: ExportSource) -> str:
    """Return the architecture of llama.cpp for a prepared, accepted model."""
    if any(windowed_layers(source.config)):
        return WINDOWED_ARCH
    even, uneven = ARCHES[source.config.model_type]
    return even if _odd_layer(source) is None else str(uneven)


def _odd_layer(source: ExportSource) -> int | None:
    """Return the first layer with other groups than layer 0, or with ragged ones."""
    first = source.attentions[0].group_sizes
    odd = (
        layer
        for layer, attention in enumerate(source.attentions)
        if attention.group_sizes != first or len(set(first)) != 1
    )
    return next(odd, None)


def prepared(source: ExportSource) -> tuple[ExportSource, tuple[str, ...]]:
    """Return the model with additions that its architecture needs, and their record."""

    def may_be_empty(layer: int) -> bool:
        # deci takes its sizes from layer 0, and skips an output bias where there are no heads
        bias = source.weights.get(f"model.layers.{layer}.self_attn.o_proj.bias")
        deci = ARCHES[source.config.model_type][1] == "deci"
        return deci and layer > 0 and (bias is None or not bias.read().any())

    if arch_of(source) != WINDOWED_ARCH:
        return regularise(source, may_be_empty)
    sinks = {
        name: Piece.of(name, torch.full((a.query_heads,), NO_SINK))
        for name, a in ((f"{a.path}.sinks", a) for a in source.attentions)
        if name not in source.weights
    }
    added = f"{WINDOWED_ARCH} has a sink logit per head: {NO_SINK:,.0f} each, of no weight."
    return replace(source, weights=source.weights | sinks), (added,) * bool(sinks)


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    reason = llama_cpp_refusal(source.net)
    if reason is not None:
        return reason
    odd = _odd_layer(prepared(source)[0])
    reason = None if odd is None else uneven_refusal(source.config)
    if odd is None or reason is None:
        return None
    return (
        f"{source.attentions[odd].path} has other heads than the first layer, and {reason} "
        "prune --for llama.cpp makes a result that it holds."
    )


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    from headprune.formats import gguf_file

    model, changes = prepared(source)
    kind = gguf_file.type_of(source, config.out_dtype)
    gguf_file.write(model, arch_of(model), folder / FILE, kind, config.like, on_step)
    write_facts(source, folder)
    if has_tokenizer(source, config.like):
        return changes
    return *changes, "There is no tokenizer beside the model: the file takes token ids alone."


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    from headprune.formats import gguf_file, llama_cpp

    model = prepared(source)[0]
    kind = gguf_file.type_of(source, config.out_dtype)
    read_back = gguf_file.read_back(model, arch_of(model), folder / FILE, kind)
    why_not = ""
    if config.prove is ExportProofBy.READ_BACK:
        why_not = "--prove read-back was given"
    elif not has_tokenizer(source, config.like):
        why_not = "llama.cpp runs no file without a tokenizer"
    elif missing(_ENGINE):
        why_not = f"{_ENGINE} is not installed"
    elif arch_of(model) == WINDOWED_ARCH and model.config.sliding_window > llama_cpp.MOST:
        why_not = f"a window of {model.config.sliding_window:,} tokens takes too long to fill"
    if why_not or not read_back.passed:
        return read_back.model_copy(update={"why_not": why_not})
    return llama_cpp.prove(model, folder / FILE, kind, same_tokenizer=config.like is None)


FORMAT = Format(
    what="a GGUF file for llama.cpp, Ollama and LM Studio",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    dtypes=tuple(dtype for dtype in ExportDtype if dtype is not ExportDtype.AUTO),
    modules=("gguf",),
    serve="llama-server -m {}/model.gguf",
)
