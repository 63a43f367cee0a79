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
from headprune.merging.spec import Activations, Heads, Setting, project
from headprune.models.heads import read_heads, write_heads
from headprune.runtime.modeling_headprune import REPEATING, Attention, LayerConfig, stock_class
from headprune.tensors.rotary import Planes, Rotation

Convert = Callable[[Attention, Heads, Setting], Heads]

_LISTENING = "headprune_listening"
_AGREES = 1e-3  # relative: a rotary embedding other than the one assumed is off by order 1


@dataclass
class _Heard:
    """What the attention function of a module was called with; its context in the original."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scaling: float
    arguments: dict[str, Any]
    eager: Callable[..., Any]
    owners: list[int] | None  # of the queries, where the attention function must repeat KV heads
    context: Tensor | None = None


@dataclass
class _FirstStream:
    """What the original computes in one module: what its heads read, and the outputs."""

    context: Tensor
    outputs: Tensor


class _Ear:
    """Where the attention function leaves what it was called with, while it listens."""

    heard: _Heard | None = None
    sequences: int | None = None
    context: Tensor | None = None


_EAR = _Ear()


def _listening_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """The model's own attention, one sequence at a time, which is kind to caches.

    While listening it keeps its arguments, attends in the original stream only, and gives zeros in
    the other.
    """
    eager = sys.modules[stock_class(module).__module__].eager_attention_forward
    scaling = arguments.pop("scaling", None) or query.shape[-1] ** -0.5
    owners, facts = None, getattr(module, "headprune", None)
    if getattr(module.config, "headprune_repeats", False):
        owners = module.headprune_kv_of_query
    if facts is not None and facts.repeats_output:  # undone, so that there is one key per KV head
        owners, key, value = facts.owners, key[:, facts.firsts], value[:, facts.firsts]
    arguments = {**arguments, "dropout": 0.0}
    heard = _Heard(query, key, attention_mask, scaling, arguments, eager, owners)

    def context(start: int, stop: int) -> Tensor:
        parts = (slice(i, i + 1) for i in range(start, stop))
        whole = slice(None)
        return torch.cat(
            [_attended(module, heard, query[p], key[p], value[p], p, whole)[0] for p in parts]
        )

    if _EAR.sequences is not None:
        heard.context = context(0, _EAR.sequences)
        _EAR.heard = heard
        return torch.cat([heard.context, torch.zeros_like(heard.context)]), None
    if _EAR.context is not None:  # the original stream has been here already
        known, _EAR.context = _EAR.context, None
        return torch.cat([known, context(len(known), len(query))]), None
    return context(0, len(query)), None


AttentionInterface.register(_LISTENING, _listening_attention)


def _attended(
    module: Any, heard: _Heard, query: Tensor, key: Tensor, value: Tensor, part: slice, rows: Any
) -> tuple[Tensor, Tensor]:
    """Context and probabilities of some sequences, for the queries at some rows."""
    length = heard.query.shape[2], heard.key.shape[2]
    if heard.owners is not None:
        key, value = key[:, heard.owners], value[:, heard.owners]

    def at_rows(argument: Any) -> Any:
        if not (isinstance(argument, Tensor) and argument.shape[-2:] == length):
            return argument
        argument = argument[part] if argument.shape[0] > 1 else argument
        return argument[..., rows, :]

    arguments = {name: at_rows(argument) for name, argument in heard.arguments.items()}
    context, probabilities = heard.eager(
        module, query, key, value, at_rows(heard.mask), scaling=heard.scaling, **arguments
    )
    return context, probabilities


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
        setting, first = _setting(attention, heads, count, args, kwargs)
        _convert_second(attention, convert(attention, heads, setting), first.outputs)
        _EAR.context = first.context

    count = next(iter(inputs.values())).shape[0]
    both = {name: torch.cat([value, value]) for name, value in inputs.items()}
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
            setting, _ = _setting(attention, read_heads(attention), count, args, kwargs)
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
    base = model.base_model
    if not inputs.keys() <= inspect.signature(base.forward).parameters.keys():
        base = model  # the base of DINOv3 is its encoder, which takes no pixels
    takes = inspect.signature(base.forward).parameters
    # what a module leaves in a cache would be there when it runs once more
    options = {"use_cache": False} if "use_cache" in takes else {}
    configs = [c for c in (model.config, model.config.get_text_config()) if hasattr(c, "use_cache")]
    cached = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        with torch.no_grad(), _listening(attentions):
            base(**inputs, **options)
    finally:
        for config, value in zip(configs, cached, strict=True):
            config.use_cache = value
        _EAR.context = None
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


def _listened(
    attention: Attention,
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    second: bool = False,
) -> tuple[_Heard, dict[str, Tensor]]:
    """Runs a module once, in one stream, to hear what its projections and attention are given."""
    entered: dict[str, Tensor] = {}

    def keep(projection: Any) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for role in projection.holds:
                entered[role] = inputs[0]

        return hook

    handles = [p.module.register_forward_pre_hook(keep(p)) for p in attention.projections]
    for projection in attention.projections:
        original = projection.module.forward
        projection.module.forward = _one_stream(original, count, second)
    _EAR.sequences = count
    try:
        attention.module(*args, **kwargs)
    finally:
        heard, _EAR.heard, _EAR.sequences = _EAR.heard, None, None
        for handle in handles:
            handle.remove()
        for projection in attention.projections:
            projection.module.__dict__.pop("forward", None)
    if heard is None or heard.query.dim() != 4 or not {"q", "k", "v"} <= set(entered):
        raise PlanError(
            f"'{attention.path}' does not hand its queries and keys to transformers' attention "
            "interface, which calibration listens to. Use a merge that needs no calibration, such "
            "as procrustes."
        )
    return heard, entered


@contextmanager
def _listening(attentions: Sequence[Attention]) -> Iterator[None]:
    """Has attention modules call the function that can listen."""
    before = [getattr(attention.module, "config", None) for attention in attentions]
    for attention, config in zip(attentions, before, strict=True):
        kept = dict(vars(config)) if isinstance(config, LayerConfig) else {}
        kept.pop("shared", None)
        repeats = kept.get("_attn_implementation") == REPEATING
        own = LayerConfig(
            config, {**kept, "_attn_implementation": _LISTENING, "headprune_repeats": repeats}
        )
        attention.module.config = own  # type: ignore[assignment]  # torch: Tensor | Module
    try:
        yield
    finally:
        for attention, config in zip(attentions, before, strict=True):
            attention.module.config = config  # type: ignore[assignment]  # as above


def _setting(
    attention: Attention,
    heads: Heads,
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Setting, _FirstStream]:
    """What a merge may know of a module, and what the original computes in it."""
    heard, entered = _listened(attention, count, args, kwargs)
    module = attention.module
    projected = {}
    for role in ("q", "k"):
        one = getattr(heads, f"{role}_bias") is not None
        projected[role] = project(_with_one(entered[role][:1].float(), one), heads.affine(role))
    rotation, factor = _found_rotation(projected, heard, kwargs)
    linear = factor is not None
    scaling = heard.scaling * (factor or 1.0)
    queries = heard.query[:count].float() / (factor or 1.0)
    value = heard.query.new_zeros(1, heads.k.shape[0], heard.key.shape[2], heads.v.shape[1])

    def probabilities(query: Tensor, key: Tensor, part: slice, rows: Tensor) -> Tensor:
        query, key = (query * (factor or 1.0)).to(heard.query), key.to(heard.key)
        return _attended(module, heard, query, key, value, part, rows)[1].float()

    assert heard.context is not None
    outputs = attention.output_projection(heard.context.flatten(2))
    made: dict[tuple[int, bool], Tensor] = {}  # roles mostly share one input
    inputs = {}
    for role in ("q", "k", "v"):
        one = getattr(heads, f"{role}_bias") is not None
        key = (entered[role].data_ptr(), one)
        if key not in made:
            made[key] = _with_one(entered[role][count:].float(), one)
        inputs[role] = made[key]
    own_scored = None
    if not linear:
        own, _ = _listened(attention, count, args, kwargs, second=True)
        own_scored = own.query[count:].float(), own.key[count:].float()
    activations = Activations(
        inputs,
        queries,
        heard.key[:count].float(),
        rotation,
        scaling,
        probabilities,
        outputs.float(),
        own_scored,
        # a sink does not shift with the scores, and a soft cap bends them first
        shifts_count=any(heard.arguments.get(name) is not None for name in ("s_aux", "softcap")),
    )
    planes = None if rotation is None else rotation.planes
    return Setting(planes, linear, activations), _FirstStream(heard.context, outputs)


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
        query, key = heard.query[:1].float(), heard.key[:1].float()
        if turned[0].shape != query.shape or turned[1].shape != key.shape:
            continue
        factor = float((turned[0] * query).sum() / turned[0].square().sum().clamp(min=1e-30))
        exact = heard.query.dtype in (torch.float32, torch.float64)
        tolerance = _AGREES if exact else 20 * _AGREES
        if _close(turned[0] * factor, query, tolerance) and _close(turned[1], key, tolerance):
            return rotation, factor
    return None, None


def _candidates(position_embeddings: Any, heard: _Heard) -> Iterator[Rotation]:
    if not (isinstance(position_embeddings, tuple) and len(position_embeddings) == 2):
        return
    cos, sin = (
        table.float()[0] if table.dim() == 3 else table.float() for table in position_embeddings
    )
    if cos.dim() != 2 or cos.shape[0] != heard.query.shape[2]:
        return
    width, head_dim = cos.shape[1], heard.query.shape[3]
    half = width // 2
    if width <= head_dim and width % 2 == 0:
        yield Rotation(Planes.halves(width, head_dim), cos[:, :half], sin[:, :half])
        yield Rotation(Planes.interleaved(width, head_dim), cos[:, ::2], sin[:, ::2])
        yield Rotation(Planes.interleaved(width, head_dim), cos[:, :half], sin[:, :half])
    if 2 * width <= head_dim:  # one angle per plane
        yield Rotation(Planes.halves(2 * width, head_dim), cos, sin)


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30))


def _convert_second(attention: Attention, heads: Heads, outputs: Tensor) -> None:
    """Lets a module run with new weights in the second stream; afterwards they are its own.

    Args:
        attention: The module.
        heads: Its new weights.
        outputs: What its output projection gives in the first stream, which is known by now.
    """
    own = tuple(
        replace(projection, module=copy.deepcopy(projection.module))
        for projection in attention.projections
    )
    write_heads(replace(attention, projections=own), heads)

    def finish(result: Tensor) -> Tensor:
        for projection in attention.projections:
            projection.module.__dict__.pop("forward", None)
        write_heads(attention, heads)
        return result

    for projection, new in zip(attention.projections, own, strict=True):
        known = outputs if projection.holds == "o" else None
        forward = _one_stream(new.module.forward, len(outputs), True, known)
        if projection.holds == "o":
            projection.module.forward = lambda x, run=forward: finish(run(x))
        else:
            projection.module.forward = forward


def _one_stream(
    forward: Callable[[Tensor], Tensor], count: int, second: bool, known: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Computes one half of a batch; the other is what is known of it, or zeros."""

    def halved(inputs: Tensor) -> Tensor:
        result = forward(inputs[count:] if second else inputs[:count])
        other = torch.zeros_like(result) if known is None else known
        return torch.cat([other, result] if second else [result, other])

    return halved
