# Copyright The headprune authors. Licensed under the Apache License, Version 2.0.
"""Runs a transformer whose attention has fewer heads than its config says, layer by layer.

This file is complete in itself (torch and transformers only). It lies beside the weights of every
model that headprune cut unevenly, so that

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

loads it where headprune is not installed. What it needs to know stands in ``config.headprune``:

    family   where attention sits, its projections, and which attributes follow the head counts
    layout   per attention module, the ids of the heads that are left

``modeling_headprune.LlamaForCausalLM`` (any class name of transformers will do) is the stock class
with its attention resized after ``__init__``. No modelling code is copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D


@dataclass
class ProjectionModule:
    """A projection of one attention module: its full path, its module, what it holds."""

    path: str
    module: nn.Module
    holds: str
    interleaved: bool


@dataclass
class Attention:
    """One attention module of a live model, with the sizes its weights have now.

    Attributes:
        path: Full path of the module in the model.
        module: The module itself.
        projections: Its projections.
        head_dim: Width of a head.
        query_ids: Ids of the query heads, in order; ids are those of the model before any cut.
        kv_ids: Ids of the KV heads, in order.
    """

    path: str
    module: nn.Module
    projections: tuple[ProjectionModule, ...]
    head_dim: int
    query_ids: tuple[int, ...]
    kv_ids: tuple[int, ...]

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

    Head counts are read off the weights, never off the config: the number of query heads from the
    width of the output projection's input, the number of KV heads from that of the key projection.

    Raises:
        ValueError: If no module matches, or a projection is missing.
    """
    base = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)
    pattern = re.escape(family["attention"]).replace(r"\*", r"[^.]+")
    found = []
    for name, module in base.named_modules():
        if not re.fullmatch(pattern, name):
            continue
        path = f"{prefix}.{name}" if prefix else name
        projections = []
        for row in family["projections"]:
            below, relative = path, row["path"]
            while relative.startswith("../"):
                below, relative = below.rpartition(".")[0], relative[3:]
            full = f"{below}.{relative}" if below else relative
            try:
                projection = model.get_submodule(full)
            except AttributeError:
                raise ValueError(f"'{path}' has no projection '{row['path']}'") from None
            projections.append(ProjectionModule(full, projection, row["holds"], row["interleaved"]))
        found.append(_measured(path, module, tuple(projections), family["head_dim"]))
    description = getattr(model.config, "headprune", None) or {}
    layout = _below_base(model, description.get("layout", {}))
    for attention in found:
        heads = layout.get(_base_path(model, attention.path))
        if heads and len(heads["query_heads"]) == attention.query_heads:
            attention.query_ids = tuple(heads["query_heads"])
            attention.kv_ids = tuple(heads["kv_heads"])
    if not found:
        raise ValueError(f"{type(model).__name__} has no module '{family['attention']}'")
    return found


def _base_path(model: PreTrainedModel, path: str) -> str:
    """The path below the base model: the same for LlamaModel and LlamaForCausalLM."""
    return path.removeprefix(f"{model.base_model_prefix}.")


def _below_base(model: PreTrainedModel, layout: Mapping[str, Any]) -> dict[str, Any]:
    return {_base_path(model, key): heads for key, heads in layout.items()}


def _measured(
    path: str, module: nn.Module, projections: tuple[ProjectionModule, ...], head_dim_attribute: str
) -> Attention:
    head_dim = int(getattr(module, head_dim_attribute))
    by_role = {p.holds: p.module for p in projections}
    output = by_role["o"]
    query_heads = width(output, input_dim(output)) // head_dim
    if "k" in by_role:
        kv_heads = width(by_role["k"], 1 - input_dim(by_role["k"])) // head_dim
    else:
        fused = by_role["qkv"]
        kv_heads = (width(fused, 1 - input_dim(fused)) // head_dim - query_heads) // 2
    ids = tuple(range(query_heads)), tuple(range(kv_heads))
    return Attention(path, module, projections, head_dim, *ids)


def resize(
    attention: Attention,
    family: Mapping[str, Any],
    query_ids: Sequence[int],
    kv_ids: Sequence[int],
) -> None:
    """Gives one attention module the sizes that the heads left need.

    Tensors that already have the new size keep their values; wider ones are cut to their first
    entries, as a place for weights that are loaded next.
    """
    query_heads, kv_heads = len(query_ids), len(kv_ids)
    counts = {"q": query_heads, "k": kv_heads, "v": kv_heads}
    for projection in attention.projections:
        heads = sum(counts[role] for role in projection.holds.replace("o", "q"))
        size = heads * attention.head_dim
        _resize_projection(projection.module, projection.holds == "o", size)
    sizes = {
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "queries_per_kv": query_heads // max(kv_heads, 1),
        "query_width": query_heads * attention.head_dim,
    }
    for attribute, size in family["follows"].items():
        setattr(attention.module, attribute, sizes[size])
    if query_heads == 0:
        _make_empty(attention)
    attention.query_ids, attention.kv_ids = tuple(query_ids), tuple(kv_ids)


def _make_empty(attention: Attention) -> None:
    inside = (n for n, m in attention.module.named_modules() if m is attention.output_projection)
    attention.module.__class__ = empty_class(type(attention.module))
    attention.module.headprune_output = next(inside, None)  # type: ignore[assignment]


def _resize_projection(module: nn.Module, is_output: bool, size: int) -> None:
    dim = input_dim(module) if is_output else 1 - input_dim(module)
    if width(module, dim) != size:
        module.weight = _narrowed(module.get_parameter("weight"), dim, size)
        if not is_output and module.bias is not None:
            module.bias = _narrowed(module.get_parameter("bias"), 0, size)
    names = ("nx", "nf") if isinstance(module, Conv1D) else ("in_features", "out_features")
    setattr(module, names[0 if is_output else 1], size)
    if is_output and size == 0 and isinstance(module, Conv1D):
        module.__class__ = EmptyConv1D


def _narrowed(parameter: nn.Parameter, dim: int, size: int) -> nn.Parameter:
    data = parameter.data.narrow(dim, 0, size).clone()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


class EmptyConv1D(Conv1D):  # type: ignore[misc]
    """A Conv1D without inputs: its bias. The stock forward cannot view an empty tensor."""

    def forward(self, x: Any) -> Any:
        return self.bias.expand(*x.shape[:-1], self.nf)


class EmptyAttention:
    """Mixed into an attention class whose heads are all gone: what is left is the output bias."""

    # what it finds on the attention class that it is mixed into
    config: Any
    layer_idx: int | None
    get_submodule: Any
    headprune_output: str | None

    def forward(
        self, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        batch, length = hidden_states.shape[:2]
        keys = length
        if past_key_values is not None and self.layer_idx == 0:
            keys = self._keep_cache_length(hidden_states, past_key_values)
        output = hidden_states.new_zeros(batch, length, 0)
        if self.headprune_output is not None:
            output = self.get_submodule(self.headprune_output)(output)
        if self.config._attn_implementation != "eager":
            return output, None
        return output, hidden_states.new_zeros(batch, 0, length, keys)

    def _keep_cache_length(self, hidden_states: Any, past_key_values: Any) -> Any:
        """Puts a stub into the cache: generate() reads the sequence length off layer 0."""
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        layers = cache.layers
        heads, width = 1, 1
        if layers and layers[0].is_initialized:
            heads, width = layers[0].keys.shape[1], layers[0].keys.shape[3]
        stub = hidden_states.new_zeros(hidden_states.shape[0], heads, hidden_states.shape[1], width)
        keys, _ = cache.update(stub, stub, self.layer_idx)
        return keys.shape[2]


def empty_class(attention_class: type[nn.Module]) -> type[nn.Module]:
    """The attention class without heads; a subclass, so that isinstance checks still hold."""
    body = {"__module__": __name__, "__doc__": EmptyAttention.__doc__}
    name = f"Empty{attention_class.__name__}"
    return _made_once(name, (EmptyAttention, attention_class), body)


_CLASSES: dict[tuple[type, ...], type] = {}


def _made_once(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """The same class for the same bases, so that isinstance and pickling agree on it."""
    return _CLASSES.setdefault(bases, type(name, bases, body))


def apply_layout(model: PreTrainedModel, description: Mapping[str, Any]) -> None:
    """Resizes the attention of a freshly built stock model to the layout in its config.

    Raises:
        ValueError: If the layout names modules that the model does not have.
    """
    layout = _below_base(model, description["layout"])
    for attention in find_attention(model, description["family"]):
        heads = layout.pop(_base_path(model, attention.path), None)
        if heads is not None:
            resize(attention, description["family"], heads["query_heads"], heads["kv_heads"])
    if layout:
        raise ValueError(
            f"config.json describes heads of modules that {type(model).__name__} does not have: "
            + ", ".join(sorted(layout))
        )


def pruned_class(native: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The stock class under its own name, resized by ``config.headprune`` after ``__init__``."""

    def __init__(self: Any, config: Any, *inputs: Any, **kwargs: Any) -> None:
        native.__init__(self, config, *inputs, **kwargs)
        apply_layout(self, config.headprune)

    body = {
        "__init__": __init__,
        "__module__": __name__,
        "__doc__": f"{native.__name__} with uneven heads.",
        # makes save_pretrained copy this file and name it in the config's auto_map
        "_auto_class": next(
            (auto for auto, cls in auto_classes(native.config_class).items() if cls is native),
            "AutoModel",
        ),
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
