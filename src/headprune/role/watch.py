"""One pass over an input: attention summed up layer by layer, so that one layer is in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.errors import FamilyError
from headprune.model.batch import Batch, token_mask
from headprune.model.passes import eager_attention, run_model
from headprune.role.attended import Attended, Counted
from headprune.role.inputs import Reading
from headprune.role.table import Role
from headprune.role.writing import Contributions
from headprune.runtime.modeling_headprune import Attention, stock_class

Tallies = dict[tuple[int, str], Counted]
"""By module and role: sums and counts of all sequences."""


@torch.no_grad()
def watch(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    reading: Reading,
    roles: Mapping[str, Role],
    classes: Mapping[str, Tensor],
    progress: Progress = lambda done, total: None,
    contributions: Contributions | None = None,
) -> Watched:
    """Measure roles on an input, and contributions in the same pass."""
    watched = Watched(attentions, reading, roles, classes)
    with attention_weights(model, attentions, watched.see), ExitStack() as stack:
        if contributions is not None:
            contributions.attach(stack)
        for number, batch in enumerate(reading.batches):
            watched.begin(number, batch)
            if contributions is not None:
                contributions.batch = batch
            run_model(model, batch)
            watched.finish()
            progress(number + 1, len(reading.batches))
    return watched


@contextmanager
def attention_weights(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    see: Callable[[int, Tensor], None],
) -> Iterator[None]:
    """Call ``see`` with the position of each module that runs, and its weights.

    Raises:
        FamilyError: If a module gives no attention weights.
    """

    def hook(position: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, outputs: see(position, _weights(outputs, attentions[position]))

    with eager_attention(model), ExitStack() as stack:
        for position, attention in enumerate(attentions):
            if attention.query_heads:
                module = attention.module
                stack.callback(module.register_forward_pre_hook(_asks, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(hook(position)).remove)
        yield


def _asks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask a module for its weights, where it returns them on demand only."""
    signature = inspect.signature(stock_class(module).forward)
    if "output_attentions" not in signature.parameters:
        return None
    bound = signature.bind(module, *args, **kwargs)
    bound.arguments["output_attentions"] = True
    return bound.args[1:], bound.kwargs


def _weights(outputs: Any, attention: Attention) -> Tensor:
    """Return the last output with rows that sum to at most one; a bias may have that shape."""
    for part in reversed(outputs[1:] if isinstance(outputs, tuple) else ()):
        if isinstance(part, Tensor) and part.dim() == 4 and part.shape[1] == attention.query_heads:
            rows = part[:, :, -1].float()
            if bool((rows >= 0).all()) and bool((rows.sum(-1) <= 1.01).all()):
                return part
    raise FamilyError(
        f"'{attention.path}' gives no attention weights, which roles need. Choose other modules "
        "with attention, or another model."
    )


class Watched:
    """The sums of one pass and of its controls."""

    batch: Batch

    def __init__(
        self,
        attentions: Sequence[Attention],
        reading: Reading,
        roles: Mapping[str, Role],
        classes: Mapping[str, Tensor],
    ) -> None:
        self.sums: Tallies = {}
        self.controls: Tallies = {}
        self.causal: dict[int, bool] = {}
        self._attentions, self._reading = attentions, reading
        self._roles, self._classes = roles, classes
        self._batch_sums: Tallies = {}
        self._batch_controls: Tallies = {}
        self._uniform: dict[tuple[str, bool, str], Counted | None] = {}

    def begin(self, number: int, batch: Batch) -> None:
        """Take the next batch."""
        self.batch = batch
        self._facts = self._reading.facts[number] if self._reading.facts else {}
        self._batch_sums, self._batch_controls, self._uniform = {}, {}, {}

    def see(self, position: int, weights: Tensor) -> None:
        attn, kind = self._attended(position, weights), self._attentions[position].kind
        for name, role in self._roles.items():
            if kind == "cross" and not role.crosses:
                continue
            key = position, name
            _sum(self._batch_sums, key, role.measure(attn))
            if role.control == "elsewhere":
                _sum(self._batch_controls, key, role.measure(attn.elsewhere()))
            elif role.control == "uniform":  # alike for modules of one kind
                alike = name, attn.causal, kind
                if alike not in self._uniform:
                    self._uniform[alike] = role.measure(attn.uniform())
                _sum(self._batch_controls, key, self._uniform[alike])

    def finish(self) -> None:
        for tallies, new in ((self.sums, self._batch_sums), (self.controls, self._batch_controls)):
            for key, counted in new.items():
                sums, counts = (part.cpu().double() for part in counted)
                if key in tallies:
                    before = tallies[key]
                    sums, counts = torch.cat([before[0], sums]), torch.cat([before[1], counts])
                tallies[key] = sums, counts

    def _attended(self, position: int, weights: Tensor) -> Attended:
        attention, device = self._attentions[position], weights.device
        decodes = attention.kind == "decoder" and "decoder_input_ids" in self.batch
        ids = self.batch["decoder_input_ids" if decodes else "input_ids"]
        queries = self._mask(attention.kind, weights.shape[0], weights.shape[-2])
        keys = self._mask(
            "encoder" if attention.kind == "cross" else attention.kind, *weights.shape[::3]
        )
        if position not in self.causal:  # a class does not say it of itself
            later = weights[:, 0].triu(1).amax(-1)[queries.to(device)]
            self.causal[position] = attention.kind != "cross" and not bool(later.any())
        return Attended(
            weights,
            queries.to(device),
            keys.to(device),
            ids.to(device),
            self.causal[position],
            {name: numbers.to(device) for name, numbers in self._classes.items()},
            self._reading.start,
            self._reading.period,
            {name: fact.to(device) for name, fact in self._facts.items()},
        )

    def _mask(self, kind: str, sequences: int, length: int) -> Tensor:
        mask = token_mask(self.batch, kind)
        return torch.ones(sequences, length, dtype=torch.bool) if mask is None else mask


def _sum(tallies: Tallies, key: tuple[int, str], new: Counted | None) -> None:
    """Add the run of a module that may run more than once in a batch."""
    if new is not None:
        before = tallies.get(key)
        tallies[key] = new if before is None else (before[0] + new[0], before[1] + new[1])
