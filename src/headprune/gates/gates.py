"""Trainable gates for all units of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headprune.runtime.modeling_headprune import Attention
from headprune.tensors import hard_concrete
from headprune.tensors.units import Unit, members


class Gates(nn.Module):
    """One gate per unit, over all attention modules in order.

    While heads are being chosen, hard-concrete gates are sampled for every sequence of a batch.
    Each sequence then measures another set of heads, which divides the variance of the gradient by
    the batch size (Voita et al. 2019 sample once per batch). After ``choose`` the open gates are
    plain factors: they fold into W_O whatever their value, so nothing binds them to [0, 1].
    ``fix_by_scores`` chooses by scores instead, before anything is sampled.

    Attributes:
        unit: The heads that one gate opens and closes.
        log_alpha: Location of every gate, shape (units,), float32.
        scale: Factor of every gate once the heads are chosen, shape (units,).
        kept: Units that stay, shape (units,).
        chosen: Whether the heads are chosen; on the host, as every step asks.
    """

    log_alpha: nn.Parameter
    scale: nn.Parameter
    kept: Bool[Tensor, " units"]
    unit_of_head: Int[Tensor, " heads"]
    sizes: Float[Tensor, " units"]

    def __init__(
        self,
        attentions: Sequence[Attention],
        unit: Unit,
        init_log_alpha: float,
        temperature: float,
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
        self.scale = nn.Parameter(torch.ones(units, dtype=torch.float32))
        self.register_buffer("unit_of_head", torch.tensor(heads, dtype=torch.long))
        self.register_buffer("sizes", torch.bincount(self.unit_of_head, minlength=units).float())
        self.unit_sizes: list[int] = self.sizes.int().tolist()  # known without asking a device
        self.register_buffer("kept", torch.ones(units, dtype=torch.bool))
        self.chosen = torch.tensor(False)
        self._gates: Tensor | None = None

    def sample(self, batch: int) -> None:
        """Set the gates of the next forward: one sample a sequence, or the values at test time."""
        if self.chosen:
            gates = self.values()[None]
        else:
            gates = hard_concrete.sample(self.log_alpha, self.temperature, draws=batch)
        self._gates = gates.index_select(1, self.unit_of_head)

    def disable(self) -> None:
        """Leave the model ungated in the next forward."""
        self._gates = None

    def source(self, position: int) -> Tensor | None:
        """Return the gates of one attention module, shape (1 or batch, query heads)."""
        return None if self._gates is None else self._gates[:, self._rows[position]]

    def values(self) -> Float[Tensor, " units"]:
        """Return the gates at test time; exactly 0 for units that do not stay."""
        if self.chosen:
            return self.scale * self.kept
        return hard_concrete.value(self.log_alpha)

    def expected_heads(self) -> Float[Tensor, ""]:
        """Return the expected number of open query heads; a gate at its bound counts as one."""
        if self.chosen:
            return (self.kept * self.sizes).sum()
        return (hard_concrete.open_share(self.log_alpha, self.temperature) * self.sizes).sum()

    def open_probability(self) -> Float[Tensor, " units"]:
        """Return the probability of each gate to be open; 1 or 0 once the heads are chosen."""
        if self.chosen:
            return self.kept.to(self.sizes)
        return hard_concrete.open_probability(self.log_alpha, self.temperature)

    @torch.no_grad()
    def choose(self, kept: Sequence[int]) -> None:
        """Fix the units that stay; from here on only their factors are trained."""
        self.kept.zero_()
        self.kept[list(kept)] = True
        self.chosen.fill_(True)

    @torch.no_grad()
    def fix_by_scores(self, kept: Sequence[int], scores: Float[Tensor, " units"]) -> None:
        """Fix the units that stay, by scores; ``log_alpha`` keeps their order."""
        self.kept.zero_()
        self.kept[list(kept)] = True
        ranks = scores.argsort().argsort().to(self.log_alpha) + 1
        self.log_alpha.copy_(ranks + len(ranks) * (self.kept.to(ranks) - 1))
        self.chosen.fill_(True)
