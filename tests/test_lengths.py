"""The length of sequences: what was asked for, or what the model takes, and then a warning."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LEDConfig,
    LEDModel,
    LongformerConfig,
    LongformerModel,
    NystromformerConfig,
    NystromformerModel,
)

from headprune import processes
from headprune.config import (
    CalibrationConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    Objective,
    TrainGatesConfig,
)
from headprune.data.batches import batches, calibration, merge_calibration
from headprune.data.text import cut
from headprune.errors import HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.model.batch import most_tokens, usable_length
from tests import tiny

LONGEST = 128  # of the tiny models
NO_LIMIT = 10**30  # what a tokenizer without one says
POSITIONS = {"max_position_embeddings": 24}


# classes whose tables of positions end, by the settings that say how long
TABLES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt", "biogpt", "bert"), POSITIONS),
    **dict.fromkeys(("ernie", "electra", "albert", "distilbert", "bart", "mbart"), POSITIONS),
    **dict.fromkeys(("pegasus", "marian", "blenderbot", "clip_text_model"), POSITIONS),
    **dict.fromkeys(("roberta", "camembert", "data2vec-text", "xlm-roberta"), POSITIONS),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta-xl", "mpnet"), POSITIONS),
    "mpt": {"max_seq_len": 24},
}
# classes of which headprune has no row, some without tiny sizes of their own
OTHERS = {
    "longformer": (LongformerModel, LongformerConfig, {**POSITIONS, "attention_window": [4] * 2}),
    "nystromformer": (NystromformerModel, NystromformerConfig, POSITIONS),
    "led": (
        LEDModel,
        LEDConfig,
        {
            **{"max_encoder_position_embeddings": 24, "max_decoder_position_embeddings": 16},
            "attention_window": [4] * 2,
        },
    ),
}
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model"), 16),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), 2),
    **{"decoder_attention_heads": 2, "intermediate_size": 16, "vocab_size": 65, "pad_token_id": 1},
}


def of_class(name):
    if name not in OTHERS:
        return tiny.model(name, **TABLES[name])
    cls, config, settings = OTHERS[name]
    known = {key: value for key, value in SMALL.items() if hasattr(config(), key)}
    return cls(config(**known, **settings)).eval()


def longest_run(net, side):
    """The longest input that transformers runs, on a side of the model."""
    two = net.config.is_encoder_decoder
    for length in range(14, 30):
        ids = {"input_ids": torch.full((1, length if side == "encoder" or not two else 8), 5)}
        if two:
            ids["decoder_input_ids"] = torch.full((1, length if side == "decoder" else 4), 5)
        try:
            with torch.no_grad():
                net(**ids)
        except (IndexError, RuntimeError, ValueError):
            return length - 1
    raise AssertionError("it has no end")


@pytest.mark.parametrize("name", [*TABLES, *OTHERS])
def test_the_limit_is_the_longest_input_that_runs(name):
    net = of_class(name)
    for side in ("encoder", "decoder") if net.config.is_encoder_decoder else ("decoder",):
        assert most_tokens(net, sides=[side]) == longest_run(net, side)


@pytest.mark.parametrize(
    ("positions", "limit", "most"),
    [(128, NO_LIMIT, 128), (128, 100, 100), (None, 512, 512), (128, None, 128), (None, None, None)],
)
def test_the_smaller_of_what_model_and_tokenizer_say(positions, limit, most):
    net = tiny.model("t5" if positions is None else "llama-mha")
    of = SimpleNamespace(model_max_length=limit)
    assert most_tokens(net, of) == most
    fits = most or 999
    assert usable_length(net, of, fits) == fits  # a warning would be an error here
    if most is not None:
        with pytest.warns(HeadpruneWarning, match=f"of {most + 1} tokens .* cut at {most}"):
            assert usable_length(net, of, most + 1) == most


def test_beyond_its_positions_a_model_fails():
    model = tiny.model("gpt2")
    model(torch.zeros(1, LONGEST, dtype=torch.long))
    with pytest.raises(IndexError):
        model(torch.zeros(1, LONGEST + 1, dtype=torch.long))


@pytest.mark.parametrize("case", ["gpt2", "bert-mlm"])
@pytest.mark.parametrize(
    "config",
    [
        TrainGatesConfig(target_heads=0.5, steps=1, batch_size=2, seq_len=999),
        HealConfig(steps=1, batch_size=2, seq_len=999),
        CalibrationConfig(seq_len=999),
    ],
    ids=["train-gates", "heal", "calibration"],
)
def test_training_cuts_sequences_with_a_word(case, config, text_file):
    model, of, data = tiny.model(case), tiny.tokenizer(), DataConfig(source=str(text_file))
    with pytest.warns(HeadpruneWarning, match=f"cut at {LONGEST}"):
        read = batches(Objective.DISTILL, model, of, data, config)
    ids = read.collate([read.rows[0], read.rows[1]])["input_ids"]
    assert ids.shape == (2, LONGEST)
    model(ids)


@pytest.mark.parametrize(
    ("positions", "words", "count", "sizes"),
    [
        (4_096, 40_000, 1, (1_024, 1)),
        (4_096, 40_000, 2, (1_024, 2)),  # each process has one
        (128, 40_000, 1, (128, 8)),
        (4_096, 3_000, 1, (64, 5)),  # little text
    ],
)
def test_a_step_of_healing_has_1024_tokens(positions, words, count, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: count)
    model, data = tiny.model("llama-mha"), DataConfig(source=str(tmp_path / "text.txt"))
    model.config.max_position_embeddings = positions
    (tmp_path / "text.txt").write_text(tiny.text(words))
    read = batches(Objective.DISTILL, model, tiny.tokenizer(), data, HealConfig(steps=1))
    assert (len(read.rows[0]["input_ids"]), read.of_step) == sizes


def test_calibration_cuts_sequences_with_a_word(text_file):
    net, of, data = tiny.model("gpt2"), tiny.tokenizer(), DataConfig(source=str(text_file))
    with pytest.warns(HeadpruneWarning, match=f"of 512 tokens .* cut at {LONGEST}"):
        text = calibration(net, of, data, CalibrationConfig(), "score")
    assert text.fit.whole()["input_ids"].shape[1] == LONGEST
    few = CalibrationConfig(calibration_tokens=64)  # fewer than the model takes: nothing to warn of
    assert calibration(net, of, data, few, "score").fit.whole()["input_ids"].shape == (1, 64)
    config = ConvertConfig(kv_heads=1, merge="lowrank", calibration_tokens=640)
    with pytest.warns(HeadpruneWarning, match=f"of 512 tokens .* cut at {LONGEST}"):
        assert merge_calibration(net, of, data, config).fit.tokens == 640


# settings that a record has only where they are used
LATER = {"tasks", "metrics", "max_new_tokens", "needle"}
LATER |= {f"needle_{name}" for name in ("lengths", "trials", "keys")}


@pytest.mark.parametrize("case", ["gpt2", "bert-mlm"])
def test_a_report_names_the_length_that_was_used(case, text_file, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    data = DataConfig(source=str(text_file))
    with pytest.warns(HeadpruneWarning, match=f"of 512 tokens .* cut at {LONGEST}"):
        cut = evaluate(folder, data, EvaluateConfig(speed=False, resamples=100))
    asked = EvaluateConfig(speed=False, resamples=100, seq_len=LONGEST)
    assert cut.provenance.settings == asked.model_dump(mode="json", exclude=LATER)
    assert cut.model == evaluate(folder, data, asked).model


def test_labels_of_tokens_are_cut_and_those_of_a_row_are_not():
    ids = list(range(9))
    tagged, several = ({"input_ids": ids, "labels": labels} for labels in (ids, [1, 0, 1, 1, 0]))
    assert cut(tagged, 4)["labels"] == cut(tagged, 4)["input_ids"] == [0, 1, 2, 8]
    assert cut(several, 4)["labels"] == [1, 0, 1, 1, 0]
    as_many = {"input_ids": ids, "labels": [1.0] * 9}  # classes
    assert cut(as_many, 4)["labels"] == [1.0] * 9
    assert cut({"input_ids": ids, "labels": 3}, 4) == {"input_ids": [0, 1, 2, 8], "labels": 3}
