"""The charts of a report, each with its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headprune.evaluation import metrics
from headprune.evaluation.report import Difference, Metric, Report
from headprune.io import figures
from headprune.io.figures import Series
from headprune.regression.baseline import DECISIVE
from headprune.render.blocks import Chart, Table, percent
from headprune.render.records import short_name
from headprune.render.runs import ReportedRun
from headprune.role import pictures
from headprune.schemas.gates import TrainedGates
from headprune.schemas.roles import RolesRecord


def main_metric(report: Report) -> Metric:
    """Return the first metric that the base has too."""
    base = _base_values(report)
    return next((one for one in report.model.metrics if one.name in base), report.model.metrics[0])


def _base_values(report: Report) -> dict[str, float]:
    if report.against is None:
        return {}
    # the original is as near to itself as can be
    nearest = {one.name: 1.0 for one in report.model.metrics if metrics.spec_of(one.name).of_two}
    return nearest | {one.name: one.value for one in report.against.metrics}


def quality_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return quality against size: a chart per metric, data, settings and base."""
    groups: dict[tuple[Any, ...], list[tuple[ReportedRun, Report]]] = {}
    for run in runs:
        for report in run.evaluations:
            name, base = main_metric(report).name, report.against
            if name in _base_values(report) and base and base.cost.attention_parameters:
                data = report.provenance.data_sha256
                key = (name, data, base.id or base.name, _conditions(report))
                groups.setdefault(key, []).append((run, report))
    return [_quality_chart(members, alone=len(groups) == 1) for members in groups.values()]


def _conditions(report: Report) -> tuple[str, ...]:
    settings = {
        name: report.provenance.settings.get(name) for name in DECISIVE if name != "prefix_ids"
    }
    flags = [f"--{name.replace('_', '-')} {v}" for name, v in settings.items() if v is not None]
    models = [report.model, *([report.against] if report.against else [])]
    return (*flags, *dict.fromkeys(one.dtype for one in models))


def _quality_chart(members: Sequence[tuple[ReportedRun, Report]], alone: bool) -> Chart:
    run, first = members[0]
    main, against, base_name = main_metric(first), first.against, run.base_name(first)
    assert against is not None
    base, whole = _base_values(first)[main.name], against.cost.attention_parameters
    series, rows = [], []
    for run, report in members:
        metric, part = main_metric(report), report.model.cost.attention_parameters
        name = run.name if report is run.evaluation else f"{run.name}: {report.model.name}"
        difference = next((d for d in report.differences if d.name == main.name), None)
        low, high = _bounds(metric.value, difference)
        series.append(Series(name, [100 * part / whole], [metric.value], [low], [high]))
        between = f"{low:.4g} to {high:.4g}" if low != high else "-"
        rows.append((name, percent(part, whole), f"{metric.value:.4f}", between))
    rows.append((base_name, "100.0%", f"{base:.4f}", "-"))
    name = metrics.label(main.name)
    figure = figures.curve(
        [*series, Series(base_name, [100.0], [base], reference=True)],
        "",
        f"attention parameters, % of {base_name}",
        name,
        base,
        f"quality of {base_name}",
        main.higher_is_better,
    )
    better = "higher" if main.higher_is_better else "lower"
    conditions = "" if alone else f"; {', '.join(_conditions(first))}"
    data = short_name(str(first.provenance.data.get("source", "")))
    return Chart(
        "Quality against size",
        figure,
        f"{name} against the attention parameters left, for {len(series)} models and the base.",
        Table(("", "attention parameters", name, "interval"), rows),
        f"{name} on {data}, {better} is better; bars are paired intervals{conditions}.",
    )


def _bounds(value: float, difference: Difference | None) -> tuple[float, float]:
    """The interval of the model's number: that of the difference, moved to the base's."""
    if difference is None:
        return value, value
    i = difference.interval
    if difference.kind == "difference":
        return value - i.estimate + i.low, value - i.estimate + i.high
    # the base's number over other windows can differ by rounding from value / estimate
    return (
        (value * i.low / i.estimate, value * i.high / i.estimate) if i.estimate else (value, value)
    )


def roles_chart(record: RolesRecord) -> Chart:
    """Return a chart of roles, before and after a cut."""
    counts = {n: sum(h.role == n for m in record.modules for h in m.heads) for n in record.roles}
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    of = f"{record.model.name}, on {short_name(record.data.source)}"
    columns, rows = pictures.roles_table(record)
    return Chart(
        "Roles of heads",
        pictures.roles_figure(record),
        f"Heads with a role: {listed}.",
        Table(columns, rows, names=len(columns)),
        f"{of}.",
        wide=True,
    )


def _taken(gates: TrainedGates) -> str:
    judgement = gates.metadata.judgement
    if judgement is None:
        return "the last ones are written"
    if not judgement.taken_after:
        return "the choice by scores is written, as none of theirs was nearer to the original"
    return f"those of step {judgement.taken_after:,} are written"


def gates_chart(gates: TrainedGates) -> Chart:
    """Return a chart of the probability of every gate to be open, over the training."""
    recorded = (gates.course >= 0).all(1).nonzero().flatten().tolist()
    places = [round(at * gates.metadata.steps / (len(gates.course) - 1)) for at in recorded]
    reached = gates.course[recorded]
    kept = gates.kept.tolist()
    lines = {
        f"{name} ({kept.count(stays)})": reached[:, gates.kept == stays].T.tolist()
        for name, stays in (("stays open", True), ("closes", False))
    }
    sure = [int(((row - 0.5).abs() >= 0.4).sum()) for row in reached]
    rows = [(f"{step:,}", f"{n} of {len(kept)}") for step, n in zip(places, sure, strict=True)]
    return Chart(
        "Gates",
        figures.courses(places, lines, "step", "probability that the gate is open"),
        f"{sure[-1]} of {len(kept)} gates are decided after {places[-1]:,} steps.",
        Table(("step", "gates open or closed with 90 %"), rows),
        f"A line per gate; {_taken(gates)}.",
    )
