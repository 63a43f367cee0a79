"""From a live model to its attention modules, and who the model is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import FamilyError
from headprune.family import FAMILIES, Family
from headprune.model.ids import with_restored_ids
from headprune.model.placement import refuse_spread, whole_class
from headprune.model.skeleton import sample_of
from headprune.registry import did_you_mean
from headprune.runtime.modeling_headprune import Attention, find_attention
from headprune.schemas.plan import ModelIdentity
from headprune.tensors.shards import whole


def family_of(config: PreTrainedConfig) -> Family:
    """The row of a config's family.

    Raises:
        FamilyError: If there is none, the config has a setting that the row refuses, or its
            language part is laid out otherwise.
    """
    if config.model_type not in FAMILIES:
        raise FamilyError(
            f"headprune does not know where model type '{config.model_type}' has its attention "
            f"heads. 'headprune families' lists the {len(FAMILIES)} types that it knows."
        )
    family = FAMILIES[config.model_type]
    lowest = family.min_transformers
    if lowest and Version(transformers.__version__) < Version(lowest):
        raise FamilyError(
            f"{config.model_type} models are supported from transformers {lowest} on, which "
            f"changed their classes; installed is {transformers.__version__}. Upgrade transformers."
        )
    for attribute, reason in family.refused.items():
        if getattr(config, attribute, None):
            raise FamilyError(
                f"This {config.model_type} model sets {attribute}={getattr(config, attribute)}: "
                f"{reason}."
            )
    _refuse_other_layout(config, family)
    return family


def _refuse_other_layout(config: PreTrainedConfig, family: Family) -> None:
    """Refuse a language part whose attention the row of the whole does not describe.

    Raises:
        FamilyError: Naming what differs.
    """
    text: Any = getattr(config, "text_config", None)
    if list(family.attention) != ["text"] or getattr(text, "model_type", None) not in FAMILIES:
        return
    part = family_of(text)
    for name in ("projections", "full_width_norms", "per_head"):
        if getattr(part, name) != getattr(family, name):
            raise FamilyError(
                f"The language part of this {config.model_type} model is a {text.model_type}, "
                f"whose attention is laid out differently ({name}). Cut that model on its own."
            )


def attention_of(model: PreTrainedModel) -> list[Attention]:
    """Finds the attention modules of a model, first layer first.

    Raises:
        FamilyError: If the family is unknown, its row does not match the model, or the model is
            spread so that its weights are not whole.
    """
    refuse_spread(model)
    try:
        found = find_attention(model, family_of(model.config).for_runtime())
        return [with_restored_ids(attention) for attention in found]
    except ValueError as error:
        raise FamilyError(
            f"The model says it is '{model.config.model_type}' but does not look like one: {error}."
        ) from None


def layer_of(path: str) -> str:
    """The layer that a module lies in; itself where it lies in none."""
    found = re.match(r".*?\.\d+(?=\.|$)", path)
    return found[0] if found else path


def refuse_unknown_kinds(kinds: Sequence[str]) -> None:
    """Refuses kinds of attention that no family has.

    Raises:
        FamilyError: Naming those that there are.
    """
    known = sorted({kind for family in FAMILIES.values() for kind in family.attention})
    for kind in kinds:
        if kind not in known:
            raise FamilyError(
                f"attention {kind}: no family has attention of that kind."
                f"{did_you_mean(kind, known)} Kinds: {', '.join(known)}."
            )


def of_kinds(attentions: list[Attention], kinds: Sequence[str]) -> list[Attention]:
    """Those attention modules that are of the given kinds; all where none is given.

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
    """Names a model so that gates or a plan of another one can be told apart."""
    return ModelIdentity(
        name=Path(name).name if Path(name).is_dir() else str(name),
        model_type=model.config.model_type,
        architecture=whole_class(model).__name__,
        fingerprint=fingerprint(attention_of(model)),
    )


def fingerprint(attentions: list[Attention]) -> str:
    """Digest of geometry and of 64 output-projection weights per module.

    The weights are rounded to bfloat16 first, so that a model has one fingerprint whether it is
    read in float32 or in bfloat16.
    """
    digest = hashlib.sha256()
    for attention in attentions:
        geometry = (attention.query_ids, attention.kv_ids, attention.head_dim)
        digest.update(repr(geometry).encode())
        weight: Tensor = attention.output_projection.get_parameter("weight")
        sample = sample_of(whole(weight))
        digest.update(sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
