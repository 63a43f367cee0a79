"""The attention of a module on a batch, as roles see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Facts = Mapping[str, Tensor]
"""Facts of a batch.

    trees      belongs (sequences, tokens, words), heads and relations (sequences, words; -1: none),
               ranks (sequences, tokens): number of more frequent kinds of tokens; -1: special
    needles    copied (sequences, queries): whether the next token is copied from the fact;
               needle, elsewhere (sequences, keys): ids of the fact in its place, and at another
               depth; -1 beside it
"""

Counted = tuple[Tensor, Tensor]
"""Sums over queries (sequences, heads, variants), and numbers of queries (sequences, variants)."""


@dataclass(frozen=True)
class Attended:
    """The attention of one module on one batch.

    Attributes:
        weights: After the softmax; rows of padded queries are undefined.
        queries: True where no padding.
        keys: True where no padding.
        causal: Whether a query sees only keys up to its place.
        classes: Ids of separating tokens, by kind.
        start: Place of the first run of random tokens.
        period: Tokens of a run; 0 on other inputs.
        facts: See ``Facts``.
    """

    weights: Float[Tensor, "sequences heads queries keys"]
    queries: Bool[Tensor, "sequences queries"]
    keys: Bool[Tensor, "sequences keys"]
    key_ids: Int[Tensor, "sequences keys"]
    causal: bool
    classes: Mapping[str, Tensor]
    start: int = 0
    period: int = 0
    facts: Facts = field(default_factory=dict)

    def first_key(self) -> Int[Tensor, " sequences"]:
        """Return the place of the first key."""
        return self.keys.int().argmax(-1)

    def in_view(self) -> Bool[Tensor, "sequences queries keys"]:
        """Return which keys each query sees; sliding windows are not known here."""
        view = self.keys[:, None] & self.queries[..., None]
        return view.tril() if self.causal else view

    def queries_after(self, tokens: int) -> Bool[Tensor, "sequences queries"]:
        """Return the queries after the first tokens of their sequence."""
        return self.queries & (self.queries.cumsum(-1) > tokens)

    def at_offset(self, offset: int, queries: Tensor | None = None) -> Counted:
        """Return the attention to the key at an offset from each query that has one."""
        mass = torch.diagonal(self.weights, offset, -2, -1).float()
        queries = self.queries if queries is None else queries & self.queries
        pairs = (queries[..., None] & self.keys[:, None]).diagonal(offset, -2, -1)
        if self.causal and offset > 0:
            pairs = torch.zeros_like(pairs)
        return counted((mass * pairs[:, None]).sum(-1), pairs.sum(-1))

    def in_second_run(self, offset: int) -> Counted:
        """Return the attention at an offset, for queries in the second run."""
        places = torch.arange(self.queries.shape[-1], device=self.queries.device)
        begin = self.start + self.period
        second = (places >= begin) & (places < begin + self.period)
        return self.at_offset(offset, second.expand_as(self.queries))

    def uniform(self) -> Attended:
        """Return one head that attends evenly to the keys in view."""
        view = self.in_view()[:, None].float()
        return replace(self, weights=view / view.sum(-1, keepdim=True).clamp(min=1))

    def elsewhere(self) -> Attended:
        """Return the same attention with the fact at another depth."""
        return replace(self, facts={**self.facts, "needle": self.facts["elsewhere"]})


def counted(sums: Float[Tensor, "sequences heads"], counts: Int[Tensor, " sequences"]) -> Counted:
    """Return the sums of a role without variants."""
    return sums[..., None], counts[..., None].to(sums.dtype)
