"""The stored settings of generation, and the positions that a text has, decide what is written."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    GenerationConfig,
    LEDConfig,
    LEDForConditionalGeneration,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

from headprune.errors import CheckpointError, DataError, HeadpruneWarning
from headprune.evaluation.written import write
from headprune.role.sentence import read_sentence
from tests import tiny

PROMPTS = [tiny.text(words, seed=words) for words in (1, 5, 3, 8, 2)]
NEW = 6
# settings that decide a greedy text
KEPT = {
    **{"min_length": 6, "min_new_tokens": 4, "num_beams": 3, "repetition_penalty": 1.9},
    **{"encoder_repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "guidance_scale": 3.0},
    **{"bad_words_ids": [[7], [8, 9]], "renormalize_logits": True, "forced_bos_token_id": 9},
    **{"forced_eos_token_id": 11, "remove_invalid_values": True, "suppress_tokens": [*range(20)]},
    **{"exponential_decay_length_penalty": (1, 3.0), "begin_suppress_tokens": [*range(5, 40)]},
    **{"sequence_bias": [[[7], -9.0], [[9], 9.0]], "encoder_no_repeat_ngram_size": 2},
    "watermarking_config": WatermarkingConfig(bias=9.0),
    **{"early_stopping": True, "length_penalty": 2.0},
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": [3, 40], "decoder_start_token_id": 4},
}
# settings that decide none of it
LEFT_OUT = {
    **{"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.2, "min_p": 0.5, "top_h": 0.4},
    **{"typical_p": 0.3, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "num_return_sequences": 3},
    **{"output_attentions": True, "output_hidden_states": True, "output_scores": True},
    **{"output_logits": True, "return_dict_in_generate": True},
    **{"max_length": 7, "max_new_tokens": 3, "max_time": 1e-9},
    **{"use_cache": False, "cache_implementation": "static", "cache_config": {"nbits": 4}},
    **{"max_cache_len": 9, "low_memory": True, "compile_config": CompileConfig()},
    **{"disable_compile": True, "prefill_chunk_size": 2, "continuous_batching_config": {}},
    **{"use_mtp": True, "is_assistant": True, "num_assistant_tokens": 3},
    **{"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.2},
    **{"assistant_early_exit": 1, "assistant_lookbehind": 3, "target_lookbehind": 3},
    **{"assistant_ensemble_weight": 0.5, "prompt_lookup_num_tokens": 3},
    **{"max_matching_ngram_size": 2, "speculation_type": "dflash", "diversity_penalty": 0.5},
}
REFUSED = {
    **{"penalty_alpha": 0.6, "dola_layers": "high", "constraints": [1], "force_words_ids": [[5]]},
    **{"token_healing": True, "num_beam_groups": 2},
}
CASES = ("llama-gqa", "bart")


def stored(net, **settings):
    """The model with settings of generation, as its file may hold them."""
    net.generation_config = GenerationConfig(
        pad_token_id=1, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2
    )
    for name, value in settings.items():  # some are refused together by the constructor
        setattr(net.generation_config, name, value)
    return net


def by_transformers(net, tokenizer, prompts):
    """What ``generate`` alone writes, after one prompt at a time."""
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        more = {"tokenizer": tokenizer} if net.generation_config.stop_strings else {}
        with torch.no_grad():
            ids = net.generate(**inputs, **more, max_new_tokens=NEW)
        start = 0 if net.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        texts.append(tokenizer.decode(ids[0, start:], skip_special_tokens=True))
    return texts


def test_every_setting_of_transformers_is_one_of_three_kinds():
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known - {"transformers_version"} == {*KEPT, *LEFT_OUT, *REFUSED, "stop_strings"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KEPT)
def test_settings_that_decide_a_text_are_kept(case, name):
    beams = {"num_beams": 3} if name in ("early_stopping", "length_penalty") else {}
    net = stored(tiny.model(case), **beams, **{name: KEPT[name]})
    tokenizer = tiny.tokenizer()
    wanted = by_transformers(net, tokenizer, PROMPTS)
    assert write(net, PROMPTS, tokenizer, 4, NEW) == wanted
    if name in ("repetition_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"):
        assert write(stored(net), PROMPTS, tokenizer, 4, NEW) != wanted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_settings_that_decide_no_text_are_left_out(case, name):
    net, tokenizer = stored(tiny.model(case)), tiny.tokenizer()
    wanted = by_transformers(net, tokenizer, PROMPTS)
    before = stored(net, **{name: LEFT_OUT[name]}).generation_config
    assert write(net, PROMPTS, tokenizer, 4, NEW) == wanted
    assert net.generation_config is before and getattr(before, name) == LEFT_OUT[name]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", REFUSED)
def test_other_searches_are_refused(case, name):
    net = stored(tiny.model(case), **{name: REFUSED[name]})
    with pytest.raises(CheckpointError, match=f"hold {name}, and text is written by greedy"):
        write(net, PROMPTS, tiny.tokenizer(), 4, NEW)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("bad_words_ids", [5], "`bad_words_ids` has to be a list"),
        ("repetition_penalty", -1.0, "`penalty` has to be a strictly positive float"),
        ("num_beams", 0, "by zero"),
        ("stop_strings", ["w5"], "substring not found"),  # this tokenizer has no pieces of words
        ("early_stopping", "maybe", "must be a boolean or 'never'"),
        ("suppress_tokens", ["w5"], "too many dimensions"),
        ("forced_eos_token_id", 99_999, "forced_eos_token_id is 99999, and the vocabulary has 65"),
        ("forced_eos_token_id", [7, 99_999], r"forced_eos_token_id is \[7, 99999\]"),
        ("forced_bos_token_id", -1_000, "forced_bos_token_id is -1000, and the vocabulary"),
        ("forced_bos_token_id", "w5", "forced_bos_token_id is w5, and the vocabulary"),
        ("decoder_start_token_id", 65, "decoder_start_token_id is 65, and the vocabulary"),
        ("pad_token_id", 65, "pad_token_id is 65, and the vocabulary"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_what_transformers_does_not_take_is_quoted(case, name, value, why):
    net = stored(tiny.model(case), **{name: value})
    with pytest.raises(CheckpointError, match=f"does not write with the settings in .*: .*{why}"):
        write(net, PROMPTS, tiny.tokenizer(), 4, NEW)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "value"), [("eos_token_id", [3, 99_999]), ("pad_token_id", -1)])
def test_ends_that_the_vocabulary_lacks_never_come(case, name, value):
    net, tokenizer = stored(tiny.model(case)), tiny.tokenizer()
    wanted = by_transformers(net, tokenizer, PROMPTS)
    assert write(stored(net, **{name: value}), PROMPTS, tokenizer, 4, NEW) == wanted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pad", [1, 9])
def test_what_fills_a_batch_behind_an_end_is_no_text(case, pad):
    net, tokenizer = stored(tiny.model(case)), tiny.tokenizer()
    texts = by_transformers(net, tokenizer, PROMPTS)
    words = [text.split() for text in texts]
    (end,) = tokenizer.convert_tokens_to_ids([max(words, key=len)[1]])
    stored(net, eos_token_id=end, pad_token_id=pad)
    wanted = by_transformers(net, tokenizer, PROMPTS)
    assert write(net, PROMPTS, tokenizer, 5, NEW) == wanted
    lengths = {len(text.split()) for text in wanted}
    assert len(lengths) > 1  # some are over before others, and are filled up


@pytest.mark.parametrize("case", CASES)
def test_strings_may_end_a_text(case):
    pieces = ["<unk>", "<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    octets = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(pieces)}, merges=[]))
    octets.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    octets.decoder = decoders.ByteLevel()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=octets, bos_token="<s>", **special)
    parts = [number for number, piece in enumerate(pieces) if not piece.isascii()]
    net = stored(tiny.model(case, vocab_size=len(tokenizer)), suppress_tokens=parts)
    first = by_transformers(net, tokenizer, PROMPTS)
    ends = sorted({text[1] for text in first if len(text) > 1})
    stored(net, suppress_tokens=parts, stop_strings=ends)
    wanted = by_transformers(net, tokenizer, PROMPTS)
    assert write(net, PROMPTS, tokenizer, 4, NEW) == wanted != first


def test_a_picture_is_drawn_whatever_the_settings_say(tmp_path):
    folder = tiny.save(tiny.model("bart"), tmp_path / "model")
    wanted = [layer.queries.labels for layer in read_sentence(folder, PROMPTS[1]).layers]
    file = folder / "generation_config.json"
    before = json.loads(file.read_text())
    names = ("return_dict_in_generate", "output_scores", "prompt_lookup_num_tokens", "max_length")
    more = {name: LEFT_OUT[name] for name in names} | {"num_beams": 4, "num_return_sequences": 2}
    file.write_text(json.dumps(before | more))
    found = [layer.queries.labels for layer in read_sentence(folder, PROMPTS[1]).layers]
    assert found == wanted
    file.write_text(json.dumps(before | {"num_beam_groups": 2, "num_beams": 2}))
    with pytest.raises(CheckpointError, match="hold num_beam_groups"):
        read_sentence(folder, PROMPTS[1])


def led():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 48)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "attention_window": [4, 4]}
    positions = {"max_encoder_position_embeddings": 24, "max_decoder_position_embeddings": 16}
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "init_std": 0.1}
    config = LEDConfig(vocab_size=65, **sizes, **heads, **layers, **positions, **special)
    net = LEDForConditionalGeneration(config)
    return net.eval()


@pytest.mark.parametrize(
    ("case", "tokens", "reads", "writes"),
    [
        *(("gpt2", tokens, *room) for tokens, room in {5: (5, 19), 18: (12, 12)}.items()),
        ("gpt2", 60, 12, 12),
        ("opt", 60, 12, 12),
        ("llama-gqa", 60, 12, 12),
        ("mpt", 20, 12, 12),
        ("bart", 5, 5, 24),
        ("bart", 60, 24, 24),
        ("marian", 60, 24, 24),
        ("led", 60, 24, 16),
    ],
)
def test_prompt_and_answer_fit_into_the_positions(case, tokens, reads, writes):
    sizes = {"max_seq_len": 24} if case == "mpt" else {"max_position_embeddings": 24}
    net = stored(led() if case == "led" else tiny.model(case, **sizes), eos_token_id=None)
    tokenizer, prompt = tiny.tokenizer(), tiny.text(tokens, seed=3)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    two = net.config.is_encoder_decoder
    ids = ids[:, :reads] if two else ids[:, -reads:]  # what follows must be near
    with torch.no_grad():
        wanted = net.generate(ids, max_new_tokens=writes)[:, 0 if two else reads :]
    with pytest.warns(HeadpruneWarning, match=f"Up to {writes} tokens .* last {reads} of a prompt"):
        (text,) = write(net, [prompt], tokenizer, 4, 128)
    assert text == tokenizer.decode(wanted[0], skip_special_tokens=True)
    (short,) = write(net, [tiny.text(5)], tokenizer, 4, 6)  # all of it fits: nothing is said
    assert len(short.split()) <= 6


def test_a_model_without_room_is_refused():
    net = tiny.model("gpt2", max_position_embeddings=1)
    with pytest.raises(DataError, match="has 1 positions, too few for a prompt and an answer"):
        write(net, PROMPTS, tiny.tokenizer(), 4, 128)
    with pytest.raises(DataError, match=r"Row 1 \(counted from 0.* has no tokens"):
        write(tiny.model("gpt2"), ["w1", ""], tiny.tokenizer(), 4, 6)
