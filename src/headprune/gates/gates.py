"""Trainable gates for all units of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headprune.runtime.modeling_headprune import Attention
from headprune.tensors import hard_concrete
from headprune.tensors.units import Unit, members

COURSE = 20  # places of a training that the course of the gates is kept of
_SPREAD = 3.0  # largest log alpha at the start: beyond it few draws have a gradient
_SLOPE = 8.0  # of log alpha by the rank, from 0 to 1: three of four gates start undecided


class Gates(nn.Module):
    """One gate per unit, over all attention modules in order.

    While heads are being chosen, hard-concrete gates are sampled for every sequence of a batch.
    Each sequence then measures another set of heads, which divides the variance of the gradient by
    the batch size (Voita et al. 2019 sample once per batch). After ``choose`` gates are 0 or 1.

    Args:
        attentions: The modules.
        unit: The heads that one gate opens and closes.
        init_log_alpha: Start of all gates.
        temperature: beta of the hard-concrete distribution.
        by_heads: Whether a unit counts by its query heads, or as one.

    Attributes:
        log_alpha: Location of every gate, shape (units,), float32.
        sizes: What every unit counts, shape (units,).
        kept: Units that stay, shape (units,).
        course: Probability of every gate to be open, at ``COURSE`` places of the training and at
            its start, shape (COURSE + 1, units); -1 where none was recorded.
        chosen: Whether the heads are chosen; on the host, as every step asks.
    """

    log_alpha: nn.Parameter
    kept: Bool[Tensor, " units"]
    course: Float[Tensor, "places units"]
    unit_of_head: Int[Tensor, " heads"]
    sizes: Float[Tensor, " units"]

    def __init__(
        self,
        attentions: Sequence[Attention],
        unit: Unit,
        init_log_alpha: float,
        temperature: float,
        by_heads: bool = True,
    ) -> None:
        super().__init__()
        self.unit = unit
        units, heads = 0, list[int]()
        self._rows: list[slice] = []
        for attention in attentions:
            start, of_head = len(heads), [0] * attention.query_heads
            for positions in members(unit, attention.group_sizes):
                for position in positions:
                    of_head[position] = units
                units += 1
            heads += of_head
            self._rows.append(slice(start, len(heads)))
        self.temperature = temperature
        self.log_alpha = nn.Parameter(torch.full((units,), init_log_alpha, dtype=torch.float32))
        self.register_buffer("unit_of_head", torch.tensor(heads, dtype=torch.long))
        sizes = torch.bincount(self.unit_of_head, minlength=units).float()
        self.register_buffer("sizes", sizes if by_heads else torch.ones(units))
        self.unit_sizes: list[int] = self.sizes.int().tolist()  # known without asking a device
        self.register_buffer("kept", torch.ones(units, dtype=torch.bool))
        self.register_buffer("course", torch.full((COURSE + 1, units), -1.0))
        self.chosen = torch.tensor(False)
        self.draws: int | None = None
        self._gates: Tensor | None = None

    @torch.no_grad()
    def start_from(self, scores: Float[Tensor, " units"], kept: int) -> None:
        """Start from scores: the best ``kept`` units open, those near the threshold undecided."""
        rank = scores.argsort().argsort().to(self.log_alpha)
        start = _SLOPE * (rank - (len(rank) - kept) + 0.5) / len(rank)
        self.log_alpha.copy_(start.clamp(-_SPREAD, _SPREAD))

    def sample(self, batch: int) -> None:
        """Set the gates of the next forward.

        They are one sample for each of ``batch`` sequences, or for all where ``draws`` is 1.
        """
        if self.chosen:
            gates = self.values()[None]
        else:
            draws = self.draws or batch
            gates = hard_concrete.sample(self.log_alpha, self.temperature, draws=draws)
        self._gates = gates.index_select(1, self.unit_of_head)

    def disable(self) -> None:
        """Leave the model ungated in the next forward."""
        self._gates = None

    def source(self, position: int) -> Tensor | None:
        """Return the gates of one attention module, shape (1 or batch, query heads)."""
        return None if self._gates is None else self._gates[:, self._rows[position]]

    def values(self) -> Float[Tensor, " units"]:
        """Return the gates at test time; exactly 0 for units that do not stay."""
        return self.kept.float() if self.chosen else hard_concrete.value(self.log_alpha)

    def expected_open(self) -> Float[Tensor, ""]:
        """Return the expected size of open units; a gate at its bound counts as 0 or 1."""
        if self.chosen:
            return (self.kept * self.sizes).sum()
        return (hard_concrete.open_share(self.log_alpha, self.temperature) * self.sizes).sum()

    def open_probability(self) -> Float[Tensor, " units"]:
        """Return the probability of each gate to be open; 1 or 0 once the heads are chosen."""
        if self.chosen:
            return self.kept.to(self.sizes)
        return hard_concrete.open_probability(self.log_alpha, self.temperature)

    @torch.no_grad()
    def record(self, step: int, steps: int) -> None:
        """Keep the course of the gates, at the steps where a place of it is reached."""
        place = step * COURSE // steps
        if not step or place > (step - 1) * COURSE // steps:
            self.course[place] = self.open_probability()

    @torch.no_grad()
    def choose(self, kept: Sequence[int]) -> None:
        """Fix the units that stay."""
        self.kept.zero_()
        self.kept[list(kept)] = True
        self.chosen.fill_(True)

    @contextmanager
    def choosing(self, kept: Sequence[int]) -> Iterator[None]:
        """Fix the units that stay in a ``with`` block."""
        before = self.kept.clone(), self.chosen.clone()
        self.choose(kept)
        try:
            yield
        finally:
            self.kept.copy_(before[0])
            self.chosen.copy_(before[1])
