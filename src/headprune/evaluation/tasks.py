"""Tasks of lm-eval, run by its own ``simple_evaluate`` around an open model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import EvaluateConfig
from headprune.data.files import visible
from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import Floats
from headprune.evaluation.report import Metric, finite
from headprune.packages import refuse_missing
from headprune.registry import did_you_mean

_YAML = (".yaml", ".yml")
# a task file may call functions (!function), so a plain YAML reader refuses it
_NAME = re.compile(r"""^(?:task|group)\s*:\s*["']?([\w.-]+)["']?\s*$""", re.MULTILINE)


def refuse_tasks(tasks: Sequence[str]) -> None:
    """Refuse tasks that do not exist, before anything is loaded.

    Raises:
        HeadpruneError: If lm-eval is not installed, or there is no such task.
    """
    if not tasks:
        return
    refuse_missing("--tasks", "lm_eval")
    names, manager = _manager(tasks)
    known = list(manager.all_tasks)
    for name in names:
        if name not in known:
            raise HeadpruneError(
                f"--tasks {name}: lm-eval has no such task, and there is no such file or folder."
                f"{did_you_mean(name, known)}"
            )


def task_scores(
    net: PreTrainedModel, tokenizer: Any, config: EvaluateConfig
) -> tuple[list[Metric], dict[str, Floats]]:
    """Run tasks.

    Args:
        net: A causal language model.
        tokenizer: Its tokenizer.
        config: Names of the tasks, and examples per forward pass.

    Returns:
        Every score of every task, with the standard error of lm-eval; and per example, the scores
        that are the mean of their examples.

    Raises:
        HeadpruneError: If a task cannot be run; quotes lm-eval.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    names, manager = _manager(config.tasks)
    try:
        results = simple_evaluate(
            HFLM(pretrained=net, tokenizer=tokenizer, batch_size=config.batch_size),
            tasks=list(names),
            task_manager=manager,
            bootstrap_iters=config.resamples,
        )
    except Exception as error:  # a task may fetch anything, and run code of its own
        if devices.is_device_failure(error):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise HeadpruneError(
            f"--tasks {','.join(config.tasks)}: lm-eval could not run them: {first}"
        ) from error
    assert results is not None  # as this process is the first
    scores = finite(_scores(results))
    columns = {one.name: _by_example(results, one.name) for one in scores}
    means = {one.name for one in scores if _is_mean(one.value, columns[one.name])}
    return scores, {name: column for name, column in columns.items() if name in means}


def _is_mean(value: float, column: Floats) -> bool:
    return len(column) > 0 and bool(np.isclose(column.mean(), value, rtol=1e-9))


def _manager(tasks: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """Return the names of tasks, and the lm-eval manager that knows them."""
    from lm_eval.tasks import TaskManager

    names, folders = [], []
    for task in tasks:
        place = Path(task)
        if not (place.is_dir() or place.suffix in _YAML):
            names.append(task)
            continue
        if not place.exists():
            raise HeadpruneError(f"--tasks {task}: there is no such file.")
        files = [place] if place.is_file() else visible(place)
        named = [name for file in files if file.suffix in _YAML for name in _named_in(file)]
        if not named:
            raise HeadpruneError(f"--tasks {task}: no YAML file there names a task ('task: NAME').")
        names += named
        folders.append(str((place if place.is_dir() else place.parent).absolute()))
    local = len(folders) == len(tasks)
    manager = TaskManager(include_path=folders or None, include_defaults=not local)
    return tuple(dict.fromkeys(names)), manager


def _named_in(file: Path) -> list[str]:
    return _NAME.findall(file.read_text(encoding="utf-8", errors="replace"))[:1]


def _scores(results: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield scores, named by task and metric; a filter other than none follows the metric."""
    for task, values in results["results"].items():
        higher = results.get("higher_is_better", {}).get(task, {})
        counted = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in values.items():
            score, comma, filtered = key.partition(",")
            if not comma or score.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{score}_stderr,{filtered}")
            known = isinstance(stderr, int | float) and math.isfinite(stderr)
            yield Metric(
                name=f"{task}:{score}" + (f",{filtered}" if filtered != "none" else ""),
                value=float(value),
                unit="1",
                higher_is_better=bool(higher.get(score, True)),
                n=counted or values.get("sample_len", 0),
                stderr=float(stderr) if known else None,
            )


def _by_example(results: Mapping[str, Any], name: str) -> Floats:
    """Return a score of every example, in the order of the data; empty if some are no numbers."""
    task, _, score = name.partition(":")
    score, _, filtered = score.partition(",")
    samples = results.get("samples", {}).get(task, ())
    some = [one for one in samples if one.get("filter", "none") == (filtered or "none")]
    values = [one.get(score) for one in sorted(some, key=lambda one: int(one["doc_id"]))]
    if not all(isinstance(value, int | float | np.number) for value in values):
        return np.empty(0)
    return np.array(values, dtype=np.float64)
