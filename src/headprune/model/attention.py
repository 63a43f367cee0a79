"""The attention modules of a live model, the names of its heads, and its identity."""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError, FamilyError
from headprune.family import FAMILIES, Family
from headprune.model.placement import refuse_spread, whole_class
from headprune.model.recognition import recognised
from headprune.model.skeleton import below_base, sample_of
from headprune.registry import did_you_mean
from headprune.runtime import MANIFEST
from headprune.runtime.modeling_headprune import Attention, find_attention
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.records import Heads
from headprune.tensors.shards import whole

_WALKED: WeakKeyDictionary[PreTrainedModel, tuple[list[object], list[Attention]]]
_WALKED = WeakKeyDictionary()
_IDS = "headprune_ids"  # of an attention module: ids of its query and KV heads, from the manifest


def family_of(config: PreTrainedConfig) -> Family:
    """Return the row of a config's family.

    Raises:
        FamilyError: If there is none, or the config has a setting that the row refuses.
    """
    if config.model_type not in FAMILIES:
        return recognised(config)
    family = FAMILIES[config.model_type]
    lowest = family.min_transformers
    if lowest and Version(transformers.__version__) < Version(lowest):
        raise FamilyError(
            f"{config.model_type} needs transformers {lowest}; installed is "
            f"{transformers.__version__}. Upgrade transformers."
        )
    for attribute, reason in family.refused.items():
        if getattr(config, attribute, None):
            raise FamilyError(
                f"This {config.model_type} model sets {attribute}={getattr(config, attribute)}: "
                f"{reason}."
            )
    return family


def attention_of(model: PreTrainedModel) -> list[Attention]:
    """Return the attention modules of a model, first layer first.

    A model is walked once, and again when it has been cut since.

    Raises:
        FamilyError: If its family is unknown, its row does not match, or it is spread so that
            its weights are not whole.
    """
    refuse_spread(model)
    known = _WALKED.get(model)
    if known is None or known[0] != _geometry(model, known[1]):
        attentions = _walk(model)
        _WALKED[model] = known = _geometry(model, attentions), attentions
    return [replace(attention) for attention in known[1]]


def _geometry(model: PreTrainedModel, attentions: Sequence[Attention]) -> list[object]:
    """Return modules, shapes, head counts and ids, which a cut changes."""
    present = dict(model.named_modules())
    geometry: list[object] = [copy.deepcopy(getattr(model.config, "headprune", None))]
    for attention in attentions:
        own = vars(attention.module)
        counts = {name: value for name, value in own.items() if type(value) is int}
        geometry += [present.get(attention.path) is attention.module, counts, own.get(_IDS)]
        for row in attention.projections:
            weight = row.module.get_parameter("weight")
            geometry += [present.get(row.path) is row.module, weight.shape]
    return geometry


def _walk(model: PreTrainedModel) -> list[Attention]:
    try:
        attentions = find_attention(model, family_of(model.config).for_runtime())
    except ValueError as error:
        raise FamilyError(
            f"The model says it is '{model.config.model_type}' but does not look like one: {error}."
        ) from None
    for attention in attentions:
        ids = vars(attention.module).get(_IDS)
        # a cut since then has changed the counts
        if ids and tuple(map(len, ids)) == (attention.query_heads, attention.kv_heads):
            attention.query_ids, attention.kv_ids = ids
    return attentions


def restore_ids(
    net: PreTrainedModel, layout: Mapping[str, Heads], family: Mapping[str, object]
) -> None:
    """Give heads the ids of the manifest, which a plain config cannot hold.

    Raises:
        CheckpointError: If the model has other head counts than the manifest.
    """
    # the folder may be opened with another head, or without one
    recorded = {below_base(net, path): heads for path, heads in layout.items()}
    for attention in find_attention(net, family):
        heads = recorded.get(below_base(net, attention.path))
        if heads is None:
            continue
        counts = (len(heads.query_heads), len(heads.kv_heads))
        if counts != (attention.query_heads, attention.kv_heads):
            raise CheckpointError(
                f"{MANIFEST} speaks of {counts[0]} query and {counts[1]} KV heads in "
                f"'{attention.path}', and the weights hold {attention.query_heads} and "
                f"{attention.kv_heads}. Get the folder again."
            )
        vars(attention.module)[_IDS] = (heads.query_heads, heads.kv_heads)


def copy_ids(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give heads the ids of a model of another class with the same modules."""
    for path, module in source.named_modules():
        if _IDS in vars(module):
            vars(target.get_submodule(path))[_IDS] = vars(module)[_IDS]


def layer_names(modules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return a short name of every attention module by path: "18", or "cross.2".

    A name is the first number in the path, or the position where numbers are missing or shared.
    The kind stands before it where a family has several kinds.

    Args:
        modules: Path and kind of each, first layer first.
    """
    numbers = [re.search(r"(?<=\.)\d+(?=\.)", path) for path, _ in modules]
    named = [(kind, n[0] if n else "") for n, (_, kind) in zip(numbers, modules, strict=True)]
    unclear = {kind for (kind, number), times in Counter(named).items() if times > 1 or not number}
    several = {kind for _, kind in modules} != {"self"}
    names: dict[str, str] = {}
    seen = Counter[str]()
    for (path, _), (kind, number) in zip(modules, named, strict=True):
        name = str(seen[kind]) if kind in unclear else number
        seen[kind] += 1
        names[path] = f"{kind}.{name}" if several else name
    return names


def layer_of(path: str) -> str:
    """Return the path of a module's layer; its own path outside of layers."""
    layer = re.match(r".*?\.\d+(?=\.|$)", path)
    return layer[0] if layer else path


def refuse_unknown_kinds(kinds: Sequence[str]) -> None:
    """Refuse kinds of attention that no family has, before a model is opened.

    Raises:
        FamilyError: With the known kinds.
    """
    known = sorted({kind for family in FAMILIES.values() for kind in family.attention})
    for kind in kinds:
        if kind not in known:
            raise FamilyError(
                f"attention {kind}: no family has attention of that kind."
                f"{did_you_mean(kind, known)} Kinds: {', '.join(known)}."
            )


def of_kinds(attentions: list[Attention], kinds: Sequence[str]) -> list[Attention]:
    """Return the attention modules of some kinds; all without kinds.

    Raises:
        FamilyError: If the model has no attention of a kind.
    """
    present = list(dict.fromkeys(attention.kind for attention in attentions))
    for kind in kinds:
        if kind not in present:
            raise FamilyError(
                f"This model has no '{kind}' attention.{did_you_mean(kind, present)} "
                f"Kinds: {', '.join(present)}."
            )
    return [a for a in attentions if not kinds or a.kind in kinds]


def identity(model: PreTrainedModel, name: str | Path) -> ModelIdentity:
    """Return a model's name, classes and fingerprint, by which gates and plans know it."""
    return ModelIdentity(
        name=Path(name).name if Path(name).is_dir() else str(name),
        model_type=model.config.model_type,
        architecture=whole_class(model).__name__,
        fingerprint=fingerprint(attention_of(model)),
    )


def fingerprint(attentions: list[Attention]) -> str:
    """Return a digest of the geometry and of 64 weights of W_O per module.

    Weights are rounded to bfloat16, so that float32 and bfloat16 give the same fingerprint.
    """
    digest = hashlib.sha256()
    for attention in attentions:
        geometry = (attention.query_ids, attention.kv_ids, attention.head_dim)
        digest.update(repr(geometry).encode())
        if attention.window_heads:
            digest.update(repr((attention.window_heads, attention.window)).encode())
        weight: Tensor = attention.output_projection.get_parameter("weight")
        sample = sample_of(whole(weight))
        digest.update(sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
