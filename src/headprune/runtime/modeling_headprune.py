# Copyright The headprune authors. Licensed under the Apache License, Version 2.0.
"""Runs a transformer whose attention has fewer heads than its config says, layer by layer.

This file is complete in itself (torch and transformers only). It lies beside the weights of every
model that headprune cut unevenly, so that

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

loads it where headprune is not installed. Its settings stand in ``config.headprune``:

    family   where attention sits, its projections, and which attributes follow the head counts
    layout   per attention module, the ids of the remaining heads, and how many of the last KV heads
             see a window only
    window   the first tokens (sinks) and the latest (size) that such heads see

``modeling_headprune.LlamaForCausalLM`` (any class name of transformers will do) is the stock class
with its attention resized after ``__init__``. No modelling code is copied.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, Cache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

SCHEMA = 1  # of config.headprune
MODULE = "modeling_headprune"

# what stands in its row of the family, and in that for one projection
_ROW: dict[str, Any] = {
    **dict.fromkeys(("attention", "follows", "config_follows", "per_head"), Mapping),
    **dict.fromkeys(("whole_norms", "head_arguments"), Mapping),
    **{"projections": list, "head_dim": str, "without_heads": str},
    **dict.fromkeys(("shares_position_bias", "counts_keys_as_queries", "shares_by_runtime"), bool),
    "keeps_kv": bool,
}
_PROJECTION: dict[str, Any] = {
    "path": str,
    "holds": str,
    "groups": bool,
    "head_dim": (str, type(None)),
    "optional": bool,
}


@dataclass
class ProjectionModule:
    """A projection of one attention module.

    Attributes:
        path: Full path in the model.
        module: The module.
        holds: Its roles: "q", "k", "v", "qkv", "o", or "" if it stays whole.
        groups: True if a fused one is laid out ``[q ... q k v]`` per KV head.
        head_dim: Width of one head in it.
    """

    path: str
    module: nn.Module
    holds: str
    groups: bool
    head_dim: int


@dataclass
class Attention:
    """One attention module of a live model, with the sizes its weights have now.

    Attributes:
        path: Full path of the module in the model.
        kind: "self", "encoder", "decoder", "cross", "text" or "vision".
        module: The module itself.
        projections: Its projections.
        head_dim: Width of a head at the output projection.
        query_ids: Ids of the query heads, in order; ids are those of the model before any cut.
        kv_ids: Ids of the KV heads, in order.
        group_sizes: Query heads of every KV head, in order; equal unless a cut left them ragged.
        window_heads: How many of the last KV heads see a window only.
        window: Its size and its sinks, if any do.
    """

    path: str
    kind: str
    module: nn.Module
    projections: tuple[ProjectionModule, ...]
    head_dim: int
    query_ids: tuple[int, ...]
    kv_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    window_heads: int = 0
    window: tuple[int, int] | None = None

    @property
    def query_heads(self) -> int:
        return len(self.query_ids)

    @property
    def kv_heads(self) -> int:
        return len(self.kv_ids)

    @property
    def output_projection(self) -> nn.Module:
        return next(p.module for p in self.projections if p.holds == "o")


def input_dim(projection: nn.Module) -> int:
    """The dimension of ``weight`` that runs over the inputs: Conv1D stores (in, out)."""
    return 0 if isinstance(projection, Conv1D) else 1


def width(projection: nn.Module, dim: int) -> int:
    """Size of ``weight`` along ``dim``."""
    return projection.get_parameter("weight").shape[dim]


def find_attention(model: PreTrainedModel, family: Mapping[str, Any]) -> list[Attention]:
    """Finds the attention modules that a family row describes, in the order of the layers.

    Head counts are read off the weights, never off the config.

    Raises:
        ValueError: If no module matches, or a projection is missing.
    """
    base = base_of(model)
    prefix = next(name for name, module in model.named_modules() if module is base)
    found = []
    for name, module in base.named_modules():
        kind = _kind(name, family)
        path = f"{prefix}.{name}" if prefix else name
        if kind is not None and _has_heads(model, path, family):
            found.append(_measured(path, kind, module, _projections(model, path, family), family))
    description = getattr(model.config, "headprune", None) or {}
    layout = _below_base(model, description.get("layout", {}))
    for attention in found:
        heads = layout.get(_base_path(model, attention.path))
        if heads and _counts(heads) == (attention.query_heads, attention.kv_heads):
            attention.query_ids = tuple(heads["query_heads"])
            attention.kv_ids = tuple(heads["kv_heads"])
            attention.group_sizes = _group_sizes(heads)
            _give_window(attention, heads, description)
    if not found:
        wanted = " or ".join(f"'{pattern}'" for pattern in family["attention"].values())
        needed = ", ".join(row["path"] for row in family["projections"] if not row["optional"])
        raise ValueError(f"{type(model).__name__} has no module {wanted} with {needed}")
    return found


def base_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head, also where its class does not say where that is."""
    base: nn.Module = model.base_model
    inside = getattr(model, "model", None)
    return inside if base is model and isinstance(inside, nn.Module) else base


def _counts(heads: Mapping[str, Any]) -> tuple[int, int]:
    return len(heads["query_heads"]), len(heads["kv_heads"])


def _kind(name: str, family: Mapping[str, Any]) -> str | None:
    for kind, patterns in family["attention"].items():
        for pattern in patterns.split("|"):
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name):
                return str(kind)
    return None


def _has_heads(model: PreTrainedModel, path: str, family: Mapping[str, Any]) -> bool:
    """Return whether a module has the projections: a hybrid model has other layers too."""
    needed = [row["path"] for row in family["projections"] if not row["optional"]]
    return all(find_projection(model, path, name) is not None for name in needed)


def find_projection(model: nn.Module, path: str, relative: str) -> nn.Module | None:
    """The module at a row's path, seen from an attention module; None where there is none."""
    try:
        module: nn.Module = model.get_submodule(_full_path(path, relative))
    except AttributeError:
        return None
    return module


def _full_path(path: str, relative: str) -> str:
    while relative.startswith("../"):
        path, relative = path.rpartition(".")[0], relative[3:]
    return f"{path}.{relative}" if path else relative


def _projections(
    model: PreTrainedModel, path: str, family: Mapping[str, Any]
) -> tuple[ProjectionModule, ...]:
    attention, found = model.get_submodule(path), []
    for row in family["projections"]:
        projection = find_projection(model, path, row["path"])
        if projection is None:
            continue
        full = _full_path(path, row["path"])
        names = (row["head_dim"] or family["head_dim"]).split("+")
        head_dim = sum(int(getattr(attention, name)) for name in names)
        found.append(ProjectionModule(full, projection, row["holds"], row["groups"], head_dim))
    return tuple(found)


def _base_path(model: PreTrainedModel, path: str) -> str:
    """The path below the base model: the same for LlamaModel and LlamaForCausalLM."""
    return path.removeprefix(f"{model.base_model_prefix}.")


def _below_base(model: PreTrainedModel, layout: Mapping[str, Any]) -> dict[str, Any]:
    return {_base_path(model, key): heads for key, heads in layout.items()}


def _measured(
    path: str,
    kind: str,
    module: nn.Module,
    projections: tuple[ProjectionModule, ...],
    family: Mapping[str, Any],
) -> Attention:
    by_role = {p.holds: p for p in projections}

    def heads(projection: ProjectionModule) -> int:
        dim = input_dim(projection.module)
        along = dim if projection.holds == "o" else 1 - dim
        return width(projection.module, along) // projection.head_dim

    query_heads = kv_heads = heads(by_role["o"])
    if "v" in by_role:
        kv_heads = heads(by_role["v"])
    elif "qkv" in by_role:
        kv_heads = (heads(by_role["qkv"]) - query_heads) // 2
    ids = tuple(range(query_heads)), tuple(range(kv_heads))
    groups = (query_heads // kv_heads,) * kv_heads if kv_heads else ()
    return Attention(path, kind, module, projections, by_role["o"].head_dim, *ids, groups)


def layout_entry(
    query_ids: Sequence[int],
    kv_ids: Sequence[int],
    group_sizes: Sequence[int],
    window_heads: int = 0,
) -> dict[str, Any]:
    """The layout of one attention module."""
    entry: dict[str, Any] = {"query_heads": list(query_ids), "kv_heads": list(kv_ids)}
    if len(set(group_sizes)) > 1:
        entry["group_sizes"] = list(group_sizes)
    if window_heads:
        entry["window_heads"] = window_heads
    return entry


def _give_window(
    attention: Attention, heads: Mapping[str, Any], description: Mapping[str, Any]
) -> None:
    attention.window_heads, attention.window = heads.get("window_heads", 0), None
    if attention.window_heads:
        attention.window = description["window"]["size"], description["window"]["sinks"]


def _group_sizes(heads: Mapping[str, Any]) -> tuple[int, ...]:
    """Query heads of every KV head, from an entry of the layout; named there if they differ."""
    queries, kv_heads = len(heads["query_heads"]), len(heads["kv_heads"])
    equal = (queries // max(kv_heads, 1),) * kv_heads
    return tuple(heads.get("group_sizes", equal))


def check_heads(heads: Any) -> None:
    """Refuse a damaged entry of the layout.

    Raises:
        ValueError: Naming the mistake.
    """
    names, others = {"query_heads", "kv_heads"}, {"group_sizes", "window_heads"}
    if not isinstance(heads, Mapping) or not names <= set(heads) <= names | others:
        raise ValueError("query_heads and kv_heads are needed, lists of ids")
    for name, numbers in heads.items():
        if name == "window_heads":
            continue
        if not isinstance(numbers, Sequence) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{name} must hold whole numbers from 0 on")
        if name != "group_sizes" and len(set(numbers)) != len(numbers):
            raise ValueError(f"{name} names a head twice")
    queries, kv_heads, sizes = (
        len(heads["query_heads"]),
        len(heads["kv_heads"]),
        _group_sizes(heads),
    )
    if len(sizes) != kv_heads or sum(sizes) != queries or 0 in sizes:
        groups = f"groups of {', '.join(map(str, sizes))}" if sizes else "no groups"
        raise ValueError(f"{queries} query heads and {kv_heads} KV heads do not make {groups}")
    windows = heads.get("window_heads", 0)
    if type(windows) is not int or not 0 <= windows <= kv_heads:
        raise ValueError(f"window_heads must be a number of its {kv_heads} KV heads, not {windows}")
    if windows and len(set(sizes)) > 1:
        raise ValueError("KV heads with unequal numbers of queries cannot have windows")


def _check_description(description: Any) -> None:
    """Refuse an invalid ``config.headprune``.

    Raises:
        ValueError: Naming the damaged part, or the schema.
    """
    parts = description if isinstance(description, Mapping) else {}
    if parts.get("schema_version") != SCHEMA:
        raise ValueError(
            f"config.json describes heads in schema {parts.get('schema_version')}; this "
            f"modeling_headprune.py reads {SCHEMA}: take the one that came with the model"
        )
    family, layout = parts.get("family"), parts.get("layout")
    if not isinstance(family, Mapping) or not isinstance(layout, Mapping):
        raise ValueError("config.json describes no family or no layout of heads")
    for name, kind in _ROW.items():
        part = family.get(name)
        named = name == "head_arguments" or not isinstance(part, Mapping)
        if not isinstance(part, kind) or not (named or set(map(type, part.values())) <= {str}):
            raise ValueError(f"the row of the family in config.json is damaged: '{name}'")
    for row in family["projections"]:
        sound = isinstance(row, Mapping) and set(row) == set(_PROJECTION)
        if not sound or not all(isinstance(row[name], kind) for name, kind in _PROJECTION.items()):
            raise ValueError("the row of the family in config.json is damaged: 'projections'")
    has_windows = any(isinstance(h, Mapping) and h.get("window_heads") for h in layout.values())
    window: Any = parts.get("window")
    if has_windows and window is None:
        raise ValueError("config.json describes heads with windows, but no window")
    if window is not None and not _is_window(window):
        raise ValueError(f"config.json describes no size and sinks of a window: {window}")
    for path, heads in layout.items():
        try:
            check_heads(heads)
        except ValueError as error:
            raise ValueError(f"config.json describes no heads of '{path}': {error}") from None


def _is_window(window: Any) -> bool:
    """Return whether a description of a window is one: whole numbers, and a size above 0."""
    if not isinstance(window, Mapping) or set(window) != {"size", "sinks"}:
        return False
    whole = all(type(number) is int for number in window.values())
    return whole and window["size"] >= 1 and window["sinks"] >= 0


def _check_fits(attention: Attention, family: Mapping[str, Any], heads: Mapping[str, Any]) -> None:
    """Refuses heads that a freshly built attention module has no place for.

    Raises:
        ValueError: Naming the module.
    """
    for attribute in family["follows"]:
        if not isinstance(getattr(attention.module, attribute, 0), int):
            raise ValueError(f"'{attribute}' of '{attention.path}' is no number of heads")
    for name, present in (("query_heads", attention.query_ids), ("kv_heads", attention.kv_ids)):
        if len(heads[name]) > len(present):
            raise ValueError(
                f"config.json describes {len(heads[name])} {name} of '{attention.path}', which has "
                f"{len(present)}"
            )
    why = no_windows(attention, family) if heads.get("window_heads") else None
    if why is not None:
        raise ValueError(f"'{attention.path}' cannot have windows: {why}")
    for norm, role in family["whole_norms"].items():
        ids = heads["query_heads" if role == "q" else "kv_heads"]
        weight = attention.module.get_submodule(norm).get_parameter("weight")
        if max(ids, default=0) * attention.head_dim >= weight.shape[0]:
            raise ValueError(f"'{attention.path}' has no head {max(ids)} in its {norm}")


def resize(
    attention: Attention,
    family: Mapping[str, Any],
    heads: Mapping[str, Any],
    window: tuple[int, int] | None = None,
) -> None:
    """Give one attention module the sizes for its remaining heads.

    Tensors that already have the new size keep their values. Wider ones are cut to their first
    entries, to hold the weights loaded next.

    Args:
        attention: The attention module.
        family: The row of its family.
        heads: Its entry of the layout: ids of the remaining query heads and KV heads. Where the KV
            heads have unequal numbers of queries, these numbers too.
        window: Size and sinks of a window, if the last ``window_heads`` KV heads have one.
    """
    for changed in (attention.module, *(p.module for p in attention.projections)):
        _make_stock(changed)
    attention.query_ids, attention.kv_ids = tuple(heads["query_heads"]), tuple(heads["kv_heads"])
    attention.group_sizes = _group_sizes(heads)
    attention.window_heads = heads.get("window_heads", 0)
    attention.window = window if attention.window_heads else None
    queries, kv_heads = attention.query_heads, attention.kv_heads
    counts = {"q": queries, "k": kv_heads, "v": kv_heads, "o": queries}
    for projection in attention.projections:
        if projection.holds:
            size = sum(counts[role] for role in projection.holds) * projection.head_dim
            _resize_projection(projection.module, projection.holds == "o", size)
            if set(projection.holds) & set("kv") and _repeats_output(attention, family):
                _repeat_output(projection, attention)
    for name, role in family["per_head"].items():
        _resize_per_head(attention.module, name, counts[role])
    for name, role in family["whole_norms"].items():
        norm: Any = attention.module.get_submodule(name)
        ids = attention.query_ids if role == "q" else attention.kv_ids
        _change_class(norm, NarrowedNorm)
        norm.headprune_heads, norm.headprune_head_dim = Positions(ids), attention.head_dim
    _write_sizes(attention, family)
    module: Any = attention.module
    mixin = _mixin(attention, family)
    if mixin is not None:
        _change_class(module, mixin)
        module.headprune = _Facts(attention, family)
    for owner in (module, *(p.module for p in attention.projections)):
        _freeze_empty(owner)


def _write_sizes(attention: Attention, family: Mapping[str, Any]) -> None:
    """Tells the module, and the config that it reads, how many heads it has."""
    module: Any = attention.module
    queries, kv_heads = attention.query_heads, attention.kv_heads
    repeated, owners = _repeated_here(attention, family), kv_owners(attention.group_sizes)
    if family["keeps_kv"]:  # all KV heads are still there, so a query finds its own by its id
        sharing = next(name for name, size in family["follows"].items() if size == "queries_per_kv")
        present = vars(module).setdefault("headprune_queries_per_kv", getattr(module, sharing))
        owners = [query // present for query in attention.query_ids]
    sizes = {
        "query_heads": queries,
        "kv_heads": kv_heads,
        "queries_per_kv": 1 if repeated else queries // max(kv_heads, 1),
        "query_width": queries * attention.head_dim,
        "kv_width": kv_heads * attention.head_dim,
    }
    for attribute, size in family["follows"].items():
        setattr(module, attribute, sizes[size])
    own: dict[str, Any] = {key: sizes[size] for key, size in family["config_follows"].items()}
    if repeated:
        own["_attn_implementation"] = REPEATING
        module.headprune_kv_of_query = Positions(owners)
    if attention.window is not None:
        own["_attn_implementation"] = WINDOWS
        full_heads = attention.kv_heads - attention.window_heads
        module.headprune_form = (full_heads, *attention.window)
        module.headprune_per_query = [n for n, role in family["per_head"].items() if role == "q"]
    if own or isinstance(getattr(module, "config", None), LayerConfig):
        module.config = LayerConfig(module.config, own)


def kv_owners(group_sizes: Sequence[int]) -> list[int]:
    """Return the KV head of every query head, by position."""
    return [kv for kv, size in enumerate(group_sizes) for _ in range(size)]


def _repeats_output(attention: Attention, family: Mapping[str, Any]) -> bool:
    """Return whether projections must give K and V once per query head."""
    return bool(family["counts_keys_as_queries"]) and attention.kv_heads < attention.query_heads


def _repeated_here(attention: Attention, family: Mapping[str, Any]) -> bool:
    """Return whether KV heads must be repeated for their queries before the attention function.

    Stock classes for grouped queries do it themselves, for groups of equal size.
    """
    if family["counts_keys_as_queries"]:
        return False
    sizes, repeats_itself = attention.group_sizes, "queries_per_kv" in family["follows"].values()
    if len(set(sizes)) > 1 or family["keeps_kv"]:
        return True
    shared = max(sizes, default=1) > 1
    return shared and family["shares_by_runtime"] and not repeats_itself


def _mixin(attention: Attention, family: Mapping[str, Any]) -> type | None:
    """Return the changes of an attention class, if it needs any."""
    if not attention.query_heads:
        return EmptySharedBias if family["shares_position_bias"] else EmptyAttention
    if attention.window is not None:
        return WindowHeads
    if family["shares_position_bias"]:
        return PartOfSharedBias
    return PartOfHeads if family["head_arguments"] or _repeats_output(attention, family) else None


def no_windows(attention: Attention, family: Mapping[str, Any]) -> str | None:
    """Why KV heads of a module cannot have windows, as the end of a sentence; None if they can."""
    if family["shares_position_bias"] or family["head_arguments"]:
        return "its attention takes a bias for every head"
    if family["keeps_kv"] or _repeats_output(attention, family):
        return "other layers read its K and V" if family["keeps_kv"] else "its K and V are repeated"
    if _repeated_here(attention, family):
        return "its KV heads are repeated for their queries before they are attended to"
    return None


def _resize_projection(module: nn.Module, is_output: bool, size: int) -> None:
    dim = input_dim(module) if is_output else 1 - input_dim(module)
    if width(module, dim) != size:
        module.weight = _narrowed(module.get_parameter("weight"), dim, size)
        if not is_output and module.bias is not None:
            module.bias = _narrowed(module.get_parameter("bias"), 0, size)
    names = ("nx", "nf") if isinstance(module, Conv1D) else ("in_features", "out_features")
    setattr(module, names[0 if is_output else 1], size)
    if is_output and size == 0 and type(module) in _EMPTY:
        module.__class__ = _EMPTY[type(module)]


def _repeat_output(projection: ProjectionModule, attention: Attention) -> None:
    """Makes a projection give K and V once per query head."""
    head_dim, queries, kv_heads = projection.head_dim, attention.query_heads, attention.kv_heads
    if projection.groups:  # [q ... q k v] per KV head; the stock class reads [q k v] per head
        starts, sizes = [0], attention.group_sizes
        for size in sizes[:-1]:
            starts.append(starts[-1] + size + 2)
        slots = []
        for start, size in zip(starts, sizes, strict=True):
            for query in range(size):
                slots += [start + query, start + size, start + size + 1]
    else:
        slots, start = [], 0
        for role in projection.holds:
            owners = list(range(queries)) if role == "q" else kv_owners(attention.group_sizes)
            slots += [start + head for head in owners]
            start += queries if role == "q" else kv_heads
    module: Any = projection.module
    _change_class(module, RepeatingProjection)
    positions = [slot * head_dim + i for slot in slots for i in range(head_dim)]
    module.headprune_positions = Positions(positions)


def _resize_per_head(attention: nn.Module, name: str, heads: int) -> None:
    owner_path, _, last = name.rpartition(".")
    try:
        owner = attention.get_submodule(owner_path)
    except AttributeError:  # a norm that not all models of the family have
        return
    entries = getattr(owner, last, None)
    if isinstance(entries, nn.ModuleList):
        setattr(owner, last, entries[:heads])
    elif entries is not None and entries.shape[0] != heads:
        setattr(owner, last, _narrowed(entries, 0, heads))


def _narrowed(parameter: nn.Parameter, dim: int, size: int) -> nn.Parameter:
    data = parameter.data.narrow(dim, 0, size).clone()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _nothing(x: Any, weight: Any) -> Any:
    """A zero for every row of an empty tensor; DDP waits for the gradients of both."""
    zeros = x.sum(-1, keepdim=True)
    return zeros + weight.sum() if torch.is_grad_enabled() else zeros


class EmptyConv1D(Conv1D):  # type: ignore[misc]  # transformers does not type it
    """A Conv1D without inputs: its bias. The stock forward cannot view an empty tensor."""

    def forward(self, x: Any) -> Any:
        return _nothing(x, self.weight) + self.bias


class EmptyLinear(nn.Linear):
    """A Linear without inputs: its bias. Some engines multiply by an empty matrix to garbage."""

    def forward(self, x: Any) -> Any:
        if torch._C._get_tracing_state() or not torch.is_grad_enabled():  # no engine sums nothing
            output = x.new_zeros(*x.shape[:-1], self.out_features)
            return output if self.bias is None else output + self.bias
        if self.bias is None:
            return _nothing(x, self.weight).expand(*x.shape[:-1], self.out_features)
        return _nothing(x, self.weight) + self.bias


_EMPTY: dict[type, type] = {Conv1D: EmptyConv1D, nn.Linear: EmptyLinear}


class Positions(nn.Module):
    """Positions to pick along one dimension, in a buffer that no checkpoint holds."""

    index: torch.Tensor

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = list(numbers)
        index = torch.tensor(self.numbers, dtype=torch.long)
        self.register_buffer("index", index, persistent=False)

    def fill(self) -> None:
        """Write the positions into the buffer, which loading leaves without numbers."""
        self.index.copy_(torch.tensor(self.numbers, dtype=torch.long))

    def forward(self, tensor: Any, dim: int) -> Any:
        """The entries of ``tensor`` at these positions."""
        return tensor.index_select(dim, self.index)


class LayerConfig:
    """The model's config as one layer sees it: its own head counts, everything else shared."""

    def __init__(self, config: Any, own: dict[str, Any]) -> None:
        shared = config.shared if isinstance(config, LayerConfig) else config
        self.__dict__.update(shared=shared, **own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "shared" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["shared"], name)


# transformers has one table for all files of this name that lie beside results of other versions
REPEATING = f"headprune_repeating_{SCHEMA}"


def repeating_attention(
    module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hands each query its KV head, where the stock class repeats none, or only equally often.

    Shapes are (batch, heads, length, head_dim). The cache holds every KV head once; repeating them
    is for the model's own attention implementation.
    """
    home = sys.modules[stock_class(module).__module__]
    eager = getattr(home, "eager_attention_forward", None)
    name = module.config.shared._attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    owners = module.headprune_kv_of_query
    return attention(module, query, owners(key, 1), owners(value, 1), *args, **kwargs)


AttentionInterface.register(REPEATING, repeating_attention)


class _SharingCache:
    """A cache that holds every KV head once, for an attention that speaks of one per query head."""

    def __init__(self, cache: Any, firsts: Positions, owners: Positions) -> None:
        self.cache, self.firsts, self.owners = cache, firsts, owners

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Store each KV head once; return all stored keys and values, one per query head."""
        own = self.firsts(keys, 1), self.firsts(values, 1)
        keys, values = self.cache.update(*own, *args, **kwargs)
        return self.owners(keys, 1), self.owners(values, 1)

    @property
    def layers(self) -> Any:
        """The layers, for an attention that reads what cross attention left in them."""
        return self

    def __getitem__(self, layer: int) -> Any:
        stored = self.cache.layers[layer]
        return SimpleNamespace(
            keys=self.owners(stored.keys, 1), values=self.owners(stored.values, 1)
        )

    def __getattr__(self, name: str) -> Any:
        if name == "cache":  # while it is copied
            raise AttributeError(name)
        return getattr(self.cache, name)


def _sharing(cache: Any, firsts: Positions, owners: Positions) -> Any:
    if isinstance(cache, EncoderDecoderCache):
        both = copy.copy(cache)
        for part in ("self_attention_cache", "cross_attention_cache"):
            setattr(both, part, _SharingCache(getattr(cache, part), firsts, owners))
        return both
    return _SharingCache(cache, firsts, owners) if isinstance(cache, Cache) else cache


class _Facts(nn.Module):
    """Facts that a changed attention class must know of its module."""

    def __init__(self, attention: Attention, family: Mapping[str, Any]) -> None:
        super().__init__()
        owners = kv_owners(attention.group_sizes)
        self.query_ids = Positions(attention.query_ids)
        self.repeats_output = _repeats_output(attention, family)
        self.owners = Positions(owners)
        self.firsts = Positions([owners.index(kv) for kv in range(attention.kv_heads)])
        self.arguments = dict(family["head_arguments"])
        self.without_heads = family["without_heads"]
        inside = (
            n for n, m in attention.module.named_modules() if m is attention.output_projection
        )
        self.output = next(inside, None)
        # its place in the cache, where it is one of a decoder
        layer = getattr(attention.module, "layer_idx", None)
        self.cache_layer: Any = getattr(attention.module, "layer_id", layer)


class _Changed:
    """Mixed into a stock class; instances are copied and pickled by naming both classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, native = type(self).__bases__
        return _blank, (mixin, native), self.__dict__


def _blank(mixin: type, native: type) -> Any:
    cls: Any = _mixed(mixin, native)
    return cls.__new__(cls)


class NarrowedNorm(_Changed):
    """A norm over all heads of the original model; it returns the remaining ones."""

    headprune_heads: Any
    headprune_head_dim: int

    def forward(self, hidden_states: Any) -> Any:
        whole = super().forward(hidden_states)  # type: ignore[misc]  # of the stock class
        by_head = whole.view(*whole.shape[:-1], -1, self.headprune_head_dim)
        return self.headprune_heads(by_head, -2).flatten(-2)


class RepeatingProjection(_Changed):
    """A projection with fewer KV heads than query heads, whose output has one per query head."""

    headprune_positions: Any

    def forward(self, hidden_states: Any) -> Any:
        whole = super().forward(hidden_states)  # type: ignore[misc]  # of the stock class
        return self.headprune_positions(whole, -1)


class PartOfHeads(_Changed):
    """An attention class whose arguments hold values for every head of the original model.

    Or one that counts KV heads by its query heads and has fewer. Then projections repeat K and V
    for it, and the cache holds them once.
    """

    headprune: _Facts
    headprune_parameters: tuple[str, ...]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._own_heads(hidden_states.shape[0], args, kwargs)
        # the stock class has it
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _own_heads(self, batch: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        positional = list(args)
        for name, dim in self.headprune.arguments.items():
            position = self.headprune_parameters.index(name)
            if name in kwargs:
                kwargs[name] = self._own(kwargs[name], dim, batch)
            elif position < len(positional):
                positional[position] = self._own(positional[position], dim, batch)
        if self.headprune.repeats_output:
            heads = self.headprune.firsts, self.headprune.owners
            positional = [_sharing(argument, *heads) for argument in positional]
            kwargs = {name: _sharing(argument, *heads) for name, argument in kwargs.items()}
        return positional, kwargs

    def _own(self, tensor: Any, dim: int | str, batch: Any) -> Any:
        if tensor is None:
            return None
        ids = self.headprune.query_ids
        if dim == "batch":
            if tensor.shape[0] == batch and tensor.dim() > 3:  # not folded together after all
                return ids(tensor, 1)
            return ids(tensor.unflatten(0, (batch, -1)), 1).flatten(0, 1)
        if tensor.shape[dim] == 1:  # the same for all heads
            return tensor
        return ids(tensor, int(dim))


class PartOfSharedBias(PartOfHeads):
    """T5: the first layer computes a position bias, for all heads, that all layers share."""

    headprune_bias: Any
    has_relative_attention_bias: bool

    def compute_bias(self, *args: Any, **kwargs: Any) -> Any:
        # the stock class has it
        self.headprune_bias = super().compute_bias(*args, **kwargs)  # type: ignore[misc]
        return self._own(self.headprune_bias, 1, 0)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("position_bias")
        output, bias, *rest = super().forward(hidden_states, *args, **kwargs)
        if given is not None:
            bias = given
        elif self.has_relative_attention_bias:
            bias, self.headprune_bias = self.headprune_bias, None
        else:
            bias = bias[:, :1]  # zeros, the same for all heads
        return output, bias, *rest


_CROPPABLE = 64  # tokens of the last forward that crop() can take back: a checked draft


class SplitLayer(DynamicLayer):  # type: ignore[misc]  # transformers does not type it
    """A layer of a cache whose window heads keep their sinks and their latest keys.

    ``full`` holds all keys of the full heads, if there are any. ``keys`` and ``values`` (batch,
    window heads, held, head_dim) are those of window heads: the latest, and, once tokens were
    forgotten, the sinks before them. They were rotated at their own positions and are not rotated
    again.
    """

    def __init__(self, full_heads: int, size: int, sinks: int) -> None:
        super().__init__()
        self.form = self.full_heads, self.size, self.sinks = full_heads, size, sinks
        self.full = DynamicLayer() if full_heads else None
        self.keys: Any = None
        self.values: Any = None
        self.length = 0  # tokens in all
        self.croppable = 0  # of them, tokens that crop() can take back
        self.held_sinks = 0  # 0 until tokens were forgotten

    @property
    def latest(self) -> int:
        """Held keys that are not sinks apart."""
        return int(self.keys.shape[2]) - self.held_sinks

    def get_seq_length(self) -> int:
        """All tokens, not the held ones: masks and positions are computed from it."""
        return self.length

    def update(self, keys: Any, values: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Take in new keys and values, full heads first.

        Args:
            keys: Shape (batch, KV heads, new, head_dim).
            values: The same.
            first: The position of the first real token of each row, shape (batch,).
            args: None.
            kwargs: None.

        Returns:
            K and V of the full heads, if there are any, K and V of the window heads, and the
            positions of the latter's keys, shape (batch, held).
        """
        split, new = self.full_heads, keys.shape[2]
        full = None if self.full is None else self.full.update(keys[:, :split], values[:, :split])
        near = super().update(keys[:, split:], values[:, split:])
        self.length, self.croppable = self.length + new, min(new, _CROPPABLE)
        positions = self._positions(first)
        self._forget(first)
        return full, near, positions

    def _positions(self, first: Any) -> Any:
        """Return the position of each held key; ``length`` for a sink among the latest."""
        device, start = self.keys.device, self.length - self.latest
        at = torch.arange(start, self.length, device=device).expand(len(self.keys), -1)
        if not self.held_sinks:
            return at
        sinks = first[:, None] + torch.arange(self.sinks, device=device)
        return torch.cat([sinks.masked_fill(sinks >= start, self.length), at], 1)

    def _forget(self, first: Any) -> None:
        """Keep the sinks and the latest keys that coming queries see."""
        latest = self.latest
        keep = min(latest, self.size - 1 + self.croppable)
        if keep == latest or self.length <= self.size + self.sinks:
            return
        # a sink among the latest is copied before it is forgotten
        places = torch.arange(self.sinks, device=self.keys.device)
        places = first[:, None] + places - (self.length - latest)
        here = ((places >= 0) & (places < latest))[:, None, :, None]
        places = places.clamp(0, latest - 1)[:, None, :, None]

        def kept(held: Any) -> Any:
            old, new = held[:, :, : self.held_sinks], held[:, :, self.held_sinks :]
            sinks = new.take_along_dim(places, 2)
            sinks = torch.where(here, sinks, old) if self.held_sinks else sinks
            return torch.cat([sinks, new[:, :, latest - keep :]], 2)

        self.keys, self.values = kept(self.keys), kept(self.values)
        self.held_sinks = self.sinks

    def crop(self, tokens_to_remove: int) -> None:
        """Take back some of the latest tokens: the number comes with a minus.

        Raises:
            ValueError: If it does not, or older keys would be needed.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes back tokens by a number below 0, not {tokens_to_remove}.")
        count = -tokens_to_remove
        if count > self.croppable and (self.length > self.latest or count > self.length):
            raise ValueError(
                f"Window heads can take back {self.croppable} tokens, not {count}: older keys are "
                f"gone. Draft at most {_CROPPABLE} tokens at a time, by a model without windows."
            )
        super().crop(-count)
        if self.full is not None:
            self.full.crop(-count)
        self.length, self.croppable = self.length - count, max(self.croppable - count, 0)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder rows, as a beam search does."""
        super().reorder_cache(beam_idx)
        if self.full is not None:
            self.full.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat rows."""
        super().batch_repeat_interleave(repeats)
        if self.full is not None:
            self.full.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        if self.full is not None:
            self.full.batch_select_indices(indices)

    def reset(self) -> None:
        """Forget everything."""
        self.__init__(*self.form)  # type: ignore[misc]


class WindowHeads(_Changed):
    """An attention class of full heads and, after them, heads that see a window only.

    Its forward leaves the cache to the attention function, which alone knows the mask, and with it
    the first real token of every row.
    """

    config: Any
    headprune_form: tuple[int, int, int]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)
        cache = None if name is None else kwargs.pop(name)
        if cache is not None:
            kwargs["headprune_layer"] = self._layer_of(
                getattr(cache, "self_attention_cache", cache)
            )
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _layer_of(self, cache: Any) -> Any:
        """This module's layer of a cache, which begins as an empty dynamic one."""
        number: Any = getattr(self, "layer_idx", getattr(self, "layer_id", None))
        layers: Any = cache.layers
        layers += [DynamicLayer() for _ in range(len(layers), number + 1)]
        layer = layers[number]
        # a window as wide as the positions, as of Phi-3, hides nothing
        most = getattr(self.config, "max_position_embeddings", None)
        wide = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= (most or 0) > 0
        plain = type(layer) is DynamicLayer or wide
        if plain and not layer.is_initialized and not cache.offloading:
            layer = layers[number] = SplitLayer(*self.headprune_form)
        if getattr(layer, "form", None) != self.headprune_form:
            raise ValueError(
                "Heads with windows need an empty DynamicCache, or the cache that they filled "
                f"before, and got a {type(cache).__name__} of {type(layer).__name__}. Leave out "
                "cache_implementation, or pass DynamicCache(config=model.config)."
            )
        return layer


# transformers has one table for all files of this name that lie beside results of other versions
WINDOWS = f"headprune_windows_{SCHEMA}"
PIECE = 1_024  # queries of window heads at once: a mask of a long prompt takes much memory


def windows_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    headprune_layer: Any = None,
    **kwargs: Any,
) -> Any:
    """Attend with the full heads, then with the window heads, by the model's own function.

    Of the keys j that query i sees, a window head sees those with i - j < size, and the first
    ``sinks`` real tokens. Shapes are (batch, heads, length, head_dim).
    """
    attention, is_eager = own_attention(module)
    (split, size, sinks), (rows, heads, new, _) = module.headprune_form, query.shape
    queries = split * (heads // key.shape[1])
    first = first_seen(attention_mask, query)
    if headprune_layer is None:
        if key.shape[2] != new:
            raise ValueError(
                "Window heads met a cache that is not theirs: something calls the former class of "
                "their module, such as a hook of accelerate."
            )
        near, length = (key[:, split:], value[:, split:]), new
        full = (key[:, :split], value[:, :split]) if split else None
        at = torch.arange(new, device=key.device).expand(rows, -1)
    else:
        full, near, at = headprune_layer.update(key, value, first[:, 0, -1, 0])
        length = headprune_layer.length
    i, j = torch.arange(length - new, length, device=key.device)[:, None], at[:, None, None]
    sink_logits = kwargs.pop("s_aux", None)

    def seen_from(some: slice) -> Any:
        begin = first.expand(-1, -1, new, -1)[:, :, some]
        if attention_mask is None:  # as of transformers; PaliGemma reads prompts both ways
            seen = j <= i[some] if getattr(module, "is_causal", True) else j < length
        else:
            mask = seen_by(attention_mask.expand(-1, -1, new, -1)[:, :, some])
            seen = mask.take_along_dim(j.clamp(max=length - 1), -1) & (j < length)
        return seen & ((i[some] - j < size) | (j < begin + sinks))

    def attend(heads: slice, some: slice, keys_and_values: Any, mask: Any) -> Any:
        own = {} if sink_logits is None else {"s_aux": sink_logits[heads]}
        part = _SomeHeads(module, heads) if module.headprune_per_query else module
        return attention(part, query[:, heads, some], *keys_and_values, mask, **kwargs, **own)

    whole, pieces = slice(None), list[Any]()
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    traced = torch.compiler.is_compiling() or tracing
    if is_eager or traced or new <= PIECE:
        mask = mask_of(seen_from(whole), is_eager, query.dtype)
        output, weights = attend(slice(queries, None), whole, near, mask)
    else:
        for start in range(0, new, PIECE):
            seen = seen_from(some := slice(start, start + PIECE))
            used = seen.any((0, 1, 2))
            used[0] = True  # kernels want a key
            keys_and_values = [each[:, :, used] for each in near]
            pieces.append(attend(slice(queries, None), some, keys_and_values, seen[..., used])[0])
        output, weights = torch.cat(pieces, 1), None
    if weights is not None:  # one for each token, also of forgotten ones
        places = at.clamp(max=length - 1)[:, None, None].expand_as(weights)
        weights = weights.new_zeros(*weights.shape[:3], length).scatter_add(-1, places, weights)
    if full is not None:
        others, of_others = attend(slice(0, queries), whole, full, attention_mask)
        output = torch.cat([others, output], 2)
        weights = None if weights is None else torch.cat([of_others, weights], 1)
    return output, weights


AttentionInterface.register(WINDOWS, windows_attention)


class _SomeHeads:
    """A module as an attention function sees it, whose tensors per query head hold some of them."""

    def __init__(self, module: Any, some: slice) -> None:
        self.headprune_module = module
        for name in module.headprune_per_query:
            if isinstance(tensor := getattr(module, name, None), torch.Tensor):
                setattr(self, name, tensor[some])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.headprune_module, name)


def own_attention(module: Any) -> tuple[Any, bool]:
    """The attention function of a module whose config names another, and whether it is eager.

    Raises:
        ValueError: If it takes no mask of tensors.
    """
    name = module.config.shared._attn_implementation
    if name not in ("sdpa", "eager"):
        raise ValueError(
            f"Heads with windows run with attn_implementation 'sdpa' or 'eager', not '{name}', "
            "which takes no mask per head."
        )
    home = sys.modules[stock_class(module).__module__]
    eager = getattr(home, "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager), name == "eager"


def seen_by(mask: Any) -> Any:
    """A mask as booleans: True where a query sees a key."""
    return mask if mask.dtype == torch.bool else mask == 0


def first_seen(mask: Any, query: Any) -> Any:
    """The position of the first token that each query sees, shape (batch, 1, 1 or length, 1)."""
    if mask is None:
        return torch.zeros(len(query), 1, 1, 1, dtype=torch.long, device=query.device)
    seen = seen_by(mask).view(torch.uint8)
    return seen.argmax(-1, keepdim=True).expand(len(query), -1, -1, -1)


def mask_of(seen: Any, is_eager: bool, dtype: Any) -> Any:
    """Booleans as the mask that an attention function takes."""
    if not is_eager:
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


class EmptyAttention(_Changed):
    """An attention class without heads: only the output bias is left."""

    # attributes of the attention class that it is mixed into
    config: Any
    layer_idx: int
    get_submodule: Any
    parameters: Any
    headprune: _Facts

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        batch, length = hidden_states.shape[:2]
        keys = self._keys(hidden_states, args, kwargs)
        output = hidden_states[..., :0]
        if torch.is_grad_enabled():  # DDP waits for a gradient of every weight, such as of norms
            source = _source(kwargs)
            unused = [*self.parameters(), *([] if source is None else [source[..., :0]])]
            output = output + sum(tensor.sum() for tensor in unused)
        if self.headprune.output is not None:
            output = self.get_submodule(self.headprune.output)(output)
        if self.headprune.without_heads == "residual":
            output = output + (kwargs["residual"] if "residual" in kwargs else args[0])
        elif self.headprune.without_heads:
            norm = self.get_submodule(self.headprune.without_heads)
            output = norm(hidden_states + output)
        if getattr(getattr(self, "config", None), "_attn_implementation", "eager") != "eager":
            return output, None
        return output, hidden_states.new_zeros(batch, 0, length, keys)

    def _keys(self, hidden_states: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the number of attended positions; a cache gets stubs in their place."""
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        cache, layer = caches[0] if caches else None, self.headprune.cache_layer
        source = _source(kwargs)
        if source is None:
            own = getattr(cache, "self_attention_cache", cache)
            return (
                hidden_states.shape[1] if own is None else _keep_length(own, layer, hidden_states)
            )
        if isinstance(cache, EncoderDecoderCache) and not cache.is_updated.get(layer):
            _keep_length(cache.cross_attention_cache, layer, source)
            cache.is_updated[layer] = True
        return source.shape[1]


def _source(kwargs: Mapping[str, Any]) -> Any:
    """The states that cross attention attends to; None for self-attention."""
    return kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))


def _keep_length(cache: Any, layer: Any, states: Any) -> Any:
    """Put a stub into a layer's own place in the cache: one head that is one number wide.

    transformers reads the sequence length off the first layer. It reads the sizes of masks off the
    first of each type (full, sliding, chunked), and crops and reorders all layers.

    Returns:
        The length that the layer would attend to.
    """
    stored = cache.layers[layer] if layer < len(cache.layers) else None
    stubs = (_stub(getattr(stored, name, None), states) for name in ("keys", "values"))
    return cache.update(*stubs, layer)[0].shape[2]


def _stub(stored: Any, states: Any) -> Any:
    """Zeros for some positions, in the sizes that a static cache may have been given before."""
    batch, length = states.shape[:2]
    if stored is None or stored.dim() != 4:
        return states.new_zeros(batch, 1, length, 1)
    shape = batch, stored.shape[1], length, stored.shape[3]
    return stored.new_zeros(shape, device=states.device)


class EmptySharedBias(EmptyAttention):
    """T5: a layer without heads still hands the position bias on, or computes it."""

    has_relative_attention_bias: bool
    compute_bias: Any

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        bias, cache = kwargs.get("position_bias"), kwargs.get("past_key_values")
        seen = cache.get_seq_length(self.layer_idx) if cache is not None else 0
        seen = seen + 0  # a copy: a static cache counts on in the tensor that it gives
        length, keys = hidden_states.shape[1], self._keys(hidden_states, args, kwargs)
        output, weights = super().forward(
            hidden_states, *args, **{**kwargs, "past_key_values": None}
        )
        if bias is None and self.has_relative_attention_bias:
            bias = self.compute_bias(
                length, keys, device=hidden_states.device, past_seen_tokens=seen
            )
        elif bias is None:
            bias = hidden_states.new_zeros(1, 1, length, keys)
        return output, bias, weights


_CLASSES: dict[tuple[type, ...], type] = {}


def _made_once(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """The same class for the same bases, so that isinstance and pickling agree on it."""
    return _CLASSES.setdefault(bases, type(name, bases, body))


def _mixed(mixin: type, native: Any) -> type:
    """A stock class with a mixin before it; a subclass, so that isinstance checks still hold."""
    parameters = tuple(inspect.signature(native.forward).parameters)
    body = {
        "__module__": __name__,
        "__doc__": mixin.__doc__,
        "headprune_parameters": parameters[2:],  # those after self and hidden_states
        "headprune_stock": native,
    }
    return _made_once(f"{mixin.__name__}{native.__name__}", (mixin, native), body)


def _change_class(module: nn.Module, mixin: type) -> None:
    module.__class__ = _mixed(mixin, stock_class(module))


def _make_stock(module: nn.Module) -> None:
    """Undo the changes of an earlier layout."""
    module.__class__ = stock_class(module)
    for name in [name for name in module._modules if name.startswith("headprune")]:
        delattr(module, name)


def _freeze_empty(module: nn.Module) -> None:
    """Spare optimizers the weights of no number, which the loader declares trainable."""
    for parameter in module.parameters():
        if not parameter.numel():
            parameter.requires_grad_(False)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of transformers behind a module that may have been changed, by any such file."""
    cls: type[nn.Module] = getattr(module, "headprune_stock", type(module))
    return cls


def apply_layout(model: PreTrainedModel, description: Mapping[str, Any]) -> None:
    """Resizes the attention of a freshly built stock model to the layout in its config.

    Raises:
        ValueError: If it is damaged, or names modules or heads that the model does not have.
    """
    _check_description(description)
    family, layout = description["family"], _below_base(model, description["layout"])
    attentions = find_attention(model, family)
    for attention in attentions:
        heads = layout.pop(_base_path(model, attention.path), None)
        if heads is not None:
            _check_fits(attention, family, heads)
            window = description.get("window")
            resize(attention, family, heads, window and (window["size"], window["sinks"]))
    # the encoder of an encoder-decoder is a model of its own, without the other two kinds
    kinds = {attention.kind for attention in attentions}
    missing = [path for path in layout if _kind(path, family) in (*kinds, None)]
    if missing:
        raise ValueError(
            f"config.json describes heads of modules that {type(model).__name__} does not have: "
            + ", ".join(sorted(missing))
        )


def pruned_class(native: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The stock class under its own name, resized by ``config.headprune`` after ``__init__``."""

    def __init__(self: Any, config: Any, *inputs: Any, **kwargs: Any) -> None:
        native.__init__(self, config, *inputs, **kwargs)
        apply_layout(self, config.headprune)

    def initialize_weights(self: Any) -> None:
        """Also called after loading."""
        native.initialize_weights(self)
        for module in self.modules():
            if isinstance(module, Positions):
                module.fill()
        _freeze_empty(self)

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "Continuous batching (generate_batch, transformers serve --continuous-batching) keeps "
            "equally many KV heads in every layer, and the heads of this model differ by layer. "
            "Use generate(), which takes batches too."
        )

    __init__.__annotations__ = {}  # strings here; vLLM asks isinstance of annotations
    body = {
        "__init__": __init__,
        "initialize_weights": initialize_weights,
        "init_continuous_batching": init_continuous_batching,
        # transformers renames old checkpoint keys for its own classes only, and this is one of them
        "is_custom_code": classmethod(lambda cls: False),
        "__module__": __name__,
        "__doc__": f"{native.__name__} with uneven heads.",
        # makes save_pretrained copy this file and name it in the config's auto_map
        "_auto_class": next(
            (auto for auto, cls in auto_classes(native.config_class).items() if cls is native),
            "AutoModel",
        ),
        # generate() would make static caches by the config, which cannot say every layer's sizes
        "_get_static_cache_init_shape": lambda self: None,
    }
    return _made_once(native.__name__, (native,), body)


def auto_classes(config_class: type) -> dict[str, type[PreTrainedModel]]:
    """The AutoModel classes that know a config class, each with the stock class it leads to."""
    found = {}
    for name in sorted(vars(modeling_auto)):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and config_class in mapping:
            classes = mapping[config_class]
            found[name] = classes[0] if isinstance(classes, tuple) else classes
    return found


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Makes ``modeling_headprune.X`` the pruned form of ``transformers.X``."""
    native = None if name.startswith("_") else getattr(transformers, name, None)
    if not (isinstance(native, type) and issubclass(native, PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pruned_class(native)
