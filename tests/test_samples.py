"""The rows that calibration takes: from all over a text, none much longer than the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from headprune.config import CalibrationConfig, DataConfig
from headprune.data.calibration import calibration
from headprune.data.samples import CalibrationSample
from headprune.model.batch import Batch
from headprune.model.loading import load_tokenizer
from tests import tiny


def collate(rows: list[dict[str, Any]]) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def sample(lengths: list[int], tokens: int, cut: bool = True) -> CalibrationSample:
    """Rows 5 ... 5 9, of which 9 ends each."""
    ids = [[5] * (length - 1) + [9] for length in lengths]
    marks = [[1] * length for length in lengths]
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": marks, "labels": lengths})
    return CalibrationSample.spread(rows, collate, tokens, cut=cut)


def test_one_long_row_does_not_pad_all_others_to_its_length() -> None:
    found = sample([10] * 9 + [500], 10_000)
    ids = found.whole()["input_ids"]
    assert ids.shape == (10, 118)  # twice the mean of 59
    assert ids[9].tolist() == [5] * 117 + [9]
    assert ids[0].tolist() == [5] * 9 + [9] + [0] * 108
    assert found.tokens == int((ids != 0).sum()) == 9 * 10 + 118


def test_rows_stay_whole_where_nobody_asked() -> None:
    found = sample([10] * 9 + [500], 10_000, cut=False)
    assert found.whole()["input_ids"].shape == (10, 500)
    assert found.tokens == 590


def test_rows_of_about_one_length_stay_whole() -> None:
    found = sample([10, 12, 14, 20], 10_000)
    assert [len(found.batches()[at]["input_ids"][0]) for at in range(4)] == [10, 12, 14, 20]
    assert found.tokens == 56


def test_what_is_held_out_is_cut_alike() -> None:
    held = sample(([10] * 3 + [500]) * 16, 2_000).held_out()
    assert held is not None
    found = [len(batch["input_ids"][0]) for batch in held.batches()]
    assert set(found) == {10, 265}  # twice the mean of 132.5
    assert held.tokens == sum(found)
    assert (held.longest, held.left) == (265, None)


def test_long_sequences_come_fewer_at_a_time() -> None:
    found = replace(sample([2048] * 4, 10_000), batch_size=8)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [2, 2]
    found = replace(sample([4096] * 2, 10_000), batch_size=4)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [1, 1]
    found = replace(sample([512] * 8, 10_000), batch_size=4)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [4, 4]


def test_pairs_stay_whole_in_calibration(tmp_path: Path) -> None:
    """A target is not as long as its source, and a second text is no end of the first."""
    model = tiny.model("t5")
    folder = tiny.save(model, tmp_path / "model")
    rows = [f"{tiny.text(6, i)}\t{tiny.text(60, i)}" for i in range(8)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb", *rows]))
    config = CalibrationConfig(calibration_tokens=10_000, seq_len=128)
    data = DataConfig(source=str(tmp_path / "pairs.tsv"), text_column="a,b")
    found = calibration(model, load_tokenizer(folder), data, config, "score")
    assert found.longest is None
    assert found.whole()["labels"].shape[1] >= 60


def test_documents_are_cut_in_calibration(tmp_path: Path) -> None:
    model = tiny.model("bert-base")
    folder = tiny.save(model, tmp_path / "model")
    texts = [tiny.text(6, i) for i in range(9)] + [tiny.text(60, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    config = CalibrationConfig(calibration_tokens=10_000, seq_len=128)
    found = calibration(
        model,
        load_tokenizer(folder),
        DataConfig(source=str(tmp_path / "rows.jsonl")),
        config,
        "score",
    )
    ids, longest = found.whole()["input_ids"], found.longest
    assert longest is not None and ids.shape[1] == longest < 40
    assert found.tokens == sum(min(len(row["input_ids"]), longest) for row in found.rows)
