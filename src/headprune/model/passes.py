"""Forward passes: plain ones, in pieces, and of two streams at once.

Pieces: modules beside attention, and attention up to its output projection, run on a few sequences
at a time. That bounds the memory of their inner states.

Streams: the original model, and the model as it is being changed, in one pass.

    sequences of the batch    0 ... n-1    n ... 2n-1
    stream                    original     changed

Modules change in the order they run, so that later layers make up for earlier ones. Most
projections have to compute one stream only: hooks hand them that half.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.batch import Batch, without_labels
from headprune.model.placement import on_device
from headprune.model.residency import blocks_of
from headprune.model.skeleton import Unmapped
from headprune.runtime.modeling_headprune import Attention, input_dim, width

TOKENS = 2048  # at a time; a longer sequence runs alone


def run_model(model: PreTrainedModel, batch: Mapping[str, Any], head: bool = False) -> Any:
    """Run a model, or the part below its head, without labels and without a KV cache."""
    inputs = on_device(model, without_labels(batch))
    runs = model if head else model.base_model
    takes = inspect.signature(runs.forward).parameters
    if "hidden_states" in takes:
        runs = model  # the base of DINOv3 is its encoder, which takes no pixels
    if "use_cache" in takes:
        inputs["use_cache"] = False
    with _without_cache(model):
        return runs(**inputs)


@contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn the KV cache off in the configs, for parts that take no ``use_cache``."""
    configs = [c for c in (model.config, model.config.get_text_config()) if hasattr(c, "use_cache")]
    former = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, former, strict=True):
            config.use_cache = value


def logits_at(model: PreTrainedModel, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Return the logits at some positions; those of others are never computed.

    Args:
        model: A language model.
        ids: Tokens, shape (sequences, tokens).
        mask: 0 at padding, same shape.
        places: Positions, shape (sequences, wanted).

    Returns:
        Shape (sequences, wanted, vocabulary).
    """
    inputs = on_device(model, {"input_ids": ids, "attention_mask": mask})
    head, at = model.get_output_embeddings(), places[..., None]

    def chosen(_: Any, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        where = at.to(states[0].device)
        return (states[0].gather(1, where.expand(-1, -1, states[0].shape[-1])), *states[1:])

    if head is None:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits.gather(1, at.to(logits.device).expand(-1, -1, logits.shape[-1]))
    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(chosen).remove)
        logits = model(**inputs, use_cache=False).logits
    return logits


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have a model attend in plain tensors, with masks as tensors, in a ``with`` block."""
    former = model.config._attn_implementation
    try:
        _attend_by(model, "eager")
        yield
    finally:
        _attend_by(model, former)


def _attend_by(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    model.config._attn_implementation = name  # Falcon asks its config at every call


@contextmanager
def in_pieces(model: PreTrainedModel, attentions: Sequence[Attention]) -> Iterator[None]:
    """Run the modules beside attention on some sequences at a time, in a ``with`` block.

    A model that does not name its layers runs unchanged.
    """
    watched = {a.module for a in attentions} | {p.module for a in attentions for p in a.projections}
    blocks: list[nn.Module] = []
    with suppress(Unmapped):
        blocks = blocks_of(model)
    beside = dict.fromkeys(
        module for block in blocks if block not in watched for module in _beside(block, watched)
    )
    with ExitStack() as stack:
        for module in beside:
            module.forward = partial(_piecewise, module.forward)
            stack.callback(delattr, module, "forward")
        yield


def _beside(module: nn.Module, watched: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules inside of one that have weights and hold no attention."""
    for child in module.children():
        if not watched.isdisjoint(child.modules()):
            if child not in watched:
                yield from _beside(child, watched)
        elif "forward" not in vars(child) and next(child.parameters(), None) is not None:
            yield child


def _piecewise(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
        return forward(*args, **kwargs)
    states = args[0]
    pieces = states.split(max(1, TOKENS // states.shape[1]))
    if len(pieces) == 1:
        return forward(states)
    outputs: Tensor | None = None
    for number, piece in enumerate(pieces):
        output = forward(piece)
        if not isinstance(output, Tensor) or output.shape[:2] != piece.shape[:2]:
            return forward(states)  # it returns more than states, such as the scores of experts
        if outputs is None:
            outputs = output.new_empty(len(states), *output.shape[1:])
        start = number * len(pieces[0])
        outputs[start : start + len(piece)] = output
    return outputs


# arguments of attention with a row per sequence, or one for all, and their dimensions
_PER_SEQUENCE = {
    "hidden_states": (3,),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "position_embeddings": (3,),
}


class _Apart(Exception):
    """An argument of an attention module cannot be split by sequence for certain."""


def entering_output(
    forward: Callable[..., Any],
    projection: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, tuple[None, ...] | None] | None:
    """Return the input of W_O, of attention that runs on a few sequences at a time.

    Hidden states, shape (sequences, length, width), are the first of its arguments.

    Returns:
        The input, shape (sequences, length, heads * head_dim), and the module's values after
        its outputs. None if it does more with these, or an argument may belong to all sequences.
    """
    named = {**kwargs, "hidden_states": args[0]} if args else {**kwargs}
    states = named.get("hidden_states")
    if len(args) > 1 or not isinstance(states, Tensor) or states.dim() != 3:
        return None
    rows, length = states.shape[:2]
    size = width(projection, 1 - input_dim(projection))
    inputs: Tensor | None = None
    result: Any = None
    for start in range(0, rows, step := max(1, TOKENS // length)):
        part = slice(start, min(start + step, rows))
        try:
            given = {name: _of_part(name, each, states, part) for name, each in named.items()}
        except _Apart:
            return None
        with _uncomputed(projection, size) as calls:
            result = forward(**given)
        if len(calls) != 1 or not _returns_only(result, calls[0][1]):
            return None
        x = calls[0][0]
        if x.shape[:2] != (part.stop - start, length):
            return None
        if inputs is None:
            inputs = x.new_empty(rows, *x.shape[1:])
        inputs[part] = x
    if inputs is None:
        return None
    return inputs, (None,) * (len(result) - 1) if isinstance(result, tuple) else None


@contextmanager
def _uncomputed(projection: nn.Module, size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Make a projection return zeros; yield its inputs and outputs."""
    calls: list[tuple[Tensor, Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        calls.append((x, x.new_zeros(*x.shape[:-1], size)))
        return calls[-1][1]

    projection.forward = forward
    try:
        yield calls
    finally:
        del projection.forward


def _of_part(name: str, value: Any, states: Tensor, part: slice) -> Any:
    """Return the part of an argument for some sequences, or raise where that is uncertain."""
    if name == "position_embeddings" and isinstance(value, tuple):
        return tuple(_of_part(name, each, states, part) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    rows, length = states.shape[:2]
    known = isinstance(value, Tensor) and value.dim() in _PER_SEQUENCE.get(name, ())
    if not known or length not in (value.shape[1], value.shape[-1]) or len(value) not in (1, rows):
        raise _Apart
    if value.shape == (length, length) and length > 1:  # rows may be tokens
        raise _Apart
    return value if len(value) == 1 else value[part]


def _returns_only(result: Any, outputs: Tensor) -> bool:
    """Return whether a module returned the outputs of its projection untouched, and no more."""
    first, *further = result if isinstance(result, tuple) else (result,)
    return first is outputs and not outputs._version and all(each is None for each in further)


class Stream(Enum):
    """One half of a batch in which every sequence is twice."""

    ORIGINAL = 0
    CHANGED = 1

    def of(self, x: Tensor) -> Tensor:
        """Return the half of a tensor that belongs to the stream."""
        return x.chunk(2)[self.value]


@dataclass(frozen=True)
class OneStream:
    """The input of a projection that computes one stream.

    Attributes:
        stream: The stream.
        inputs: Shape (sequences, length, width).
        other: Outputs of the other stream; None for zeros, where nobody reads them.
    """

    stream: Stream
    inputs: Tensor
    other: Tensor | None = None

    def beside(self, outputs: Tensor) -> Tensor:
        """Return the outputs of both streams."""
        other = torch.zeros_like(outputs) if self.other is None else self.other
        halves = [outputs, other] if self.stream is Stream.ORIGINAL else [other, outputs]
        return torch.cat(halves)


class RunsTwice(PlanError):
    """A module runs more than once, so that no one place has its statistics."""


class Order:
    """The modules that a pass has reached; each may run once."""

    def __init__(self) -> None:
        self._reached: set[str] = set()

    def reach(self, attention: Attention) -> None:
        """Note that a module runs; raise ``RunsTwice`` if it ran before."""
        if attention.path in self._reached:
            raise RunsTwice(
                f"'{attention.path}' runs in more than one layer, so there is no one place to "
                "take its statistics from."
            )
        self._reached.add(attention.path)


@contextmanager
def entering(
    projection: nn.Module, enter: Callable[[Tensor], Tensor | OneStream]
) -> Iterator[None]:
    """Let ``enter`` map the input of a projection, to both streams or one, in a ``with`` block."""
    waiting: list[OneStream] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = enter(args[0])
        if isinstance(given, OneStream):
            waiting.append(given)
            given = given.inputs
        return given, *args[1:]

    def after(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
        return waiting.pop().beside(outputs) if waiting else outputs

    with ExitStack() as stack:
        stack.callback(projection.register_forward_pre_hook(before).remove)
        stack.callback(projection.register_forward_hook(after).remove)
        yield


def in_sequence(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    batch: Batch,
    enter: Callable[[Attention, Tensor], Tensor | OneStream],
) -> None:
    """Run one forward pass in which ``enter`` replaces the input of every output projection.

    Args:
        model: The model.
        attentions: The modules.
        batch: All sequences at once; each twice, if ``enter`` tells streams apart.
        enter: Maps a module and the input of its output projection to the input to compute.

    Raises:
        RunsTwice: If a module runs more than once.
    """
    order = Order()

    def once(attention: Attention, x: Tensor) -> Tensor | OneStream:
        order.reach(attention)
        return enter(attention, x)

    with ExitStack() as stack:
        for attention in attentions:
            if attention.query_heads:
                stack.enter_context(_gathering(attention, partial(once, attention)))
        stack.enter_context(in_pieces(model, attentions))
        stack.enter_context(torch.no_grad())
        run_model(model, batch)


@contextmanager
def _gathering(
    attention: Attention, enter: Callable[[Tensor], Tensor | OneStream]
) -> Iterator[None]:
    """Replace the input of W_O for all sequences; the attention before it runs in pieces."""
    module, projection = attention.module, attention.output_projection
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        gathered = entering_output(forward, projection, args, kwargs)
        if gathered is None:
            with entering(projection, enter):
                return forward(*args, **kwargs)
        inputs, further = gathered
        given = enter(inputs)
        del gathered, inputs  # which are of both streams, and would stay
        if isinstance(given, OneStream):
            outputs = given.beside(projection(given.inputs))
        else:
            outputs = projection(given)
        return outputs if further is None else (outputs, *further)

    patched = "forward" in vars(module) or "forward" in vars(projection)
    if patched or projection not in set(module.modules()):
        with entering(projection, enter):
            yield
        return
    module.forward = run
    try:
        yield
    finally:
        del module.forward
