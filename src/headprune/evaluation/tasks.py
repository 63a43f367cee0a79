"""Tasks of lm-eval, run by its own ``simple_evaluate`` around a model that is loaded already."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import EvaluateConfig
from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import Floats
from headprune.evaluation.report import Metric
from headprune.packages import refuse_missing
from headprune.registry import did_you_mean

_YAML = (".yaml", ".yml")
_NAME = re.compile(r"""^(?:task|group)\s*:\s*["']?([\w.-]+)["']?\s*$""", re.MULTILINE)


@dataclass(frozen=True)
class TaskScores:
    """What a model scores.

    Attributes:
        metrics: Every score of every task, with the standard error of lm-eval.
        columns: Per example, those scores that are the mean of their examples.
    """

    metrics: tuple[Metric, ...]
    columns: dict[str, Floats]


def refuse_tasks(tasks: Sequence[str]) -> None:
    """Refuses tasks that are not there, before anything is loaded.

    Raises:
        HeadpruneError: If lm-eval is not installed, or there is no such task.
    """
    if not tasks:
        return
    refuse_missing("--tasks", "lm_eval")
    names, manager = _found(tasks)
    known = list(manager.all_tasks)
    for name in names:
        if name not in known:
            raise HeadpruneError(
                f"--tasks {name}: lm-eval has no such task, and there is no such file or folder."
                f"{did_you_mean(name, known)}"
            )


def task_scores(net: PreTrainedModel, tokenizer: Any, config: EvaluateConfig) -> TaskScores:
    """Runs tasks.

    Args:
        net: A causal language model.
        tokenizer: Its tokenizer.
        config: Names the tasks, and says how many examples a forward pass takes.

    Raises:
        HeadpruneError: If a task cannot be run; what lm-eval says is in there.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    names, manager = _found(config.tasks)
    try:
        found = simple_evaluate(
            HFLM(pretrained=net, tokenizer=tokenizer, batch_size=config.batch_size),
            tasks=list(names),
            task_manager=manager,
            bootstrap_iters=config.resamples,
        )
    except Exception as error:  # a task may fetch anything, and run code of its own
        if devices.gave_out(error):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise HeadpruneError(
            f"--tasks {','.join(config.tasks)}: lm-eval could not run them: {first}"
        ) from error
    assert found is not None  # as this process is the first
    scores = list(_scores(found))
    columns = {}
    for one in scores:
        task, _, score = one.name.partition(":")
        each = _examples(found.get("samples", {}).get(task, ()), *_parted(score))
        if len(each) and np.isclose(each.mean(), one.value, rtol=1e-9):
            columns[one.name] = each
    return TaskScores(tuple(scores), columns)


def _found(tasks: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The names of tasks, and what knows where they are."""
    from lm_eval.tasks import TaskManager

    names, folders = [], []
    for task in tasks:
        place = Path(task)
        if place.is_dir():
            inside = [n for file in sorted(place.rglob("*")) for n in _named_in(file)]
            if not inside:
                raise HeadpruneError(f"--tasks {task}: the folder has no YAML file with a task.")
            names += inside
            folders.append(str(place))
        elif place.suffix in _YAML:
            names += _of_file(place)
            folders.append(str(place.absolute().parent))
        else:
            names.append(task)
    local = len(folders) == len(tasks)
    manager = TaskManager(include_path=folders or None, include_defaults=not local)
    return tuple(dict.fromkeys(names)), manager


def _of_file(file: Path) -> list[str]:
    if not file.is_file():
        raise HeadpruneError(f"--tasks {file}: there is no such file.")
    names = _named_in(file)
    if not names:
        raise HeadpruneError(f"--tasks {file}: the file names no task, as 'task: NAME' would.")
    return names


def _named_in(file: Path) -> list[str]:
    """The task of a YAML file. It may call functions, so that it is none for a plain reader."""
    if file.suffix not in _YAML or not file.is_file():
        return []
    return _NAME.findall(file.read_text(encoding="utf-8", errors="replace"))[:1]


def _scores(found: Mapping[str, Any]) -> Iterator[Metric]:
    """All scores, named by task and metric; a filter other than none stands behind the metric."""
    for task, results in found["results"].items():
        higher = found.get("higher_is_better", {}).get(task, {})
        counted = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in results.items():
            score, comma, filtered = key.partition(",")
            if not comma or score.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = results.get(f"{score}_stderr,{filtered}")
            yield Metric(
                name=f"{task}:{score}" + (f",{filtered}" if filtered != "none" else ""),
                value=float(value),
                unit="1",
                higher_is_better=bool(higher.get(score, True)),
                n=counted or results.get("sample_len", 0),
                stderr=float(stderr) if isinstance(stderr, int | float) else None,
            )


def _parted(score: str) -> tuple[str, str]:
    name, _, filtered = score.partition(",")
    return name, filtered or "none"


def _examples(samples: Sequence[Mapping[str, Any]], score: str, filtered: str) -> Floats:
    """A score of every example, in the order of the data; none where some are no numbers."""
    own = [one for one in samples if one.get("filter", "none") == filtered]
    values = [one.get(score) for one in sorted(own, key=lambda one: int(one["doc_id"]))]
    if not all(isinstance(value, int | float | np.number) for value in values):
        return np.empty(0)
    return np.array(values, dtype=np.float64)
