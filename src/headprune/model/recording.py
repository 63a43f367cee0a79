"""What attention modules hand to the attention function of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from headprune.runtime.modeling_headprune import REPEATING, Attention, LayerConfig, stock_class

_RECORDED = "headprune_recorded"


@dataclass(frozen=True)
class RecordedCall:
    """One call of the attention function, and the function itself.

    Attributes:
        module: The attention module.
        query: Shape (sequences, query heads, length, head_dim).
        key: Shape (sequences, KV heads, source length, head_dim).
        value: The same.
        mask: What is added to the scores; None without.
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
    owners: list[int] | None

    def outputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """What the heads give for some sequences, shape (sequences, length, heads, head_dim).

        One sequence at a time, which is kind to caches.
        """
        found = []
        for number in range(start, len(self.query) if stop is None else stop):
            part = slice(number, number + 1)
            tensors = self.query[part], self.key[part], self.value[part]
            found.append(self._attend(*tensors, part, slice(None))[0])
        return torch.cat(found)

    def without_numbers(self) -> RecordedCall:
        """The call as ``probabilities`` needs it: what it was given by its shapes alone."""
        shapes = {name: getattr(self, name) for name in ("query", "key", "value")}
        return replace(self, **{n: x.new_zeros(()).expand(x.shape) for n, x in shapes.items()})

    def probabilities(self, query: Tensor, key: Tensor, part: slice, rows: Tensor) -> Tensor:
        """The attention of other queries, at some rows of some sequences, to other keys."""
        heads, width = self.value.shape[1], self.value.shape[3]
        value = self.query.new_zeros(1, heads, self.key.shape[2], width)
        attention: Tensor = self._attend(query, key, value, part, rows)[1]
        return attention

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, part: slice, rows: Any
    ) -> tuple[Tensor, Tensor]:
        length = self.query.shape[2], self.key.shape[2]
        if self.owners is not None:
            key, value = key[:, self.owners], value[:, self.owners]

        def at_rows(argument: Any) -> Any:
            if not (isinstance(argument, Tensor) and argument.shape[-2:] == length):
                return argument
            argument = argument[part] if argument.shape[0] > 1 else argument
            return argument[..., rows, :]

        arguments = {name: at_rows(argument) for name, argument in self.arguments.items()}
        outputs, probabilities = self.eager(
            self.module, query, key, value, at_rows(self.mask), scaling=self.scaling, **arguments
        )
        return outputs, probabilities


class AttentionRecorder:
    """Stands in for the attention function of some modules.

    Args:
        attend: Gets every call, and says what the heads give.
    """

    def __init__(self, attend: Callable[[RecordedCall], Tensor]) -> None:
        self.attend = attend

    @contextmanager
    def recording(self, attentions: Sequence[Attention]) -> Iterator[None]:
        """Has modules call it, for the time of a ``with`` block."""
        modules: list[Any] = [attention.module for attention in attentions]
        before = [getattr(module, "config", None) for module in modules]
        for module, config in zip(modules, before, strict=True):
            own = dict(vars(config)) if isinstance(config, LayerConfig) else {}
            own.pop("shared", None)
            own["headprune_repeats"] = own.get("_attn_implementation") == REPEATING
            own |= {"_attn_implementation": _RECORDED, "headprune_recorder": self}
            module.config = LayerConfig(config, own)
        try:
            yield
        finally:
            for module, config in zip(modules, before, strict=True):
                module.config = config


def _recorded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers looks up; the module's config knows the recorder."""
    scaling = arguments.pop("scaling", None) or query.shape[-1] ** -0.5
    owners, facts = None, getattr(module, "headprune", None)
    if module.config.headprune_repeats:
        owners = module.headprune_kv_of_query.numbers
    if facts is not None and facts.repeats_output:  # undone, so that there is one key per KV head
        owners = facts.owners.numbers
        key, value = facts.firsts.pick(key, 1), facts.firsts.pick(value, 1)
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
    return module.config.headprune_recorder.attend(call), None


AttentionInterface.register(_RECORDED, _recorded_attention)
