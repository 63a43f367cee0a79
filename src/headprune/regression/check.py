"""headprune check: a model against limits, a stored baseline and the original."""

from __future__ import annotations

import time
from pathlib import Path

from headprune.config import CheckConfig
from headprune.context import Allowed, Progress
from headprune.errors import HeadpruneError
from headprune.evaluation import speed
from headprune.evaluation.evaluate import run
from headprune.evaluation.loaded import Loaded, load
from headprune.evaluation.metrics import Floats, context_of, is_score, parted, plain, spec_of
from headprune.evaluation.report import Identified, Metric
from headprune.io.outputs import claimed_file
from headprune.io.ownership import BASELINE
from headprune.model.cost import model_cost, stated_context
from headprune.model.residency import residency_of
from headprune.regression.baseline import Baseline, Subject, read_baseline
from headprune.regression.limits import SPEED, STRUCTURE, Limit, parse_limit
from headprune.regression.verdicts import (
    Judged,
    Verdict,
    judge_limit,
    load_route,
    overall,
    structure_of,
)
from headprune.schemas.values import Digest
from headprune.tensors.dtypes import dtype_name


class CheckReport(Identified):
    """The result of ``headprune check``.

    Attributes:
        schema_version: Version of this schema.
        id: SHA-256 of the content without times.
        provenance: How it was measured.
        verdict: The worst of all verdicts.
        passed: Whether every limit holds.
        model: Folder or hub id.
        measured: Id of the model; None where its files are not at hand.
        against: The original, if a limit refers to it.
        measured_against: Its id.
        baseline: The baseline file, if a limit refers to it.
        limits: Limit by limit.
        metrics: Quality of the model.
        evaluate_s: Seconds that loading, running and timing the models took.
        judge_s: Seconds that the check itself took.
    """

    verdict: Verdict
    passed: bool
    model: str
    measured: Digest | None = None
    against: str | None
    measured_against: Digest | None = None
    baseline: str | None
    limits: tuple[Judged, ...]
    metrics: tuple[Metric, ...]
    evaluate_s: float
    judge_s: float


def check(
    config: CheckConfig,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> CheckReport:
    """Evaluate a model and judge its limits.

    Args:
        config: Model, data and limits.
        trust_remote_code: Allow code that comes with the models.
        progress: Called with windows done and windows in all.

    Raises:
        HeadpruneError: If the check cannot be made; whether it passes is in the report.
    """
    limits = [parse_limit(text) for text in config.limits]
    if not limits:
        raise HeadpruneError(
            "There is no limit to check: give --limit 'perplexity <= +2 %', or 'limits' in the "
            "file of --config."
        )
    baseline, against = _references(limits, config)
    start = time.perf_counter()
    loaded = _load(config, against, trust_remote_code)
    _refuse_limits(limits, loaded)
    if baseline is not None:
        path, settings = Path(str(config.baseline)), loaded.settings(config.evaluate_config())
        baseline.refuse_other(path, loaded, settings)
        original = loaded.ids[1] if against is not None else None
        for one in limits:
            if one.needs_baseline and one.is_quality:
                baseline.refuse_metric(path, one.metric, settings, original)
            if one.needs_baseline and plain(one.metric) == "kv_cache_bytes":
                tokens, dtype = stated_context(*loaded.nets), dtype_name(loaded.nets[0].dtype)
                baseline.refuse_cache(path, one.metric, tokens, dtype)
    evaluation = run(loaded, config.evaluate_config(), progress)
    ratios: dict[str, Floats] = {}
    for at, context in _timed(limits).items():
        net, base = loaded.nets
        faster = speed.ratios(net, base, context)
        ratios |= {f"{name}{at}": by_repeat for name, by_repeat in faster.items()}
    evaluated = time.perf_counter()
    route = load_route(loaded.nets[0])
    judged = tuple(judge_limit(one, evaluation, route, baseline, ratios, config) for one in limits)
    verdict, report = overall(judged), evaluation.report
    return CheckReport(
        verdict=verdict,
        passed=verdict is Verdict.PASSED,
        model=config.model,
        measured=report.model.id,
        against=against,
        measured_against=loaded.ids[1] if against is not None else None,
        baseline=config.baseline if baseline is not None else None,
        limits=judged,
        metrics=report.model.metrics,
        provenance=report.provenance,
        evaluate_s=evaluated - start,
        judge_s=time.perf_counter() - evaluated,
    )


def update_baseline(
    config: CheckConfig,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> Baseline:
    """Evaluate a model and write the baseline; an earlier one is replaced.

    Args:
        config: Model, data and limits.
        trust_remote_code: Allow code that comes with the model.
        progress: Called with windows done and windows in all.

    Raises:
        HeadpruneError: If it must not be written.
    """
    if config.baseline is None:
        raise HeadpruneError("--update-baseline needs --baseline, the file to write.")
    limits, path = [parse_limit(text) for text in config.limits], Path(config.baseline)
    sources = [domain.source for domain in config.data]
    with claimed_file(path, BASELINE, True, (config.model, *sources, config.against)):
        # of use for embeddings only: these are measured against the original
        original = not limits or any(_is_of_two(one) for one in limits)
        loaded = _load(config, config.against if original else None, trust_remote_code)
        evaluation = run(loaded, config.evaluate_config(), progress)
        report = evaluation.report
        baseline = Baseline(
            **report.provenance.model_dump(),
            model=config.model,
            subject=Subject.of(loaded.nets[0]),
            dtype=report.model.dtype,
            inputs_sha256=loaded.inputs_sha256(),
            against=report.against.id if report.against is not None else None,
            limits=config.limits,
            metrics={metric.name: metric.value for metric in report.model.metrics},
            structure=structure_of(report.model.cost),
            kv_cache_tokens=report.model.cost.kv_cache_tokens,
            load_route=load_route(loaded.nets[0]),
            samples={k: tuple(v.tolist()) for k, v in evaluation.samples[0].columns.items()},
        )
        baseline.write(path)
    return baseline


def _load(config: CheckConfig, against: str | None, trust_remote_code: bool) -> Loaded:
    allowed = Allowed(trust_remote_code, drop_unexpected=config.drop_unexpected)
    return load(config.model, config.domains(), config.evaluate_config(), against, allowed)


def _is_of_two(limit: Limit) -> bool:
    """Return whether the metric itself needs the original, whatever the limit."""
    return limit.is_quality and spec_of(limit.metric).of_two


def _references(limits: list[Limit], config: CheckConfig) -> tuple[Baseline | None, str | None]:
    """Return the baseline and the original, each only if a limit needs it."""
    for one in limits:
        if one.needs_baseline and config.baseline is None:
            raise HeadpruneError(
                f"The limit '{one.text}' is relative to a baseline: give --baseline FILE."
            )
        if one.needs_original and config.against is None:
            raise HeadpruneError(
                f"The limit '{one.text}' is relative to the original: give --against MODEL."
            )
    stored = config.baseline is not None and any(one.needs_baseline for one in limits)
    beside = any(one.needs_original or _is_of_two(one) for one in limits)
    return (
        read_baseline(Path(str(config.baseline))) if stored else None,
        config.against if beside else None,
    )


def _timed(limits: list[Limit]) -> dict[str, int]:
    """Return prompts to time, by what limits on speed have behind their names, as "@8k"."""
    timed = [one.metric for one in limits if plain(one.metric) in SPEED]
    return {name.removeprefix(plain(name)): context_of(name) or speed.PROMPT for name in timed}


def _refuse_limits(limits: list[Limit], loaded: Loaded) -> None:
    """Refuse limits on what this run will not measure, before it runs."""
    kind, known = type(loaded.nets[0]).__name__, loaded.metrics()
    speed.refuse_long_prompts(loaded.nets, (n for at, n in _timed(limits).items() if at))
    structure = structure_of(model_cost(loaded.nets[0]))
    for one in limits:
        if plain(one.metric) in STRUCTURE and one.metric not in structure:
            raise HeadpruneError(
                f"The limit '{one.text}': of a {kind} with these positions this run knows "
                f"{', '.join(structure)}."
            )
        if one.is_quality and not is_score(one.metric) and one.metric not in known:
            raise HeadpruneError(
                f"The limit '{one.text}': this run does not measure {parted(one.metric)[0]} on "
                f"that data; for a {kind} on this data it measures "
                f"{', '.join(known) or 'nothing without --against'}."
            )
        if plain(one.metric) == "decode_tokens_per_s" and not structure["kv_cache_bytes"]:
            raise HeadpruneError(
                f"The limit '{one.text}': a {kind} generates no text; limit prefill_tokens_per_s."
            )
        if plain(one.metric) in SPEED and any(map(residency_of, loaded.nets)):
            raise HeadpruneError(
                f"The limit '{one.text}': models that run layer by layer are not timed. Give "
                "--config placement=whole, or leave this limit out."
            )
