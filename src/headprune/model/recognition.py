"""Rows of the family table, read off the modules of a model whose type the table lacks.

A module of attention has projections named as one of ``_LAYOUTS``, of sizes that are multiples of a
head's width. Every other weight in it must be a norm, or have an entry per head. What sizes cannot
show, such as a forward that mixes heads, the verification of every result does.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from headprune.errors import FamilyError, HeadpruneError
from headprune.family import FAMILIES, Family, Projection
from headprune.family.spec import Role, Size
from headprune.model.batch import is_remote
from headprune.model.skeleton import without_weights
from headprune.runtime.modeling_headprune import (
    auto_classes,
    base_of,
    find_attention,
    find_projection,
)

_LAYOUTS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "dense"),
    ("q_proj", "k_proj", "v_proj", "Wo"),
    ("q", "k", "v", "o"),
    ("query", "key", "value", "../output.dense"),
)
_ONE_NORM = "a norm runs over all K heads at once and would see other heads"
_STATES = r"conv1d|A_log|dt_bias|decay|slope"
_SENSES = r"vision|visual|audio|image"
_CROSS = r"encoder_attn|EncDec|cross"
_TEXT = r"language_model|text_(model|encoder|decoder)"
_LATENT = ("kv_b_proj", "o_proj")
_LATENT_QUERIES = {
    **{"q_b_proj": "qk_head_dim", "q_proj": "qk_head_dim"},
    "q_gate_proj": "qk_head_dim+v_head_dim",
}
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_NAMES: Mapping[Size, tuple[str, ...]] = {
    "query_heads": ("num_heads", "num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "queries_per_kv": ("num_key_value_groups",),
    "query_width": ("all_head_size", "inner_dim", "embed_dim"),
}
_MAPPINGS = (
    MODEL_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
_KNOWN: dict[str, Family] = {}  # by class and text of a config


def recognised(config: PreTrainedConfig) -> Family:
    """Return the row that the modules of a config's model amount to.

    Raises:
        FamilyError: With the modules or the tensor that no row describes.
    """
    key = key_of(config)
    if key not in _KNOWN:
        _KNOWN[key] = _row(config)
    return _KNOWN[key]


def key_of(config: PreTrainedConfig) -> str:
    """Return the same text for configs of the same class and content."""
    return f"{type(config).__qualname__} {config.to_json_string()}"


def note_outputs(config: PreTrainedConfig) -> None:
    """Note that the layers of a recognised model take more from attention than its output.

    So no layer may lose all heads.
    """
    _KNOWN[key_of(config)] = replace(recognised(config), keeps_a_head=True)


def row_of(config: PreTrainedConfig) -> Family | None:
    """Return the row of a config's family; None where there is none."""
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    try:
        return recognised(config)
    except FamilyError:
        return None


def _row(config: PreTrainedConfig) -> Family:
    name, cls = config.model_type, _class_of(config)
    if cls is None:
        raise FamilyError(
            f"Model type '{name}' is not in headprune's table ('headprune families'), and "
            "transformers has no class for it whose modules could be looked at."
        )
    net = without_weights(cls, config)
    base = base_of(net)
    rows: dict[str, Family] = {}
    whole: dict[nn.Module, FamilyError] = {}  # modules that stay, with the reason
    odd: dict[str, FamilyError] = {}  # those of text among them, by their paths
    for path, module in base.named_modules():
        layout = _layout_of(base, path)
        if layout is not None:
            try:
                row = _described(name, path, module, layout)
            except FamilyError as why:
                whole[module] = why
                if not (_keeps_states(module) or re.search(_SENSES, path)):
                    odd[path] = why
            else:
                first = rows.setdefault(_pattern(path), row)
                if (row.projections, row.head_dim) != (first.projections, first.head_dim):
                    whole[module] = FamilyError(
                        f"Model type '{name}': '{path}' has other projections than the attention "
                        "of other layers."
                    )
                # sinks, for one, may be in some layers only
                per_head = {**first.per_head, **row.per_head}
                rows[_pattern(path)] = replace(first, per_head=per_head)
    tower = any(re.search(_TEXT, pattern) for pattern in rows)
    for path, refusal in odd.items():
        if not tower or re.search(_TEXT, path):
            raise refusal
    if not rows:
        raise FamilyError(
            f"Model type '{name}' is not in headprune's table ('headprune families'), and no "
            f"module of its {cls.__name__} has the projections of attention, such as "
            f"{', '.join(_LAYOUTS[0])}."
        )
    row = _shared(_joined(name, rows, net), base)
    for attention in find_attention(net, row.for_runtime()):
        if attention.module in whole:
            raise whole[attention.module]
    native = _config_says_counts(cls, config, row, net)
    return replace(row, native=True, fewer_kv_heads="native") if native else row


def named_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that a config names: of transformers, or of its own code."""
    names = config.architectures
    name = str(names[0]) if isinstance(names, list) and names else ""
    own = auto_classes(type(config)).values() if is_remote(type(config)) else ()
    named = next((cls for cls in own if cls.__name__ == name), getattr(transformers, name, None))
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that a config names, or else that of its bare model."""
    if (named := named_class(config)) is not None:
        return named
    known: Any = next((each[type(config)] for each in _MAPPINGS if type(config) in each), None)
    cls: type[PreTrainedModel] | None = known[0] if isinstance(known, tuple) else known
    return cls


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _keeps_states(module: nn.Module) -> bool:
    """Return whether a module is no softmax attention: it carries a state from token to token."""
    return any(re.search(_STATES, name) for name, _ in module.named_parameters())


def _shared(row: Family, base: nn.Module) -> Family:
    """Return a row whose K and V stay, if some of its layers read K and V of others."""
    if row.projections[1].roles != "k":
        return row
    patterns = [one for each in row.attention.values() for one in each.split("|")]
    q, k, v, o, *gates = row.projections

    def has(path: str, *projections: Projection) -> bool:
        return all(_is_linear(find_projection(base, path, one.path)) for one in projections)

    modules = [path for path, _ in base.named_modules() if _pattern(path) in patterns]
    if not any(has(path, q, o) and not has(path, k, v) for path in modules):
        return row
    kept = [replace(one, roles="", optional=True) for one in (k, v)]
    sizes = {n: s for n, s in row.size_attributes.items() if s in ("query_heads", "queries_per_kv")}
    return replace(
        row,
        projections=(q, *kept, o, *gates),
        size_attributes=sizes,
        keeps_kv=True,
        keeps_a_head=True,
        cached_width=f"{k.path}.out_features+{k.path}.out_features",
        fewer_kv_heads="some of its layers read K and V of others, so these stay",
    )


def _config_says_counts(
    cls: type[PreTrainedModel], config: PreTrainedConfig, row: Family, net: PreTrainedModel
) -> bool:
    """Return whether a plain config can hold other counts: it is built with one group of heads."""
    if row.fewer_kv_heads != "runtime" or [*row.attention] != ["self"] or not row.kv_heads_key:
        return False
    modules = find_attention(net, row.for_runtime())
    first, other = modules[0], copy.deepcopy(config)
    queries = first.query_heads // first.kv_heads
    if first.kv_heads == 1 or any(m.group_sizes != first.group_sizes for m in modules):
        return False
    try:
        setattr(other, row.query_heads_key, queries)
        setattr(other, str(row.kv_heads_key), 1)
        other.head_dim = first.head_dim
        built = without_weights(cls, other)
        changed = find_attention(built, row.for_runtime())
    except (AttributeError, StrictDataclassError, HeadpruneError, ValueError):
        return False
    counts = {(m.query_heads, m.kv_heads, m.head_dim) for m in changed}
    inside = tuple(f"{module.path}." for module in modules)
    return counts == {(queries, 1, first.head_dim)} and all(
        name.startswith(inside) or parameter.shape == net.get_parameter(name).shape
        for name, parameter in built.named_parameters()
    )


def _joined(name: str, rows: Mapping[str, Family], net: PreTrainedModel) -> Family:
    """Return one row for all patterns; those of images and sound stay whole."""
    text = {p: row for p, row in rows.items() if not re.search(_SENSES, p)}
    within = {pattern: row for pattern, row in text.items() if re.search(_TEXT, pattern)}
    text = within or text
    if not net.config.is_encoder_decoder and net.config.get_text_config() is not net.config:
        text = {p: row for p, row in text.items() if not re.search(_CROSS, p)}
    row = next(iter(text.values()), None)
    if row is None or any(
        one.projections != row.projections or one.head_dim != row.head_dim for one in text.values()
    ):
        raise FamilyError(
            f"Model type '{name}' has attention modules of several kinds ({', '.join(rows)}), "
            "which one row of headprune's table would have to tell apart."
        )
    kinds: dict[str, str] = {}
    for pattern in text:
        kind = _kind(pattern, net) if len(text) > 1 or net.config.is_encoder_decoder else _own(net)
        kinds[kind] = f"{kinds[kind]}|{pattern}" if kind in kinds else pattern
    return replace(row, attention=kinds)


def _kind(pattern: str, net: PreTrainedModel) -> str:
    if re.search(_CROSS, pattern):
        return "cross"
    side = re.search(r"encoder|decoder", pattern)
    return side[0] if side else _own(net)


def _own(net: PreTrainedModel) -> str:
    return "self" if net.config.get_text_config() is net.config else "text"


def _layout_of(base: nn.Module, path: str) -> tuple[str, ...] | None:
    """Return the names of a module's projections; None for another module."""
    for layout in (*_LAYOUTS, _LATENT):
        modules = [find_projection(base, path, each) for each in layout]
        if all(_is_linear(each) for each in modules):
            return layout
    return None


def _is_linear(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _described(name: str, path: str, module: Any, layout: tuple[str, ...]) -> Family:
    """Return the row of one attention module."""
    if layout == _LATENT:
        return _latent(name, path, module)
    width_name = next((n for n in _HEAD_DIMS if isinstance(getattr(module, n, None), int)), None)
    if width_name is None:
        raise FamilyError(f"Model type '{name}': '{path}' does not say how wide a head is.")
    narrower = isinstance(getattr(module, "v_head_dim", None), int)
    value_name = "v_head_dim" if narrower else width_name
    width, value = int(getattr(module, width_name)), int(getattr(module, value_name))
    q, k, v = (module.get_submodule(each).weight.shape[0] for each in layout[:3])
    is_below = not layout[3].startswith("../")
    out = module.get_submodule(layout[3]).weight.shape[1] if is_below else q
    queries, kv_heads = out // value, v // value
    whole = out % value == v % value == 0 and kv_heads and queries % kv_heads == 0
    if not whole or k != kv_heads * width or q not in (queries * width, 2 * queries * width):
        raise FamilyError(
            f"Model type '{name}': '{path}' has {layout[0]} {q}, {layout[1]} {k}, {layout[2]} {v} "
            f"and {layout[3]} {out} wide, which are not heads of {width}."
        )
    beside = _Beside(queries, kv_heads, width, module.get_submodule(layout[0]).weight.shape[1])
    for tensor, parameter in module.named_parameters():
        owner = tensor.rpartition(".")[0]
        whole = owner in layout or "indexer" in owner  # an indexer has heads of its own
        if not whole and not beside.takes(tensor, parameter.shape):
            raise FamilyError(
                f"Model type '{name}': '{path}' has '{tensor}' of shape {tuple(parameter.shape)} "
                "beside its projections, whose part in every head is not known."
            )
    projections = [
        Projection(
            each,
            role if not beside.norms or role in "vo" else "",
            head_dim=width_name if role in "qk" and value_name != width_name else None,
        )
        for each, role in zip(layout, "qkvo", strict=True)
    ]
    if q == 2 * queries * width:  # query and gate of every head
        projections[0] = Projection(layout[0], "q", head_dim=f"{width_name}+{width_name}")
    sizes = {"query_heads": queries, "kv_heads": kv_heads, "queries_per_kv": queries // kv_heads}
    sizes["query_width"] = out
    attributes = {
        attribute: size
        for size, names in _NAMES.items()
        for attribute in names
        if getattr(module, attribute, None) == sizes[size]
    }
    one_kv_per_query = "queries_per_kv" not in attributes.values() and not beside.norms
    says_kv_heads = hasattr(getattr(module, "config", None), "num_key_value_heads")
    return Family(
        model_type=name,
        attention={"self": _pattern(path)},
        projections=(*projections, *beside.gates),
        head_dim=value_name,
        size_attributes=attributes,
        config_size_attributes=dict(_read_from_config(type(module))),
        per_head=beside.per_head,
        full_width_norms=beside.norms,
        kv_heads_key="num_key_value_heads" if says_kv_heads else None,
        fewer_kv_heads=_ONE_NORM if beside.norms else "runtime",
        expects_one_kv_per_query=one_kv_per_query,
    )


@dataclass
class _Beside:
    """The tensors of an attention module beside its projections."""

    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    per_head: dict[str, Role] = field(default_factory=dict)
    norms: dict[str, Role] = field(default_factory=dict)
    gates: list[Projection] = field(default_factory=list)

    def takes(self, tensor: str, shape: Sequence[int]) -> bool:
        """Note a tensor; return whether its part in every head is known."""
        child, first, rest = tensor.rpartition(".")[0], shape[0], set(shape[1:])
        widths = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        is_norm = "norm" in child and not rest
        if is_norm and first == self.head_dim:  # the same of every head
            return True
        if first == widths[0] and re.search("gate|g_proj|query$", child):
            gate = Projection(child, "q")
            self.gates += [gate] if gate not in self.gates else []
        elif is_norm and first in widths and re.match("[qk]_", child):
            self.norms[child] = "q" if child.startswith("q") else "k"
        elif first in (self.query_heads, self.kv_heads) and rest <= {1, self.head_dim, self.hidden}:
            self.per_head[tensor] = "q" if first == self.query_heads else "k"
        else:
            return False
        return True


def _latent(name: str, path: str, module: Any) -> Family:
    """Return the row of an MLA module: K and V of a head come out of the shared latent."""
    names = {name for name, child in module.named_children() if _is_linear(child)}
    queries = [name for name in _LATENT_QUERIES if name in names]
    dims = ("qk_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    missing = [each for each in dims if not isinstance(getattr(module, each, None), int)]
    if not queries or missing:
        lacks = ", ".join(missing) or "q_proj or q_b_proj"
        raise FamilyError(f"Model type '{name}': '{path}' has latent attention without {lacks}.")
    projections = (
        Projection(queries[0], "q", head_dim=_LATENT_QUERIES[queries[0]]),
        Projection("kv_b_proj", "q", head_dim="qk_nope_head_dim+v_head_dim"),
        Projection("o_proj", "o"),
    )
    heads, rest = divmod(module.o_proj.weight.shape[1], module.v_head_dim)
    if rest:
        raise FamilyError(
            f"Model type '{name}': '{path}' has o_proj {module.o_proj.weight.shape[1]} wide, which "
            f"are not heads of {module.v_head_dim}."
        )
    beside = _Beside(heads, heads, module.v_head_dim, module.o_proj.weight.shape[0])
    for tensor, parameter in module.named_parameters():
        a_head = tuple(parameter.shape) == (heads,) and not re.search("indexer|norm", tensor)
        if a_head or re.match(r"g_proj|gate_proj", tensor):  # the latents and an indexer stay
            beside.takes(tensor, parameter.shape)
    return Family(
        model_type=name,
        attention={"self": _pattern(path)},
        projections=(*projections, *beside.gates),
        head_dim="v_head_dim",
        size_attributes={"num_heads": "query_heads"},
        per_head=beside.per_head,
        kv_heads_key="num_key_value_heads",
        cached_width="kv_lora_rank+qk_rope_head_dim+indexer.head_dim",
        fewer_kv_heads="all heads share one latent K and V already, and the cache holds only that",
    )


def _read_from_config(cls: type[nn.Module]) -> Iterator[tuple[str, Size]]:
    """Yield the settings that the forward of an attention reads from its config."""
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return
    settings: dict[str, Size] = {
        "num_attention_heads": "query_heads",
        "num_key_value_heads": "kv_heads",
    }
    for setting, size in settings.items():
        if re.search(rf"config\.{setting}\b", source):
            yield setting, size
