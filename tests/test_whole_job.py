"""The whole job on tiny models of every family that reads text, in bfloat16."""

import math
import re

import pytest
import torch

import headprune
from headprune.errors import PlanError
from tests import tiny
from tests.marks import slow_unless

LENGTH = {"seq_len": 16}
SAMPLE = {**LENGTH, "calibration_tokens": 256}
TASKS = ("causal-lm", "masked-lm", "seq2seq-lm")
# Whisper reads sound; transformers takes the tiny tokenizer for another where a Qwen2 has it
OTHERS = {"whisper", "qwen2"}
CASES = [c for c in tiny.FAMILY_CASES if tiny.task(c) in TASKS and c not in OTHERS]
ODD = {"mpnet"}  # weights on demand only
SHARED = {"albert"}  # one module is all layers: there is no place to fit a W_O at
NOT_MERGED = (
    "cannot have fewer KV heads|hand its queries and keys|of its own for every KV head|"
    "runs in more than one layer|does not run on the calibration text"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Text for models that read one, and pairs for those that translate."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(tiny.text(4_000))
    pairs = (f"{tiny.text(8, row)},{tiny.text(8, row + 1_000)}" for row in range(200))
    (folder / "pairs.csv").write_text("\n".join(["source,target", *pairs]))
    of_pairs = {"data": folder / "pairs.csv", "text_column": "source,target"}
    return {task: {"data": folder / "text.txt"} for task in TASKS} | {"seq2seq-lm": of_pairs}


def measured(result, original, text):
    """Verifies a result and evaluates it."""
    read = {**text, "data": str(text["data"])}
    assert headprune.verify(result, against=original).passed
    few = {"max_windows": 8, "speed": False, **LENGTH}
    report = headprune.evaluate(result, against=str(original), **few, **read)
    assert math.isfinite(report.model.metrics[0].value)


def looked_into(result, original, text):
    """Tells the roles of a result, and scores it to be cut again."""
    told, scores = (result.with_name(f"{what}-{result.name}") for what in ("roles", "scores"))
    headprune.roles(result, output=told, against=original, sequences=8, **LENGTH, **text)
    assert (told / "roles.json").is_file()
    headprune.score(result, output=scores, criterion=("fisher",), **SAMPLE, **text)
    assert (scores / "scores.json").is_file()


@pytest.mark.parametrize("case", slow_unless(ODD.__contains__, CASES))
def test_the_whole_job(case, tmp_path, texts):
    original = tiny.save(tiny.model(case, torch.bfloat16), tmp_path / "original")
    text = texts[tiny.task(case)]
    columns = {name: value for name, value in text.items() if name != "data"}
    scores, cut, shared = (tmp_path / name for name in ("scores", "cut", "shared"))
    headprune.score(original, output=scores, criterion=("fisher",), **SAMPLE, **text)
    refit = {} if case in SHARED else {"refit": text["data"]}
    headprune.prune(original, cut, scores=scores, keep=0.6, **refit, **SAMPLE, **columns)
    measured(cut, original, text)
    looked_into(cut, original, text)
    budget = {"kv_budget": 0.5, "calibrate": text["data"]}
    refused = ""
    try:
        headprune.convert_gqa(original, shared, **budget, **SAMPLE, **columns)
    except PlanError as why:
        refused = str(why)
    if refused:
        assert re.search(NOT_MERGED, refused) and not shared.exists()
    else:
        measured(shared, original, text)
