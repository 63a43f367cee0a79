"""headprune report: what runs were asked for and what came out, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import spec_of
from headprune.evaluation.report import Difference, ModelReport, Report
from headprune.io.outputs import claimed_file
from headprune.io.ownership import REPORT
from headprune.io.parsing import validated
from headprune.io.writing import write_whole
from headprune.regression.baseline import DECISIVE
from headprune.regression.check import CheckReport
from headprune.reports import page
from headprune.reports.discovery import discover
from headprune.reports.reading import assemble
from headprune.reports.view import (
    Quality,
    ShownCheck,
    ShownEvaluation,
    ShownInterval,
    ShownRun,
    Size,
)

MARKDOWN = (".md", ".markdown")


@dataclass(frozen=True)
class Reported:
    """A finished report.

    Attributes:
        runs: What it shows.
        output: The page, or the Markdown.
        warnings: What is missing on it, as it is not finished.
    """

    runs: tuple[ShownRun, ...]
    output: Path
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        runs = [
            {"name": r.name, "folder": str(r.folder), "source": r.source, "asked": r.asked}
            for r in self.runs
        ]
        return {"output": str(self.output), "runs": runs, "warnings": list(self.warnings)}


def report(runs: Sequence[str | Path], output: Path, overwrite: bool = False) -> Reported:
    """Writes a report on one run, or on several side by side.

    Args:
        runs: Folders that headprune wrote (results, gates, scores, or folders that hold several of
            them and reports of ``evaluate`` and ``check``), or such reports themselves.
        output: The page to write, or with a suffix of Markdown a summary for a pull request.
        overwrite: Replace an existing page, if headprune wrote it.

    Raises:
        HeadpruneError: If there is nothing finished to report on, or the output cannot be written.
    """
    if not runs:
        raise HeadpruneError("There is no run to report on; give its folder.")
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm", *MARKDOWN):
        raise HeadpruneError(
            f"'{output}': a report is written as a page (.html) or as Markdown (.md); name such a "
            "file."
        )
    places = list(dict.fromkeys(Path(run) for run in runs))
    with claimed_file(output, REPORT, overwrite, places):
        return _report(places, output)


def _report(places: Sequence[Path], output: Path) -> Reported:
    found = [discover(place) for place in places]
    evaluations = {
        file: read_evaluation(file, content)
        for place in found
        for file, content in place.reports.items()
    }
    checks = {
        file: read_check(file, content) for place in found for file, content in place.checks.items()
    }
    shown = assemble(found, evaluations, checks)
    drawn = page.contents(shown)
    text = page.markdown(drawn) if output.suffix.lower() in MARKDOWN else page.html(drawn)
    write_whole(output, text)
    left_out = (f"Not in the report: {each}" for place in found for each in place.unfinished)
    return Reported(tuple(shown), output, tuple(left_out))


def read_check(file: Path, content: dict[str, Any]) -> ShownCheck:
    """What a report of ``check`` says, as the report shows it.

    Raises:
        CheckpointError: If it has another schema.
    """
    read = validated(CheckReport, content, file)
    rows = tuple((one.limit, one.found(), one.verdict.value) for one in read.limits)
    return ShownCheck(
        read.id, read.measured, read.model, file, read.verdict.value, read.passed, rows
    )


def read_evaluation(file: Path, content: dict[str, Any]) -> ShownEvaluation:
    """What a report of ``evaluate`` says, as the report shows it.

    Raises:
        CheckpointError: If it has another schema.
    """
    read = validated(Report, content, file)
    base: dict[str, float] = {}
    if read.against is not None:
        of_two = [one.name for one in read.model.metrics if spec_of(one.name).of_two]
        base = dict.fromkeys(of_two, 1.0)  # the original is as near to itself as can be
        base |= {metric.name: metric.value for metric in read.against.metrics}
    intervals = {difference.name: difference for difference in read.differences}
    provenance = read.provenance
    data, memory = provenance.data, provenance.settings.get("memory")
    return ShownEvaluation(
        id=read.id,
        created=read.provenance.created,
        measured=read.model.id,
        measured_base=read.against.id if read.against else None,
        model=read.model.name,
        base=read.against.name if read.against else None,
        file=file,
        data=", ".join([str(data.get("source", "")), *(provenance.domains or {})]),
        data_sha256=read.provenance.data_sha256,
        conditions=_conditions(read),
        qualities=tuple(
            Quality(
                metric.name,
                metric.value,
                base.get(metric.name),
                metric.higher_is_better,
                metric.n,
                _interval(intervals.get(metric.name)),
            )
            for metric in read.model.metrics
        ),
        size=_size(read.model),
        base_size=_size(read.against) if read.against else None,
        memory=memory if isinstance(memory, int) else None,
        provenance=_provenance(read),
        needle=read.needle(),
    )


def _conditions(read: Report) -> tuple[str, ...]:
    options = [name for name in DECISIVE if name != "prefix_ids"]
    settings = {name: read.provenance.settings.get(name) for name in options}
    told = [f"--{name.replace('_', '-')} {v}" for name, v in settings.items() if v is not None]
    models = [read.model, *([read.against] if read.against else [])]
    return (*told, *dict.fromkeys(one.dtype for one in models))


def _interval(difference: Difference | None) -> ShownInterval | None:
    if difference is None:
        return None
    i = difference.interval
    return ShownInterval(difference.kind, i.estimate, i.low, i.high, i.confidence, i.n)


def _size(model: ModelReport) -> Size:
    cost, speed = model.cost, model.speed
    return Size(
        parameters=cost.parameters,
        attention_parameters=cost.attention_parameters,
        query_heads=cost.query_heads,
        kv_heads=cost.kv_heads,
        kv_cache_bytes_per_token=cost.kv_cache_bytes_per_token,
        longest_context=model.longest_context,
        prefill_tokens_per_s=speed.prefill_tokens_per_s if speed else None,
        decode_by_batch=tuple(sorted(speed.decode_by_batch.items())) if speed else (),
        peak_memory_bytes=speed.peak_memory_bytes if speed else None,
        device=speed.device if speed else None,
    )


def _provenance(read: Report) -> tuple[tuple[str, str], ...]:
    provenance, data = read.provenance, read.provenance.data
    rows = {
        "measured": provenance.created,
        "model": f"{read.model.name} ({read.model.architecture}, {read.model.dtype})",
        **({"against": read.against.name} if read.against else {}),
        "platform": provenance.platform,
        **{f"data {name}": value for name, value in data.items() if value is not None},
        "data sha256": provenance.data_sha256,
        **{
            f"data {domain} {name}": value
            for domain, said in (provenance.domains or {}).items()
            for name, value in said.items()
            if value is not None
        },
        **{f"{name} version": version for name, version in provenance.versions.items()},
        **{f"--{n.replace('_', '-')}": v for n, v in provenance.settings.items() if v is not None},
    }
    return tuple((name, str(value)) for name, value in rows.items())
