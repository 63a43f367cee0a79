"""Mixtures of experts in graphs: every expert runs on every token, and the router weighs.

A graph is fixed before the tokens that choose their experts come. The sum is the same: an expert
has the weight 0 for tokens not sent to it. Some of transformers' implementations count the
tokens of every expert, which exporters do not know. Others gather the experts' weights for every
token, whose memory grows with the text.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_NAME = "headprune_all"


def run_all_experts(model: PreTrainedModel) -> None:
    """Run all experts of a model, if it has some."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _all_experts)
    if any(hasattr(module, "_apply_gate") for module in model.modules()):
        model.set_experts_implementation(_NAME)


def _all_experts(
    self: Any,
    hidden_states: Float[Tensor, "tokens width"],
    top_k_index: Int[Tensor, "tokens chosen"],
    top_k_weights: Float[Tensor, "tokens chosen"],
) -> Float[Tensor, "tokens width"]:
    every = hidden_states[None].expand(self.num_experts, -1, -1)  # OpenVINO does not broadcast it

    def project(x: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(self, name)
        output = torch.bmm(x, weight if self.is_transposed else weight.transpose(1, 2))
        bias: Tensor | None = getattr(self, f"{name}_bias", None) if self.has_bias else None
        return output if bias is None else output + bias[:, None]

    if self.has_gate:
        inner = self._apply_gate(project(every, "gate_up_proj"))
    else:
        inner = self.act_fn(project(every, "up_proj"))
    outputs = project(inner, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        outputs = self.post_expert_norm(outputs)
    tokens = hidden_states.shape[0]  # len() of it would be a constant of the graph
    weights = hidden_states.new_zeros(tokens, self.num_experts)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    summed: Tensor = (outputs * weights.T[..., None]).sum(0)
    return summed
