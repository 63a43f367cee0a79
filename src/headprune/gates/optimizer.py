"""The optimiser of gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

_LARGEST = 2.0  # mean square of a step's gradient, over the usual one


class GateOptimizer(torch.optim.AdamW):
    """AdamW, except that all gates share one second moment.

        g <- g min(1, sqrt(2 v / mean(g^2)))
        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) mean(g^2)
        log_alpha <- log_alpha - lr m / sqrt(v)

    Adam divides every coordinate by its own gradient scale: a head that matters a hundred times
    more moves no faster, only more steadily. After a few hundred noisy steps the order of heads is
    then mostly luck. With one scale the distance of a gate is its summed gradient: the cost of
    closing the head along the way.

    Some heads closed together make the loss of a sequence explode. Only the direction of such a
    step counts, or it would outweigh all others.

    Args:
        gates: The gates' ``log_alpha``.
        scale: The gates' factors; they get plain Adam.
        weights: Other parameters; they get plain AdamW.
        gate_lr: Learning rate of the gates.
        scale_lr: Learning rate of ``scale``.
        weight_lr: Learning rate of the weights.
        betas: Decay of the first and of the second moment.
    """

    def __init__(
        self,
        gates: nn.Parameter,
        scale: nn.Parameter,
        weights: list[nn.Parameter],
        gate_lr: float,
        scale_lr: float,
        weight_lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [gates], "lr": gate_lr},
            {"params": [scale], "lr": scale_lr, "weight_decay": 0.0},
        ]
        if weights:
            groups.append({"params": weights, "lr": weight_lr})
        super().__init__(groups, betas=betas, weight_decay=0.01)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step; AdamW skips the gates, whose gradient it does not see."""
        group = self.param_groups[0]
        (gates,) = group["params"]
        gradient, gates.grad = gates.grad, None
        loss: float | None = super().step(closure)
        gates.grad = gradient
        if gradient is None:  # the heads are chosen
            return loss
        state = self.state[gates]
        if state:
            gradient = self._bounded(gradient, state)
        else:
            state["step"] = torch.zeros((), device=gates.device)
            state["first"] = torch.zeros_like(gates)
            state["second"] = torch.zeros((), device=gates.device)
        first, second = group["betas"]
        state["step"] += 1
        state["first"].lerp_(gradient, 1 - first)
        state["second"].lerp_(gradient.square().mean(), 1 - second)
        scale = (state["second"] / (1 - second ** state["step"])).sqrt() + group["eps"]
        gates -= group["lr"] * state["first"] / (1 - first ** state["step"]) / scale
        return loss

    def _bounded(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Return the gradient, bounded by ``_LARGEST`` times the usual mean square."""
        second = self.param_groups[0]["betas"][1]
        usual = state["second"] / (1 - second ** state["step"])
        factor = (_LARGEST * usual / gradient.square().mean()).sqrt().clamp(max=1)
        return torch.where(usual > 0, gradient * factor, gradient)
