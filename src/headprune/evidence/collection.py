"""One streaming pass over calibration data that measures what criteria ask for.

Gates of one row per example sit on the input of every output projection, as in training; their
gradients are those of every example for itself, so that nothing depends on the batch an example
comes in. What is summed over tokens leaves padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import DataError, PlanError
from headprune.evidence.criteria import Activations, Need, UnitEvidence
from headprune.evidence.criteria.spec import first_not_finite
from headprune.evidence.losses import example_losses
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.gating import apply_gate
from headprune.model.heads import read_output
from headprune.model.loading import task_of
from headprune.model.passes import eager_attention, run_model
from headprune.model.residency import recomputing
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.dtypes import in_float32


def collect(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Iterable[Batch],
    needs: frozenset[Need],
    special_ids: Sequence[int] = (),
    seed: int = 0,
) -> list[UnitEvidence]:
    """Measures gradients, activations and attention in one pass over the data.

    Args:
        model: The model.
        attentions: The attention modules to look at.
        batches: The examples; ``labels`` among the inputs where the task has some.
        needs: What to measure; "gram", "losses" and "gates" are none of this function's business.
        special_ids: Token ids that attention weights are not counted on.
        seed: Seed of the directions that stand for a loss where a model has no head.

    Raises:
        DataError: If an example has nothing to score, or a number is not finite.
        PlanError: If attention weights are asked for and the model does not give them.
    """
    evidence = [UnitEvidence(a.path, partial(_output_weight, a), seed=seed) for a in attentions]
    streamed = needs & {"gradients", "activations", "attention", "curvature"}
    backward = bool(needs & {"gradients", "curvature"})
    if not streamed:
        return evidence
    collector = _Collector(attentions, needs)
    frozen = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(collector.attached(model))
            stack.enter_context(torch.set_grad_enabled(backward))
            for number, batch in enumerate(batches):
                collector.start(batch, special_ids)
                if backward:
                    losses = example_losses(model, task_of(model), batch, seed)
                    losses.sum().backward()
                else:
                    run_model(model, batch)
                collector.finish(number)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return [collector.evidence(position, part, needs) for position, part in enumerate(evidence)]


class _Collector:
    """Collects what hooks see, and sums it after every batch."""

    batch: Batch
    special: Tensor
    live: list[list[Tensor]]  # the gates of every module, one per run

    def __init__(
        self,
        attentions: Sequence[Attention],
        needs: frozenset[Need],
    ) -> None:
        self.wants_curvature = "curvature" in needs
        self.wants_gradients = bool(needs & {"gradients", "curvature"})
        self.wants_attention = "attention" in needs
        self.attentions = attentions
        self.gradients: list[list[Tensor]] = [[] for _ in attentions]
        self.activations: list[Activations | None] = [None for _ in attentions]
        self.weights: list[tuple[Tensor, int]] = [
            (torch.zeros(a.query_heads, dtype=torch.float64), 0) for a in attentions
        ]
        self.curvature: list[Tensor | None] = [None for _ in attentions]
        self.tokens = [0 for _ in attentions]

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Puts the hooks on for the time of a pass."""
        with ExitStack() as stack:
            for position, attention in enumerate(self.attentions):
                if not attention.query_heads:
                    continue
                output, inputs = attention.output_projection, self._on_inputs(position)
                stack.callback(output.register_forward_pre_hook(inputs).remove)
                outputs = self._on_outputs(position)
                stack.callback(output.register_forward_hook(outputs).remove)
                if self.wants_attention:
                    weights = self._on_attention(position)
                    stack.callback(attention.module.register_forward_hook(weights).remove)
            if self.wants_attention:
                stack.enter_context(eager_attention(model))
            yield

    def start(self, batch: Batch, special_ids: Sequence[int]) -> None:
        """Forgets the gates of the last batch; hooks make those of the coming one."""
        self.batch = batch
        self.special = torch.tensor(sorted(set(special_ids)), dtype=torch.long)
        self.live = [[] for _ in self.attentions]

    def finish(self, number: int) -> None:
        """Takes the gradients of a batch, and refuses what is not finite."""
        for position, attention in enumerate(self.attentions):
            where = f"in '{attention.path}' in batch {number} (counted from 0)"
            seen = self.activations[position]
            if seen is not None:  # before any gradient: those of all layers are of one making
                _refuse_not_finite(seen.squares, f"An activation {where}")
            if self.wants_attention and attention.query_heads and not self.weights[position][1]:
                if seen is None or seen.tokens == 0:
                    continue  # a module that does not run
                raise PlanError(
                    f"'{attention.path}' does not give its attention weights, which the criterion "
                    "confidence needs. Use other criteria."
                )
        for position, attention in enumerate(self.attentions):
            where = f"in '{attention.path}' in batch {number} (counted from 0)"
            if self.wants_gradients and attention.query_heads:
                # a module that runs more than once has a gate at every run
                rows = [gate.grad for gate in self.live[position] if gate.grad is not None]
                if rows:
                    summed = torch.stack(rows).sum(0).double().cpu()
                    _refuse_not_finite(summed, f"A gradient {where}")
                    self.gradients[position].append(summed)

    def evidence(self, position: int, part: UnitEvidence, needs: frozenset[Need]) -> UnitEvidence:
        """The evidence of one module, at the end."""
        heads = self.attentions[position].query_heads
        if "gradients" in needs:
            rows = self.gradients[position]
            part = replace(
                part, gradients=torch.cat(rows) if rows else torch.zeros(1, heads).double()
            )
        if "curvature" in needs:
            summed, tokens = self.curvature[position], self.tokens[position]
            if summed is None:  # a module that does not run
                summed = torch.zeros(part.output_weight.shape[1], dtype=torch.float64)
            part = replace(part, curvature=summed / max(tokens, 1))
        if "activations" in needs:
            seen = self.activations[position]
            if seen is None:
                nothing = torch.zeros(heads, part.output_weight.shape[-1], dtype=torch.float64)
                seen = Activations(nothing, nothing, 0)
            part = replace(part, activations=seen)
        if "attention" in needs:
            total, count = self.weights[position]
            part = replace(part, attention=total / max(count, 1))
        return part

    def _on_inputs(
        self, position: int
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        attention = self.attentions[position]

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            shape = len(x) if self.wants_gradients else 1, attention.query_heads
            gate = torch.ones(shape, device=x.device, requires_grad=self.wants_gradients)
            if recomputing():
                return apply_gate(x, gate), *args[1:]
            self.live[position].append(gate)
            mask = token_mask(self.batch, attention.kind)
            with torch.no_grad():
                heads = in_float32(real_tokens(x, mask)).unflatten(-1, (attention.query_heads, -1))
                self.tokens[position] += len(heads)
                sums = heads.sum(0, dtype=torch.float64)
                squares = heads.square().sum(0, dtype=torch.float64)
                new = Activations(sums.cpu(), squares.cpu(), len(heads))
                seen = self.activations[position]
                self.activations[position] = new if seen is None else seen + new
            return apply_gate(x, gate), *args[1:]

        return hook

    def _on_outputs(self, position: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def summed(gradient: Tensor) -> None:
            new = gradient.detach().double().square().flatten(0, -2).sum(0).cpu()
            seen = self.curvature[position]
            self.curvature[position] = new if seen is None else seen + new

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.wants_curvature and not recomputing():
                output.register_hook(summed)

        return hook

    def _on_attention(self, position: int) -> Callable[[nn.Module, Any, Any], None]:
        attention = self.attentions[position]

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            weights = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else None
            if not isinstance(weights, Tensor) or weights.dim() != 4 or recomputing():
                return
            # what a head does with "nothing to say" is to look at a special token
            ids = self._keys(attention.kind, weights.shape[-1])
            if ids is not None:
                special = torch.isin(ids, self.special.to(ids.device)).to(weights.device)
                weights = weights.masked_fill(special[:, None, None, :], 0.0)
            largest = weights.amax(-1).transpose(1, 2)  # (batch, length, heads)
            rows = real_tokens(largest, token_mask(self.batch, attention.kind))
            total, count = self.weights[position]
            self.weights[position] = total + rows.double().sum(0).cpu(), count + len(rows)

        return hook

    def _keys(self, kind: str, length: int) -> Tensor | None:
        name = "decoder_input_ids" if kind == "decoder" else "input_ids"
        ids = self.batch.get(name)
        return ids if isinstance(ids, Tensor) and ids.shape[-1] == length else None


def _refuse_not_finite(values: Tensor, what: str) -> None:
    if first_not_finite(values) is not None:
        raise DataError(
            f"{what} is not finite: the model overflows in this dtype or its weights are damaged. "
            "Try --dtype float32."
        )


def _output_weight(attention: Attention) -> Tensor:
    if not attention.query_heads:
        return torch.zeros(0, 1, 1)
    heads, _ = read_output(attention)
    return heads.cpu()
