"""Ids of heads stay those of the original model, also where a plain config cannot say them."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.model.base_names import below_base
from headprune.runtime import MANIFEST
from headprune.runtime.modeling_headprune import Attention, find_attention
from headprune.schemas.records import Heads

_IDS = "headprune_ids"  # of an attention module: ids of its query heads and of its KV heads


def restore_ids(
    net: PreTrainedModel, layout: Mapping[str, Heads], family: Mapping[str, object]
) -> None:
    """Tells a model what the manifest beside its weights says of the ids of its heads.

    Args:
        net: The model.
        layout: Per attention module, the heads that are left.
        family: The row of its family.

    Raises:
        CheckpointError: If it has other heads than the manifest says.
    """
    # the model may be another head's, or none's
    told = {below_base(net, path): heads for path, heads in layout.items()}
    for attention in find_attention(net, family):
        heads = told.get(below_base(net, attention.path))
        if heads is None:
            continue
        counts = (len(heads.query_heads), len(heads.kv_heads))
        if counts != (attention.query_heads, attention.kv_heads):
            raise CheckpointError(
                f"{MANIFEST} speaks of {counts[0]} query and {counts[1]} KV heads in "
                f"'{attention.path}', and the weights hold {attention.query_heads} and "
                f"{attention.kv_heads}: they do not belong together. Get the folder again."
            )
        vars(attention.module)[_IDS] = (heads.query_heads, heads.kv_heads)


def with_restored_ids(attention: Attention) -> Attention:
    """Gives an attention module the ids that its model was told, if they fit."""
    ids = vars(attention.module).get(_IDS)
    if ids and tuple(map(len, ids)) == (attention.query_heads, attention.kv_heads):
        attention.query_ids, attention.kv_ids = ids
    return attention
