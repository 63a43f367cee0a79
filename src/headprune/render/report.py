"""headprune report: runs and their results, as a page or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune._version import __version__
from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import label
from headprune.evaluation.report import Report
from headprune.io.markup import xml_safe
from headprune.io.outputs import claimed_file
from headprune.io.ownership import REPORT
from headprune.io.writing import write_whole
from headprune.render import charts, html, records
from headprune.render.blocks import (
    Block,
    Chart,
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
from headprune.render.head_map import HeadMap
from headprune.render.markdown import escaped, markdown
from headprune.render.models import evaluated, speeds
from headprune.render.runs import ReportedRun, assemble
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Shape

MARKDOWN = (".md", ".markdown")


@dataclass(frozen=True)
class Reported:
    """A finished report and its runs."""

    runs: tuple[ReportedRun, ...]
    output: Path

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        runs = [
            {"name": r.name, "folder": str(r.path), "source": r.source, "summary": r.summary}
            for r in self.runs
        ]
        return {"output": str(self.output), "runs": runs}


def report(runs: Sequence[str | Path], output: Path, overwrite: bool = False) -> Reported:
    """Write a report on one run, or on several side by side.

    Args:
        runs: Folders of headprune, or reports of ``evaluate`` and ``check``.
        output: A page (.html), or a summary for a pull request (.md).
        overwrite: Replace an existing page of headprune.

    Raises:
        HeadpruneError: If nothing finished is there, or the output cannot be written.
    """
    if not runs:
        raise HeadpruneError("There is no run to report on; give its folder.")
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm", *MARKDOWN):
        raise HeadpruneError(
            f"'{output}': a report is written as a page (.html) or as Markdown (.md); name such a "
            "file."
        )
    paths = list(dict.fromkeys(Path(run) for run in runs))
    with claimed_file(output, REPORT, overwrite, paths):
        shown = assemble([read_place(path) for path in paths])
        as_text = output.suffix.lower() in MARKDOWN
        write_whole(output, summary(shown) if as_text else page(shown))
    return Reported(tuple(shown), output)


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the self-contained HTML page."""
    shared: list[Block] = [*charts.quality_charts(runs)]
    by_run = [*map(run_blocks, runs)]
    title = f"{len(runs)} runs side by side"
    if len(runs) == 1:  # the map of heads comes first
        title, first = runs[0].name, int(runs[0].head_map is not None)
        by_run, shared = [[*by_run[0][:first], *shared, *by_run[0][first:]]], []
    else:
        maps = [*_named_maps(runs)]
        by_run = [[block for block in blocks if block not in maps] for blocks in by_run]
        shared = [comparison(runs), *shared, *maps]
    return html.page(
        "page.html.jinja",
        style=html.template("page.css"),
        script=html.template("page.js"),
        title=title,
        heads=[(run, tiles(run)) for run in runs],
        shared=shared,
        by_run=by_run,
    )


def _named_maps(runs: Sequence[ReportedRun]) -> Iterator[HeadMap]:
    for run in runs:
        if run.head_map is not None:
            run.head_map.name = run.name
            yield run.head_map


def summary(runs: Sequence[ReportedRun]) -> str:
    """Return the Markdown summary for a pull request."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    several = len(runs) > 1
    lines = [f"- **{escaped(run.name)}**: {escaped(run.summary)}" for run in runs]
    about = "\n".join(lines) if several else escaped(runs[0].summary)
    blocks: list[Block] = [comparison(runs), *charts.quality_charts(runs)]
    blocks += _named_maps(runs) if several else []
    for run in runs:
        for block in run_blocks(run):
            if isinstance(block, Chart) or block in blocks:
                continue  # a training is for the page
            if several and isinstance(block, Section):
                block = Section(f"{block.title}: {run.name}", block.blocks, block.folded)
            blocks.append(block)
    text = f"## {escaped(title)}\n\n{about}\n\n{markdown(blocks, level=3)}"
    return xml_safe(
        f"<!-- headprune {__version__} -->\n{text}\n\nMade by headprune {__version__}.\n"
    )


def run_blocks(run: ReportedRun) -> list[Block]:
    """Return heads, trainings, proof, roles, checks and evaluations of a run."""
    blocks: list[Block] = [run.head_map] if run.head_map is not None else []
    blocks += charts.training_charts(run) + charts.roles_charts(run)
    if run.manifest is not None:
        code = records.load_code(run.manifest, run.path.name)
        stored = Paragraph(
            records.stored(run.manifest.shape, run.manifest.uneven, run.manifest.brings_code)
        )
        blocks.append(Section("Proof", records.proof(run.manifest), folded=True))
        blocks.append(Section("Load it", [code, stored], folded=True))
        if run.manifest.choice is not None:
            blocks.append(Section("Chosen", records.chosen(run.manifest.choice), folded=True))
    if run.role_table is not None:
        blocks.append(Section("Roles", [run.role_table], folded=True))
    for check in run.checks:
        rows = [(one.limit, one.found(), one.verdict.value) for one in check.limits]
        table = Table(("limit", "found", "verdict"), rows, names=3)
        verdict = Paragraph(f"{check.verdict.value}: {check.model}")
        blocks.append(Section("Check", [verdict, table], folded=True))
    for report in run.evaluations:
        inside = evaluated(report, run.base_name(report) if run.manifest is not None else None)
        inside.append(Section("How it was measured", [_provenance(report)], folded=True))
        blocks.append(Section(f"Evaluation of {report.model.name}", inside, folded=True))
    if run.manifest is not None:
        steps = [(step.created, records.done(step), step.proven) for step in run.manifest.steps]
        chain = Table(("written", "step", "proof"), steps, names=3)
        blocks.append(Section("Provenance", [chain, _facts(run.manifest)], folded=True))
    return blocks


def tiles(run: ReportedRun) -> list[Tile]:
    """Return the headline numbers of a run."""
    shown = [*_size_tiles(run), *_measured_tiles(run)]
    manifest, drawn = run.manifest, run.head_map
    if manifest is not None:
        detail = "every tensor compared, no outputs"
        if (proof := manifest.proof) is not None:
            detail = f"differs by {proof.gated_vs_reloaded:.1e}, allowed {proof.tolerance:.0e}"
        shown.append(Tile("proof", "passed", detail, "good"))
        native = manifest.shape is Shape.NATIVE
        how = (
            "a plain config; no other code"
            if native
            else "with remote code, or headprune installed"
        )
        shown.append(Tile("loads", "anywhere" if native else "by runtime", how))
    elif drawn is not None and drawn.only_scored:
        shown.append(Tile("query heads", f"{drawn.counts[1]:,}", "scored"))
    elif run.histories:
        first = run.histories[0]
        shown.append(Tile("steps", f"{first.steps:,}", f"last loss {first.points[-1].loss:.4g}"))
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
    if run.manifest is not None:
        return records.size_rows(run.manifest.steps)
    if run.head_map is not None and not run.head_map.only_scored:
        stay, heads = run.head_map.counts
        return [("query heads", heads, stay)]
    return []


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
        column = {"started from": run.source}
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
        if run.manifest is not None:
            column["proof"] = f"passed, {run.manifest.proven}"
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return Table(["", *(run.name for run in runs)], rows, "Runs side by side")


def _data(report: Report) -> str:
    source = records.short_name(str(report.provenance.data.get("source", "")))
    return ", ".join([source, *(report.provenance.domains or {})])


def _facts(manifest: Manifest) -> Table:
    source, evidence, by = manifest.source, manifest.evidence, manifest.made_by
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
