"""A text in three parts: sequences for calibration, and documents of several texts, mixed."""

import gzip
import json
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from headprune.compression import texts
from headprune.compression.heldout import HeldOut, Lengths
from headprune.config import CalibrationConfig, DataConfig
from headprune.data.batches import calibration
from headprune.data.text import Text, split
from headprune.errors import DataError
from tests import tiny


@given(st.data(), st.integers(0, 200))
def test_parts_are_disjoint_and_even(data, total):
    fit = data.draw(st.integers(0, total))
    held_out = data.draw(st.none() | st.integers(1, 50))
    parts = split(total, fit, held_out)
    numbers = list(chain(*parts))
    assert len(numbers) == len({*numbers}) and {*numbers} <= {*range(total)}
    assert len(parts.fit) == fit
    assert len(numbers) - fit == min(total - fit, held_out or total)
    assert 0 <= len(parts.choose) - len(parts.report) <= 1
    for part in parts:
        steps = [b - a for a, b in pairwise(part)]
        assert part == sorted(part)
        if part is parts.fit:
            assert not steps or max(steps) - min(steps) <= 1


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def text_of(lengths, tokens, whole=False):
    """Rows 5 ... 5 9: each ends with 9."""
    ids = [[5] * (length - 1) + [9] for length in lengths]
    marks = [[1] * length for length in lengths]
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": marks, "labels": lengths})
    return Text.calibration(rows, collate, tokens, whole)


def test_one_long_row_does_not_pad_all_others_to_its_length():
    fit = text_of([10] * 9 + [500], 10_000).fit
    ids = fit.whole()["input_ids"]
    assert ids.shape == (10, 118)  # twice the mean of 59
    assert ids[9].tolist() == [5] * 117 + [9]
    assert ids[0].tolist() == [5] * 9 + [9] + [0] * 108
    assert fit.tokens == int((ids != 0).sum()) == 9 * 10 + 118
    whole = text_of([10] * 9 + [500], 10_000, whole=True).fit
    assert (whole.whole()["input_ids"].shape, whole.tokens) == ((10, 500), 590)
    assert text_of([10, 12, 14, 20], 10_000).fit.tokens == 56  # of about one length


def test_calibration_fits_on_its_budget_and_holds_out_what_is_left():
    text = text_of(([10] * 3 + [500]) * 16, 2_000)
    assert [len(part.rows) for part in (text.fit, text.choose, text.report)] == [27, 3, 3]
    for part in (text.choose, text.report):
        lengths = [len(batch["input_ids"][0]) for batch in part.batches(1)]
        assert {*lengths} <= {10, 265} and part.tokens == sum(lengths)  # cut alike
    short = text_of([10] * 9, 80)
    assert [len(part.rows) for part in (short.fit, short.choose, short.report)] == [8, 1, 0]
    assert text_of([10] * 8, 80).choose.tokens == 0


@pytest.mark.parametrize(
    ("length", "batch_size", "sizes"), [(512, 8, 2), (4096, 4, 1), (128, 4, 4)]
)
def test_long_sequences_come_fewer_at_a_time(length, batch_size, sizes):
    fit = replace(text_of([length] * 4, 1 << 20).fit, batch_size=batch_size)
    assert [len(batch["input_ids"]) for batch in fit.batches()] == [sizes] * (4 // sizes)


def test_documents_are_cut_in_calibration_and_pairs_are_not(tmp_path):
    config = CalibrationConfig(calibration_tokens=10_000, seq_len=128)
    lines = [tiny.text(6, i) for i in range(9)] + [tiny.text(60, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    fit = calibration(tiny.model("bert-base"), tiny.tokenizer(), data, config, "score").fit
    assert fit.longest is not None and fit.whole()["input_ids"].shape[1] == fit.longest < 40
    pairs = [f"{tiny.text(6, i)}\t{tiny.text(60, i)}" for i in range(8)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb", *pairs]))
    data = DataConfig(source=str(tmp_path / "pairs.tsv"), text_column="a,b")
    fit = calibration(tiny.model("t5"), tiny.tokenizer(), data, config, "score").fit
    assert fit.longest is None and fit.whole()["labels"].shape[1] >= 60


def test_the_text_that_ships_is_named_with_its_source():
    files = [Path(data.source) for data in texts.shipped().values()]
    source = (files[0].parent / "README.md").read_text(encoding="utf-8")
    assert len(files) == 6
    for file in files:
        assert f"`{file.name}`" in source
        text = gzip.decompress(file.read_bytes()).decode()
        assert 80_000 < len(text) < 100_000 and "Gutenberg" not in text
    assert "PSF LICENSE AGREEMENT" in (files[0].parent / "LICENSE-PSF").read_text()


def test_an_eighth_of_every_text_is_held_out_from_all_over_it(tmp_path):
    lines = [f"line {i:04d} of a text\n" for i in range(1600)]
    (tmp_path / "plain.txt").write_text("".join(lines))
    for name, count in (("rows", 80), ("few", 9)):
        rows = [json.dumps({"text": line}) for line in lines[:count]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files = ("plain.txt", "rows.jsonl", "few.jsonl")
    sources = {Path(n).stem: DataConfig(source=str(tmp_path / n)) for n in files}
    parts = texts.read(sources)
    three = (parts.fit, parts.choose, parts.report)
    plain = [[row[0] for row, _ in part[0].rows] for part in three]
    assert sorted("".join(map("".join, plain)).splitlines(True)) == lines  # nothing is in both
    held_out = [plain[1][0], plain[2][0], plain[1][1], plain[2][1]]  # in turns: 4 blocks
    assert all(block.startswith("line") and block.endswith("\n") for block in held_out)
    assert [4 * int(block[5:9]) // 1600 for block in held_out] == [0, 1, 2, 3]
    assert [[len(part[at].rows) for part in three] for at in (1, 2)] == [[70, 5, 5], [7, 1, 1]]
    labelled = DataConfig(source=str(tmp_path / "labelled.jsonl"), label_column="label")
    Path(labelled.source).write_text(json.dumps({"text": "a", "label": "b"}))
    with pytest.raises(DataError, match="cannot be mixed"):
        texts.read({**sources, "labelled": labelled})


@pytest.mark.parametrize("short", ["choose", "report"])
def test_each_held_out_part_needs_a_sequence(short):
    few, many = (
        (texts.Documents("t", (((tiny.text(words),), None),), plain=False),) for words in (3, 100)
    )
    parts = texts.Parts((), *((few, many) if short == "choose" else (many, few)))
    net, tokenizer = tiny.model("llama-gqa"), tiny.tokenizer()
    with pytest.raises(DataError, match=f"3 tokens, is held out to {short} on"):
        HeldOut(net, tokenizer, parts, Lengths(16, 64, 4))
    enough = texts.Parts((), many, many)
    assert HeldOut(net, tokenizer, enough, Lengths(16, 64, 4)).tokens == 64


def test_texts_are_mixed_in_equal_parts_as_far_as_they_reach(tmp_path):
    sizes = {"long": 400_000, "longer": 900_000, "short": 3_000}
    for name, size in sizes.items():
        lines = (f"{name} text {i:06d}\n" for i in range(size // 18))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    fit = texts.read({n: DataConfig(source=str(tmp_path / f"{n}.txt")) for n in sizes}).fit
    parts = dict(zip(sizes, texts.mixed(fit, 20_000), strict=True))
    assert parts["short"].size == fit[2].size
    assert abs(parts["long"].size - parts["longer"].size) < 10_000
    assert 110_000 < sum(part.size for part in parts.values()) < 140_000
    data = texts.write(list(parts.values()), tmp_path / "mixed")
    assert Path(data.source).read_text().count("short text") == fit[2].size // 18
    many, whole = texts.mixed(fit[:2], 2_000), fit[:2]  # both reach far: from all over them
    for part, text in zip(many, whole, strict=True):
        assert abs(part.size - 16 * 2_000 * texts.CHARACTERS // 2) < 20_000
        assert text.rows.index(part.rows[-1]) > 0.8 * len(text.rows)


def test_sentences_are_rows():
    rows = ((("A first sentence of it. And a\nsecond one. No.",), None),)
    text = texts.Documents("t", rows, plain=True)
    assert [row[0] for row, _ in text.by_sentence().rows] == ["A first sentence of it."]
