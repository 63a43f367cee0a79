"""How wide heads are, as ``headprune inspect --ranks`` saw it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from headprune.schemas.values import Count

SHARES = (0.9, 0.95, 0.99)  # of the energy

Widths = tuple[Count, Count, Count]
"""The fewest directions that hold each of ``SHARES``."""


class HeadRanks(BaseModel):
    """The effective rank of a head.

    Attributes:
        head: Its id: its number in the original model.
        values: Of W_V W_O.
        scores: Of W_Q W_K, before any rotation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: Count
    values: Widths
    scores: Widths


class ModuleRanks(BaseModel):
    """The heads of an attention module.

    Attributes:
        path: Its path.
        kind: Its kind.
        value_dim: Width of its values.
        key_dim: Width of its queries and keys.
        heads: Those that it has.
        group_values: Per KV head, the largest share's rank of W_V W_O of its query heads together.
        saved: Parameters of W_V and W_O beyond that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    kind: str
    value_dim: Count
    key_dim: Count
    heads: tuple[HeadRanks, ...]
    group_values: tuple[Count, ...]
    saved: Count


class Ranks(BaseModel):
    """How wide the heads of a model are.

    Attributes:
        tokens: Tokens of the text that were read.
        shares: Shares of the energy, in the order of all ranks.
        modules: The attention modules that have heads, first layer first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Count
    shares: tuple[float, ...] = SHARES
    modules: tuple[ModuleRanks, ...]
