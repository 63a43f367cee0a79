"""What each kind of step of a recipe does: one row a kind, one function of the package each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.config import (
    BudgetConfig,
    CalibrationConfig,
    CheckConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    TrainGatesConfig,
    build,
)
from headprune.errors import HeadpruneError
from headprune.merging import MERGES
from headprune.pipelines import estimates
from headprune.pipelines.check import check
from headprune.pipelines.convert_gqa import convert_gqa
from headprune.pipelines.estimates import Estimate, Sizes
from headprune.pipelines.evaluate import evaluate
from headprune.pipelines.heal import heal
from headprune.pipelines.plan import plan
from headprune.pipelines.prune import prune
from headprune.pipelines.report import report
from headprune.pipelines.score import Watch as ScoringWatch
from headprune.pipelines.score import needs_of, score
from headprune.pipelines.train_gates import train_gates
from headprune.recipe import (
    CheckStep,
    ConvertStep,
    EvaluateStep,
    HealStep,
    PlanStep,
    PruneStep,
    Recipe,
    ReportStep,
    ScoreStep,
    Step,
    TrainGatesStep,
)
from headprune.regression.junit import junit_xml
from headprune.regression.limits import parse_limit
from headprune.regression.verdicts import Verdict
from headprune.writing import write_whole


def _no_progress(done: int, total: int, numbers: str = "") -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """Who is told how a run goes on.

    Attributes:
        on_step: Called with a step's name, and whether its output is there already.
        on_stage: Called with a few words before every stage of a step.
        on_progress: Called with how much of a stage is done, of how much, and numbers to show.
        on_done: Called with a step's name, its result in a line, whether it passed, and seconds.
    """

    on_step: Callable[[str, bool], None] = lambda name, cached: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_progress: Callable[..., None] = _no_progress
    on_done: Callable[[str, str, bool, float], None] = lambda name, summary, passed, seconds: None


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

    def trust(self) -> dict[str, Any]:
        """Arguments of every function that loads a model to look at its heads."""
        return {
            "trust_remote_code": self.recipe.trust_remote_code,
            "assume_supported": self.recipe.assume_supported,
            "drop_unexpected": self.recipe.drop_unexpected,
        }

    def loading(self) -> dict[str, Any]:
        """Arguments of every function that loads a model to change it."""
        return {**self.trust(), "on_stage": self.watch.on_stage}

    def scoring(self) -> ScoringWatch:
        """The watch of the functions that score."""
        return ScoringWatch(stage=self.watch.on_stage, step=self.watch.on_progress)

    def again(self) -> dict[str, Any]:
        """Arguments of every function that can go on from a checkpoint."""
        return {"resume": self.resume, "overwrite": True}


@dataclass(frozen=True)
class Result:
    """What a step came to.

    Attributes:
        summary: In a line.
        passed: False if it found that a limit is broken.
    """

    summary: str
    passed: bool = True


def _score(job: Job) -> Result:
    step: ScoreStep = job.step
    score(
        job.model,
        job.output,
        step.criterion,
        job.data(),
        step.config(CalibrationConfig),
        unit=step.unit,
        attention=step.attention,
        gates=job.path("gates"),
        watch=job.scoring(),
        **job.trust(),
    )
    return Result(f"scores by {', '.join(step.criterion)}")


def _plan(job: Job) -> Result:
    step: PlanStep = job.step
    scores = job.path("scores")
    assert scores is not None
    planned = plan(
        job.model,
        scores,
        step.config(BudgetConfig),
        output=job.output / str(step.file),
        criterion=step.criterion,
        rounds=step.rounds,
        watch=job.scoring(),
        **job.trust(),
    )
    made = planned.plan
    return Result(f"{made.kept_heads} of {made.query_heads} heads stay, by {planned.criterion}")


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
        scores=job.path("scores"),
        criterion=step.criterion,
        keep=step.keep,
        refit=job.data("refit"),
        calibration=step.calibration,
        shape=step.shape,
        dtype=step.dtype,
        out_dtype=step.out_dtype,
        on_module=job.watch.on_progress,
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
    measured = evaluate(
        job.model,
        data,
        job.step.config(EvaluateConfig),
        against=job.inputs.get("against"),
        trust_remote_code=job.recipe.trust_remote_code,
        drop_unexpected=job.recipe.drop_unexpected,
        progress=job.watch.on_progress,
    )
    measured.write(job.output / str(job.step.file))
    found = [f"{m.name.replace('_', ' ')} {m.value:.4f}" for m in measured.model.metrics[:1]]
    for d in measured.differences[:1]:
        i = d.interval
        found.append(f"{d.kind} {i.estimate:.4f} ({i.low:.4f} to {i.high:.4f})")
    return Result(", ".join(found))


def _check(job: Job) -> Result:
    step: CheckStep = job.step
    job.watch.on_stage("evaluating")
    found = check(
        _check_config(step, job.model, job.data(), job.inputs, job.recipe.drop_unexpected),
        trust_remote_code=job.recipe.trust_remote_code,
        progress=job.watch.on_progress,
    )
    write_whole(job.output / str(step.file), found.model_dump_json(indent=2) + "\n")
    seconds = found.evaluate_s + found.judge_s
    xml = junit_xml(found.model, found.limits, found.strict, seconds)
    write_whole(job.output / "junit.xml", xml)
    held = sum(limit.verdict is Verdict.PASSED for limit in found.limits)
    summary = f"{found.verdict.value}: {held} of {len(found.limits)} limits hold"
    return Result(summary, passed=found.passed)


def _check_config(
    step: CheckStep,
    model: str,
    data: DataConfig | None,
    inputs: dict[str, str],
    drop_unexpected: bool = False,
) -> CheckConfig:
    examples = data or DataConfig(source="")
    values = {n: getattr(step, n) for n in CheckConfig.model_fields if n in CheckStep.model_fields}
    values |= examples.model_dump(exclude={"source"}) | {"data": examples.source, "model": model}
    values["drop_unexpected"] = drop_unexpected
    values |= {slot: inputs.get(slot) for slot in ("against", "baseline")}
    config: CheckConfig = build(CheckConfig, values)
    return config


def _report(job: Job) -> Result:
    page = job.output / str(job.step.file)
    report([job.recipe.output], page)
    report([job.recipe.output], page.with_suffix(".md"))
    return Result(f"{page.name} and {page.stem}.md")


def _refuse_score(step: ScoreStep) -> None:
    needs_of(step.criterion)


def _refuse_convert(step: ConvertStep) -> None:
    if step.merge is not None:
        MERGES[step.merge]


def _refuse_check(step: CheckStep) -> None:
    for limit in map(parse_limit, step.limits):
        if limit.needs_baseline and step.baseline is None:
            raise HeadpruneError(
                f"The limit '{limit.text}' is about a change since a baseline: give baseline: FILE."
            )
        if limit.needs_original and step.against is None:
            raise HeadpruneError(
                f"The limit '{limit.text}' is about the original, and the model that is checked is "
                "the original."
            )
    _check_config(step, "", None, {})


@dataclass(frozen=True)
class Row:
    """How a kind of step runs.

    Attributes:
        run: Does it, and writes the job's output folder.
        estimate: What it would take, of the step, its recipe and the model's sizes.
        work: What lies there of an interrupted run that it can go on from, as a pattern of the
            step's name; None if it starts anew.
        refuse: Raises where the step asks for what there is not; called before any step runs.
    """

    run: Callable[[Job], Result]
    estimate: Callable[[Any, Recipe, Sizes], Estimate]
    work: str | None = None
    refuse: Callable[[Any], None] = lambda step: None


_WORK = "{name}-checkpoints/config.yaml"  # of a training
ROWS: dict[type[Step], Row] = {
    ScoreStep: Row(_score, estimates.scoring, refuse=_refuse_score),
    PlanStep: Row(_plan, estimates.planning),
    TrainGatesStep: Row(_train_gates, estimates.training_gates, work=_WORK),
    PruneStep: Row(_prune, estimates.cutting),
    ConvertStep: Row(_convert, estimates.converting, refuse=_refuse_convert),
    HealStep: Row(_heal, estimates.healing, work=_WORK),
    EvaluateStep: Row(_evaluate, estimates.evaluating),
    CheckStep: Row(_check, estimates.checking, refuse=_refuse_check),
    ReportStep: Row(_report, estimates.reporting),
}
