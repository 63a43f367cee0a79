"""Recording the calls of transformers' attention function, and the rotary embedding before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from headprune.model.windows import calling
from headprune.runtime.modeling_headprune import REPEATING, Attention, stock_class
from headprune.tensors.rotary import RotaryPairs, Rotation

_RECORDED = "headprune_recorded"
_AGREES = 1e-3  # relative: a wrong rotary embedding is off by order 1
_TRIED = 32  # rows of a sequence, on which another function is tried


@dataclass(frozen=True)
class RecordedCall:
    """One call of the attention function, and the function itself.

    Attributes:
        module: The attention module.
        query: Shape (sequences, query heads, length, head_dim).
        key: Shape (sequences, KV heads, source length, head_dim).
        value: The same.
        mask: Added to the scores; None without.
        scaling: Factor of the scores.
        arguments: Others.
        eager: The model's own attention function, in plain tensors.
        owners: The KV head of every query head, where the function does not repeat KV heads.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    arguments: dict[str, Any]
    eager: Callable[..., Any]
    owners: Tensor | None

    def outputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return outputs of some sequences, shape (sequences, length, heads, head_dim).

        They are computed one sequence at a time, which suits caches. torch's kernel does it where
        it agrees with the model's own function.
        """
        fuses = self._fuses(start)
        outputs = []
        for number in range(start, len(self.query) if stop is None else stop):
            outputs.append(self._outputs_at(number, slice(None), fuses))
        return torch.cat(outputs)

    def without_numbers(self) -> RecordedCall:
        """Return the call as ``probabilities`` needs it: shapes in place of numbers."""
        shapes = {name: getattr(self, name) for name in ("query", "key", "value")}
        return replace(self, **{n: x.new_zeros(()).expand(x.shape) for n, x in shapes.items()})

    def probabilities(self, query: Tensor, key: Tensor, part: slice, rows: Tensor) -> Tensor:
        """Return the attention of other queries, at some rows of some sequences, to other keys."""
        heads, width = self.value.shape[1], self.value.shape[3]
        value = self.query.new_zeros(1, heads, self.key.shape[2], width)
        attention: Tensor = self._attend(query, key, value, part, rows)[1]
        return attention

    @property
    def bends_scores(self) -> bool:
        """True if softmax gets more than the scores: a sink, or a soft cap on them."""
        return any(self.arguments.get(name) is not None for name in ("s_aux", "softcap"))

    def _fuses(self, number: int) -> bool:
        """Return whether torch's kernel agrees with the model's own function on one sequence."""
        length = self.query.shape[2]
        rows = torch.arange(0, length, -(-length // _TRIED), device=self.query.device)
        exact = self.query.dtype in (torch.float32, torch.float64)
        own, fused = (self._outputs_at(number, rows, fuses) for fuses in (False, True))
        return not self.bends_scores and _close(fused, own, _AGREES if exact else 20 * _AGREES)

    def _outputs_at(self, number: int, rows: Any, fuses: bool) -> Tensor:
        part = slice(number, number + 1)
        query, key, value = self.query[part][:, :, rows], self.key[part], self.value[part]
        if not fuses:
            return self._attend(query, key, value, part, rows)[0]
        owners = self.owners
        if owners is None:
            every = torch.arange(query.shape[1], device=key.device)
            owners = every * key.shape[1] // query.shape[1]
        outputs = F.scaled_dot_product_attention(
            query,
            key[:, owners],
            value[:, owners],
            self._at(self.mask, part, rows),
            scale=self.scaling,
        )
        return outputs.transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, part: slice, rows: Any
    ) -> tuple[Tensor, Tensor]:
        if self.owners is not None:
            key, value = key[:, self.owners], value[:, self.owners]
        mask, arguments = self._at(self.mask, part, rows), self.arguments.items()
        outputs, probabilities = self.eager(
            self.module,
            query,
            key,
            value,
            mask,
            scaling=self.scaling,
            **{name: self._at(argument, part, rows) for name, argument in arguments},
        )
        return outputs, probabilities

    def _at(self, argument: Any, part: slice, rows: Any) -> Any:
        """Some rows of some sequences of an argument that has queries x keys."""
        length = self.query.shape[2], self.key.shape[2]
        if not (isinstance(argument, Tensor) and argument.shape[-2:] == length):
            return argument
        argument = argument[part] if argument.shape[0] > 1 else argument
        return argument[..., rows, :]


def recording(
    attentions: Sequence[Attention], attend: Callable[[RecordedCall], Tensor]
) -> AbstractContextManager[None]:
    """Replace the attention function of some modules in a ``with`` block.

    Args:
        attentions: The modules.
        attend: Maps a call to the outputs of the heads.

    Raises:
        PlanError: If heads have windows, which it would leave out.
    """
    return calling(attentions, _RECORDED, headprune_record=attend)


def _recorded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    scaling = arguments.pop("scaling", None) or query.shape[-1] ** -0.5
    owners, facts = None, getattr(module, "headprune", None)
    if module.config.headprune_before == REPEATING:
        owners = module.headprune_kv_of_query.index
    if facts is not None and facts.repeats_output:  # undone, so that there is one key per KV head
        owners = facts.owners.index
        key, value = facts.firsts(key, 1), facts.firsts(value, 1)
    call = RecordedCall(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scaling=scaling,
        arguments={**arguments, "dropout": 0.0},
        eager=sys.modules[stock_class(module).__module__].eager_attention_forward,
        owners=owners,
    )
    return module.config.headprune_record(call), None


AttentionInterface.register(_RECORDED, _recorded_attention)


def found_rotation(
    projected: Mapping[str, Tensor], scored: Mapping[str, Tensor], position_embeddings: Any
) -> tuple[Rotation | None, float | None]:
    """Return the rotary embedding from projections to scores, and the factor of queries.

    It is found by trial, so that no table has to say how a family pairs coordinates.

    Args:
        projected: Outputs of the projections "q" and "k" in float32; shape (sequences, heads,
            length, head_dim).
        scored: The same as they enter the scores, in the model's element type.
        position_embeddings: Cosines and sines, if the module got any.

    Returns:
        The rotation, None without one; and the factor, None where nothing agrees, as with a norm
        in between.
    """
    query, key = scored["q"], scored["k"]
    exact = query.dtype in (torch.float32, torch.float64)
    tolerance = _AGREES if exact else 20 * _AGREES
    for rotation in (None, *_candidates(position_embeddings, *query.shape[2:])):
        rotated = [
            projected[role] if rotation is None else rotation.rotate(projected[role])
            for role in ("q", "k")
        ]
        if rotated[0].shape != query.shape or rotated[1].shape != key.shape:
            continue
        wanted = query.float()
        factor = float((rotated[0] * wanted).sum() / rotated[0].square().sum().clamp(min=1e-30))
        agrees = _close(rotated[0] * factor, wanted, tolerance)
        if agrees and _close(rotated[1], key.float(), tolerance):
            return rotation, factor
    return None, None


def _candidates(position_embeddings: Any, length: int, head_dim: int) -> Iterator[Rotation]:
    if not (isinstance(position_embeddings, tuple) and len(position_embeddings) == 2):
        return
    cos, sin = (
        table.float()[0] if table.dim() == 3 else table.float() for table in position_embeddings
    )
    if cos.dim() != 2 or cos.shape[0] != length:
        return
    width, device = cos.shape[1], cos.device
    half = width // 2
    if width <= head_dim and width % 2 == 0:
        yield Rotation(RotaryPairs.halves(width, head_dim, device), cos[:, :half], sin[:, :half])
        interleaved = RotaryPairs.interleaved(width, head_dim, device)
        yield Rotation(interleaved, cos[:, ::2], sin[:, ::2])
        yield Rotation(interleaved, cos[:, :half], sin[:, :half])
    if 2 * width <= head_dim:  # one angle per pair
        yield Rotation(RotaryPairs.halves(2 * width, head_dim, device), cos, sin)


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30))
