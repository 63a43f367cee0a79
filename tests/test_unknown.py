"""Model types without a row: whose attention theirs is like, read off the model itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from headprune.errors import FamilyError
from headprune.family import FAMILIES
from headprune.model.attention import family_of
from headprune.model.unknown import why_unknown

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 3},
}

SENTENCES = {
    "cwm": r"\(layers\.\*\.self_attn with q_proj, k_proj, v_proj, o_proj\) is laid out like "
    r"llama's, so that a row of one line may do: headprune/family/spec\.py",
    "minimax_m2": r"is laid out like olmo2's, so",
    "bert-generation": r"attention\.self with query, key, value, .* is laid out like bert's, so",
    "dpr": r"bert_model\.encoder\..* has bert's projections at another place, so that a row of a",
    "mvp": r"encoder\.layers\.\*\.self_attn, decoder.* and 1 more .* laid out like bart's, so",
    "doge": r"laid out like llama's but for A, dt_proj, which a row would have to place",
    "umt5": r"laid out like t5's but for relative_attention_bias, which",
    "codegen": r"\(h\.\*\.attn with qkv_proj, out_proj\) is laid out like that of no family in",
    "mamba": r"'mamba', and MambaModel has no attention heads that could be cut\.",
    "cohere2_vision": r"laid out like llava's \(not that in vision_tower\..*\), so",
}


class MadeUpConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "gpt3"


class BrokenConfig(CONFIG_MAPPING["bert"]):  # type: ignore[misc]
    """BERT's, of which no model can be built: its heads do not divide its width."""

    model_type = "bertie"


def config_of(name: str) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[name]
    default = cls()
    return cls(**{key: size for key, size in SIZES.items() if hasattr(default, key)})


def refusal(config: PreTrainedConfig) -> str:
    with pytest.raises(FamilyError) as caught:
        family_of(config)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in SENTENCES if name in CONFIG_MAPPING])
def test_a_type_without_a_row_is_likened_by_its_structure(name: str) -> None:
    text = refusal(config_of(name))
    assert text.startswith(f"headprune has no row for model type '{name}'")
    assert re.search(SENTENCES[name], text), text
    assert len(text) <= 400
    assert "\n" not in text and "Did you mean" not in text


@pytest.mark.parametrize("cls", [MadeUpConfig, BrokenConfig])
def test_a_type_that_cannot_be_built_gets_the_plain_sentence(cls: type[PreTrainedConfig]) -> None:
    text = refusal(cls())
    count = len(FAMILIES)
    assert text == (
        f"headprune has no row for model type '{cls.model_type}'; 'headprune families' lists the "
        f"{count} that it has."
    )


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "bert", "t5", "olmo2", "whisper", "deepseek_v3"]
)
def test_a_family_of_the_table_is_likened_to_one_of_its_kind(name: str) -> None:
    alike = {"qwen3": "llama", "whisper": "bart"}.get(name, name)
    assert f"laid out like {alike}'s, so" in why_unknown(config_of(name))
