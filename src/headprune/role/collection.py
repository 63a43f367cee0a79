"""One streaming pass over an input: attention is summed up while it is there, layer by layer.

Hooks take the weights that a module returns and leave per sequence and head a few sums; the weights
of a layer are gone before those of the next are made. Nothing depends on the batch that a sequence
comes in: padding counts neither as query nor as key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import FamilyError
from headprune.model.batch import Batch, token_mask
from headprune.model.passes import eager_attention, run_model
from headprune.role.contribution import Contributions
from headprune.role.inputs import Input
from headprune.role.spec import Attended, Counted, Hidden, Parsed, Role
from headprune.role.writing import Written
from headprune.runtime.modeling_headprune import Attention, stock_class

Tallies = dict[tuple[int, str], Counted]
"""By module and role: sums of all sequences, shape (sequences, heads, variants), and counts."""


class Watched:
    """What one pass found.

    Attributes:
        found: Of the heads.
        controls: Of attention that spreads evenly over the same keys, and of the same attention
            where what is looked for lies elsewhere.
        causal: Whether a module's queries see only keys up to their own place.
    """

    def __init__(self) -> None:
        self.found: Tallies = {}
        self.controls: Tallies = {}
        self.causal: dict[int, bool] = {}


@torch.no_grad()
def watch(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    given: Input,
    roles: Mapping[str, Role],
    classes: Mapping[str, Tensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
    beside: Contributions | None = None,
) -> Watched:
    """Measures roles on an input.

    Args:
        model: The model.
        attentions: The modules to look at.
        given: What the model reads.
        roles: Those that are measured on it, by name.
        classes: Ids of tokens by kind.
        progress: Called with batches done and in all.
        beside: Sums up what heads write in the same pass.

    Raises:
        FamilyError: If a module gives no attention weights.
    """
    written = Written(model, given) if any(role.writing for role in roles.values()) else None
    watcher = _Watcher(attentions, given, roles, classes, written)
    with weights_told(model, attentions, watcher.see), ExitStack() as stack:
        if written is not None:
            for attention in attentions:
                written.attach(stack, attention)
        if beside is not None:
            beside.attach(stack)
        for number, batch in enumerate(given.batches):
            watcher.batch = batch
            watcher.parsed = given.parsed[number] if given.parsed else None
            watcher.hidden = given.hidden[number] if given.hidden else None
            if beside is not None:
                beside.batch = batch
            run_model(model, batch)
            watcher.finish()
            progress(number + 1, len(given.batches))
    return watcher.result


@contextmanager
def weights_told(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    see: Callable[[int, Tensor], None],
) -> Iterator[None]:
    """Has a model tell its attention weights, for the time of a ``with`` block.

    Args:
        model: The model.
        attentions: The modules to look at.
        see: Called with the position of a module and its weights, of shape (sequences, heads,
            queries, keys), each time it runs.

    Raises:
        FamilyError: If a module gives no attention weights.
    """

    def told_of(position: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, outputs: see(position, _weights(outputs, attentions[position]))

    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for position, attention in enumerate(attentions):
            if attention.query_heads:
                module = attention.module
                stack.callback(module.register_forward_pre_hook(_asks, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(told_of(position)).remove)
        yield


class _Watcher:
    """Sums up what hooks see."""

    batch: Batch
    parsed: Parsed | None
    hidden: Hidden | None

    def __init__(
        self,
        attentions: Sequence[Attention],
        given: Input,
        roles: Mapping[str, Role],
        classes: Mapping[str, Tensor],
        written: Written | None,
    ) -> None:
        self.attentions, self.given = attentions, given
        self.roles, self.classes, self.written = roles, classes, written
        self.result = Watched()
        self._batch: Tallies = {}
        self._moved: Tallies = {}
        self._even: dict[tuple[Any, ...], Counted] = {}
        self._of: dict[tuple[int, str], tuple[Any, ...]] = {}

    def see(self, position: int, weights: Tensor) -> None:
        """Sums up the weights of a module."""
        attention = self.attentions[position]
        seen = self._attended(position, weights)
        for name, role in self._roles_of(attention):
            key = position, name
            _sum(self._batch, key, role.measure(seen))
            if role.control == "elsewhere":
                _sum(self._moved, key, role.measure(_elsewhere(seen)))
            if role.control == "uniform":
                self._of[key] = kind = (name, seen.causal, attention.kind)
                if kind not in self._even:
                    self._even[kind] = role.measure(_evenly(seen))

    def finish(self) -> None:
        """Takes over what the hooks saw of a batch."""
        for (position, name), sums in self._batch.items():
            _add(self.result.found, (position, name), sums)
        for key, kind in self._of.items():
            _add(self.result.controls, key, self._even[kind])
        for key, sums in self._moved.items():
            _add(self.result.controls, key, sums)
        self._batch, self._moved, self._even, self._of = {}, {}, {}, {}

    def _roles_of(self, attention: Attention) -> list[tuple[str, Role]]:
        crosses = attention.kind == "cross"
        return [(name, role) for name, role in self.roles.items() if role.crosses or not crosses]

    def _attended(self, position: int, weights: Tensor) -> Attended:
        kind, device = self.attentions[position].kind, weights.device
        decodes = "decoder_input_ids" in self.batch
        ids = self.batch["decoder_input_ids" if kind == "decoder" and decodes else "input_ids"]
        queries = self._mask(kind, weights.shape[0], weights.shape[-2])
        keys = self._mask("encoder" if kind == "cross" else kind, *weights.shape[::3])
        # told by the weights: a class does not say it of itself
        if position not in self.result.causal:
            later = weights[:, 0].triu(1).amax(-1)[queries.to(device)]
            self.result.causal[position] = kind != "cross" and not bool(later.any())
        return Attended(
            weights,
            queries.to(device),
            keys.to(device),
            ids.to(device),
            self.result.causal[position],
            {name: numbers.to(device) for name, numbers in self.classes.items()},
            self.given.start,
            self.given.period,
            None if self.written is None else self.written.logits(self.attentions[position], ids),
            None if self.parsed is None else self.parsed.to(device),
            None if self.hidden is None else self.hidden.to(device),
        )

    def _mask(self, kind: str, sequences: int, length: int) -> Tensor:
        mask = token_mask(self.batch, kind)
        return torch.ones(sequences, length, dtype=torch.bool) if mask is None else mask


def _asks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks a module for its weights, where it returns them on demand only."""
    signature = inspect.signature(stock_class(module).forward)
    if "output_attentions" not in signature.parameters:
        return None
    bound = signature.bind(module, *args, **kwargs)
    bound.arguments["output_attentions"] = True
    return bound.args[1:], bound.kwargs


def _weights(outputs: Any, attention: Attention) -> Tensor:
    """The attention weights among what a module returns.

    Some return the bias of positions before them, whose shape may be the same. Rows of weights sum
    to one, or to less where part of them goes to no key.

    Raises:
        FamilyError: If there are none.
    """
    for part in reversed(outputs[1:] if isinstance(outputs, tuple) else ()):
        if isinstance(part, Tensor) and part.dim() == 4 and part.shape[1] == attention.query_heads:
            rows = part[:, :, -1].float()
            if bool((rows >= 0).all()) and bool((rows.sum(-1) <= 1.01).all()):
                return part
    raise FamilyError(
        f"'{attention.path}' gives no attention weights, from which roles are told. Choose other "
        "modules with --attention, or another model."
    )


def _evenly(seen: Attended) -> Attended:
    """One head that spreads its attention evenly over the keys in view."""
    view = seen.seen()[:, None].float()
    even = view / view.sum(-1, keepdim=True).clamp(min=1)
    return replace(seen, weights=even)


def _elsewhere(seen: Attended) -> Attended:
    """The same attention, were what it looks for where another context has it."""
    if seen.hidden is None:
        return seen
    moved = replace(seen.hidden, needle=seen.hidden.elsewhere)
    return replace(seen, hidden=moved)


def _sum(tallies: Tallies, key: tuple[int, str], new: Counted) -> None:
    """Of a module that runs more than once in a batch."""
    before = tallies.get(key)
    tallies[key] = new if before is None else (before[0] + new[0], before[1] + new[1])


def _add(tallies: Tallies, key: tuple[int, str], new: Counted) -> None:
    sums, counts = (part.cpu().double() for part in new)
    before = tallies.get(key)
    tallies[key] = (
        (sums, counts)
        if before is None
        else (torch.cat([before[0], sums]), torch.cat([before[1], counts]))
    )
