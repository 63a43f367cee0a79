"""Text that a model writes by greedy search, or by the beams that its own settings name.

The settings are those of ``generation_config.json``, or of an older config.json. There are three
kinds of them. Some decide the text, and are kept. Some change no greedy text, and are left out.
Others ask for another search, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from headprune.errors import CheckpointError
from headprune.model.reading import damage_is

# these change no greedy text, or only by chance
_LEFT_OUT = {
    # drawing of tokens
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "num_return_sequences"),
    # other outputs
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    "return_dict_in_generate",
    # lengths that the caller says, and the clock
    *("max_length", "max_new_tokens", "max_time"),
    # memory and speed
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config"),
    # tokens guessed ahead, which the model then checks
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "speculation_type"),
    # parts of refused ones, and the file itself
    *("diversity_penalty", "num_beam_groups", "transformers_version", "_from_model_config"),
}
# searches that transformers runs by code from the hub, and one that writes the prompt anew
_REFUSED = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing")
_NEVER = ("bos_token_id", "eos_token_id")  # without effect where the vocabulary lacks them
# they also look at the prompt, where padding would count
_OF_PROMPTS = {
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **{"encoder_repetition_penalty": 1, "forced_bos_token_id": None},
}


def search_of(model: PreTrainedModel) -> GenerationConfig:
    """Return the stored settings that decide the text of a model without drawing tokens.

    Raises:
        CheckpointError: If they ask for another search, or for a token that is not there.
    """
    stored = model.generation_config.to_dict() if model.generation_config is not None else {}
    refused = [name for name in _REFUSED if stored.get(name)]
    refused += ["num_beam_groups"] if (stored.get("num_beam_groups") or 1) > 1 else []
    if refused:
        raise CheckpointError(
            f"The settings of generation of '{model.name_or_path}' hold {' and '.join(refused)}, "
            "and text is written by greedy search or beams alone. Remove that from its "
            "generation_config.json, or from config.json where there is none."
        )
    kept = {name: x for name, x in stored.items() if x is not None and name not in _LEFT_OUT}
    head, absent = model.get_output_embeddings(), []
    size = len(head.weight) if head else model.config.get_text_config(decoder=True).vocab_size
    for name in [name for name in kept if name.endswith("_token_id")]:
        ids = kept[name] if isinstance(kept[name], list) else [kept[name]]
        there = [one for one in ids if isinstance(one, int) and 0 <= one < size]
        if there == ids:
            continue
        if name in _NEVER or ids == [-1]:  # some write -1 for none
            kept[name] = there or None
        else:
            absent.append(f"{name} is {kept[name]}")
    with _as_stored(model):
        if absent:
            raise ValueError(f"{' and '.join(absent)}, and the vocabulary has {size:,} tokens")
        return GenerationConfig(**kept, do_sample=False)


def _as_stored(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Blame the settings for whatever a search raises in a ``with`` block."""
    return damage_is(
        lambda why: (
            f"'{model.name_or_path}' does not write with the settings in its "
            f"generation_config.json: {why.rstrip('.')}. Correct that file."
        )
    )


def minds_padding(search: GenerationConfig, continues: bool) -> bool:
    """Return whether settings look at the tokens of a prompt, so that none may be padding.

    Those of an encoder-decoder look at its source only by name, else at its own text.
    """
    names = [name for name in _OF_PROMPTS if continues or name.startswith("encoder_")]
    return any(getattr(search, name) not in (None, _OF_PROMPTS[name]) for name in names)


@torch.no_grad()
def generated(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    search: GenerationConfig,
    most: int,
    tokenizer: Any = None,
) -> Tensor:
    """Return the ids that a model writes: of a decoder, those after its prompts.

    Args:
        model: The model.
        inputs: Its inputs, on its device; a decoder's are padded on the left.
        search: See ``search_of``.
        most: Tokens to write, at most.
        tokenizer: Its tokenizer, for settings about strings.

    Raises:
        CheckpointError: If the settings do not fit the model; quotes transformers.
    """
    continues = not model.config.is_encoder_decoder
    length = inputs["input_ids"].shape[1] if continues else 0
    # max_new_tokens would make transformers warn of its own default for max_length
    search.max_length = max(length, 1) + most
    more = {"tokenizer": tokenizer} if search.stop_strings else {}
    stored = model.generation_config
    model.generation_config = search  # generate takes unset ones from there
    try:
        with _as_stored(model):
            ids: Tensor = model.generate(**inputs, generation_config=search, **more)
    finally:
        model.generation_config = stored
    return ids[:, length:]


def until_end(ids: Tensor, search: GenerationConfig, continues: bool) -> list[list[int]]:
    """Return rows of ids up to their first end: whatever fills a batch behind it is no text.

    An encoder-decoder may begin with the same token.
    """
    known, begin = search.eos_token_id, 0 if continues else 1
    ends = known if isinstance(known, list) else [known]

    def end(row: list[int]) -> int | None:
        return next((n + 1 for n, one in enumerate(row) if one in ends and n >= begin), None)

    return [row[: end(row)] for row in ids.tolist()]
