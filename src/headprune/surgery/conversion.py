"""KV heads merged on calibration text, one attention module after the other, in one pass.

Every module is run before it runs in earnest, once in each stream, to record what its projections
and its attention are given. The converted module then computes the changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.batch import Batch, doubled
from headprune.model.heads import HeadWeights, project_output, read_heads, write_heads
from headprune.model.passes import (
    OneStream,
    Order,
    RunsTwice,
    Stream,
    eager_attention,
    entering,
    in_pieces,
    run_model,
)
from headprune.model.recording import RecordedCall, found_rotation, recording
from headprune.runtime.modeling_headprune import Attention, ProjectionModule
from headprune.surgery.merges.spec import MergeActivations, MergeContext, project
from headprune.tensors.rotary import RotaryPairs, Rotation

Convert = Callable[[Attention, HeadWeights, MergeContext], HeadWeights]


def convert_in_sequence(
    model: PreTrainedModel, attentions: Sequence[Attention], batch: Batch, convert: Convert
) -> None:
    """Replaces the weights of attention modules in one forward pass, in the order they run.

    Args:
        model: The model; its weights change in place.
        attentions: The modules to convert.
        batch: Calibration text: all sequences at once.
        convert: From a module, its weights and what calibration showed to new weights of the
            same shapes.

    Raises:
        PlanError: If a module runs more than once, or its attention cannot be recorded.
    """
    conversion = _Conversion(convert)
    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for attention in attentions:
            visit = partial(conversion.visit, attention)
            handle = attention.module.register_forward_pre_hook(visit, with_kwargs=True)
            stack.callback(handle.remove)
            for projection in attention.projections:
                enter = partial(conversion.enter, projection)
                stack.enter_context(entering(projection.module, enter))
        stack.enter_context(recording(attentions, conversion.attend))
        stack.enter_context(in_pieces(model, attentions))
        stack.enter_context(torch.no_grad())
        run_model(model, doubled(batch))


def geometry(
    model: PreTrainedModel, attentions: Sequence[Attention], inputs: Mapping[str, Tensor]
) -> dict[str, MergeContext]:
    """Return a merge's context of every module, found on any inputs, without activations.

    A module whose attention cannot be recorded counts as one whose queries can absorb nothing.
    """
    found: dict[str, MergeContext] = {}
    seen = _Recorded()

    def attend(call: RecordedCall) -> Tensor:
        seen.call = call
        return call.outputs()

    def keep(projection: ProjectionModule, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.keep(projection, args[0])

    def look(
        attention: Attention, module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        try:
            rotation, factor = seen.rotation(attention, read_heads(attention), kwargs)
            context = MergeContext(_pairs(rotation), factor is not None)
        except PlanError:
            context = MergeContext(linear=False)
        found.setdefault(attention.path, context)
        seen.clear()

    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for attention in attentions:
            hook = partial(look, attention)
            handle = attention.module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
            for projection in attention.projections:
                handle = projection.module.register_forward_pre_hook(partial(keep, projection))
                stack.callback(handle.remove)
        stack.enter_context(recording(attentions, attend))
        stack.enter_context(torch.no_grad())
        run_model(model, inputs)
    return found


@dataclass
class _Recorded:
    """The record of one run of a module.

    Attributes:
        inputs: What entered the projection of every role, in all streams.
        call: The call of the attention function.
        attended: Outputs of the heads in the original's stream.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    call: RecordedCall | None = None
    attended: Tensor | None = None

    def keep(self, projection: ProjectionModule, x: Tensor) -> None:
        # the input of W_O is the output of the heads, kept by itself where needed
        self.inputs |= dict.fromkeys(projection.holds.replace("o", ""), x)

    def clear(self) -> None:
        self.inputs, self.call, self.attended = {}, None, None

    def complete(self, attention: Attention) -> RecordedCall:
        """The call.

        Raises:
            PlanError: If something is missing.
        """
        projected = {"q", "k", "v"} <= set(self.inputs)
        if self.call is None or self.call.query.dim() != 4 or not projected:
            raise PlanError(
                f"'{attention.path}' does not hand its queries and keys to transformers' attention "
                "interface, where calibration records them. Use a merge that needs no calibration, "
                "such as procrustes."
            )
        return self.call

    def rotation(
        self, attention: Attention, heads: HeadWeights, kwargs: dict[str, Any]
    ) -> tuple[Rotation | None, float | None]:
        """As ``found_rotation``, on the first sequence."""
        call = self.complete(attention)
        projected = {
            role: project(_with_one(self.inputs[role][:1].float(), heads, role), heads.affine(role))
            for role in ("q", "k")
        }
        scored = {"q": call.query[:1], "k": call.key[:1]}
        return found_rotation(projected, scored, kwargs.get("position_embeddings"))


class _Conversion:
    """The state of a pass from module to module."""

    def __init__(self, convert: Convert) -> None:
        self.convert = convert
        self.order = Order()
        # of a recording run, and the stream that it computes
        self.recorded: _Recorded | None = None
        self.stream = Stream.ORIGINAL
        # in the module that runs: what its heads give in both streams, and the original's W_O
        self.attended: tuple[Tensor, Tensor | None] | None = None
        self.outputs: Tensor | None = None

    def visit(
        self, attention: Attention, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Converts a module before it runs."""
        if self.recorded is not None:
            return
        try:
            self.order.reach(attention)
        except RunsTwice as error:
            raise PlanError(
                f"{error} Use a merge that needs no calibration, such as procrustes."
            ) from None
        heads = read_heads(attention)
        original = self._record(attention, Stream.ORIGINAL, args, kwargs)
        call = original.complete(attention)
        assert original.attended is not None
        outputs = project_output(attention, original.attended.flatten(2))
        rotation, factor = original.rotation(attention, heads, kwargs)
        original.call = call.without_numbers()
        del call  # as large as everything kept

        attended: dict[bool, tuple[HeadWeights, Tensor]] = {}  # of these weights, and the last

        def known(other: HeadWeights) -> Tensor | None:
            return next((x for one, x in attended.values() if _attends_alike(one, other)), None)

        def read(other: HeadWeights) -> Tensor:
            heads_give = known(other)
            if heads_give is None:
                write_heads(attention, other)
                call = self._record(attention, Stream.CHANGED, args, kwargs).complete(attention)
                write_heads(attention, heads)
                heads_give = call.outputs(len(call.query) // 2)
                attended[_attends_alike(heads, other)] = other, heads_give
            return heads_give.flatten(2).float()

        own = partial(self._own_scored, attention, args, kwargs, factor or 1.0)
        activations = _activations(heads, original, rotation, factor, outputs, own, read)
        context = MergeContext(_pairs(rotation), factor is not None, activations)
        new = self.convert(attention, heads, context)
        write_heads(attention, new)
        self.attended, self.outputs = (original.attended, known(new)), outputs

    def enter(self, projection: ProjectionModule, x: Tensor) -> OneStream:
        """Return the stream a projection computes: the recorded one, or else the changed one."""
        if self.recorded is not None:
            self.recorded.keep(projection, x)
            return OneStream(self.stream, self.stream.of(x))
        known = None
        if projection.holds == "o":
            known, self.outputs = self.outputs, None
        return OneStream(Stream.CHANGED, Stream.CHANGED.of(x), known)

    def attend(self, call: RecordedCall) -> Tensor:
        """Return the outputs of the heads: original, unless known already, and changed."""
        count = len(call.query) // 2
        if self.recorded is None:
            known, self.attended = self.attended, None
            if known is None:
                return call.outputs()
            original, changed = known
            return torch.cat([original, call.outputs(count) if changed is None else changed])
        self.recorded.call = call
        if self.stream is Stream.CHANGED:  # nobody reads it
            _, heads, length, _ = call.query.shape
            return call.query.new_zeros(2 * count, length, heads, call.value.shape[3])
        self.recorded.attended = attended = call.outputs(0, count)
        return torch.cat([attended, torch.zeros_like(attended)])

    def _own_scored(
        self,
        attention: Attention,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        times: float,
    ) -> tuple[Tensor, Tensor]:
        """The queries and keys that a module, as it is, makes of the changed stream.

        Scores should be as these, and not make up for what earlier layers have lost: that is for
        W_O. docs/experiments.md says what each is worth.
        """
        call = self._record(attention, Stream.CHANGED, args, kwargs).complete(attention)
        query, key = Stream.CHANGED.of(call.query), Stream.CHANGED.of(call.key)
        return query.float() / times, key.float().clone()  # the other stream is let go

    def _record(
        self, attention: Attention, stream: Stream, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Recorded:
        """Runs a module in one stream, to see what its projections and attention are given."""
        self.stream, self.recorded = stream, (recorded := _Recorded())
        try:
            attention.module(*args, **kwargs)
        finally:
            self.recorded = None
        return recorded


def _activations(
    heads: HeadWeights,
    original: _Recorded,
    rotation: Rotation | None,
    factor: float | None,
    outputs: Tensor,
    own: Callable[[], tuple[Tensor, Tensor]],
    read: Callable[[HeadWeights], Tensor],
) -> MergeActivations:
    """Return the activations of a module on calibration text.

    Args:
        heads: Its weights.
        original: Its record in the original's stream.
        rotation: Its rotary embedding.
        factor: What queries are multiplied with after it; None where a norm stands in between.
        outputs: Outputs of the original's W_O.
        own: Computes the queries and keys that it makes of the changed stream.
        read: From other weights to what then enters W_O in the changed stream.
    """
    assert original.call is not None
    call, times = original.call, factor or 1.0

    def attention(query: Tensor, key: Tensor, part: slice, rows: Tensor) -> Tensor:
        query, key = (query * times).to(call.query), key.to(call.key)
        return call.probabilities(query, key, part, rows).float()

    made: dict[tuple[int, bool], Tensor] = {}  # roles mostly share one input
    inputs = {}
    for role in ("q", "k", "v"):
        entered = original.inputs[role]
        key = (entered.data_ptr(), getattr(heads, f"{role}_bias") is not None)
        if key not in made:
            made[key] = _with_one(Stream.CHANGED.of(entered).float(), heads, role)
        inputs[role] = made[key]
    return MergeActivations(
        inputs,
        own,
        rotation,
        call.scaling * times,
        attention,
        outputs.float(),
        read,
        # a sink does not shift with the scores, and a soft cap bends them first
        shifts_count=call.bends_scores,
    )


def _attends_alike(one: HeadWeights, other: HeadWeights) -> bool:
    """Return whether weights differ in W_O at most, by identity."""
    names = ("q", "k", "v", "q_bias", "k_bias", "v_bias")
    return all(getattr(one, name) is getattr(other, name) for name in names)


def _with_one(inputs: Tensor, heads: HeadWeights, role: str) -> Tensor:
    """The inputs of a projection, with a 1 at the end where it has a bias."""
    if getattr(heads, f"{role}_bias") is None:
        return inputs
    return torch.cat([inputs, inputs.new_ones(*inputs.shape[:-1], 1)], -1)


def _pairs(rotation: Rotation | None) -> RotaryPairs | None:
    return None if rotation is None else rotation.pairs
