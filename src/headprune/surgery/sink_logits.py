"""A sink logit for each query head of a layer with a window, in place of the first tokens.

Heads look at the first tokens where they need none, and a window loses these (Xiao et al. 2023,
arXiv 2309.17453). A logit that a head learns stands beside its scores in the softmax, and adds no
value (gpt-oss, OpenAI 2025, arXiv 2508.10925). Granite SWA is Llama with such logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.masking_utils import sdpa_mask

from headprune.model.attention import attention_of, copy_ids
from headprune.model.batch import Batch, without_labels
from headprune.model.placement import on_device
from headprune.model.windows import AttentionCall, attending
from headprune.surgery.layer_windows import OF_CLASS, WITH_LOGITS

IN_ONE_KERNEL = "headprune_sinks"
"""Attention with sink logits for training: on a CPU two to three times as fast as the model's."""
NO_SINK = -1e4  # a logit whose exponential is 0
_SINKS = 4  # first tokens that serve as sinks (Xiao et al., section 3.1)
# less than all of their weight, as the first window has these tokens beside the logit
_SHIFT = -2.0


def no_sink_logits(config: PreTrainedConfig) -> str | None:
    """Return why layers of a model get no sink logits; None if they do."""
    if getattr(config, "headprune", None) is not None:
        return "its heads are uneven, and need the code that travels with them."
    if config.model_type in WITH_LOGITS:
        return None
    return f"its class is a {config.model_type}, and {', '.join(WITH_LOGITS)} can have sink logits."


@torch.no_grad()
def sink_logits(
    net: PreTrainedModel, paths: Collection[str], batches: Iterable[Batch]
) -> dict[str, Float[Tensor, " heads"]]:
    """Measure the weight of the first tokens for queries that no longer see them.

    Args:
        net: A model with windows of layers.
        paths: The attention modules of these layers.
        batches: Texts of more tokens than the window.

    Returns:
        The mean log sum exp of the scores of these tokens, less 2, by path.
    """
    attentions = {a.module: a for a in attention_of(net) if a.path in paths}
    weights: dict[str, list[Tensor]] = {path: [] for path in paths}

    def attend(call: AttentionCall) -> Tensor:
        first = call.key[:, :, :_SINKS].repeat_interleave(
            call.query.shape[1] // call.key.shape[1], 1
        )
        beyond = min(net.config.sliding_window + _SINKS, call.query.shape[2] - 1)
        scores = (call.query[:, :, beyond:] @ first.mT).float() * call.module.scaling
        weights[attentions[call.module].path].append(scores.logsumexp(-1).mean((0, 2)))
        return call.outputs(call.mask)

    with attending([*attentions.values()], attend):
        for batch in batches:
            net(**without_labels(on_device(net, batch)))
    return {path: torch.stack(each).mean(0) + _SHIFT for path, each in weights.items()}


def with_sink_logits(
    net: PreTrainedModel, logits: Mapping[str, Float[Tensor, " heads"]]
) -> PreTrainedModel:
    """Return a model as a Granite SWA of the same weights, with logits in some attention modules.

    Args:
        net: A model for which ``no_sink_logits`` has no reason; it is spent.
        logits: By path. The others get ``NO_SINK``.
    """
    own, head_dim = net.config, attention_of(net)[0].head_dim
    # a config may hold settings that its own class ignores, and this one would obey
    both = GraniteSWAConfig().to_dict().keys() & type(own)().to_dict().keys()
    settings = {name: getattr(own, name) for name in both - {*OF_CLASS}}
    settings["tie_word_embeddings"] = (
        net.get_output_embeddings().weight is net.get_input_embeddings().weight
    )
    config = GraniteSWAConfig(
        **settings,
        head_dim=head_dim,
        attention_multiplier=head_dim**-0.5,
        attention_bias=own.model_type == "qwen2",
    )
    config.name_or_path = own.name_or_path
    with no_init_weights():
        twin = GraniteSWAForCausalLM(config)
    state = net.state_dict()
    for attention in attention_of(net):
        none = torch.full((attention.query_heads,), NO_SINK)
        state[f"{attention.path}.sinks"] = logits.get(attention.path, none)
        if config.attention_bias:
            weight = attention.output_projection.get_parameter("weight")
            state[f"{attention.path}.o_proj.bias"] = weight.new_zeros(weight.shape[0])
    twin.load_state_dict(state, assign=True)
    twin.tie_weights()
    copy_ids(net, twin)
    twin.generation_config = net.generation_config
    return twin.to(net.device).eval()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Tensor,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend with the logit as the score of one more key, whose value is 0.

    Queries have the logit in one more channel, where that key alone has a 1.
    """
    _, heads, new, width = query.shape
    length, more = key.shape[2], 8  # kernels want widths that divide by 8
    if attention_mask is None:
        attention_mask = torch.ones(new, length, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril(length - new)[None, None]
    logit = (s_aux / scaling).to(query.dtype).view(1, heads, 1, 1)
    q = pad(torch.cat([query, logit.expand(*query.shape[:3], 1)], -1), (0, more - 1))
    k, v = (pad(each, (0, more, 1, 0)) for each in (key, value))
    k[:, :, 0, width] = 1
    # fused kernels of GPUs take no groups beside a mask
    k, v = (each.repeat_interleave(heads // key.shape[1], 1) for each in (k, v))
    mask = pad(attention_mask, (1, 0), value=True)
    outputs = scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    return outputs[..., :width].transpose(1, 2), None


AttentionInterface.register(IN_ONE_KERNEL, _attention)
AttentionMaskInterface.register(IN_ONE_KERNEL, sdpa_mask)
