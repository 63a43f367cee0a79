"""What each kind of step of a recipe does: one row a kind, one function of the package each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.config import (
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    TrainGatesConfig,
)
from headprune.pipelines import estimates
from headprune.pipelines.convert_gqa import convert_gqa
from headprune.pipelines.estimates import Estimate, Sizes
from headprune.pipelines.evaluate import evaluate
from headprune.pipelines.heal import heal
from headprune.pipelines.prune import prune
from headprune.pipelines.train_gates import train_gates
from headprune.recipe import (
    ConvertStep,
    EvaluateStep,
    HealStep,
    PruneStep,
    Recipe,
    Step,
    TrainGatesStep,
)

REPORT = "report.json"


def _no_progress(done: int, total: int, numbers: str = "") -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """Who is told how a run goes on.

    Attributes:
        on_step: Called with a step's name, and whether its output is there already.
        on_stage: Called with a few words before every stage of a step.
        on_progress: Called with how much of a stage is done, of how much, and numbers to show.
        on_done: Called with a step's name, its result in a line, and seconds.
    """

    on_step: Callable[[str, bool], None] = lambda name, cached: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_progress: Callable[..., None] = _no_progress
    on_done: Callable[[str, str, float], None] = lambda name, summary, seconds: None


@dataclass(frozen=True)
class Job:
    """One step, with all that it takes.

    Attributes:
        recipe: The recipe.
        step: The step's settings.
        inputs: Where its models, gates and plans lie: slot to folder, file or hub id.
        output: Folder to write.
        resume: Whether ``output`` holds an interrupted run with the same inputs.
        watch: Who is told how it goes on.
    """

    recipe: Recipe
    step: Any
    inputs: dict[str, str]
    output: Path
    resume: bool = False
    watch: Watch = field(default_factory=Watch)

    @property
    def model(self) -> str:
        """The model that the step works on."""
        return self.inputs["model"]

    def data(self, slot: str = "data") -> DataConfig | None:
        """The source of examples that a slot names."""
        name = getattr(self.step, slot)
        return None if name is None else self.recipe.data[name]

    def path(self, slot: str) -> Path | None:
        """Where an input lies, if the step has it."""
        return Path(self.inputs[slot]) if slot in self.inputs else None

    def loading(self) -> dict[str, Any]:
        """Arguments of every function that loads a model to change it."""
        return {
            "trust_remote_code": self.recipe.trust_remote_code,
            "assume_supported": self.recipe.assume_supported,
            "on_stage": self.watch.on_stage,
        }

    def again(self) -> dict[str, Any]:
        """Arguments of every function that can go on from a checkpoint."""
        return {"resume": self.resume, "overwrite": not self.resume}


@dataclass(frozen=True)
class Result:
    """What a step came to.

    Attributes:
        summary: In a line.
        passed: False if it found that a limit is broken.
    """

    summary: str
    passed: bool = True


def _train_gates(job: Job) -> Result:
    data = job.data()
    assert data is not None
    run = train_gates(
        job.model,
        data,
        job.output,
        job.step.config(TrainGatesConfig),
        on_step=lambda r: job.watch.on_progress(r.step, r.steps, f"loss {r.loss:.3f}"),
        **job.loading(),
        **job.again(),
    )
    found = run.metadata
    return Result(f"gates of {found.kept_heads} of {found.query_heads} heads stay open")


def _prune(job: Job) -> Result:
    step: PruneStep = job.step
    pruned = prune(
        job.model,
        job.output,
        gates=job.path("gates"),
        plan=job.path("plan"),
        keep=step.keep,
        shape=step.shape,
        dtype=step.dtype,
        **job.loading(),
    )
    before, after = pruned.manifest.query_heads
    return Result(f"{after} of {before} heads, proved")


def _convert(job: Job) -> Result:
    converted = convert_gqa(
        job.model,
        job.output,
        job.step.config(ConvertConfig),
        calibrate=job.data("calibrate"),
        shape=job.step.shape,
        on_module=job.watch.on_progress,
        **job.loading(),
    )
    before, after = converted.pruned.manifest.kv_heads
    return Result(f"{after} of {before} KV heads ({converted.merge}), proved")


def _heal(job: Job) -> Result:
    data = job.data()
    assert data is not None
    healed = heal(
        job.model,
        job.inputs["teacher"],
        data,
        job.output,
        job.step.config(HealConfig),
        on_step=lambda r: job.watch.on_progress(r.step, r.steps, f"divergence {r.loss:.4f}"),
        **job.loading(),
        **job.again(),
    )
    return Result(f"divergence {healed.before:.4f} before, {healed.after:.4f} after, proved")


def _evaluate(job: Job) -> Result:
    data = job.data()
    assert data is not None
    job.watch.on_stage("evaluating")
    report = evaluate(
        job.model,
        data,
        job.step.config(EvaluateConfig),
        against=job.inputs.get("against"),
        trust_remote_code=job.recipe.trust_remote_code,
        progress=job.watch.on_progress,
    )
    report.write(job.output / REPORT)
    found = [f"{m.name.replace('_', ' ')} {m.value:.4f}" for m in report.model.metrics[:1]]
    for d in report.differences[:1]:
        i = d.interval
        found.append(f"{d.kind} {i.estimate:.4f} ({i.low:.4f} to {i.high:.4f})")
    return Result(", ".join(found))


@dataclass(frozen=True)
class Row:
    """How a kind of step runs.

    Attributes:
        run: Does it, and writes the job's output folder.
        estimate: What it would take, of the step, its recipe and the model's sizes.
        work: What lies there of an interrupted run that it can go on from, as a pattern of the
            step's name; None if it starts anew.
    """

    run: Callable[[Job], Result]
    estimate: Callable[[Any, Recipe, Sizes], Estimate]
    work: str | None = None


ROWS: dict[type[Step], Row] = {
    TrainGatesStep: Row(_train_gates, estimates.training_gates, work="{name}/config.yaml"),
    PruneStep: Row(_prune, estimates.cutting),
    ConvertStep: Row(_convert, estimates.converting),
    HealStep: Row(_heal, estimates.healing, work="{name}-checkpoints/config.yaml"),
    EvaluateStep: Row(_evaluate, estimates.evaluating),
}
