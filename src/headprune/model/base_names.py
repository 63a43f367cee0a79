"""Names of tensors and modules with and without the base model's prefix.

Checkpoints of a model without its head lack the prefix that the whole model has, and the other way
round.
"""

from __future__ import annotations

from transformers import PreTrainedModel


def below_base(net: PreTrainedModel, name: str) -> str:
    """The name below the base model: the same for ``LlamaModel`` and ``LlamaForCausalLM``."""
    return name.removeprefix(f"{net.base_model_prefix}.")


def either_way(net: PreTrainedModel, name: str) -> tuple[str, str, str]:
    """A name as it is, without the prefix, and with it."""
    return name, below_base(net, name), f"{net.base_model_prefix}.{name}"
