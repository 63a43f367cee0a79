"""Cut models that another stock class can hold as they are."""

from __future__ import annotations

from collections.abc import Sequence

import transformers
from transformers import GPTBigCodeConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.model.attention import attention_of
from headprune.model.loading import native_class
from headprune.surgery.cut import Cut

_SHARED = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    *("activation_function", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon"),
    *("initializer_range", "scale_attn_weights", "use_cache", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "tie_word_embeddings", "id2label", "label2id", "problem_type"),
)


def has_twin(net: PreTrainedModel) -> bool:
    """Return whether this model, with one KV head in every layer, is another stock class."""
    config, others = net.config, ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    return (
        config.model_type == "gpt2"
        and all(a.query_heads == config.n_head for a in attention_of(net))
        and not any(getattr(config, name) for name in others)
        and hasattr(transformers, _twin_name(net))
    )


def _twin_name(net: PreTrainedModel) -> str:
    name = native_class(type(net)).__name__.replace("LMHeadModel", "ForCausalLM")
    return name.replace("GPT2", "GPTBigCode")


def twin_of(net: PreTrainedModel, cuts: Sequence[Cut]) -> str | None:
    """Return the other stock class of a model that ends with one KV head in every layer."""
    one_each = all(len(cut.kv_positions) == 1 for cut in cuts)
    whole = all(len(cut.query_positions) == cut.attention.query_heads for cut in cuts)
    return _twin_name(net) if one_each and whole and has_twin(net) else None


def native_twin(net: PreTrainedModel) -> PreTrainedModel | None:
    """The same model in another stock class that needs no extra code; None if there is none.

    GPT-2 has no setting for the number of KV heads. With one, and all its query heads, it is a
    GPTBigCode (Ben Allal et al. 2023, arXiv 2301.03988) to the last bit of its weights.
    """
    if not has_twin(net):
        return None
    if {a.kv_heads for a in attention_of(net)} != {1}:
        return None
    config = GPTBigCodeConfig(
        **{name: getattr(net.config, name) for name in _SHARED},
        attention_softmax_in_fp32=False,
        scale_attention_softmax_in_fp32=False,
        dtype=net.config.dtype,
    )
    twin = getattr(transformers, _twin_name(net))(config).to(net.dtype).eval()
    state = net.state_dict()
    transposed = {
        f"{name}.weight" for name, module in net.named_modules() if isinstance(module, Conv1D)
    }
    moved = {name: t.T.contiguous() if name in transposed else t for name, t in state.items()}
    missing, unexpected = twin.load_state_dict(moved, strict=False)
    assert not unexpected
    assert all("lm_head" in name for name in missing)
    twin.tie_weights()
    twin.generation_config = net.generation_config if twin.can_generate() else None
    return twin
