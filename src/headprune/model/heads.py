"""The weights of an attention module, head by head, read and written in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from headprune.errors import PlanError
from headprune.model.residency import present
from headprune.runtime.modeling_headprune import (
    Attention,
    ProjectionModule,
    input_dim,
    kv_owners,
)
from headprune.tensors.index_maps import role_slices

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one attention module, head by head; everything acts on column vectors.

    Attributes:
        q: W_Q, shape (query heads, head_dim, hidden).
        k: W_K, shape (KV heads, head_dim, hidden).
        v: W_V, shape (KV heads, head_dim, hidden).
        o: W_O, shape (query heads, hidden, head_dim).
        q_bias: Shape (query heads, head_dim); None without.
        k_bias: Shape (KV heads, head_dim); None without.
        v_bias: Shape (KV heads, head_dim); None without.
        o_bias: Shape (hidden,); None without.
        group_sizes: Query heads of every KV head, in order.
    """

    q: Float[Tensor, "query_heads head_dim hidden"]
    k: Float[Tensor, "kv_heads head_dim hidden_k"]
    v: Float[Tensor, "kv_heads head_dim_v hidden_k"]
    o: Float[Tensor, "query_heads out head_dim_v"]
    group_sizes: tuple[int, ...]
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None

    @property
    def owners(self) -> list[int]:
        """The KV head of every query head."""
        return kv_owners(self.group_sizes)

    def affine(self, role: str) -> Float[Tensor, "heads head_dim hidden_1"]:
        """Return weights with the bias as a last column, for inputs with a 1 at the end."""
        weight: Tensor = getattr(self, role)
        bias = getattr(self, f"{role}_bias")
        return weight if bias is None else torch.cat([weight, bias[..., None]], dim=-1)

    def with_affine(self, role: str, weight: Tensor) -> HeadWeights:
        """Return these heads with other weights of one role, in the form of ``affine``."""
        changes: dict[str, Any] = {role: weight}
        if getattr(self, f"{role}_bias") is not None:
            changes = {role: weight[..., :-1], f"{role}_bias": weight[..., -1]}
        return replace(self, **changes)

    def queries_of(self, group: Sequence[int]) -> list[int]:
        """Return the positions of the query heads of some KV heads."""
        return [query for query, owner in enumerate(self.owners) if owner in group]


def _with_weights(function: Function) -> Function:
    """Keep the weights of the attention module in memory while a function works on it."""

    @wraps(function)
    def called(attention: Attention, *others: Any) -> Any:
        with present(attention.module):
            return function(attention, *others)

    return cast(Function, called)


@_with_weights
def read_heads(attention: Attention) -> HeadWeights:
    """Return the weights of one attention module.

    Raises:
        PlanError: If it has no K and V for every KV head, or more than one of them.
    """
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor | None] = {}
    for projection in attention.projections:
        weight, bias = _parameters(projection.module)
        if projection.holds == "o":
            weights["o"], biases["o"] = read_output(attention)
            continue
        outwards = weight if input_dim(projection.module) == 1 else weight.T
        for role, rows in head_rows(attention, projection).items():
            if role in weights:
                raise PlanError(
                    f"'{attention.path}' has more than one projection for {role.upper()}, which no "
                    "merge knows how to share."
                )
            weights[role] = outwards[rows.to(weight.device)].float()
            biases[role] = None if bias is None else bias[rows.to(bias.device)].float()
    if not set("qkvo") <= set(weights):
        raise PlanError(f"'{attention.path}' has no K and V for every KV head to share.")
    return HeadWeights(
        **weights,
        group_sizes=attention.group_sizes,
        q_bias=biases["q"],
        k_bias=biases["k"],
        v_bias=biases["v"],
        o_bias=biases["o"],
    )


@_with_weights
@torch.no_grad()
def write_heads(attention: Attention, heads: HeadWeights) -> None:
    """Write weights of unchanged shapes back into the module they were read from."""
    for projection in attention.projections:
        module = projection.module
        weight, bias = _parameters(module)
        transposed = input_dim(module) == 0
        if projection.holds == "o":
            write_output(attention, heads.o, heads.o_bias)
            continue
        outwards = weight.T if transposed else weight
        for role, rows in head_rows(attention, projection).items():
            outwards[rows.flatten().to(weight.device)] = (
                getattr(heads, role).flatten(0, 1).to(weight)
            )
            if bias is not None:
                bias[rows.flatten().to(bias.device)] = (
                    getattr(heads, f"{role}_bias").flatten().to(bias)
                )


@_with_weights
def read_output(
    attention: Attention,
) -> tuple[Float[Tensor, "heads hidden head_dim"], Float[Tensor, " hidden"] | None]:
    """Return copies of W_O head by head in float32, and of its bias if it has one."""
    module = attention.output_projection
    weight, bias = _parameters(module)
    inwards = weight if input_dim(module) == 1 else weight.T
    heads = inwards.unflatten(1, (attention.query_heads, -1)).transpose(0, 1)
    return heads.float().clone(), None if bias is None else bias.float().clone()


@_with_weights
@torch.no_grad()
def write_output(
    attention: Attention, heads: Float[Tensor, "heads hidden head_dim"], bias: Tensor | None
) -> None:
    """Write W_O into the module, and its bias if it has one."""
    module = attention.output_projection
    weight, bias_before = _parameters(module)
    inwards = heads.transpose(0, 1).flatten(1).to(weight)
    weight.copy_(inwards.T if input_dim(module) == 0 else inwards)
    if bias_before is not None and bias is not None:
        bias_before.copy_(bias.to(bias_before))


def project_output(attention: Attention, x: Tensor) -> Tensor:
    """Return the output of W_O, past the hooks on it."""
    module = attention.output_projection
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    return F.linear(x, weight.T if isinstance(module, Conv1D) else weight, bias)


def head_rows(attention: Attention, projection: ProjectionModule) -> dict[str, Tensor]:
    """Return the rows of every role's heads along the head dimension of a projection."""
    if not projection.holds:
        return {}
    total = {"q": attention.query_heads, "k": attention.kv_heads, "v": attention.kv_heads}
    return role_slices(projection.holds, projection.groups, total, projection.head_dim)


def output_rows(attention: Attention, projection: ProjectionModule) -> dict[str, Tensor]:
    """Return the same in a projection's output, which may have K and V once per query head."""
    repeated = getattr(projection.module, "headprune_positions", None)
    by_role = head_rows(attention, projection)
    if repeated is not None:
        first = {place: at for at, place in reversed([*enumerate(repeated.numbers)])}
        by_role = {role: rows.clone().apply_(first.__getitem__) for role, rows in by_role.items()}
    return by_role


def _parameters(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    parameters = dict(module.named_parameters(recurse=False))
    bias = parameters.get("bias")
    return parameters["weight"].detach(), None if bias is None else bias.detach()
