"""Facts of a model family, as data.

A family is one row. Most models of today are laid out like Llama, and then the row is one line in
``llama.py``: its name, and what differs from Llama, if anything. GPT-OSS adds a sink per head, and
reads

    llama_like("gpt_oss", per_head={"sinks": "q"}),

The tests pick the row up and build a tiny random model from the family's config class. They prove
gate = cut = reloaded, with a KV cache, with empty layers, and with a corrupted sibling that must
fail. If they pass, the family is supported. ``headprune families markdown`` prints its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Size = Literal["query_heads", "kv_heads", "queries_per_kv", "query_width", "kv_width"]
Role = Literal["q", "k", "v"]


def _nothing() -> Any:
    return field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Projection:
    """One projection of an attention module.

    Attributes:
        path: Path relative to the attention module; a leading ``../`` climbs to its parent.
        roles: Its roles, in order: "q", "k", "v", "qkv"; "o" for the output projection; ""
            for one that stays whole.
        interleaved_per_kv_head: For fused projections: False for ``[Q; K; V]``, True for
            ``[q ... q k v]`` per KV head, which with one query per KV head is ``[q k v]`` per head.
        head_dim: Attribute of the attention module with the width of one head in this projection,
            or several joined by "+"; by default the row's ``head_dim``.
        optional: Whether some models of the family go without it.
    """

    path: str
    roles: str
    interleaved_per_kv_head: bool = False
    head_dim: str | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the family table.

    Attributes:
        model_type: ``config.model_type`` of the family.
        attention: The kinds of attention the model has ("self"; "encoder", "decoder", "cross";
            "text", "vision"), each with the path of its modules below the base model, in which
            ``*`` is one path segment, and ``|`` is between several.
        projections: The projections of one attention module.
        head_dim: Attribute of the attention module that holds the width of a head.
        size_attributes: Attributes of the attention module that change with the head counts, and
            the size each one takes.
        config_size_attributes: The same for attributes that its forward reads from the config.
        per_head: Other tensors (or module lists) of the attention module with one entry per head
            along their first dimension, and the role of that head.
        full_width_norms: Norms over all heads of a projection at once. Their results change
            when a head is missing, so norm and projection stay whole and their output is narrowed.
        head_arguments: Arguments of the attention's forward that carry one entry per head of the
            original model, and the dimension of it; "batch" where batch and heads share the first.
        shares_position_bias: Whether the first module computes a position bias for all.
        headless_output: Use of the output in a forward without heads: "" returns it,
            "residual" adds the argument of that name, anything else is the norm that takes
            input + output.
        query_heads_key: Config attribute for the number of query heads.
        kv_heads_key: Config attribute for the number of KV heads; None where it is always the
            number of query heads.
        native: Whether the stock class, given other counts in its config, can hold a cut with
            equal counts in all layers.
        native_unless: Config attributes that make it impossible when they are truthy.
        fewer_kv_heads: Where fewer KV heads than query heads fit: "native" in the stock class,
            "runtime" in the class that travels with the result, or the reason why nowhere.
        cached_width: Attributes of the attention module, or of modules in it, joined by "+", with
            the numbers that one token leaves in the cache; needed where these are not K and V of
            every KV head.
        expects_one_kv_per_query: True if the forward takes one KV head per query head. Then
            fewer are repeated before it sees them (and cached once nevertheless).
        caches_query_heads: Config attribute under which K and V are cached for every query head.
        keeps_kv: True if K and V stay whole, since other layers read them. Every query head keeps
            the KV head that it had.
        keeps_a_head: True if a layer cannot lose all heads, since others take more from it than its
            output.
        min_transformers: Lowest version of transformers whose classes look as the row says; None
            for the lowest that headprune runs on.
        refused: Config attributes that make a model of the family unsupported when they are
            truthy, with the reason.
    """

    model_type: str
    attention: Mapping[str, str]
    projections: tuple[Projection, ...]
    head_dim: str = "head_dim"
    size_attributes: Mapping[str, Size] = _nothing()
    config_size_attributes: Mapping[str, Size] = _nothing()
    per_head: Mapping[str, Role] = _nothing()
    full_width_norms: Mapping[str, Role] = _nothing()
    head_arguments: Mapping[str, int | Literal["batch"]] = _nothing()
    shares_position_bias: bool = False
    headless_output: str = ""
    query_heads_key: str = "num_attention_heads"
    kv_heads_key: str | None = None
    native: bool = False
    native_unless: tuple[str, ...] = ()
    fewer_kv_heads: str = "runtime"
    cached_width: str | None = None
    expects_one_kv_per_query: bool = False
    caches_query_heads: str | None = None
    keeps_kv: bool = False
    keeps_a_head: bool = False
    min_transformers: str | None = None
    refused: Mapping[str, str] = _nothing()

    def for_runtime(self) -> dict[str, Any]:
        """Return the part of the row to put in config.json: enough to rebuild a model.

        Its keys are those of ``config.headprune`` in schema 1, as in earlier results.
        """
        return {
            "attention": dict(self.attention),
            "projections": [
                {
                    "path": projection.path,
                    "holds": projection.roles,
                    "groups": projection.interleaved_per_kv_head,
                    "head_dim": projection.head_dim,
                    "optional": projection.optional,
                }
                for projection in self.projections
            ],
            "head_dim": self.head_dim,
            "follows": dict(self.size_attributes),
            "config_follows": dict(self.config_size_attributes),
            "per_head": dict(self.per_head),
            "whole_norms": dict(self.full_width_norms),
            "head_arguments": dict(self.head_arguments),
            "shares_position_bias": self.shares_position_bias,
            "counts_keys_as_queries": self.expects_one_kv_per_query,
            "shares_by_runtime": self.fewer_kv_heads == "runtime",
            "keeps_kv": self.keeps_kv,
            "without_heads": self.headless_output,
        }
