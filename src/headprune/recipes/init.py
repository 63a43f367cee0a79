"""headprune init: from a few answers to a recipe with comments."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from headprune.declaration import Options
from headprune.errors import HeadpruneError, RecipeError
from headprune.exporting.source import built
from headprune.io.markup import printable
from headprune.io.outputs import claimed_file
from headprune.io.ownership import RECIPE
from headprune.io.writing import write_whole
from headprune.model.loading import Task, load_config, task_of
from headprune.model.refusals import refuse_without_text
from headprune.recipes.reading import read_recipe
from headprune.recipes.recipe import Recipe

MODEL, DATA = "HuggingFaceTB/SmolLM2-135M", "wikitext:wikitext-2-raw-v1"


class Goal(str, Enum):
    """What the recipe is for."""

    KV_CACHE = "kv-cache"  # a smaller KV cache: fewer KV heads, then healing
    HEADS = "heads"  # fewer heads: gates, then a cut
    STUDY = "study"  # which heads matter: several cuts from the same gates


class Hardware(str, Enum):
    """Where it runs."""

    CPU = "cpu"
    GPU = "gpu"


class Answers(Options):
    """What init asks.

    Attributes:
        model: Folder or hub id.
        goal: What the recipe is for.
        data: Text to train on: a file, a folder or a hub id.
        test_data: Text to measure on; None for the test split of a hub id.
        hardware: Where it runs.
        output: The recipe's output folder.
    """

    model: str = MODEL
    goal: Goal = Goal.KV_CACHE
    data: str = DATA
    test_data: str | None = None
    hardware: Hardware = Hardware.CPU
    output: str = "headprune-run"


def init(path: Path, answers: Answers, overwrite: bool = False) -> Recipe:
    """Writes a recipe, and reads it back.

    Args:
        path: The YAML file to write.
        answers: What it is for.
        overwrite: Replace an existing file.

    Raises:
        CheckpointError: If the file exists and must not be replaced.
        RecipeError: If there is no text to measure on.
        FamilyError: If the model reads no text.
    """
    inputs = (answers.model, answers.data, answers.test_data)
    with claimed_file(path, RECIPE, overwrite, inputs):
        write_whole(path, recipe_text(answers, path.name))
    return read_recipe(path)


def recipe_text(answers: Answers, file: str) -> str:
    """The recipe, with comments.

    Args:
        answers: What it is for.
        file: Name of its file.

    Raises:
        RecipeError: If there is no text to measure on.
    """
    local = Path(answers.data).exists()
    if local and answers.test_data is None:
        raise RecipeError(
            f"'{answers.data}' is a local text: say what to measure on, which was not trained on, "
            "with --test-data FILE."
        )
    test, split = (
        answers.test_data or answers.data,
        "" if answers.test_data else "\n    split: test",
    )
    task = _task(answers.model)
    limit = _LIMITS.get(task, _LIMITS["causal-lm"])
    steps = _STEPS[answers.goal].format(**_SIZES[answers.hardware], limit=limit)
    return _HEAD.format(
        file=printable(shlex.quote(file)),  # in comments, which end with the line
        model=_quoted(answers.model),
        output=_quoted(answers.output),
        train=_quoted(answers.data),
        test=_quoted(test),
        split=split,
        columns=_COLUMNS.get(task, ""),
        steps=steps.strip("\n"),
    )


def _task(model: str) -> Task:
    """What a model in a folder is for; one of the hub is not fetched for this question.

    Raises:
        FamilyError: If it reads no text.
    """
    net = None
    if Path(model).is_dir():
        with suppress(HeadpruneError):  # what is wrong with it is told when the recipe runs
            net = built(load_config(model))
    if net is None:
        return "causal-lm"
    refuse_without_text(net, "a recipe of init")
    return task_of(net)


def _quoted(text: str) -> str:
    """A YAML scalar: JSON's quotes are YAML's, and a plain name needs none."""
    plain = text.replace("/", "").replace("-", "").replace(".", "").replace("_", "").isalnum()
    same = plain and yaml.safe_load(text) == text  # not a date, a number or a truth value
    return text if same else json.dumps(text, ensure_ascii=False)


_SIZES: dict[Hardware, dict[str, Any]] = {
    Hardware.CPU: {
        "gate_steps": 100,
        "heal_steps": 100,
        "batch_size": 4,
        "seq_len": 128,
        "windows": 40,
        "dtype": "auto",
        "recompute": "false",
    },
    Hardware.GPU: {
        "gate_steps": 300,
        "heal_steps": 1000,
        "batch_size": 8,
        "seq_len": 512,
        "windows": 200,
        "dtype": "bfloat16",
        "recompute": "true",
    },
}

# what must hold of the models of a task
_LIMITS: dict[Task, str] = {
    "causal-lm": "perplexity <= 200 % # of the original's",
    "classification": "accuracy >= 95 % # of the original's",
    "features": "mean_cosine >= 0.9 # of the embeddings with the original's",
}
# what data of a task needs beside its source
_COLUMNS: dict[Task, str] = {
    "classification": "\n    label_column: label # the column of the class",
    "seq2seq-lm": "\n    text_column: source,target # the two columns of pairs",
}

_HEAD = """\
# A recipe of headprune. See what it would take, then run it; what is done is not done again:
#   headprune run {file} --dry-run
#   headprune run {file}
# Any setting can be given there as well: --set steps.evaluate.max_windows=10
model: {model}
output: {output} # one folder per step, all settings, and the versions

# Files, folders or hub ids; text, JSONL, CSV, TSV or parquet. Columns are named where there are
# several: text_column: de,en for pairs, label_column: label for classifiers.
data:
  train:
    source: {train}{columns}
  test: # not trained on
    source: {test}{split}{columns}

# In order. A step works on the model that the step before it made; its settings are the options of
# the command of its name.
steps:
{steps}
"""

_EVALUATE = """\
  # quality, size and speed, with intervals of the difference to the original
  evaluate:
    max_windows: {windows}
    dtype: {dtype}
"""
_CHECK = """\
  # what must hold; the run ends with exit code 1 if it does not
  check:
    limits:
      - {limit}; see headprune check --help
    max_windows: {windows}
    dtype: {dtype}
"""
_REPORT = """\
  # all of it on one page
  report:
"""

_STEPS = {
    Goal.KV_CACHE: """\
  # KV heads that share: what a generated token leaves in the cache is halved
  convert-gqa:
    kv_budget: 0.5 # share of all KV heads, spread over the layers; kv_heads: 1 for MQA everywhere
    calibrate: train # text that shows what the heads do
    layout: per-layer # uniform: the same number in every layer, so that any engine loads it
    dtype: {dtype}
  # trained to match the original
  heal:
    steps: {heal_steps}
    train: all # attention and lora need less memory
    batch_size: {batch_size}
    seq_len: {seq_len}
    gradient_checkpointing: {recompute} # saves memory, at a third more time
"""
    + _EVALUATE
    + _CHECK
    + _REPORT,
    Goal.HEADS: """\
  # a gate on every head, or on every KV head with its queries where they are shared
  train-gates:
    target_heads: 0.75 # a share, or a count such as 202; hit exactly
    steps: {gate_steps}
    batch_size: {batch_size}
    seq_len: {seq_len}
    dtype: {dtype}
    gradient_checkpointing: {recompute} # saves memory, at a third more time
  # the closed ones are cut out of the weights, and the result is proven
  prune:
    # uniform: the same counts in every layer, so that any engine loads it; train with method: l0
    layout: per-layer
    dtype: {dtype}
"""
    + _EVALUATE
    + _CHECK
    + _REPORT,
    Goal.STUDY: """\
  # which heads matter: their gates, trained once
  train-gates:
    target_heads: 0.5
    method: l0 # gates that are cut at several counts below; refit fits W_O to one
    steps: {gate_steps}
    batch_size: {batch_size}
    seq_len: {seq_len}
    dtype: {dtype}
    gradient_checkpointing: {recompute} # saves memory, at a third more time
"""
    + "".join(
        f"""\
  keep-{share}:
    step: prune
    model: original
    gates: train-gates
    keep: 0.{share}
    dtype: {{dtype}}
  evaluate-{share}:
    step: evaluate
    max_windows: {{windows}}
    dtype: {{dtype}}
    speed: false
"""
        for share in (75, 50, 25)
    )
    + _REPORT,
}
