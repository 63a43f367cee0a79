"""What headprune must know of a model family, as data.

A family is one row. To add one, write the row (see ``llama.py`` for the plainest), and the
registry-parametrised tests prove gate = cut = reloaded on a tiny model of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Size = Literal["query_heads", "kv_heads", "queries_per_kv", "query_width"]


@dataclass(frozen=True)
class Projection:
    """One projection of an attention module.

    Attributes:
        path: Path relative to the attention module; a leading ``../`` climbs to its parent.
        holds: What it computes, in order: "q", "k", "v", "qkv"; "o" for the output projection.
        interleaved: For fused projections: False for ``[Q; K; V]``, True for ``[q k v]`` per head.
    """

    path: str
    holds: str
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the family table.

    Attributes:
        model_type: ``config.model_type`` of the family.
        attention: Path of the attention modules below the base model; ``*`` is one path segment.
        projections: The projections of one attention module.
        head_dim: Attribute of the attention module that holds the width of a head.
        follows: Attributes of the attention module that change with the head counts, and the size
            each one takes.
        query_heads_key: Config attribute for the number of query heads.
        kv_heads_key: Config attribute for the number of KV heads; None where it is always the
            number of query heads.
        native_uniform: Whether the stock class, given other counts in its config, can hold a cut
            with equal counts in all layers.
        refused: Config attributes that make a model of the family unsupported when they are
            truthy, with the reason.
    """

    model_type: str
    attention: str
    projections: tuple[Projection, ...]
    head_dim: str = "head_dim"
    follows: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))
    query_heads_key: str = "num_attention_heads"
    kv_heads_key: str | None = None
    native_uniform: bool = False
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def for_runtime(self) -> dict[str, Any]:
        """The part of the row that travels in config.json: all that rebuilding a model needs."""
        return {
            "attention": self.attention,
            "projections": [asdict(projection) for projection in self.projections],
            "head_dim": self.head_dim,
            "follows": dict(self.follows),
        }
