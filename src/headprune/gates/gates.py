"""Trainable gates for all units of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headprune.gates.saliency import ObdSaliency
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors import hard_concrete
from headprune.tensors.units import Unit, members

BELOW_LATER_ROUNDS = 100.0


class Gates(nn.Module):
    """One gate per unit, over all attention modules in order.

    Hard-concrete gates are sampled anew for every sequence of a batch while they are being chosen:
    each sequence then measures another set of heads, which cuts the variance of the gradient by
    the batch size (Voita et al. 2019 sample once per batch). After ``choose`` the gates that stay
    are plain factors, trained on as such: they fold into W_O whatever their value, so nothing binds
    them to [0, 1]. ``reopen`` begins another round of choosing among the heads that are left.

    Gates that are not ``sampled`` are plain factors from the start; ``close`` takes them away by
    their ``saliency``, and ``settle`` all at once by scores.

    Attributes:
        unit: What one gate opens and closes.
        sampled: Whether gates are drawn from the hard-concrete distribution while they are chosen.
        saliency: What closing the gates would cost, as the steps have shown; of plain factors only.
        log_alpha: Location of every gate, shape (units,), float32.
        scale: Factor of every gate once the heads are chosen, shape (units,).
        kept: Which units are left, shape (units,).
        chosen: Whether the heads of this round are chosen.
    """

    log_alpha: nn.Parameter
    scale: nn.Parameter
    kept: Bool[Tensor, " units"]
    chosen: Bool[Tensor, ""]
    unit_of_head: Int[Tensor, " heads"]
    sizes: Float[Tensor, " units"]

    def __init__(
        self,
        attentions: Sequence[Attention],
        unit: Unit,
        init_log_alpha: float,
        temperature: float,
        sampled: bool = True,
    ) -> None:
        super().__init__()
        self.sampled, self.unit = sampled, unit
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
        self.init_log_alpha = init_log_alpha
        self.log_alpha = nn.Parameter(torch.full((units,), init_log_alpha, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(units, dtype=torch.float32))
        self.register_buffer("unit_of_head", torch.tensor(heads, dtype=torch.long))
        self.register_buffer("sizes", torch.bincount(self.unit_of_head, minlength=units).float())
        self.unit_sizes: list[int] = self.sizes.int().tolist()  # known without asking a device
        self.register_buffer("kept", torch.ones(units, dtype=torch.bool))
        self.register_buffer("chosen", torch.tensor(False))
        self.saliency = ObdSaliency(units)
        self._gates: Tensor | None = None
        self._copies: Tensor | None = None
        self.drawn = False

    def sample(self, batch: int) -> None:
        """Sets the gates of the next forward: one sample a sequence, or the values at test time."""
        chosen = bool(self.chosen)
        self.drawn = self.sampled and not chosen
        if chosen:
            gates = self.values()[None]
        elif self.drawn:
            sample = hard_concrete.sample(self.log_alpha, self.temperature, draws=batch)
            gates = sample * (self.scale * self.kept).detach()
        else:  # a copy per sequence, for the gradient of each
            gates = self.values().repeat(batch, 1)
            gates.retain_grad()
            self._copies = gates
        self._gates = gates.index_select(1, self.unit_of_head)

    def take_saliency(self) -> None:
        """Adds the gradients of the last backward to what closing the gates would cost."""
        assert self._copies is not None
        assert self._copies.grad is not None
        # the loss is a mean over sequences
        self.saliency.add(self._copies.grad * len(self._copies))
        self._copies = None

    def disable(self) -> None:
        """Leaves the model ungated in the next forward."""
        self._gates = None

    @property
    def disabled(self) -> bool:
        """Whether the next forward is that of the ungated model."""
        return self._gates is None

    def source(self, position: int) -> Tensor | None:
        """The current gates of one attention module, shape (1 or batch, query heads)."""
        return None if self._gates is None else self._gates[:, self._rows[position]]

    def values(self) -> Float[Tensor, " units"]:
        """The gates at test time; exactly 0 for units that do not stay."""
        open_ = hard_concrete.value(self.log_alpha) if self.sampling else 1.0
        return open_ * self.scale * self.kept

    def expected_heads(self) -> Float[Tensor, ""]:
        """Expected number of open query heads; a gate at its upper bound counts as one."""
        if not self.sampling:
            return (self.kept * self.sizes).sum()
        share = hard_concrete.open_share(self.log_alpha, self.temperature)
        return (share * self.kept * self.sizes).sum()

    def open_probability(self) -> Float[Tensor, " units"]:
        """How likely every gate is open; 1 or 0 of plain factors."""
        if not self.sampling:
            return self.kept.to(self.sizes)
        return hard_concrete.open_probability(self.log_alpha, self.temperature) * self.kept

    @property
    def sampling(self) -> bool:
        """Whether the next forward samples its gates."""
        return self.sampled and not self.chosen

    def choose(self, kept: Sequence[int]) -> None:
        """Fixes which units stay; from here on only their factors are trained."""
        self.kept.zero_()
        self.kept[list(kept)] = True
        if self.sampled:
            self.scale.data.mul_(hard_concrete.value(self.log_alpha.detach()))
        else:  # in the order in which they would go on to be closed
            costs = self.saliency.cost(self.values())[self.kept]
            self.log_alpha.data[self.kept] = costs.argsort().argsort() + 1.0
        self.chosen.fill_(True)

    @torch.no_grad()
    def settle(self, kept: Sequence[int], scores: Float[Tensor, " units"]) -> None:
        """Fixes which units stay, by scores; ``log_alpha`` says in which order they would go."""
        self.kept.zero_()
        self.kept[list(kept)] = True
        ranks = scores.argsort().argsort().to(self.log_alpha) + 1
        self.log_alpha.copy_(ranks + len(ranks) * (self.kept.to(ranks) - 1))
        self.chosen.fill_(True)

    @torch.no_grad()
    def close(self, units: Sequence[int]) -> None:
        """Takes plain factors away, the first of them first.

        ``log_alpha`` goes on to say in which order heads would come back.
        """
        order = torch.arange(len(units), device=self.log_alpha.device)
        self.log_alpha[list(units)] = (order - self.kept.sum()).to(self.log_alpha)
        self.kept[list(units)] = False

    def reopen(self) -> None:
        """Begins another round: the gates of the heads that are left are open and sampled again.

        Those of heads that are gone sink below all that go later, so that ``log_alpha`` goes on to
        say in which order heads would come back.
        """
        self.log_alpha.data[self.kept] = self.init_log_alpha
        self.log_alpha.data[~self.kept] -= BELOW_LATER_ROUNDS
        self.chosen.fill_(False)
