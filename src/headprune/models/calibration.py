"""One pass over calibration text, in which attention modules are replaced one after the other.

Two streams run side by side as one batch: in its first half the model is the original, in its
second half every module is converted as soon as it is reached. So each conversion sees what the
converted layers before it make of the text, and what the original makes of it; nothing is kept of a
layer once it is passed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from headprune.errors import PlanError
from headprune.merging.spec import Activations, Heads, Setting
from headprune.models.heads import read_heads, write_heads
from headprune.runtime.modeling_headprune import Attention, LayerConfig
from headprune.tensors.rotary import Planes, Rotation

Convert = Callable[[Attention, Heads, Setting], Heads]

_LISTENING = "headprune_listening"
_AGREES = 1e-3  # relative: a rotary embedding other than the one assumed is off by order 1


@dataclass
class _Heard:
    """What the attention function of a module was called with, in the original stream."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scaling: float
    arguments: dict[str, Any]
    eager: Callable[..., Any]
    context: Tensor


class _Ear:
    """Where the attention function leaves what it was called with."""

    heard: _Heard | None = None
    sequences: int = 0


_EAR = _Ear()


def _listening_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """Keeps its arguments; attends in the original stream, and gives zeros in the other."""
    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    count = _EAR.sequences
    scaling = arguments.pop("scaling", None) or query.shape[-1] ** -0.5
    arguments["dropout"] = 0.0
    heard = _Heard(query[:count], key[:count], attention_mask, scaling, arguments, eager, query)
    context = [_attended(module, heard, value[:count], part)[0] for part in _each(count)]
    heard.context = torch.cat(context)
    _EAR.heard = heard
    return torch.cat([heard.context, torch.zeros_like(heard.context)]), None


AttentionInterface.register(_LISTENING, _listening_attention)


def _attended(
    module: Any,
    heard: _Heard,
    value: Tensor,
    part: slice,
    query: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Context and probabilities of some sequences; with other queries and keys, if given."""
    mask = heard.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[part]
    query = heard.query[part] if query is None else query
    key = heard.key[part] if key is None else key
    context, probabilities = heard.eager(
        module, query, key, value[part], mask, scaling=heard.scaling, **heard.arguments
    )
    return context, probabilities


def _each(count: int) -> Iterator[slice]:
    return (slice(i, i + 1) for i in range(count))


def convert_in_sequence(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    inputs: dict[str, Tensor],
    convert: Convert,
) -> None:
    """Replaces the weights of attention modules in one forward pass, in the order they run.

    Args:
        model: The model; its weights change in place.
        attentions: The modules to convert.
        inputs: Calibration text: ``input_ids`` and whatever else, shape (sequences, length).
        convert: From a module, its weights and what calibration showed to new weights of the
            same shapes.

    Raises:
        PlanError: If a module runs more than once, or its attention cannot be listened to.
    """
    done: set[str] = set()

    def on_module(attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if attention.path in done:
            raise PlanError(
                f"'{attention.path}' runs in more than one layer, so there is no one place to take "
                "its statistics from. Use a merge that needs no calibration, such as procrustes."
            )
        done.add(attention.path)
        heads = read_heads(attention)
        setting = _setting(attention, heads, count, args, kwargs)
        _run_both(attention, count, convert(attention, heads, setting))

    count = next(iter(inputs.values())).shape[0]
    both = {name: torch.cat([value, value]) for name, value in inputs.items()}
    done: set[str] = set()
    try:
        _run(model, attentions, both, on_module)
    finally:
        for attention in attentions:
            for projection in attention.projections:
                projection.module.__dict__.pop("forward", None)


def geometry(
    model: PreTrainedModel, attentions: Sequence[Attention], inputs: dict[str, Tensor]
) -> dict[str, Setting]:
    """What a merge must know of every module, found on any inputs, without their activations.

    A module that cannot be listened to counts as one whose queries can absorb nothing.
    """
    found: dict[str, Setting] = {}
    count = next(iter(inputs.values())).shape[0]

    def on_module(attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            setting = _setting(attention, read_heads(attention), count, args, kwargs)
        except PlanError:
            setting = Setting(linear=False)
        found.setdefault(attention.path, replace(setting, activations=None))

    both = {name: torch.cat([value, value]) for name, value in inputs.items()}
    _run(model, attentions, both, on_module)
    return found


def _run(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    inputs: dict[str, Tensor],
    on_module: Callable[[Attention, tuple[Any, ...], dict[str, Any]], None],
) -> None:
    """One forward pass that stops before every module; not again where that runs the module."""
    inside = False

    def hook_for(attention: Attention) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal inside
            if inside:
                return
            inside = True
            try:
                on_module(attention, args, kwargs)
            finally:
                inside = False

        return hook

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # masks are tensors then, whatever they stand for
    handles = [
        a.module.register_forward_pre_hook(hook_for(a), with_kwargs=True) for a in attentions
    ]
    takes = inspect.signature(model.base_model.forward).parameters
    # what a module leaves in a cache would be there when it runs once more
    options = {"use_cache": False} if "use_cache" in takes else {}
    try:
        with torch.no_grad():
            model.base_model(**inputs, **options)
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


def _listened(
    attention: Attention, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Heard, dict[str, Tensor]]:
    """Runs a module once to hear what enters its projections and its attention function."""
    entered: dict[str, Tensor] = {}

    def keep(projection: Any) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for role in projection.holds:
                entered[role] = inputs[0]

        return hook

    handles = [p.module.register_forward_pre_hook(keep(p)) for p in attention.projections]
    module, _EAR.sequences, _EAR.heard = attention.module, count, None
    with _own_config(module):
        try:
            module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
    heard, _EAR.heard = _EAR.heard, None
    if heard is None or heard.query.dim() != 4 or not {"q", "k", "v"} <= set(entered):
        raise PlanError(
            f"'{attention.path}' does not hand its queries and keys to transformers' attention "
            "interface, which calibration listens to. Use a merge that needs no calibration, such "
            "as procrustes."
        )
    return heard, entered


@contextmanager
def _own_config(module: nn.Module) -> Iterator[None]:
    before = getattr(module, "config", None)
    module.config = LayerConfig(before, {"_attn_implementation": _LISTENING})  # type: ignore[assignment]
    try:
        yield
    finally:
        module.config = before  # type: ignore[assignment]


def _setting(
    attention: Attention,
    heads: Heads,
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Setting:
    heard, entered = _listened(attention, count, args, kwargs)
    module = attention.module
    projected = {
        role: _projected(entered[role][:count].float(), heads.affine(role)) for role in ("q", "k")
    }
    rotation, factor = _found_rotation(projected, heard, kwargs)
    linear = factor is not None
    scaling = heard.scaling * (factor or 1.0)
    queries = heard.query.float() / (factor or 1.0)
    value = heard.query.new_zeros(count, heads.k.shape[0], heard.key.shape[2], heads.v.shape[1])

    def probabilities(query: Tensor, key: Tensor, part: slice) -> Tensor:
        query = (query * (factor or 1.0)).to(heard.query)
        return _attended(module, heard, value, part, query, key.to(heard.key))[1].float()

    target = attention.output_projection(heard.context.flatten(2)).float()
    inputs = {
        role: _with_one(entered[role][count:].float(), getattr(heads, f"{role}_bias") is not None)
        for role in ("q", "k", "v")
    }
    activations = Activations(
        inputs, queries, heard.key.float(), rotation, scaling, probabilities, target
    )
    return Setting(None if rotation is None else rotation.planes, linear, activations)


def _projected(inputs: Tensor, affine: Tensor) -> Tensor:
    inputs = _with_one(inputs, affine.shape[-1] > inputs.shape[-1])
    return (inputs @ affine.flatten(0, 1).T).unflatten(-1, affine.shape[:2]).transpose(1, 2)


def _with_one(inputs: Tensor, wanted: bool) -> Tensor:
    return torch.cat([inputs, inputs.new_ones(*inputs.shape[:-1], 1)], -1) if wanted else inputs


def _found_rotation(
    projected: dict[str, Tensor], heard: _Heard, kwargs: dict[str, Any]
) -> tuple[Rotation | None, float | None]:
    """The rotary embedding that leads from the projections to the scores, and a factor of queries.

    Found by trying, so that no table has to say how a family pairs coordinates: what is right
    agrees to rounding. The factor is None where nothing agrees, as with a norm in between.
    """
    for rotation in (None, *_candidates(kwargs.get("position_embeddings"), heard)):
        turned = [
            projected[role] if rotation is None else rotation.apply(projected[role])
            for role in ("q", "k")
        ]
        if turned[0].shape != heard.query.shape or turned[1].shape != heard.key.shape:
            continue
        query, key = heard.query.float(), heard.key.float()
        factor = float((turned[0] * query).sum() / turned[0].square().sum().clamp(min=1e-30))
        exact = heard.query.dtype in (torch.float32, torch.float64)
        tolerance = _AGREES if exact else 20 * _AGREES
        if _close(turned[0] * factor, query, tolerance) and _close(turned[1], key, tolerance):
            return rotation, factor
    return None, None


def _candidates(position_embeddings: Any, heard: _Heard) -> Iterator[Rotation]:
    if not (isinstance(position_embeddings, tuple) and len(position_embeddings) == 2):
        return
    cos, sin = (table.float()[0] if table.dim() == 3 else table.float() for table in position_embeddings)
    if cos.dim() != 2 or cos.shape[0] != heard.query.shape[2]:
        return
    width, head_dim = cos.shape[1], heard.query.shape[3]
    half = width // 2
    if width <= head_dim:
        yield Rotation(Planes.halves(width, head_dim), cos[:, :half], sin[:, :half])
        yield Rotation(Planes.interleaved(width, head_dim), cos[:, ::2], sin[:, ::2])
        yield Rotation(Planes.interleaved(width, head_dim), cos[:, :half], sin[:, :half])
    if 2 * width <= head_dim:  # one angle per plane
        yield Rotation(Planes.halves(2 * width, head_dim), cos, sin)


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30))


def _run_both(attention: Attention, count: int, heads: Heads) -> None:
    """Until the output projection has run, converts the second stream; then both weights are new."""
    own = tuple(
        replace(projection, module=copy.deepcopy(projection.module))
        for projection in attention.projections
    )
    converted = replace(attention, projections=own)
    write_heads(converted, heads)
    for projection, new in zip(attention.projections, own, strict=True):
        projection.module.forward = _split(  # type: ignore[method-assign]
            projection.module.forward, new.module, count, lambda: None
        )
    output = next(p.module for p in attention.projections if p.holds == "o")

    def finish() -> None:
        for projection in attention.projections:
            projection.module.__dict__.pop("forward", None)
        write_heads(attention, heads)

    new_output = next(p.module for p in own if p.holds == "o")
    output.__dict__.pop("forward", None)
    output.forward = _split(output.forward, new_output, count, finish)  # type: ignore[method-assign]


def _split(
    original: Callable[[Tensor], Tensor], new: nn.Module, count: int, after: Callable[[], None]
) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        result = torch.cat([original(inputs[:count]), new(inputs[count:])])
        after()
        return result

    return forward
