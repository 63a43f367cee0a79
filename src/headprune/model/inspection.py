"""headprune inspect: what a model's attention is made of, and what a cut could save."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedConfig

from headprune.context import Allowed
from headprune.model import cost
from headprune.model.attention import attention_of, family_of
from headprune.model.loading import from_pretrained, load_config, task_of
from headprune.model.refusals import PACKED, quantised_by
from headprune.model.units import default_unit, unit_sizes
from headprune.tensors.dtypes import dtype_name
from headprune.tensors.units import Unit

# kernels and quantisers are tuned for these widths; narrower heads waste lanes
USUAL_HEAD_DIMS = (64, 128)


class _InspectionPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttentionReport(_InspectionPart):
    """One attention module.

    Attributes:
        path: Module path; the key of plans.
        kind: "self", or which of several: encoder, decoder, cross, text, vision.
        query_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Width of a head.
        parameters: Parameters of its projections.
    """

    path: str
    kind: str
    query_heads: int
    kv_heads: int
    head_dim: int
    parameters: int


class Saving(_InspectionPart):
    """What removing a share of the heads would save.

    Attributes:
        heads_removed: The share.
        parameters: Parameters saved.
        kv_cache_bytes_per_token: KV cache saved per token, in the model's dtype.
    """

    heads_removed: float
    parameters: int
    kv_cache_bytes_per_token: int


class Inspection(_InspectionPart):
    """A model's attention.

    Attributes:
        family: Row of the family table.
        architecture: Class of the model.
        task: What its head is for.
        dtype: Element type of the checkpoint.
        unit: What train-gates removes as one piece by default.
        units: How many such pieces there are.
        attentions: Its attention modules.
        parameters: All parameters.
        attention_parameters: Those of the attention projections.
        kv_cache_bytes_per_token: KV cache per token, by the element type of the cache; empty for
            models that generate nothing.
        savings: What cuts of several sizes would save.
        notes: What to know of the model before cutting it.
    """

    schema_version: Literal[1] = 1
    family: str
    architecture: str
    task: str
    dtype: str
    unit: Unit
    units: int
    attentions: tuple[AttentionReport, ...]
    parameters: int
    attention_parameters: int
    kv_cache_bytes_per_token: dict[str, int]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...]


def inspect(model: str | Path, allowed: Allowed = Allowed()) -> Inspection:
    """Describes a model's attention.

    Args:
        model: Folder or hub id.
        allowed: What the model may bring.

    Raises:
        HeadpruneError: If it cannot be loaded or its family is not supported.
    """
    config = load_config(model, trust_remote_code=allowed.trust_remote_code)
    net = from_pretrained(
        model,
        trust_remote_code=allowed.trust_remote_code,
        drop_unexpected=allowed.drop_unexpected,
        weights=False,
    )
    attentions = attention_of(net)
    sizes = cost.model_cost(net)
    unit = default_unit(attentions)
    generates = task_of(net) in cost.GENERATES
    elements = cost.kv_cache_elements_per_token(net)
    return Inspection(
        family=family_of(net.config).model_type,
        architecture=type(net).__name__,
        task=task_of(net),
        dtype=dtype_name(net.dtype),
        unit=unit,
        units=len(unit_sizes(attentions, unit)),
        attentions=tuple(
            AttentionReport(
                path=a.path,
                kind=a.kind,
                query_heads=a.query_heads,
                kv_heads=a.kv_heads,
                head_dim=a.head_dim,
                parameters=cost.attention_parameters(a),
            )
            for a in attentions
        ),
        parameters=sizes.parameters,
        attention_parameters=sizes.attention_parameters,
        kv_cache_bytes_per_token={
            name: elements * width for name, width in cost.BYTES_PER_ELEMENT.items() if generates
        },
        savings=tuple(
            Saving(
                heads_removed=share,
                parameters=round(share * sizes.attention_parameters),
                kv_cache_bytes_per_token=round(share * sizes.kv_cache_bytes_per_token),
            )
            for share in (0.25, 0.5, 0.75)
        ),
        notes=_notes(config, {a.head_dim for a in attentions}),
    )


def _notes(config: PreTrainedConfig, head_dims: set[int]) -> tuple[str, ...]:
    """What keeps it from being cut; and every head_dim that kernels are not tuned for."""
    usual = " and ".join(map(str, USUAL_HEAD_DIMS))
    method = quantised_by(config)
    notes = [] if method is None else [f"It is quantised ({method}): {PACKED}"]
    for head_dim in sorted(head_dims - set(USUAL_HEAD_DIMS)):
        if head_dim < min(USUAL_HEAD_DIMS):
            what = f"under the usual {usual}: attention kernels gain less from fewer heads"
        else:
            what = f"not one of the usual {usual}, but no narrower"
        notes.append(f"head_dim {head_dim} is {what}.")
    return tuple(notes)
