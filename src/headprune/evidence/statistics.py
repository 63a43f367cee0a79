"""Statistics of attention modules, collected in one pass over calibration text.

A gate per example sits on the input of every output projection, as in training. Gradients are those
of every example by itself, so that nothing depends on the batch of an example. Sums over tokens
leave padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.evidence.losses import example_losses
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.gating import apply_gate, frozen
from headprune.model.heads import read_output
from headprune.model.loading import task_of
from headprune.model.passes import RunsTwice, run_model
from headprune.model.residency import recomputing
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.dtypes import in_float32
from headprune.tensors.least_squares import outer_sum

Need = Literal["gradients", "activations", "gram", "curvature", "recall"]
"""A statistic of ``Statistics``, by the name of its attribute."""

Units = Sequence[Sequence[int]]
"""Positions of the query heads of every unit of one attention module."""

IN_PASS: frozenset[Need] = frozenset({"gradients", "activations", "gram", "curvature"})


@dataclass(frozen=True)
class Activations:
    """Sums over real tokens of the input of W_O.

    Attributes:
        sums: Sum of x, shape (query heads, head_dim).
        squares: Sum of x^2, shape (query heads, head_dim).
        tokens: Tokens summed; padding does not count.
    """

    sums: Float[Tensor, "heads head_dim"]
    squares: Float[Tensor, "heads head_dim"]
    tokens: int

    def __add__(self, other: Activations) -> Activations:
        return Activations(
            self.sums + other.sums, self.squares + other.squares, self.tokens + other.tokens
        )


@dataclass
class Statistics:
    """Statistics of one attention module; a criterion names those it needs.

    Attributes:
        path: Path of the module.
        read_output: Reads W_O, which stays in the model: ``output_weight``.
        seed: Seed of random criteria.
        runs: Runs of the module in one pass of the model.
        collected: The statistics.
    """

    path: str
    read_output: Callable[[], Tensor]
    seed: int = 0
    runs: int = 0
    collected: dict[Need, Any] = field(default_factory=dict)

    @property
    def output_weight(self) -> Float[Tensor, "heads hidden head_dim"]:
        """W_O; a copy in float32."""
        return self.read_output()

    @property
    def gradients(self) -> Float[Tensor, "examples heads"]:
        """D loss / d gate per example and query head; an example's loss is a mean over tokens."""
        return self._get("gradients")

    @property
    def activations(self) -> Activations:
        """Sums of the input of W_O."""
        activations: Activations = self.collected["activations"]
        return activations

    @property
    def gram(self) -> Float[Tensor, "width width"]:
        """Sum over tokens of x x^T of the input of W_O; width is heads x head_dim.

        About the mean of x where W_O has a bias: a refit moves the mean into the bias.
        """
        return self._get("gram")

    @property
    def curvature(self) -> Float[Tensor, " hidden"]:
        """Mean over tokens of (d loss / d output)^2, per coordinate of the output of W_O."""
        return self._get("curvature")

    @property
    def recall(self) -> Float[Tensor, " heads"]:
        """Words that only the passage tells, and that go with a head (``recall.effects``)."""
        return self._get("recall")

    def _get(self, need: Need) -> Tensor:
        value: Tensor = self.collected[need]
        return value


def collect(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Iterable[Batch],
    needs: frozenset[Need],
    seed: int = 0,
) -> list[Statistics]:
    """Collect statistics in one pass over the data: one forward, and one backward for gradients.

    Args:
        model: The model.
        attentions: The attention modules.
        batches: The examples; ``labels`` among the inputs where the task has some.
        needs: The statistics; those outside of ``IN_PASS`` are left to others.
        seed: Seed of the directions that stand for a loss where a model has no head.

    Raises:
        DataError: If an example has nothing to score, or a number is not finite.
        PlanError: If a module of a Gram matrix runs twice.
    """
    result = [Statistics(a.path, partial(_output_weight, a), seed) for a in attentions]
    backward = bool(needs & {"gradients", "curvature"})
    if not needs & IN_PASS:
        return result
    collector = _Collector(attentions, needs)
    finite = _Finite()
    with frozen(model), collector.attached(), torch.set_grad_enabled(backward):
        for number, batch in enumerate(batches):
            collector.start(batch)
            if backward:
                example_losses(model, task_of(model), batch, seed).sum().backward()
            else:
                run_model(model, batch)
            collector.finish(number, finite)
    finite.confirm()
    for statistics, sums in zip(result, collector.sums, strict=True):
        statistics.runs = len(sums.live)
        statistics.collected |= sums.finished(needs, statistics)
    return result


@dataclass
class _Sums:
    """Sums of one attention module during a pass."""

    heads: int
    biased: bool  # whether W_O has a bias
    gradients: list[Tensor] = field(default_factory=list)
    activations: Activations | None = None
    gram: Tensor | None = None
    curvature: Tensor | None = None
    tokens: int = 0
    live: list[Tensor] = field(default_factory=list)  # gates of this batch, one per run

    def finished(self, needs: frozenset[Need], statistics: Statistics) -> dict[Need, Any]:
        """Return the statistics, but for the Gram on the CPU; zeros where no module ran."""
        weight = statistics.output_weight
        heads, hidden, head_dim = self.heads, weight.shape[1], weight.shape[-1]
        zeros = partial(torch.zeros, dtype=torch.float64)
        seen = self.activations or Activations(zeros(heads, head_dim), zeros(heads, head_dim), 0)
        every: dict[Need, Any] = {
            "gradients": torch.cat(self.gradients).cpu() if self.gradients else zeros(1, heads),
            "activations": Activations(seen.sums.cpu(), seen.squares.cpu(), seen.tokens),
            "gram": self._gram(),
            "curvature": (zeros(hidden) if self.curvature is None else self.curvature.cpu())
            / max(self.tokens, 1),
        }
        return {need: value for need, value in every.items() if need in needs}

    def _gram(self) -> Tensor | None:
        if self.gram is None or self.activations is None or not self.biased:
            return self.gram
        total = self.activations.sums.flatten()
        return self.gram - torch.outer(total, total) / max(self.activations.tokens, 1)


class _Collector:
    """Hooks on attention modules, and the sums that they feed."""

    batch: Batch

    def __init__(self, attentions: Sequence[Attention], needs: frozenset[Need]) -> None:
        self.attentions, self.needs = attentions, needs
        self.wants_gradients = bool(needs & {"gradients", "curvature"})
        self.sums = [_Sums(a.query_heads, _is_biased(a)) for a in attentions]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks for the time of a pass."""
        with ExitStack() as stack:
            for attention, sums in zip(self.attentions, self.sums, strict=True):
                if not attention.query_heads:
                    continue
                output, hook = attention.output_projection, self._on_inputs(attention, sums)
                stack.callback(output.register_forward_pre_hook(hook).remove)
                if "curvature" in self.needs:
                    stack.callback(output.register_forward_hook(_on_outputs(sums)).remove)
            yield

    def start(self, batch: Batch) -> None:
        """Forget the gates of the last batch; hooks make those of the coming one."""
        self.batch = batch
        for sums in self.sums:
            sums.live = []

    def finish(self, number: int, finite: _Finite) -> None:
        """Take the gradients of a batch, and note whether its numbers are finite."""
        modules = list(zip(self.attentions, self.sums, strict=True))
        for attention, sums in modules:
            seen = sums.activations
            if seen is not None:  # before any gradient: one wrong activation spoils all of them
                finite.note(seen.squares, "An activation", attention, number)
        for attention, sums in modules:
            # a module that runs more than once has a gate at every run
            rows = [gate.grad for gate in sums.live if gate.grad is not None]
            if rows:
                summed = torch.stack(rows).sum(0).double()
                finite.note(summed, "A gradient", attention, number)
                sums.gradients.append(summed)

    def _on_inputs(
        self, attention: Attention, sums: _Sums
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            shape = len(x) if self.wants_gradients else 1, attention.query_heads
            gate = torch.ones(shape, device=x.device, requires_grad=self.wants_gradients)
            if recomputing():
                return apply_gate(x, gate), *args[1:]
            if sums.live and "gram" in self.needs:
                raise RunsTwice(
                    f"'{attention.path}' runs in more than one layer, so that no one place has its "
                    "statistics. Score it by fisher, gradient or wanda."
                )
            sums.live.append(gate)
            with torch.no_grad():
                rows = in_float32(real_tokens(x, token_mask(self.batch, attention.kind)))
                heads = rows.unflatten(-1, (attention.query_heads, -1))
                sums.tokens += len(heads)
                total = heads.sum(0, dtype=torch.float64)
                squares = heads.square().sum(0, dtype=torch.float64)
                new = Activations(total, squares, len(heads))
                sums.activations = new if sums.activations is None else sums.activations + new
                if "gram" in self.needs:
                    gram = outer_sum(rows, rows)
                    sums.gram = gram if sums.gram is None else sums.gram.add_(gram)
            return apply_gate(x, gate), *args[1:]

        return hook


def _on_outputs(sums: _Sums) -> Callable[[nn.Module, Any, Tensor], None]:
    def summed(gradient: Tensor) -> None:
        new = gradient.detach().double().square().flatten(0, -2).sum(0)
        sums.curvature = new if sums.curvature is None else sums.curvature + new

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if not recomputing():
            output.register_hook(summed)

    return hook


def first_not_finite(values: Tensor) -> tuple[int, ...] | None:
    """Return the position of the first NaN or infinity."""
    wrong: Bool[Tensor, ...] = ~torch.isfinite(values)
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None


class _Finite:
    """Flags of finite numbers in a pass: noted on their device, and taken from there once."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._sentences: list[str] = []

    def note(self, values: Tensor, what: str, attention: Attention, number: int) -> None:
        """Note some values of a batch."""
        self._flags.append(values.isfinite().all())
        self._sentences.append(f"{what} in '{attention.path}' in batch {number}")

    def confirm(self) -> None:
        """Raise DataError for the first values that are not finite."""
        known = torch.stack(self._flags).tolist() if self._flags else []
        for said, finite in zip(self._sentences, known, strict=True):
            if not finite:
                raise DataError(
                    f"{said} (counted from 0) is not finite: the model overflows in this dtype or "
                    "its weights are damaged. Try --config dtype=float32."
                )


def _is_biased(attention: Attention) -> bool:
    return bool(attention.query_heads) and read_output(attention)[1] is not None


def _output_weight(attention: Attention) -> Tensor:
    if not attention.query_heads:
        return torch.zeros(0, 1, 1)
    heads, _ = read_output(attention)
    return heads.cpu()
