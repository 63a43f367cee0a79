"""Which engine holds a result of which shape: the one table of it.

Plans keep to it, the commands that serve a result follow it, and the docs show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from headprune.config import Target
from headprune.engines import llama_cpp
from headprune.model.attention import attention_of, family_of
from headprune.model.loading import task_of
from headprune.model.probes import probe_inputs

EVEN, KV_COUNTS, QUERY_COUNTS = "plain config", "KV heads per layer", "query heads per layer"
RAGGED, EMPTY = "ragged groups", "layer without attention"
SHAPES = (EVEN, KV_COUNTS, QUERY_COUNTS, RAGGED, EMPTY)
NO = "no"
_TEXT = {"input_ids", "attention_mask", "decoder_input_ids"}

Reason = Callable[[PreTrainedModel], str | None]
"""Why something cannot be, as the end of a sentence; None if it can."""


@dataclass(frozen=True)
class EngineShapes:
    """An engine that runs results.

    Attributes:
        name: The engine, and the way into it.
        tested: The version that the cells were tried with.
        cells: Per shape: "yes", "no", or what is written for it.
        refusal: Why it takes no result of a model, of whatever shape.
        limits: Shapes that it takes of other models and not of this one, with the reason.
        zero_heads: The layers without attention that get a zero head, which costs as much as one
            that stays: none, the first one, or every one.
    """

    name: str
    tested: str
    cells: Mapping[str, str]
    refusal: Reason
    limits: Callable[[PreTrainedModel], Mapping[str, str]] = lambda net: {}
    zero_heads: Literal["none", "first", "every"] = "none"

    def holds(self, net: PreTrainedModel) -> frozenset[str]:
        """The shapes that it takes of a model."""
        if self.refusal(net) is not None:
            return frozenset()
        return frozenset(s for s in SHAPES if self.cells[s] != NO and s not in self.limits(net))


def generates_none(net: PreTrainedModel) -> str | None:
    """Why what serves generated text takes no such model."""
    if task_of(net) == "causal-lm":
        return None
    return f"a {type(net).__name__} generates no text, and this engine is for what does."


def graph_refusal(net: PreTrainedModel) -> str | None:
    """Why a model comes to no graphs; None if nothing is known against it."""
    strange = sorted(set(probe_inputs(net)) - _TEXT)
    if strange:
        return f"a {type(net).__name__} takes {', '.join(strange)}; models of text alone fit."
    return None


def zero_heads_refusal(net: PreTrainedModel) -> str | None:
    """Why a model cannot be given zero heads."""
    family = family_of(net.config)
    roles = {p.holds for a in attention_of(net) for p in a.projections if p.holds}
    if family.per_head or family.full_width_norms or roles != set("qkvo"):
        return (
            "zero heads are made of separate projections of q, k, v and the output, and a "
            f"{family.model_type} has more that goes by heads."
        )
    return None


def _llama_cpp_refusal(net: PreTrainedModel) -> str | None:
    return llama_cpp.refusal(net.config) or generates_none(net)


def _where(reason: str | None, *shapes: str) -> dict[str, str]:
    return {} if reason is None else dict.fromkeys(shapes, reason)


_ALL = dict.fromkeys(SHAPES, "yes")
TARGETS: dict[Target, EngineShapes] = {
    Target.LLAMA_CPP: EngineShapes(
        "llama.cpp (`export --to gguf`)",
        "xllamacpp 2026.10.11549",
        {**_ALL, RAGGED: "zero query heads", EMPTY: "yes; a zero head in layer 0"},
        _llama_cpp_refusal,
        lambda net: _where(llama_cpp.uneven_refusal(net.config), KV_COUNTS, QUERY_COUNTS, EMPTY),
        "first",
    ),
    Target.VLLM: EngineShapes(
        "vLLM, transformers backend",
        "0.32.0, CPU",
        {**_ALL, RAGGED: "`export --to vllm`", EMPTY: "`export --to vllm`; a zero head"},
        generates_none,
        lambda net: _where(zero_heads_refusal(net), RAGGED, EMPTY),
        "every",
    ),
    Target.ONNX: EngineShapes(
        "ONNX Runtime (`export --to onnx`)", "onnxruntime 1.32.0", _ALL, graph_refusal
    ),
    Target.OPENVINO: EngineShapes(
        "OpenVINO (`export --to openvino`)", "2026.4.1, CPU", _ALL, graph_refusal
    ),
    Target.ANYWHERE: EngineShapes(
        "anything else that loads the original",
        "transformers 5.23.0",
        {**dict.fromkeys(SHAPES, NO), EVEN: "yes"},
        lambda net: None,
    ),
}


def shapes_of(groups: Sequence[Sequence[int]], plain: bool) -> frozenset[str]:
    """What an engine must hold for a result.

    Args:
        groups: Per attention module, the number of queries of every KV head.
        plain: Whether a plain config describes the result.
    """
    if plain:
        return frozenset({EVEN})
    present = [group for group in groups if group]
    found = {
        KV_COUNTS: len({len(group) for group in present}) > 1,
        # groups that are not equal are made so, up to the largest
        QUERY_COUNTS: len({(sum(group), max(group) * len(group)) for group in present}) > 1,
        RAGGED: any(len(set(group)) > 1 for group in present),
        EMPTY: len(present) < len(groups),
    }
    # counts that are the same everywhere, and no plain config has them
    return frozenset(shape for shape, there in found.items() if there) or frozenset({QUERY_COUNTS})
