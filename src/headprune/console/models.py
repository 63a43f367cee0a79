"""What models are made of, and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from headprune.evaluation.report import ModelReport, Report
    from headprune.family.capabilities import Capability
    from headprune.model.inspection import Inspection
from headprune.console.tables import folded, module_table, narrow, table
from headprune.evaluation.metrics import label, spec_of

_WIDE = 110  # characters of a terminal with room for names of models side by side


def inspection(console: Console, report: Inspection) -> None:
    """A model's attention, module by module, and what cuts would save."""
    share = report.attention_parameters / report.parameters
    console.print(
        f"[bold]{report.architecture}[/] (family {report.family}, {report.task}, {report.dtype}): "
        f"{report.parameters:,} parameters, {share:.1%} of them in attention"
    )
    several = len({a.kind for a in report.attentions}) > 1
    kind = ("kind",) if several else ()
    columns = (*kind, "query heads", "KV heads", "head_dim", "parameters")
    rows = {}
    for a in report.attentions:
        numbers = (a.query_heads, a.kv_heads, a.head_dim, f"{a.parameters:,}")
        rows[a.path] = (*((a.kind,) if several else ()), *map(str, numbers))
    module_table(console, columns, folded(rows), numbers_from=1 + several)
    if report.kv_cache_bytes_per_token:
        sizes = ", ".join(f"{n:,} in {d}" for d, n in report.kv_cache_bytes_per_token.items())
        console.print(f"KV cache, bytes per token: {sizes}")
    savings = table("heads removed", "parameters saved", "of the model", "KV bytes/token saved")
    for saving in report.savings:
        savings.add_row(
            f"{saving.heads_removed:.0%}",
            f"{saving.parameters:,}",
            f"{saving.parameters / report.parameters:.1%}",
            f"{saving.kv_cache_bytes_per_token:,}",
        )
    console.print(savings)
    console.print(f"Default unit: {report.unit.value} ({report.units} of them).")
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")


def families(console: Console, rows: list[Capability]) -> None:
    """What works for which family; every listed one can be gated, cut and proven."""
    cells, notes = _family_cells(rows)
    grid = table(*_FAMILY_COLUMNS, numbers_from=len(_FAMILY_COLUMNS))
    for row in cells:
        grid.add_row(*row)
    console.print(grid)
    for note in (*notes, _FAMILY_LEGEND):
        console.print(note, highlight=False)


def families_markdown(rows: list[Capability]) -> str:
    """The same as Markdown, for the documentation."""
    cells, notes = _family_cells(rows)
    lines = [_FAMILY_COLUMNS, ("---",) * len(_FAMILY_COLUMNS), *cells]
    drawn = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return "\n\n".join([drawn, "<br>\n".join(notes), _FAMILY_LEGEND])


_FAMILY_COLUMNS = (
    "family",
    "attention",
    "gates",
    "even cut",
    "uneven cut",
    "fewer KV heads",
    "refused",
)


_FAMILY_LEGEND = (
    "All of them: cuts with other counts in every layer, layers without heads. native: a "
    "plain config that loads anywhere. runtime: modeling_headprune.py lies beside the weights, "
    "which asks for trust_remote_code=True, or for headprune.from_pretrained. GGUF: later."
)


def _family_cells(rows: list[Capability]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Cells, and the numbered reasons that they point to."""
    notes: list[str] = []

    def note(reason: str) -> str:
        if reason not in notes:
            notes.append(reason)
        return f"({notes.index(reason) + 1})"

    cells: list[tuple[str, ...]] = []
    for row in rows:
        fewer = row.fewer_kv_heads
        if fewer not in ("native", "runtime"):
            fewer = f"no {note(fewer)}"
        refused = [f"{name} {note(reason)}" for name, reason in row.refused.items()]
        kinds = ", ".join(row.attention)
        name = f"{row.family} (transformers {row.since})" if row.since else row.family
        gates = "yes" if row.gates else "no text"
        cells.append((name, kinds, gates, row.even, row.uneven, fewer, ", ".join(refused)))
    return cells, [f"({number}) {reason}." for number, reason in enumerate(notes, 1)]


def evaluation(console: Console, report: Report) -> None:
    """Quality, size and speed, beside the base where there is one."""
    models = [report.model, *([report.against] if report.against else [])]
    compared = {label(one.name): (one.change, one.bounds) for one in report.differences}
    sure = {f"{100 * one.interval.confidence:g} % interval" for one in report.differences}
    grid = table("", *map(escape, _headings(models)), *["change", *sure] * bool(compared))
    for number, column in enumerate(grid.columns[1:], 1):
        if number > len(models):
            column.no_wrap = True
        elif console.width < _WIDE:
            grid.padding, column.max_width = (0, 1), 14
    differ = len({m.dtype for m in models}) > 1  # which halves the bytes of one of them
    for row in zip(*(_numbers(m, differ) for m in models), strict=True):
        name = row[0][0]
        grid.add_row(escape(name), *(value for _, value in row), *compared.get(name, ()))
    console.print(grid)
    columns, rows = report.needle()
    beside = " (of the base in brackets)" if report.against is not None else ""
    if rows:
        console.print("Needles found, by context and depth" + beside)
        found = table(*columns)
        for line in rows:
            found.add_row(*line)
        console.print(narrow(found))
    for m in report.model.metrics:
        if spec_of(m.name).of_two:
            console.print(f"{escape(label(m.name))} with the base: {m.value:.4f}")


def _headings(models: Sequence[ModelReport]) -> list[str]:
    """Names of models, without their folders where the names still differ."""
    short = [Path(model.name).name for model in models]
    if not all(short) or len({*short}) < len(short):
        short = [model.name for model in models]
    return short


def _numbers(model: ModelReport, with_dtype: bool) -> list[tuple[str, str]]:
    rows = [
        (label(m.name), f"{m.value:.4f}" + (f" ± {m.stderr:.4f}" if m.stderr else ""))
        for m in model.metrics
        if not spec_of(m.name).of_two
    ]
    cost, speed = model.cost, model.speed
    rows += [
        ("query heads", f"{cost.query_heads:,}"),
        ("KV heads", f"{cost.kv_heads:,}"),
        ("parameters", f"{cost.parameters:,}"),
        *([("computed in", model.dtype)] if with_dtype else []),
        ("KV bytes per token", f"{cost.kv_cache_bytes_per_token:,}"),
    ]
    if model.longest_context is not None:
        rows.append(("longest context, tokens", f"{model.longest_context:,}"))
    if speed is not None:
        rows.append(("prefill tokens/s", f"{speed.prefill_tokens_per_s:,.0f}"))
        if speed.decode_tokens_per_s is not None:
            rows.append(("decode tokens/s", f"{speed.decode_tokens_per_s:,.1f}"))
        for size, rate in speed.decode_by_batch.items():
            if size > 1:
                rows.append((f"decode tokens/s, batch of {size}", f"{rate:,.1f}"))
        rows.append(("peak memory, MiB", f"{speed.peak_memory_bytes / 2**20:,.0f}"))
    return rows
