"""What a role is told from, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Source = Literal["text", "repeated", "trees", "needles"]
"""The input of a role: the text, runs of random tokens that come twice, parsed sentences, or
contexts with a fact in them."""

Control = Literal["uniform", "unrepeated", "offset", "elsewhere"]
"""Uniform attention on the same input, the same head where the second run is another, the most
frequent offset of what is looked for, or the place where what is looked for lies in another row."""


@dataclass(frozen=True)
class Parsed:
    """The words of sentences, and what they depend on.

    Attributes:
        belongs: Which tokens belong to which words.
        heads: The word that each depends on; -1 for none.
        relations: How, by number; -1 for none.
        ranks: How many kinds of tokens are more frequent than a token; -1 for special ones.
    """

    belongs: Bool[Tensor, "sequences tokens words"]
    heads: Int[Tensor, "sequences words"]
    relations: Int[Tensor, "sequences words"]
    ranks: Int[Tensor, "sequences tokens"]

    def to(self, device: torch.device) -> Parsed:
        """The same on a device."""
        return Parsed(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Hidden:
    """A fact in a context.

    Attributes:
        asked: Which queries write it again.
        needle: Token ids where it is told; -1 elsewhere.
        elsewhere: The same, were it told where another context has it.
    """

    asked: Bool[Tensor, "sequences queries"]
    needle: Int[Tensor, "sequences keys"]
    elsewhere: Int[Tensor, "sequences keys"]

    def to(self, device: torch.device) -> Hidden:
        """The same on a device."""
        return Hidden(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Attended:
    """The attention of one module on one batch, and what stands at its queries and keys.

    Attributes:
        weights: After the softmax; the rows of padded queries mean nothing.
        queries: Which queries are no padding.
        keys: Which keys are no padding.
        key_ids: Token ids of the keys.
        causal: Whether a query sees only keys up to its own place.
        classes: Ids of the tokens of some classes, by name: those of ``delimiter``.
        start: Place of the first token of the first run, where the input is repeated.
        period: Tokens of a run; 0 on text.
        written: Logits of the tokens of the first run, by what the module would write of each of
            them; None where it writes no logits.
        parsed: Words and trees, where the input has some.
        hidden: A fact, where the input has one.
    """

    weights: Float[Tensor, "sequences heads queries keys"]
    queries: Bool[Tensor, "sequences queries"]
    keys: Bool[Tensor, "sequences keys"]
    key_ids: Int[Tensor, "sequences keys"]
    causal: bool
    classes: Mapping[str, Tensor]
    start: int = 0
    period: int = 0
    written: Float[Tensor, "sequences heads places tokens"] | None = None
    parsed: Parsed | None = None
    hidden: Hidden | None = None

    def first_key(self) -> Int[Tensor, " sequences"]:
        """Place of the first key that is no padding."""
        return self.keys.int().argmax(-1)

    def seen(self) -> Bool[Tensor, "sequences queries keys"]:
        """Which keys each query sees. A window that slides is not known here."""
        seen = self.keys[:, None] & self.queries[..., None]
        return seen.tril() if self.causal else seen

    def after(self, tokens: int) -> Bool[Tensor, "sequences queries"]:
        """Queries that so many tokens of their sequence stand before."""
        return self.queries & (self.queries.cumsum(-1) > tokens)

    def at_offset(self, offset: int, queries: Tensor | None = None) -> Counted:
        """What queries give to the key so many places further on.

        Args:
            offset: Place of the key less that of the query.
            queries: The queries that count, shape (sequences, queries); None for all. Those that
                have no such key do not.
        """
        mass = torch.diagonal(self.weights, offset, -2, -1).float()
        queries = self.queries if queries is None else queries & self.queries
        pairs = (queries[..., None] & self.keys[:, None]).diagonal(offset, -2, -1)
        if self.causal and offset > 0:
            pairs = torch.zeros_like(pairs)
        return counted((mass * pairs[:, None]).sum(-1), pairs.sum(-1))

    def second_run(self, offset: int) -> Counted:
        """The same of the queries in the second of two runs."""
        places = torch.arange(self.queries.shape[-1], device=self.queries.device)
        begins = self.start + self.period
        second = (places >= begins) & (places < begins + self.period)
        return self.at_offset(offset, second.expand_as(self.queries))


Counted = tuple[Tensor, Tensor]
"""Per sequence, what was summed over queries, of shape (sequences, heads, variants), and the number
of these queries, of shape (sequences, variants)."""


@dataclass(frozen=True)
class Role:
    """What a head can be seen to do.

    Attributes:
        measure: Sums and counts of the score in one batch.
        line: The score from which on a head has the role.
        sign: Its letter in the table.
        definition: What the score is.
        source: Paper and place from which definition and line are taken.
        on: The input that it is measured on.
        control: What the score is held against: it must be under the line. None: it has none, and
            heads that do nothing may have it.
        attribute: Whether it is told beside the role, and never is one.
        crosses: Whether cross-attention can have it.
        beyond: Whether the line is on how far the score is over its control.
        writing: Whether it is told from what heads write.
        fewest: Queries with which a variant counts.
        variants: What the score has one value of each for; the best one counts.
        cost: What its measurement takes.
    """

    measure: Callable[[Attended], Counted]
    line: float
    sign: str
    definition: str
    source: str
    on: Source
    control: Control | None
    cost: str
    attribute: bool = False
    crosses: bool = False
    beyond: bool = False
    writing: bool = False
    fewest: int = 1
    variants: tuple[str, ...] = ("",)


def counted(sums: Float[Tensor, "sequences heads"], counts: Int[Tensor, " sequences"]) -> Counted:
    """The sums of a role that has no variants."""
    return sums[..., None], counts[..., None].to(sums.dtype)
