"""Short texts: plain text sentence by sentence, and how many of them make a step."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2ForSequenceClassification

from headprune.config import (
    CalibrationConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    Objective,
    RolesConfig,
)
from headprune.data.batches import batches, calibration, merge_calibration
from headprune.data.read import read_examples
from headprune.data.sentences import by_sentence, sentences
from headprune.errors import CheckpointError
from headprune.evaluation.evaluate import evaluate, run
from headprune.evaluation.loaded import load
from headprune.model.batch import without_labels
from headprune.model.loading import load_tokenizer
from headprune.role.inputs import text_input
from tests import tiny

LONG = "What a sentence of this length is for, nobody knows"
TEXT = f"{LONG}. {LONG}!\nNo. {LONG}?\n\n{LONG}, {LONG},\n{LONG}.\n"


def test_a_sentence_ends_with_its_sign_or_an_empty_line():
    assert list(sentences([TEXT])) == [
        f"{LONG}.",
        f"{LONG}!",  # "No." is too short to be read alone
        f"{LONG}?",
        f"{LONG}, {LONG}, {LONG}.",
    ]


def test_signs_of_other_scripts_end_a_sentence_too():
    found = list(sentences(["一" * 30 + "。" + "二" * 30 + "？三。" + "क " * 20 + "। " + LONG]))
    assert [len(one) for one in found] == [31, 31, 41, len(LONG)]


def test_files_are_read_one_by_one(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(LONG)
    found = by_sentence(read_examples(DataConfig(source=str(tmp_path))))
    assert list(found.texts) == [(LONG,), (LONG,)]


@given(st.lists(st.integers(0, len(TEXT)), max_size=6))
def test_pieces_of_the_text_make_no_difference(cuts):
    ends = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[start:end] for start, end in pairwise(ends)]
    assert list(sentences(pieces)) == list(sentences([TEXT]))


def test_text_without_an_end_is_not_held_for_ever():
    assert len(list(sentences(["word " * 20_000] * 3))) == 3


def _written(folder):
    """The same sentences as plain text and as a table."""
    every = [" ".join(tiny.text(5 + at, seed=at).split()) + " ." for at in range(40)]
    plain, table = folder / "text.txt", folder / "rows.jsonl"
    plain.write_text("\n".join(every))
    table.write_text("".join(json.dumps({"text": one}) + "\n" for one in every))
    return plain, table


def test_text_that_is_no_sentences_and_tables_stay_as_they_are(tmp_path):
    (tmp_path / "running.txt").write_text(tiny.text(2_000))
    plain, table = _written(tmp_path)
    for file in (tmp_path / "running.txt", table):
        examples = read_examples(DataConfig(source=str(file)))
        assert by_sentence(examples) is examples
    found = by_sentence(read_examples(DataConfig(source=str(plain))))
    assert len(found.texts) == 40 and found.rows_are_documents


def test_embeddings_of_plain_text_are_of_its_sentences(tmp_path):
    folder = tiny.save(tiny.model("bert-base"), tmp_path / "model")
    tiny.save(tiny.model("bert-base"), tmp_path / "other")
    config = EvaluateConfig(speed=False, seq_len=64)
    found = [
        evaluate(folder, DataConfig(source=str(file)), config, against=tmp_path / "other")
        for file in _written(tmp_path)
    ]
    plain, table = ({m.name: (m.value, m.n) for m in one.model.metrics} for one in found)
    assert plain == table
    assert plain["similarity_correlation"][1] == 40
    data = DataConfig(source=str(_written(tmp_path)[0]))
    samples = run(load(folder, data, config, tmp_path / "other"), config).samples[0]
    assert samples.documents_of("mean_cosine") is not None  # neighbours are no accident


def test_pairs_are_calibrated_as_they_are_embedded(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"a": tiny.text(9, at), "b": tiny.text(5, at + 99)} for at in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, config = DataConfig(source=str(file), text_column="a,b"), CalibrationConfig(seq_len=64)
    batch = calibration(
        tiny.model("bert-base"), tiny.tokenizer(), data, config, "score"
    ).fit.whole()
    assert 9 <= batch["input_ids"].shape[1] < 9 + 5


def _step(case, folder, lengths, **settings):
    """What healing on texts of so many words takes."""
    file = folder / "texts.jsonl"
    pair = case == "t5"
    rows = [{"text": tiny.text(n, seed=at)} for at, n in enumerate(lengths)]
    rows = [row | ({"second": tiny.text(9)} if pair else {}) for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = HealConfig(steps=1, **settings)
    data = DataConfig(source=str(file), text_column="text,second" if pair else "text")
    net = tiny.model(case)
    objective = Objective.LM if pair else Objective.DISTILL
    return batches(objective, net, tiny.tokenizer(), data, config)


def test_a_step_of_short_texts_has_the_tokens_of_one_of_long_ones(tmp_path):
    found = _step("bert-base", tmp_path, [4] * 4_000)
    assert found.of_step == 1_024 // len(found.rows[0]["input_ids"]) > 100
    step = found.collate(list(found.rows.select(range(found.of_step))))
    assert step["input_ids"].numel() <= 1_024
    assert _step("bert-base", tmp_path, [4] * 400).of_step == 50  # a pass has eight steps
    assert _step("bert-base", tmp_path, [4] * 400, batch_size=3).of_step == 3
    assert _step("t5", tmp_path, [4] * 99 + [400], seq_len=512).of_step == 4  # at least
    assert _step("gpt2", tmp_path, [4] * 4_000, seq_len=64).of_step == 16  # packed into windows


def test_one_long_text_pads_no_step(tmp_path):
    found = _step("bert-base", tmp_path, [4] * 1_999 + [60], seq_len=64)
    last = found.rows[1_999]["input_ids"]
    batch = found.collate([found.rows[0], found.rows[1_999]])["input_ids"]
    assert len(last) == 60 and batch.shape[1] < 12
    assert batch[1, -1] == last[-1]


def test_pairs_are_as_long_as_their_longer_side(tmp_path):
    found = _step("t5", tmp_path, [4] * 2_000)
    assert found.of_step == 1_024 // len(found.rows[0]["labels"])
    batch = found.collate([found.rows[at] for at in range(2)])
    assert batch["labels"].shape[1] > batch["input_ids"].shape[1]


def test_a_classifier_that_cannot_tell_padding_says_what_it_lacks(tmp_path):
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": tiny.VOCAB}
    net = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=None))
    folder = tiny.save(net, tmp_path / "model")
    data = DataConfig(source=str(_written(tmp_path)[0]))
    config = CalibrationConfig(calibration_tokens=256, seq_len=64)
    with pytest.raises(CheckpointError, match="GPT2ForSequenceClassification has no pad_token_id"):
        calibration(net, load_tokenizer(folder), data, config, "score")
    with pytest.raises(CheckpointError, match="has no pad_token_id"):
        merge_calibration(net, load_tokenizer(folder), data, ConvertConfig(kv_heads=3))
    net.config.pad_token_id = 1
    assert net(
        **without_labels(
            calibration(net, load_tokenizer(folder), data, config, "score").fit.whole()
        )
    )


def test_roles_are_those_of_running_text(tmp_path):
    plain, _ = _written(tmp_path)
    net, config = tiny.model("bert-base"), RolesConfig(sequences=4, seq_len=64)
    found, tokens = text_input(net, tiny.tokenizer(), DataConfig(source=str(plain)), config)
    assert tokens == 4 * 64
    assert all(batch["input_ids"].shape[1] == 64 for batch in found.batches)


@pytest.mark.parametrize(("case", "alike"), [("bert-base", True), ("bert-mlm", False)])
def test_merges_of_encoders_see_sequences_as_long_as_sentences(case, alike, tmp_path):
    net, folder = tiny.model(case), tiny.save(tiny.model(case), tmp_path / "model")
    config = ConvertConfig(kv_heads=1, calibration_tokens=512, seq_len=64)
    tokenizer = tiny.tokenizer()
    for file in _written(tmp_path):
        found = merge_calibration(net, load_tokenizer(folder), DataConfig(source=str(file)), config)
        texts = by_sentence(read_examples(DataConfig(source=str(file)))).texts
        mean = sum(len(tokenizer(text)["input_ids"]) for (text,) in texts) / len(texts)
        assert (found.fit.whole()["input_ids"].shape[1] == round(mean)) is alike
