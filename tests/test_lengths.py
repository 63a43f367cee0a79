"""The length of sequences: what was asked for, or what the model takes, and then a warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, LlamaConfig, MptConfig, T5Config

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
from headprune.errors import HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.model.batch import most_tokens, usable_length
from tests import tiny

LONGEST = 128  # of the tiny models
NO_LIMIT = 10**30  # what a tokenizer without one says


@pytest.mark.parametrize(
    ("positions", "limit", "most"),
    [
        (128, NO_LIMIT, 128),
        (514, 512, 512),  # RoBERTa: two rows of its embeddings are no positions
        (128, 512, 128),
        (None, 512, 512),
        (128, None, 128),
        (None, None, None),
    ],
)
def test_the_smaller_of_what_model_and_tokenizer_say(
    positions: int | None, limit: int | None, most: int | None
) -> None:
    config = T5Config() if positions is None else LlamaConfig(max_position_embeddings=positions)
    of = SimpleNamespace(model_max_length=limit)
    assert most_tokens(config, of) == most
    fits = most or 999
    assert usable_length(config, of, fits) == fits  # a warning would be an error here
    if most is not None:
        with pytest.warns(HeadpruneWarning, match=f"of {most + 1} tokens .* cut at {most}"):
            assert usable_length(config, of, most + 1) == most


def test_models_without_positions_have_the_limit_of_their_tokenizer() -> None:
    assert most_tokens(T5Config()) is None
    assert most_tokens(BertConfig(max_position_embeddings=40)) == 40
    assert most_tokens(MptConfig(max_seq_len=40)) == 40
    assert most_tokens(T5Config(), SimpleNamespace(model_max_length=512)) == 512


def test_beyond_its_positions_a_model_fails() -> None:
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
def test_training_cuts_sequences_with_a_word(
    case: str, config: TrainGatesConfig | HealConfig | CalibrationConfig, text_file: Path
) -> None:
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
def test_a_step_of_healing_has_1024_tokens(
    positions: int,
    words: int,
    count: int,
    sizes: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "count", lambda: count)
    model, data = tiny.model("llama-mha"), DataConfig(source=str(tmp_path / "text.txt"))
    model.config.max_position_embeddings = positions
    (tmp_path / "text.txt").write_text(tiny.text(words))
    read = batches(Objective.DISTILL, model, tiny.tokenizer(), data, HealConfig(steps=1))
    assert (len(read.rows[0]["input_ids"]), read.of_step) == sizes


def test_calibration_cuts_sequences_with_a_word(text_file: Path) -> None:
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
LATER = {"tasks", "needle", "needle_lengths", "needle_trials", "metrics", "max_new_tokens"}


@pytest.mark.parametrize("case", ["gpt2", "bert-mlm"])
def test_a_report_names_the_length_that_was_used(
    case: str, text_file: Path, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    data = DataConfig(source=str(text_file))
    with pytest.warns(HeadpruneWarning, match=f"of 512 tokens .* cut at {LONGEST}"):
        cut = evaluate(folder, data, EvaluateConfig(speed=False, resamples=100))
    asked = EvaluateConfig(speed=False, resamples=100, seq_len=LONGEST)
    assert cut.provenance.settings == asked.model_dump(mode="json", exclude=LATER)
    assert cut.model == evaluate(folder, data, asked).model
