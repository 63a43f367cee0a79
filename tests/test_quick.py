"""The whole way of a Llama and a GPT-2, in a few seconds: what ``make quick`` ends with."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.test_cli import succeeds

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_from_scores_to_a_proven_and_measured_result(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model(case), tmp_path / "model")
    Path("text.txt").write_text(tiny.text(600))

    def headprune(line):
        return succeeds(capsys, *line.split())

    scored = "--criterion fisher --config seq_len=16 --config calibration_tokens=256"
    headprune(f"score model --data text.txt {scored} scores")
    by = "--scores scores --criterion fisher --keep 0.5"
    headprune(f"prune model {by} --dry-run --save-plan plan.json")
    assert "verified" in headprune("prune model --plan plan.json result")
    headprune("verify result")
    told = json.loads(headprune("inspect result --json"))
    assert sum(layer["query_heads"] for layer in told["attentions"]) == 6 * tiny.LAYERS // 2
    measured = "--no-speed --config seq_len=16 --max-windows 4 --json"
    report = json.loads(headprune(f"evaluate result --data text.txt --against model {measured}"))
    costs = [report[name]["cost"]["kv_cache_bytes"] for name in ("model", "against")]
    assert 0 < costs[0] < costs[1]
    assert report["model"]["metrics"][0]["value"] > 1
