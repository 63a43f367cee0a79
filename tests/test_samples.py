"""The rows that calibration takes: from all over a text, none much longer than the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from headprune.config import CalibrationConfig
from headprune.data.samples import CalibrationSample
from headprune.model.batch import Batch


def collate(rows: list[dict[str, Any]]) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def sample(lengths: list[int], tokens: int) -> CalibrationSample:
    """Rows 5 ... 5 9, of which 9 ends each."""
    ids = [[5] * (length - 1) + [9] for length in lengths]
    marks = [[1] * length for length in lengths]
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": marks, "labels": lengths})
    return CalibrationSample.spread(rows, collate, tokens)


def test_one_long_row_does_not_pad_all_others_to_its_length() -> None:
    found = sample([10] * 9 + [500], 10_000)
    ids = found.whole()["input_ids"]
    assert ids.shape == (10, 118)  # twice the mean of 59
    assert ids[9].tolist() == [5] * 117 + [9]
    assert ids[0].tolist() == [5] * 9 + [9] + [0] * 108
    assert found.tokens == int((ids != 0).sum()) == 9 * 10 + 118


def test_rows_of_about_one_length_stay_whole() -> None:
    found = sample([10, 12, 14, 20], 10_000)
    assert [len(found.batches()[at]["input_ids"][0]) for at in range(4)] == [10, 12, 14, 20]
    assert found.tokens == 56


def test_what_is_held_out_is_cut_alike() -> None:
    held = sample(([10] * 3 + [500]) * 16, 2_000).held_out()
    assert held is not None
    found = [len(batch["input_ids"][0]) for batch in held.batches()]
    assert set(found) <= {10, 265}  # twice the mean of 132.5
    assert held.tokens == sum(found)
    assert (held.longest, held.left) == (265, None)


def test_long_sequences_come_fewer_at_a_time() -> None:
    found = replace(sample([2048] * 4, 10_000), batch_size=8)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [2, 2]
    found = replace(sample([4096] * 2, 10_000), batch_size=4)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [1, 1]
    found = replace(sample([512] * 8, 10_000), batch_size=4)
    assert [len(batch["input_ids"]) for batch in found.batches()] == [4, 4]
    assert CalibrationConfig(seq_len=2048, batch_size=8).tokens_per_pass == 4096
    assert CalibrationConfig(seq_len=128, batch_size=8).tokens_per_pass == 1024
