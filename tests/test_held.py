"""Models, data and plans that a Python user holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from datasets import Dataset

import headprune
from headprune.errors import HeadpruneError
from headprune.model.attention import attention_of
from tests import tiny

SMALL: dict[str, Any] = {"seq_len": 16, "calibration_tokens": 256}


def texts(seed: int = 0) -> Dataset:
    return Dataset.from_dict({"text": [tiny.text(60, seed + number) for number in range(24)]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_memory_is_scored_pruned_and_measured(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    net, pair = tiny.model("llama-gqa", dtype), tiny.tokenizer()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    headprune.score((net, pair), tmp_path / "scores", data=texts(), dtype=torch.float32, **SMALL)
    result = headprune.prune(
        (net, pair), tmp_path / "out", scores=tmp_path / "scores", keep=0.5, refit=texts(), **SMALL
    )
    small = result.model
    heads = [sum(a.query_heads for a in attention_of(each)) for each in (net, small)]
    assert heads[1] == heads[0] // 2 and small.dtype == dtype
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert result.tokenizer("a")["input_ids"] == pair("a")["input_ids"]
    assert f"{heads[0]} to {heads[1]}" in result._repr_html_()
    copied = headprune.from_pretrained(result.save_pretrained(tmp_path / "copy"))
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(copied(input_ids=ids).logits, small(input_ids=ids).logits)
    how: dict[str, Any] = {"seq_len": 16, "speed": False, "dtype": torch.float32}
    report = headprune.evaluate((small, pair), data=texts(9), against=(net, pair), **how)
    on_disk = headprune.evaluate(tmp_path / "out", data=texts(9), against=(net, pair), **how)
    values = [{one.name: one.value for one in each.model.metrics} for each in (report, on_disk)]
    assert values[0] == values[1] and "perplexity" in values[0]
    assert not any((tmp_path / "tmp").iterdir())  # nothing stays behind


def test_a_plan_may_be_a_mapping(tmp_path: Path) -> None:
    net = tiny.model("llama-gqa")
    first = attention_of(net)[0]
    net.config.name_or_path = ""
    result = headprune.prune(net, tmp_path / "out", plan={first.path: (0, 1)})
    assert next(a.query_ids for a in attention_of(result.model)) == (2, 3, 4, 5)
    with pytest.raises(HeadpruneError, match="has no usable tokenizer"):
        headprune.evaluate(net, data=texts())


def test_several_data_sets_are_domains(tmp_path: Path) -> None:
    pair = (tiny.model("llama-gqa"), tiny.tokenizer())
    data = {"main": texts(), "other": texts(50)}
    report = headprune.evaluate(pair, data=data, seq_len=16, speed=False)
    assert {"perplexity", "perplexity[other]"} <= {one.name for one in report.model.metrics}


def test_a_result_is_uploaded_as_it_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            calls.append(("token", {"token": token}))

        def create_repo(self, repo_id: str, **options: Any) -> None:
            calls.append((repo_id, options))

        def upload_folder(self, **options: Any) -> SimpleNamespace:
            calls.append(("upload", options))
            return SimpleNamespace()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    net = tiny.model("llama-gqa")
    result = headprune.prune(net, tmp_path / "out", plan={attention_of(net)[0].path: [0, 1]})
    result.push_to_hub("me/small", private=True, token="t", commit_message="Smaller")
    assert calls == [
        ("token", {"token": "t"}),
        ("me/small", {"private": True, "exist_ok": True}),
        (
            "upload",
            {
                "repo_id": "me/small",
                "folder_path": tmp_path / "out",
                "commit_message": "Smaller",
            },
        ),
    ]
