"""headprune report: results and their measurements, as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import label
from headprune.evaluation.report import Report
from headprune.io.outputs import claimed_file
from headprune.io.ownership import REPORT
from headprune.io.writing import write_whole
from headprune.render import charts, html, records
from headprune.render.blocks import (
    Block,
    Paragraph,
    Section,
    Table,
    Tile,
    at_context,
    percent,
    plural,
    short_count,
)
from headprune.render.folders import read_place
from headprune.render.models import evaluated, speeds
from headprune.render.runs import ReportedRun, assemble
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape


@dataclass(frozen=True)
class Reported:
    """A finished report and its runs."""

    runs: tuple[ReportedRun, ...]
    output: Path

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        runs = [
            {"name": r.name, "folder": str(r.path), "source": _source(r), "summary": r.summary}
            for r in self.runs
        ]
        return {"output": str(self.output), "runs": runs}


def report(runs: Sequence[str | Path], output: Path, overwrite: bool = False) -> Reported:
    """Write a page on one result, or on several side by side.

    Args:
        runs: Results, and their gates, scores, roles and reports of ``evaluate`` and ``check``.
        output: An HTML file.
        overwrite: Replace an existing page of headprune.

    Raises:
        HeadpruneError: If nothing finished is there, or the output cannot be written.
    """
    if not runs:
        raise HeadpruneError("There is no run to report on; give its folder.")
    html.refuse_other_suffix(output)
    paths = list(dict.fromkeys(Path(run) for run in runs))
    with claimed_file(output, REPORT, overwrite, paths):
        shown = assemble([read_place(path) for path in paths])
        write_whole(output, page(shown))
    return Reported(tuple(shown), output)


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the self-contained HTML page."""
    shared: list[Block] = [*charts.quality_charts(runs)]
    by_run = [*map(run_blocks, runs)]
    title = f"{len(runs)} runs side by side"
    if len(runs) == 1:  # the map of heads comes first
        title, by_run, shared = runs[0].name, [[runs[0].head_map, *shared, *by_run[0]]], []
    else:
        for run in runs:
            run.head_map.name = run.name
        shared = [comparison(runs), *shared, *(run.head_map for run in runs)]
    return html.page(
        "page.html.jinja",
        style=html.template("page.css"),
        script=html.template("page.js"),
        title=title,
        runs=runs,
        tiles=tiles(runs[0]) if len(runs) == 1 else [],
        shared=shared,
        by_run=by_run,
    )


def run_blocks(run: ReportedRun) -> list[Block]:
    """Return roles, proof, checks, evaluations and provenance of a run."""
    manifest = run.manifest
    stored = records.how_stored(manifest)
    code = records.load_code(manifest, run.path.name)
    blocks: list[Block] = [] if run.roles is None else [charts.roles_chart(run.roles)]
    blocks += [] if run.gates is None else [charts.gates_chart(run.gates)]
    blocks.append(Section("Proof", records.proof(manifest)))
    blocks.append(Section("Load it", [code, Paragraph(stored)]))
    if manifest.choice is not None:
        blocks.append(Section("Chosen", records.chosen(manifest.choice)))
    if run.role_table is not None:
        blocks.append(Section("Roles", [run.role_table]))
    for check in run.checks:
        rows = [(one.limit, one.found(), one.verdict.value) for one in check.limits]
        table = Table(("limit", "found", "verdict"), rows, names=3)
        verdict = Paragraph(f"{check.verdict.value}: {check.model}")
        blocks.append(Section("Check", [verdict, table]))
    for report in run.evaluations:
        inside = evaluated(report, run.base_name(report))
        inside.append(Section("How it was measured", [_provenance(report)]))
        blocks.append(Section(f"Evaluation of {report.model.name}", inside))
    steps = [(step.created, records.done(step), step.proven) for step in manifest.steps]
    chain = Table(("written", "step", "proof"), steps, names=3)
    return [*blocks, Section("Provenance", [chain, _facts(manifest)])]


def tiles(run: ReportedRun) -> list[Tile]:
    """Return the headline numbers of a run."""
    shown = [*_size_tiles(run), *_measured_tiles(run)]
    detail = "every tensor compared, no outputs"
    if (proof := run.manifest.proof) is not None:
        detail = f"differs by {proof.gated_vs_reloaded:.1e}, allowed {proof.tolerance:.0e}"
    shown.append(Tile("proof", "passed", detail, "good"))
    native = run.manifest.shape is Shape.NATIVE
    how = "a plain config; no other code" if native else "with remote code, or headprune installed"
    shown.append(Tile("loads", "anywhere" if native else "by runtime", how))
    for check in run.checks:
        held = sum(one.verdict.value == "passed" for one in check.limits)
        detail = f"{held} of {plural(len(check.limits), 'limit')} hold"
        shown.append(Tile("check", check.verdict.value, detail, "good" if check.passed else "bad"))
    return shown


def _size_tiles(run: ReportedRun) -> list[Tile]:
    shown = []
    for name, before, after in _size_rows(run):
        number = short_count if name == "parameters" else "{:,}".format
        detail = f"{percent(after, before)} left of {number(before)}"
        shown.append(Tile(name, number(after), detail))
    return shown


def _size_rows(run: ReportedRun) -> list[tuple[str, int, int]]:
    report = run.evaluation
    if report is not None and report.against is not None and run.is_against_original(report):
        before, after = report.against.cost, report.model.cost
        rows = [
            ("query heads", before.query_heads, after.query_heads),
            ("KV heads", before.kv_heads, after.kv_heads),
            ("parameters", before.parameters, after.parameters),
        ]
        if before.kv_cache_bytes:
            cache = before.kv_cache_bytes, after.kv_cache_bytes
            rows.append((f"KV bytes {at_context(after.kv_cache_tokens)}", *cache))
        return rows
    return records.size_rows(run.manifest.steps)


def _measured_tiles(run: ReportedRun) -> list[Tile]:
    if (report := run.evaluation) is None:
        return []
    main = charts.main_metric(report)
    changes = {one.name: one.in_words() for one in report.differences}
    base = run.base_name(report)
    detail = f"{changes[main.name]} of {base}" if main.name in changes else f"n = {main.n:,}"
    shown = [Tile(label(main.name), f"{main.value:.4g}", detail)]
    ours, theirs = speeds(report.model), speeds(report.against) if report.against else {}
    if ours:
        name, rate = list(ours.items())[-1]
        if name in theirs:
            shown.append(Tile(name, f"{rate / theirs[name]:.2f} x", f"against {base}"))
        else:
            shown.append(Tile(name, f"{rate:,.1f}", ""))
    return shown


def comparison(runs: Sequence[ReportedRun]) -> Table:
    """Return a column per run and a row per number."""
    columns: list[dict[str, str]] = []
    for run in runs:
        column = {"started from": _source(run)}
        for name, before, after in _size_rows(run):
            column[name] = f"{after:,} of {before:,} ({percent(after, before)})"
        if (report := run.evaluation) is not None:
            column["measured on"] = _data(report)
            base = run.base_name(report)
            against = "the original" if base == "original" else base
            for name, _, value, change in report.rows():
                column[name] = value
                if change != "-":
                    column[f"{name}, against {against}"] = change
            theirs = speeds(report.against) if report.against else {}
            for name, rate in speeds(report.model).items():
                ratio = f" ({rate / theirs[name]:.2f} x)" if name in theirs else ""
                column[name] = f"{rate:,.1f}{ratio}"
        column["proof"] = f"passed, {run.manifest.proven}"
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return Table(["", *(run.name for run in runs)], rows, "Runs side by side")


def _source(run: ReportedRun) -> str:
    return run.manifest.steps[0].source.name


def _data(report: Report) -> str:
    source = records.short_name(str(report.provenance.data.get("source", "")))
    return ", ".join([source, *(report.provenance.domains or {})])


def _facts(manifest: Manifest) -> Table:
    source, evidence, by = manifest.source, manifest.evidence, manifest.provenance
    options = {} if by is None else {n: v for n, v in by.options.items() if v is not None}
    facts = {
        "id": manifest.id,
        "command": by and ", ".join([by.command, *(f"{n} {v}" for n, v in options.items())]),
        "source": f"{source.name} ({source.architecture}, fingerprint {source.fingerprint})",
        "source id": manifest.parent,
        "heads chosen by": evidence and records.chosen_by(evidence),
        **{f"{name} version": version for name, version in manifest.versions.items()},
        "files": f"{len(manifest.files)} with their SHA-256 in headprune.json",
    }
    return _provenance_table(facts)


def _provenance(report: Report) -> Table:
    one = report.provenance
    data = {"data": {**one.data, "sha256": one.data_sha256}}
    data |= {f"data {name}": part for name, part in (one.domains or {}).items()}
    facts = {
        "measured": one.created,
        "platform": one.platform,
        **{f"{name} {n}": value for name, part in data.items() for n, value in part.items()},
        **{f"{name} version": version for name, version in one.versions.items()},
        **{f"--{name.replace('_', '-')}": value for name, value in one.settings.items()},
    }
    return _provenance_table(facts)


def _provenance_table(facts: Mapping[str, Any]) -> Table:
    rows = [(name, str(value)) for name, value in facts.items() if value is not None]
    return Table(("", "provenance"), rows, names=2, facts=True)
