"""headprune check: a model against limits, a stored baseline and the original."""

from __future__ import annotations

import time
from pathlib import Path

from transformers import PreTrainedModel

from headprune.config import CheckConfig
from headprune.context import Allowed
from headprune.errors import HeadpruneError
from headprune.evaluation.evaluate import run
from headprune.evaluation.loaded import Loaded, load
from headprune.evaluation.metrics import METRICS, is_score, parted
from headprune.evaluation.quality import Progress
from headprune.evaluation.report import Identified, Metric
from headprune.io.outputs import claimed_file
from headprune.io.ownership import BASELINE
from headprune.model import speed
from headprune.model.cost import model_cost
from headprune.model.residency import residency_of
from headprune.regression.baseline import Baseline, Subject, read_baseline
from headprune.regression.git import GitState, git_state
from headprune.regression.judging import judge_limit, load_route, structure_of
from headprune.regression.limits import ROLES_LOST, SPEED, Limit, parse_limit
from headprune.regression.roles import lost_roles
from headprune.regression.verdicts import Judged, Verdict, overall
from headprune.schemas.values import Digest

_OF_TWO = {name for name, spec in METRICS.items() if spec.of_two}  # whatever the limit


class CheckReport(Identified):
    """What ``headprune check`` found.

    Attributes:
        schema_version: Version of this schema.
        id: SHA-256 of all that it says, but for times.
        provenance: How it was measured.
        verdict: The worst of all verdicts.
        passed: Whether every limit holds.
        model: Folder or hub id.
        measured: Id of the model; None where its files are not at hand.
        against: The original, if a limit refers to it.
        measured_against: Its id.
        baseline: The baseline file, if a limit refers to it.
        baseline_commit: The git commit that it was made from.
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
    baseline_commit: str | None
    limits: tuple[Judged, ...]
    metrics: tuple[Metric, ...]
    evaluate_s: float
    judge_s: float


def check(
    config: CheckConfig,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> CheckReport:
    """Evaluates a model and judges its limits.

    Args:
        config: What to check.
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
    _check_metrics(limits, loaded)
    times = any(one.metric in SPEED for one in limits)
    if times and any(map(residency_of, loaded.nets)):
        raise HeadpruneError(
            "Limits on speed time a model as a whole, which placement=layers does not hold. Give "
            "--config placement=whole, or leave these limits out."
        )
    if baseline is not None:
        _compare_origin(baseline, loaded, config)
        for one in (one for one in limits if one.needs_baseline and one.is_quality):
            settings = loaded.settings(config.evaluate_config())
            original = loaded.ids[1] if against is not None else None
            baseline.refuse_metric(Path(str(config.baseline)), one.metric, settings, original)
    evaluation = run(loaded, config.evaluate_config(), progress)
    counts = any(one.metric == ROLES_LOST for one in limits)
    lost = lost_roles(loaded, config, progress) if counts else None
    ratios = speed.ratios(*loaded.nets) if times else {}
    evaluated = time.perf_counter()
    judged = tuple(
        lost.judge(one, config)
        if lost is not None and one.metric == ROLES_LOST
        else judge_limit(one, loaded, evaluation, baseline, ratios, config)
        for one in limits
    )
    verdict = overall(judged)
    return CheckReport(
        verdict=verdict,
        passed=verdict is Verdict.PASSED,
        model=config.model,
        measured=evaluation.report.model.id,
        against=against,
        measured_against=loaded.ids[1] if against is not None else None,
        baseline=config.baseline if baseline is not None else None,
        baseline_commit=baseline.commit if baseline is not None else None,
        limits=judged,
        metrics=evaluation.report.model.metrics,
        provenance=evaluation.report.provenance,
        evaluate_s=evaluated - start,
        judge_s=time.perf_counter() - evaluated,
    )


def update_baseline(
    config: CheckConfig,
    allow_dirty: bool = False,
    allow_other: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> Baseline:
    """Evaluates a model and writes the baseline.

    Args:
        config: What to record.
        allow_dirty: Write it although tracked files differ from the commit it will name.
        allow_other: Replace a baseline of other data, settings or another model.
        trust_remote_code: Allow code that comes with the model.
        progress: Called with windows done and windows in all.

    Raises:
        HeadpruneError: If it must not be written.
    """
    if config.baseline is None:
        raise HeadpruneError("--update-baseline needs --baseline, the file to write.")
    limits = [parse_limit(text) for text in config.limits]
    path = Path(config.baseline)
    state = git_state(path)
    if state is not None and state.changed and not allow_dirty:
        raise HeadpruneError(
            f"The baseline would name the commit {state.commit[:12]}, but {len(state.changed)} "
            f"tracked files differ from it ('{state.changed[0]}' the first). Commit them, or give "
            "allow_dirty."
        )
    read = [domain.source for domain in config.data]
    with claimed_file(path, BASELINE, True, (config.model, *read, config.against)):
        earlier = read_baseline(path) if path.exists() and not allow_other else None
        baseline = _record(config, limits, state, earlier, trust_remote_code, progress)
        baseline.write(path)
    return baseline


def _record(
    config: CheckConfig,
    limits: list[Limit],
    state: GitState | None,
    earlier: Baseline | None,
    trust_remote_code: bool,
    progress: Progress,
) -> Baseline:
    # of use for embeddings only, which are measured against the original
    original = not limits or any(parted(one.metric)[0] in _OF_TWO for one in limits)
    loaded = _load(config, config.against if original else None, trust_remote_code)
    if earlier is not None:
        _compare_origin(earlier, loaded, config)
    evaluation = run(loaded, config.evaluate_config(), progress)
    report = evaluation.report
    return Baseline(
        **report.provenance.model_dump(exclude={"data_sha256", "settings"}),
        commit=state.commit if state is not None else None,
        dirty=bool(state is not None and state.changed),
        model=config.model,
        subject=_subject(loaded.nets[0]),
        dtype=report.model.dtype,
        data_sha256=report.provenance.data_sha256,
        inputs_sha256=loaded.inputs_sha256(),
        against=report.against.id if report.against is not None else None,
        settings=report.provenance.settings,
        limits=config.limits,
        metrics={metric.name: metric.value for metric in report.model.metrics},
        structure=structure_of(report.model.cost),
        load_route=load_route(loaded.nets[0]),
        samples={k: tuple(v.tolist()) for k, v in evaluation.samples[0].columns.items()},
    )


def _load(config: CheckConfig, against: str | None, trust_remote_code: bool) -> Loaded:
    settings = config.evaluate_config()
    return load(
        config.model,
        config.domains(),
        settings,
        against,
        Allowed(trust_remote_code, drop_unexpected=config.drop_unexpected),
    )


def _references(limits: list[Limit], config: CheckConfig) -> tuple[Baseline | None, str | None]:
    """The baseline and the original, each only if a limit needs it."""
    baseline, against = None, None
    for one in limits:
        if one.needs_baseline and config.baseline is None:
            raise HeadpruneError(
                f"The limit '{one.text}' is relative to a baseline: give --baseline FILE."
            )
        if one.needs_original and config.against is None:
            raise HeadpruneError(
                f"The limit '{one.text}' is relative to the original: give --against MODEL."
            )
        if one.needs_original or parted(one.metric)[0] in _OF_TWO:
            against = config.against
        if one.needs_baseline and baseline is None:
            assert config.baseline is not None
            baseline = read_baseline(Path(config.baseline))
    return baseline, against


def _check_metrics(limits: list[Limit], loaded: Loaded) -> None:
    """Refuses limits on what this run will not measure, before it runs."""
    generates = model_cost(loaded.nets[0]).kv_cache_bytes_per_token > 0
    for one in limits:
        if one.is_quality and not is_score(one.metric) and one.metric not in loaded.metrics():
            found = ", ".join(loaded.metrics()) or "nothing without --against"
            raise HeadpruneError(
                f"The limit '{one.text}': this run does not measure {one.metric} window by window; "
                f"for a {type(loaded.nets[0]).__name__} on this data it measures {found}."
            )
        if one.metric == "decode_tokens_per_s" and not generates:
            raise HeadpruneError(
                f"The limit '{one.text}': a {type(loaded.nets[0]).__name__} generates no text; "
                "limit prefill_tokens_per_s."
            )


def _compare_origin(baseline: Baseline, loaded: Loaded, config: CheckConfig) -> None:
    baseline.refuse_other(
        Path(str(config.baseline)),
        _subject(loaded.nets[0]),
        loaded.data_sha256(),
        loaded.further() or {},
        loaded.inputs_sha256(),
        loaded.settings(config.evaluate_config()),
    )


def _subject(net: PreTrainedModel) -> Subject:
    text = net.config.get_text_config()
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    width, layers, vocabulary = (getattr(text, name, None) for name in sizes)
    return Subject(
        model_type=net.config.model_type,
        architecture=type(net).__name__,
        hidden_size=width,
        layers=layers,
        vocab_size=vocabulary,
    )
