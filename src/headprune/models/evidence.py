"""One streaming pass over calibration data that measures what criteria ask for.

Gates of one row per example sit on the input of every output projection, as in training; their
gradients are those of every example for itself, so that nothing depends on the batch an example
comes in. What is summed over tokens leaves padding out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.criteria import Activations, Evidence, Need, Units
from headprune.criteria.spec import first_not_finite
from headprune.errors import DataError, PlanError
from headprune.models.gating import apply_gate, fixed, gated
from headprune.models.heads import read_output
from headprune.models.loading import Task
from headprune.runtime.modeling_headprune import Attention

Batch = Mapping[str, Any]
Progress = Callable[[int, int], None]


def collect(
    model: PreTrainedModel,
    task: Task,
    attentions: Sequence[Attention],
    batches: Sequence[Batch],
    needs: frozenset[Need],
    gates: Sequence[Tensor] | None = None,
    special_ids: Sequence[int] = (),
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Evidence]:
    """Measures gradients, activations and attention in one pass over the data.

    Args:
        model: The model.
        task: What its loss is.
        attentions: The attention modules to look at.
        batches: The examples; ``labels`` among the inputs where the task has some.
        needs: What to measure; "gram", "losses" and "gates" are none of this function's business.
        gates: Gates that the model runs with, per module; None for all open.
        special_ids: Token ids that attention weights are not counted on.
        seed: Seed of the directions that stand for a loss where a model has no head.
        progress: Called with batches done and batches in all.

    Raises:
        DataError: If an example has nothing to score, or a number is not finite.
        PlanError: If attention weights are asked for and the model does not give them.
    """
    evidence = [
        Evidence(a.path, read_output(a)[0].cpu(), seed=seed) if a.query_heads else _empty(a)
        for a in attentions
    ]
    streamed = needs & {"gradients", "activations", "attention", "curvature"}
    backward = bool(needs & {"gradients", "curvature"})
    if not streamed:
        return evidence
    gather = _Gathered(attentions, gates, needs)
    frozen = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(gather.listening("attention" in needs, model))
            stack.enter_context(torch.set_grad_enabled(backward))
            for number, batch in enumerate(batches):
                gather.start(batch, backward, special_ids)
                if backward:
                    losses = example_losses(model, task, batch, seed)
                    losses.sum().backward()
                else:
                    run_model(model, batch)
                gather.finish(number, backward)
                progress(number + 1, len(batches))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return [gather.evidence(position, part, needs) for position, part in enumerate(evidence)]


def losses_without(
    model: PreTrainedModel,
    task: Task,
    attentions: Sequence[Attention],
    units: Sequence[Units],
    batches: Sequence[Batch],
    gates: Sequence[Tensor] | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Float[Tensor, " units"]]:
    """What the mean loss per example rises by when a unit is closed, for every unit, exactly.

    Args:
        model: The model.
        task: What its loss is; "features" has none that closing a unit could raise.
        attentions: The attention modules.
        units: Per module, its units.
        batches: The examples.
        gates: Gates that the model runs with, per module; None for all open.
        seed: As for ``collect``.
        progress: Called with units done and units in all.

    Raises:
        DataError: If an example has nothing to score, or a loss is not finite.
    """
    total, found, done = sum(map(len, units)), [], 0
    start = gates or [torch.ones(a.query_heads) for a in attentions]
    reference = None
    if task == "features":
        with torch.no_grad(), gated(attentions, fixed(start)):
            reference = [embedding(model, batch) for batch in batches]

    def mean(gates: Sequence[Tensor]) -> float:
        with torch.no_grad(), gated(attentions, fixed(gates)):
            if reference is not None:  # there the loss is the distance to the whole model's
                gaps = zip(batches, reference, strict=True)
                losses = [(embedding(model, b) - r).square().sum(-1) for b, r in gaps]
            else:
                losses = [example_losses(model, task, batch, seed) for batch in batches]
        return float(torch.cat(losses).double().mean())

    whole = mean(start)
    for position, of_module in enumerate(units):
        rises = []
        for unit in of_module:
            gate = start[position].clone()
            gate[list(unit)] = 0.0
            rises.append(mean([*start[:position], gate, *start[position + 1 :]]) - whole)
            done += 1
            progress(done, total)
        found.append(torch.tensor(rises, dtype=torch.float64))
    return found


def example_losses(
    model: PreTrainedModel, task: Task, batch: Batch, seed: int = 0
) -> Float[Tensor, " examples"]:
    """The loss of every example: the mean over what is scored of it.

    A model without a head has no loss. There it is the embedding (as ``evaluate`` takes it) along a
    random direction, whose squared gradient is in the mean that of the whole embedding.

    Raises:
        DataError: If there is nothing to score in an example, or labels are missing.
    """
    if task == "features":
        vectors = embedding(model, batch)
        return (vectors * _directions(batch, vectors.shape[-1], seed).to(vectors)).sum(-1)
    if batch.get("labels") is None:
        raise DataError(
            "A loss on this task needs labels: name the --label-column, or use a criterion that "
            "needs no loss (fluctuation, wanda, reconstruction)."
        )
    labels = batch["labels"]
    logits = run_model(model, {k: v for k, v in batch.items() if k != "labels"}, head=True).logits
    if task == "classification":
        return F.cross_entropy(_wide(logits), labels.to(logits.device), reduction="none")
    labels = labels.to(logits.device)
    if "attention_mask" in batch and "decoder_input_ids" not in batch:
        labels = labels.masked_fill(batch["attention_mask"].to(labels.device) == 0, -100)
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    scored = labels != -100
    if not bool(scored.any(1).all()):
        row = int((~scored.any(1)).nonzero()[0])
        raise DataError(
            f"Example {row} of a batch has no tokens to score, only padding. Leave empty texts out."
        )
    per_token = F.cross_entropy(_wide(logits).mT, labels, reduction="none", ignore_index=-100)
    mean: Tensor = per_token.sum(1) / scored.sum(1)
    return mean


def embedding(model: PreTrainedModel, batch: Batch) -> Float[Tensor, "examples hidden"]:
    """Mean of the last hidden states over real tokens, normalised.

    Raises:
        DataError: If an example is nothing but padding.
    """
    states = _wide(run_model(model, batch).last_hidden_state)
    mask = token_mask(batch, "self")
    weight = torch.ones_like(states[..., 0]) if mask is None else mask.to(states)
    if not bool(weight.any(1).all()):
        raise DataError("An example has no tokens, only padding. Leave empty texts out.")
    return F.normalize((states * weight[..., None]).sum(1) / weight.sum(1, keepdim=True), dim=-1)


class _Gathered:
    """What hooks leave behind, and what is summed of it after every batch."""

    def __init__(
        self,
        attentions: Sequence[Attention],
        gates: Sequence[Tensor] | None,
        needs: frozenset[Need],
    ) -> None:
        self.wants_curvature = "curvature" in needs
        self.wants_attention = "attention" in needs
        self.attentions = attentions
        self.gates = gates or [torch.ones(a.query_heads) for a in attentions]
        self.gradients: list[list[Tensor]] = [[] for _ in attentions]
        self.activations: list[Activations | None] = [None for _ in attentions]
        self.weights: list[tuple[Tensor, int]] = [
            (torch.zeros(a.query_heads, dtype=torch.float64), 0) for a in attentions
        ]
        self.curvature: list[Tensor | None] = [None for _ in attentions]
        self.tokens = [0 for _ in attentions]
        self.batch: Batch = {}
        self.special = torch.zeros(0, dtype=torch.long)
        self.live: list[list[Tensor]] = []

    @contextmanager
    def listening(self, attention: bool, model: PreTrainedModel) -> Iterator[None]:
        """Puts the hooks on for the time of a pass."""
        handles = []
        for position, module in enumerate(self.attentions):
            if not module.query_heads:
                continue
            hook = self._on_inputs(position)
            handles.append(module.output_projection.register_forward_pre_hook(hook))
            handles.append(
                module.output_projection.register_forward_hook(self._on_outputs(position))
            )
            if attention:
                seen = self._on_attention(position)
                handles.append(module.module.register_forward_hook(seen))
        before = model.config._attn_implementation
        if attention:
            model.set_attn_implementation("eager")
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if attention:
                model.set_attn_implementation(before)

    def start(self, batch: Batch, gradients: bool, special_ids: Sequence[int]) -> None:
        """Makes one gate per example and head for the coming batch."""
        self.batch = batch
        self.special = torch.tensor(sorted(set(special_ids)), dtype=torch.long)
        self.live = [[] for _ in self.attentions]
        self.wants_gradients = gradients

    def finish(self, number: int, gradients: bool) -> None:
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
            if gradients and attention.query_heads:
                # a module that runs more than once has a gate at every run
                rows = [gate.grad for gate in self.live[position] if gate.grad is not None]
                if rows:
                    summed = torch.stack(rows).sum(0).double().cpu()
                    _refuse_not_finite(summed, f"A gradient {where}")
                    self.gradients[position].append(summed)

    def evidence(self, position: int, part: Evidence, needs: frozenset[Need]) -> Evidence:
        """The evidence of one module, at the end."""
        heads = self.attentions[position].query_heads
        if "gradients" in needs:
            rows = self.gradients[position]
            part = replace(
                part, gradients=torch.cat(rows) if rows else torch.zeros(1, heads).double()
            )
        if "curvature" in needs:
            summed, tokens = self.curvature[position], self.tokens[position]
            nothing = torch.zeros(part.output_weight.shape[1], dtype=torch.float64)
            part = replace(part, curvature=nothing if summed is None else summed / max(tokens, 1))
        if "activations" in needs:
            width = part.output_weight.shape[-1]
            nothing = torch.zeros(heads, width, dtype=torch.float64)
            seen = self.activations[position]
            part = replace(part, activations=seen or Activations(nothing, nothing, 0))
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
            gate = self.gates[position].to(x.device, torch.float32)[None]
            if self.wants_gradients:
                gate = gate.repeat(len(x), 1).requires_grad_(True)
                self.live[position].append(gate)
            mask = token_mask(self.batch, attention.kind)
            with torch.no_grad():
                heads = _wide(real_tokens(x, mask)).unflatten(-1, (attention.query_heads, -1))
                self.tokens[position] += len(heads)
                closed = self.gates[position].to(heads)[:, None].double()
                sums = heads.sum(0, dtype=torch.float64) * closed
                squares = heads.square().sum(0, dtype=torch.float64) * closed**2
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
            if self.wants_curvature:
                output.register_hook(summed)

        return hook

    def _on_attention(self, position: int) -> Callable[[nn.Module, Any, Any], None]:
        attention = self.attentions[position]

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            weights = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else None
            if not isinstance(weights, Tensor) or weights.dim() != 4:
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


def real_tokens(x: Tensor, mask: Tensor | None) -> Float[Tensor, "tokens width"]:
    """The rows of (batch, length, width) that are no padding."""
    rows = x.flatten(0, -2)
    if mask is None or mask.numel() != len(rows):
        return rows
    return rows[mask.flatten().to(rows.device)]


def token_mask(batch: Batch, kind: str) -> Tensor | None:
    """Which tokens are real, of those that the queries of a kind of attention stand at."""
    if kind in ("decoder", "cross") and "decoder_input_ids" in batch:
        labels = batch.get("labels")
        return None if labels is None else labels != -100
    mask = batch.get("attention_mask")
    return None if mask is None else mask != 0


def run_model(model: PreTrainedModel, batch: Batch, head: bool = False) -> Any:
    """Runs the model, or what is below its head, without labels."""
    inputs = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }
    return model(**inputs) if head else model.base_model(**inputs)


def _directions(batch: Batch, width: int, seed: int) -> Float[Tensor, "examples width"]:
    """A random vector of signs per example, by its own tokens, whichever batch it comes in."""
    mask, rows = token_mask(batch, "self"), []
    for number, ids in enumerate(batch["input_ids"].cpu()):
        real = ids if mask is None else ids[mask[number].cpu()]
        digest = hashlib.sha256(str(seed).encode() + real.numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1)
    return torch.stack(rows)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _refuse_not_finite(values: Tensor, what: str) -> None:
    if first_not_finite(values) is not None:
        raise DataError(
            f"{what} is not finite: the model overflows in this dtype or its weights are damaged. "
            "Try --dtype float32."
        )


def _empty(attention: Attention) -> Evidence:
    return Evidence(attention.path, torch.zeros(0, 1, 1))
