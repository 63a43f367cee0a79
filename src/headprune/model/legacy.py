"""Folders of transformers 4 whose heads were pruned there.

``prune_heads`` of transformers 4 wrote ``"pruned_heads": {"0": [1, 4]}`` into config.json: layer to
the heads that are gone. transformers 5 ignores the entry, and the weights then do not fit.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError
from headprune.model.attention import attention_of, family_of
from headprune.model.skeleton import without_weights
from headprune.runtime.modeling_headprune import SCHEMA
from headprune.schemas.plan import Number

_PRUNED = TypeAdapter(dict[Annotated[int, Field(ge=0)], list[Number]])  # layers are JSON's names


def has_pruned_heads(config: PreTrainedConfig) -> bool:
    """Whether the config says that transformers 4 pruned heads."""
    pruned = getattr(config, "pruned_heads", None) or {}
    return any(pruned.values()) if isinstance(pruned, dict) else True


def layout_of_pruned_heads(config: PreTrainedConfig, native: type[PreTrainedModel]) -> None:
    """Gives such a config the description that the runtime rebuilds models from, in place.

    Raises:
        CheckpointError: If the entry names layers or heads that the model does not have.
        FamilyError: If the family is not supported.
    """
    try:
        pruned = _PRUNED.validate_python(config.pruned_heads)
    except ValidationError:
        raise CheckpointError(
            f"config.json has pruned_heads={config.pruned_heads!r}, which is no map from layer "
            'numbers to lists of heads, such as {"0": [1, 4]}.'
        ) from None
    family = family_of(config)
    del config.pruned_heads
    attentions = attention_of(without_weights(native, config))
    unknown = sorted(set(pruned) - set(range(len(attentions))))
    if unknown:
        raise CheckpointError(
            f"config.json says that heads of layer {unknown[0]} were pruned, but the model has "
            f"{len(attentions)} attention modules."
        )
    layout: dict[str, Any] = {}
    for layer, attention in enumerate(attentions):
        gone = set(pruned.get(layer, ()))
        if gone - set(attention.query_ids):
            raise CheckpointError(
                f"config.json says that head {max(gone)} of layer {layer} was pruned, but it had "
                f"{attention.query_heads} heads."
            )
        left = [head for head in attention.query_ids if head not in gone]
        layout[attention.path] = {"query_heads": left, "kv_heads": left}
    config.headprune = {"schema_version": SCHEMA, "family": family.for_runtime(), "layout": layout}
