"""Cutting heads out of a live model, in place, by a plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headprune.errors import HeadpruneWarning, PlanError
from headprune.family import Family
from headprune.model.attention import attention_of, family_of, fingerprint
from headprune.model.batch import is_remote
from headprune.model.gating import fixed, gated
from headprune.model.loading import native_class
from headprune.model.residency import present
from headprune.model.skeleton import without_weights
from headprune.model.windows import Narrowed, no_windows, windowed
from headprune.runtime import modeling_headprune
from headprune.runtime.modeling_headprune import Attention, input_dim, layout_entry
from headprune.schemas.plan import AttentionPlan, Plan, Shape, check_heads, check_module
from headprune.surgery.layer_windows import no_layer_windows, with_windows
from headprune.tensors.index_maps import IndexMap, projection_slices
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Cut:
    """The change of one attention module; positions index its present heads.

    Attributes:
        attention: The module.
        query_positions: Query heads that stay, in their new order.
        kv_positions: KV heads that stay, in their new order. Where several become one, they
            compute the same by now, and the first of them stays.
        scale: Gate value per query head that stays; None for all 1.
        group_sizes: Query heads of every KV head that stays.
        window_heads: How many of the last KV heads that stay see a window only.
        narrowed: Present KV heads that see a window from now on.
        window: Size and sinks of the window.
    """

    attention: Attention
    query_positions: tuple[int, ...]
    kv_positions: tuple[int, ...]
    scale: tuple[float, ...] | None
    group_sizes: tuple[int, ...]
    window_heads: int = 0
    narrowed: tuple[int, ...] = ()
    window: tuple[int, int] | None = None

    @property
    def heads(self) -> dict[str, Any]:
        """The entry of the layout for what stays."""
        return layout_entry(self.query_ids, self.kv_ids, self.group_sizes, self.window_heads)

    @property
    def query_ids(self) -> list[int]:
        """Ids of the query heads that stay."""
        return [self.attention.query_ids[p] for p in self.query_positions]

    @property
    def kv_ids(self) -> list[int]:
        """Ids of the KV heads that stay."""
        return [self.attention.kv_ids[p] for p in self.kv_positions]

    def heads_left(self) -> dict[str, Any]:
        """The layout entry of the module as it is now; after the cut."""
        a = self.attention
        return layout_entry(a.query_ids, a.kv_ids, a.group_sizes, self.window_heads)

    def gate(self) -> Tensor:
        """The gates whose model this cut equals: 0 for removed heads. Shape (present heads,)."""
        gate = torch.zeros(self.attention.query_heads)
        scale = self.scale or (1.0,) * len(self.query_positions)
        gate[list(self.query_positions)] = torch.tensor(scale)
        return gate


def _as_it_is(attention: Attention) -> tuple[tuple[int, ...], tuple[int, ...], None]:
    return tuple(range(attention.query_heads)), tuple(range(attention.kv_heads)), None


def uncut(attention: Attention) -> Cut:
    """The cut that leaves a module as it is."""
    whole = Cut(attention, *_as_it_is(attention), attention.group_sizes)
    return replace(whole, window_heads=attention.window_heads, window=attention.window)


def narrowed(cuts: Sequence[Cut]) -> list[Narrowed]:
    """Return the KV heads that cuts give a window."""
    return [Narrowed(c.attention, c.narrowed, c.window) for c in cuts if c.narrowed and c.window]


@contextmanager
def computing_as(cuts: Sequence[Cut], gates: Sequence[Tensor]) -> Iterator[None]:
    """Have a model compute with gates, and the windows of cuts, in a ``with`` block."""
    with windowed(narrowed(cuts)), gated([cut.attention for cut in cuts], fixed(gates)):
        yield


def window_of(cuts: Sequence[Cut]) -> tuple[int, int] | None:
    """Return size and sinks of the window of some heads, if a result has any."""
    return next((cut.window for cut in cuts if cut.window_heads), None)


def resolve(plan: Plan, model: PreTrainedModel, ragged: bool = False) -> list[Cut]:
    """Check a plan against a model and turn ids into positions.

    Args:
        plan: The plan.
        model: The model it is for.
        ragged: Whether the KV heads of a module may end with unequal numbers of query heads.

    Raises:
        PlanError: If the plan is for another model, names missing heads, leaves out a module,
            or would leave the groups of a grouped-query attention with unequal sizes.
    """
    refuse_foreign(plan, model)
    family = family_of(model.config)
    window = None if plan.window is None else (plan.window.size, plan.window.sinks)
    why_not = {} if window is None else no_windows(model)
    return [
        _cut(a, plan.attentions[a.path], family, ragged, window, why_not.get(a.path))
        for a in attention_of(model)
    ]


def refuse_foreign(plan: Plan, model: PreTrainedModel) -> None:
    """Refuses a plan of another model.

    Raises:
        PlanError: If it is for another one, names missing heads, or leaves out a module.
    """
    attentions = attention_of(model)
    present = {attention.path: attention for attention in attentions}
    for name, part in plan.attentions.items():
        check_module(name, present)
        check_heads(name, set(part.keep), present[name].query_ids)
    for attention in attentions:
        _check_counts(plan.attentions.get(attention.path), attention)
    if plan.model is not None and plan.model.fingerprint != fingerprint(attentions):
        raise PlanError(
            f"The plan was made for '{plan.model.name}' ({plan.model.architecture}, fingerprint "
            f"{plan.model.fingerprint}), but this model's fingerprint is "
            f"{fingerprint(attentions)}. Give the model it was made for."
        )


def _check_counts(part: AttentionPlan | None, attention: Attention) -> None:
    if part is None:
        raise PlanError(
            f"The plan says nothing of '{attention.path}'. A full plan names every attention "
            "module; to name only some, use the short form (module path to heads to remove)."
        )
    counts = (attention.query_heads, attention.kv_heads)
    if (part.query_heads, part.kv_heads) != counts:
        raise PlanError(
            f"The plan is for {part.query_heads} query and {part.kv_heads} KV heads in "
            f"'{attention.path}', which has {counts[0]} and {counts[1]}. Give the model it was "
            "made for."
        )


def _cut(
    attention: Attention,
    part: AttentionPlan,
    family: Family,
    ragged: bool,
    window: tuple[int, int] | None,
    why_not: str | None,
) -> Cut:
    kept = {attention.query_ids.index(head) for head in part.keep}
    if family.keeps_a_head and not kept:
        raise PlanError(
            f"The plan leaves no head in '{attention.path}'. Other layers read more of it than its "
            "output, so keep one."
        )
    scale = dict(zip(part.keep, part.scale, strict=True)) if part.scale else None
    queries_of = members(Unit.KV_GROUP, attention.group_sizes)
    groups = part.groups or [(head,) for head in attention.kv_ids]
    used: dict[int, list[int]] = {}
    narrowed, near = _narrowed(attention, part, window, why_not)
    for group in sorted(groups, key=lambda group: group[0] in near):  # full heads come first
        _check_kv_heads(attention, group)
        positions = [attention.kv_ids.index(head) for head in group]
        queries = sorted(kept & {q for position in positions for q in queries_of[position]})
        if queries:
            used[positions[0]] = queries
    sizes = tuple(map(len, used.values()))
    if len(set(sizes)) > 1:
        problem = (
            f"The plan leaves the KV heads of '{attention.path}' with "
            f"{', '.join(map(str, sizes))} query heads each"
        )
        if "queries_per_kv" not in family.size_attributes.values():
            raise PlanError(f"{problem}; {family.model_type} needs equal groups.")
        if not ragged:
            raise PlanError(
                f"{problem}. Such ragged groups load through the runtime only: ask for them with "
                "--layout ragged. --unit kv-group (removes whole KV heads) and --unit query-slot "
                "(the same query of every group) keep the groups equal."
            )
    order = tuple(q for queries in used.values() for q in queries)
    factors = tuple(scale[attention.query_ids[q]] for q in order) if scale else None
    forms = [attention.kv_ids[position] in near for position in used]
    if any(forms) and len(set(sizes)) > 1:
        raise PlanError(
            f"The plan gives KV heads of '{attention.path}' windows and leaves them with "
            f"{', '.join(map(str, sizes))} query heads each. Windows need equal groups."
        )
    own = attention.window or window
    return Cut(attention, order, tuple(used), factors, sizes, sum(forms), narrowed, own)


def _narrowed(
    attention: Attention, part: AttentionPlan, window: tuple[int, int] | None, why_not: str | None
) -> tuple[tuple[int, ...], set[int]]:
    """Return the positions of KV heads that get a window, and the ids of all that have one."""
    ids = attention.kv_ids
    present = set(ids[len(ids) - attention.window_heads :])
    near = present if part.window is None else set(part.window)
    _check_kv_heads(attention, sorted(near))
    for group in part.groups or ():
        if 0 < len(near & set(group)) < len(group):
            raise PlanError(
                f"KV heads {', '.join(map(str, group))} of '{attention.path}' would be merged, and "
                "some of them have a window. Merge first, and give windows last."
            )
    changes = near != present or (near and window not in (None, attention.window))
    if present and changes:
        heads = ", ".join(map(str, sorted(present)))
        raise PlanError(
            f"'{attention.path}' has windows already: KV heads {heads}. Give the model without "
            "them."
        )
    if changes and why_not is not None:
        raise PlanError(f"KV heads of '{attention.path}' cannot have windows: {why_not}.")
    return tuple(ids.index(head) for head in sorted(near)) if changes else (), near


def _check_kv_heads(attention: Attention, group: Sequence[int]) -> None:
    unknown = sorted(set(group) - set(attention.kv_ids))
    if unknown:
        raise PlanError(
            f"The plan names KV head {unknown[0]} of '{attention.path}', which has "
            f"{', '.join(map(str, attention.kv_ids))}."
        )


def index_maps(cut: Cut, family: Family) -> list[IndexMap]:
    """The slices of the attention's tensors that stay, with gate values folded into W_O."""
    attention = cut.attention
    if (cut.query_positions, cut.kv_positions, cut.scale) == _as_it_is(attention):
        return []
    total = {"q": attention.query_heads, "k": attention.kv_heads, "v": attention.kv_heads}
    kept = {"q": cut.query_positions, "k": cut.kv_positions, "v": cut.kv_positions}
    maps = []
    for projection in attention.projections:
        module, holds, head_dim = projection.module, projection.holds, projection.head_dim
        if not holds:
            continue
        rows = projection_slices(holds, projection.groups, kept, total, head_dim, cut.group_sizes)
        weight, bias = f"{projection.path}.weight", f"{projection.path}.bias"
        if holds == "o":
            scale = None
            if cut.scale is not None:
                scale = torch.tensor(cut.scale).repeat_interleave(head_dim)
            maps.append(IndexMap(weight, input_dim(module), rows, scale))
            continue
        maps.append(IndexMap(weight, 1 - input_dim(module), rows))
        if module.bias is not None:
            maps.append(IndexMap(bias, 0, rows))
    parameters = dict(attention.module.named_parameters())
    for name, role in family.per_head.items():
        if name in parameters:
            maps.append(
                IndexMap(f"{attention.path}.{name}", 0, torch.tensor(kept[role], dtype=torch.long))
            )
    return maps


@torch.no_grad()
def fold_gates(cuts: Sequence[Cut]) -> list[Cut]:
    """Multiplies the gate values of heads that stay into W_O of the uncut model, in place.

    Returns:
        The same cuts with gates of 1; with them the model computes as before.
    """
    folded = []
    for cut in cuts:
        if cut.scale is not None:
            module = cut.attention.output_projection
            gate = torch.ones(cut.attention.query_heads)  # heads that go stay for the control
            gate[list(cut.query_positions)] = torch.tensor(cut.scale)
            gate = gate.repeat_interleave(cut.attention.head_dim)
            shape = (-1, 1) if input_dim(module) == 0 else (1, -1)
            with present(module):
                weight = module.get_parameter("weight")
                wide = torch.promote_types(weight.dtype, torch.float32)
                weight.copy_(weight.to(wide) * gate.to(weight.device, wide).view(shape))
        folded.append(replace(cut, scale=None))
    return folded


def _pick_modules(cut: Cut, family: Family) -> None:
    """Keeps the entries of module lists that have one module per head."""
    kept = {"q": cut.query_positions, "k": cut.kv_positions, "v": cut.kv_positions}
    modules = dict(cut.attention.module.named_modules())
    for name, role in family.per_head.items():
        entries = modules.get(name)
        if isinstance(entries, nn.ModuleList):
            owner, _, last = name.rpartition(".")
            setattr(modules[owner], last, nn.ModuleList(entries[p] for p in kept[role]))


def cut_heads(model: PreTrainedModel, cuts: Sequence[Cut]) -> Shape:
    """Cuts heads out of a model in place and rewrites its config; one operation.

    Args:
        model: The model; afterwards it computes as with ``cut.gate()`` applied.
        cuts: One per attention module, as ``resolve`` returns them.

    Returns:
        How the result must be stored.
    """
    family = family_of(model.config)
    shape = result_shape(cuts, model.config)
    if shape is Shape.NATIVE and window_of(cuts) is not None:
        _write_layer_windows(model, cuts)
        return shape
    _renumber_alignment(model, cuts)
    for cut in cuts:
        for index_map in index_maps(cut, family):
            _replace(model, index_map)
        _pick_modules(cut, family)
        modeling_headprune.resize(cut.attention, family.for_runtime(), cut.heads, cut.window)
    (_write_native_config if shape is Shape.NATIVE else _write_runtime_config)(model, cuts, family)
    return shape


def _renumber_alignment(model: PreTrainedModel, cuts: Sequence[Cut]) -> None:
    """Lets Whisper's generation config name the heads that give the times of words as they are now.

    The one file beside a model that numbers heads; whatever else numbers layers, which all stay.
    """
    generation: Any = getattr(model, "generation_config", None)
    named = getattr(generation, "alignment_heads", None)
    if named is None:
        return
    kept = [list(cut.query_positions) for cut in cuts if cut.attention.kind == "cross"]
    left = [[layer, kept[layer].index(head)] for layer, head in named if head in kept[layer]]
    if left:
        generation.alignment_heads = left
        return
    del generation.alignment_heads
    warnings.warn(
        f"None of the {len(named)} heads is left that the times of words are taken from "
        "(alignment_heads in generation_config.json): the result gives no times of words.",
        HeadpruneWarning,
        stacklevel=2,
    )


def result_shape(cuts: Sequence[Cut], config: PreTrainedConfig) -> Shape:
    """Native where the stock class and a plain config can hold the result."""
    family = family_of(config)
    counts = {(len(cut.query_positions), len(cut.kv_positions)) for cut in cuts}
    untouched = all(
        (len(cut.query_positions), len(cut.kv_positions))
        == (cut.attention.query_heads, cut.attention.kv_heads)
        for cut in cuts
    )
    native = family.native and not any(getattr(config, key, None) for key in family.native_unless)
    if any(cut.window_heads for cut in cuts):
        window, every = window_of(cuts), len(cuts) == getattr(config, "num_hidden_layers", None)
        whole = untouched and all(cut.scale is None for cut in cuts) and windows_layers(cuts)
        plain = whole and every and window and no_layer_windows(config, window[0]) is None
        return Shape.NATIVE if plain else Shape.RUNTIME
    ragged = any(len(set(cut.group_sizes)) > 1 for cut in cuts)
    shared = any(max(cut.group_sizes, default=1) > 1 for cut in cuts)
    even = len(counts) == 1 and min(counts)[0] > 0 and native and not ragged
    even = even and (family.kv_heads_key is not None or not shared)
    even = even and config_holds(config, *min(counts))
    # an uncut model of any family is what its config already says
    already_cut = getattr(config, "headprune", None) is not None
    return Shape.NATIVE if even or (untouched and not already_cut) else Shape.RUNTIME


def windows_layers(cuts: Sequence[Cut]) -> bool:
    """Return whether all windows of a result are of whole layers, without sinks."""
    whole = all(cut.window_heads in (0, len(cut.kv_positions)) for cut in cuts)
    window = window_of(cuts)
    return whole and window is not None and window[1] == 0


_STATE = ("training", "gradient_checkpointing", "generation_config")  # of a model in use


def _write_layer_windows(model: PreTrainedModel, cuts: Sequence[Cut]) -> None:
    """Makes a model one of the class that holds its windows; no weight is touched."""
    window, modules = window_of(cuts), dict(model.named_modules())
    assert window is not None
    layers = [layer for layer, cut in enumerate(cuts) if cut.window_heads]
    config = with_windows(model.config, layers, window[0])
    same = without_weights(AutoModelForCausalLM._model_mapping[type(config)], config)
    for name, module in same.named_modules():
        if type(module).__module__.startswith("transformers.models."):
            modules[name].__class__ = type(module)
            for setting, value in vars(module).items():
                if setting[0] != "_" and setting not in _STATE and not isinstance(value, Tensor):
                    modules[name].__dict__[setting] = value


def config_holds(config: PreTrainedConfig, queries: int, kv_heads: int) -> bool:
    """Return whether a plain config passes its own checks: Llama's wants a multiple."""
    plain, family = copy.deepcopy(config), family_of(config)
    setattr(plain, family.query_heads_key, queries)
    if family.kv_heads_key is not None:
        setattr(plain, family.kv_heads_key, kv_heads)
    try:
        plain.validate()
    except StrictDataclassError:
        return False
    return True


def _replace(model: nn.Module, index_map: IndexMap) -> None:
    path, _, name = index_map.tensor.rpartition(".")
    owner = model.get_submodule(path)
    old = getattr(owner, name)
    new = nn.Parameter(index_map.apply(old.data), requires_grad=old.requires_grad)
    setattr(owner, name, new)


def _write_native_config(model: PreTrainedModel, cuts: Sequence[Cut], family: Family) -> None:
    config, own_layers = model.config, _has_own_layers(model.config)
    for attribute in ("headprune", "auto_map", "allow_global_per_layer_attribute_access"):
        if attribute != "auto_map" or not is_remote(type(config)):
            config.__dict__.pop(attribute, None)
    if not own_layers:
        config.per_layer_config = None
    model.__class__ = native_class(type(model))
    _write_head_dim(config, cuts[0].attention, family)
    if family.kv_heads_key is not None:
        setattr(config, family.kv_heads_key, cuts[0].attention.kv_heads)
    setattr(config, family.query_heads_key, cuts[0].attention.query_heads)


def _write_runtime_config(model: PreTrainedModel, cuts: Sequence[Cut], family: Family) -> None:
    config, native = model.config, native_class(type(model))
    config.headprune = {
        "schema_version": modeling_headprune.SCHEMA,
        "family": family.for_runtime(),
        "layout": {cut.attention.path: cut.heads_left() for cut in cuts},
    }
    window = window_of(cuts)
    if window is not None:
        config.headprune["window"] = dict(zip(("size", "sinks"), window, strict=True))
    fits = [*family.attention] == ["self"] and len(cuts) == config.num_hidden_layers
    if fits and not family.keeps_kv and not _has_own_layers(config):
        # transformers' cache code sizes static caches from these
        _write_head_dim(config, cuts[0].attention, family)
        config.per_layer_config = None
        config.allow_global_per_layer_attribute_access = True
        config.per_layer_config = {
            layer: layer_overrides(cut.attention, family) for layer, cut in enumerate(cuts)
        }
    config.auto_map = {
        auto: f"modeling_headprune.{cls.__name__}"
        for auto, cls in modeling_headprune.auto_classes(type(config)).items()
    }
    model.__class__ = modeling_headprune.pruned_class(native)


def _has_own_layers(config: PreTrainedConfig) -> bool:
    """Return whether its layers differ without us: Gemma 4 has two widths of a head."""
    return config.is_heterogeneous and not config.allow_global_per_layer_attribute_access


def _write_head_dim(config: PreTrainedConfig, attention: Attention, family: Family) -> None:
    """Says how wide a head is, where it can no longer be told from hidden_size and their number."""
    computed = isinstance(getattr(type(config), "head_dim", None), property)
    if family.head_dim == "head_dim" and not computed:
        config.head_dim = attention.head_dim


def layer_overrides(attention: Attention, family: Family) -> dict[str, object]:
    """The settings of one layer in ``per_layer_config``."""
    if not attention.query_heads:
        return {"skip": ["attention"]}
    overrides: dict[str, object] = {family.query_heads_key: attention.query_heads}
    if family.kv_heads_key is not None:
        overrides[family.kv_heads_key] = attention.kv_heads
    return overrides
