"""Results as tables and pictures for a terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headprune.schemas.plan import AttentionPlan, Plan, Shape

if TYPE_CHECKING:
    from headprune.distillation.heal import Healed
    from headprune.evaluation.report import ModelReport, Report
    from headprune.export.convert_gqa import Converted
    from headprune.export.prune import Preview
    from headprune.export.publish import Pruned
    from headprune.family.capabilities import Capability
    from headprune.gates.train_gates import GatesRun
    from headprune.gates.trainer import GateStep
    from headprune.model.inspection import Inspection
    from headprune.pickles.import_pickle import Imported
    from headprune.proof.verify import Verification
    from headprune.schemas.manifest import Manifest


def table(*columns: str, numbers_from: int = 1) -> Table:
    """A plain table: the first columns hold names, the others numbers."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if position >= numbers_from else "left"
        # nothing is cut off
        grid.add_column(column, justify=side, overflow="fold")
    return grid


def module_table(
    console: Console,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[str | Text]],
    numbers_from: int = 1,
) -> None:
    """A table with a row per attention module, whose names are shortened where lines would break.

    Args:
        console: Where it is printed.
        columns: The columns behind that of the modules.
        rows: Their cells, by path.
        numbers_from: The first column of numbers.
    """

    def filled(first: str, names: Sequence[str]) -> Table:
        grid = table(first, *columns, numbers_from=numbers_from)
        for name, cells in zip(names, rows.values(), strict=True):
            grid.add_row(escape(name), *cells)
        return grid

    grid = filled("attention module", list(rows))
    wide = grid.__rich_measure__(console, console.options.update(width=10_000)).maximum
    if wide <= console.width:
        console.print(grid)
        return
    names, pattern = shortened(list(rows))
    console.print(filled("module", names))
    if pattern:
        console.print(f"[bright_black]attention modules: {escape(pattern)}[/]", soft_wrap=True)


def _alike(lists: Sequence[Sequence[str]]) -> int:
    """With how many equal items all of them begin."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def shortened(paths: Sequence[str]) -> tuple[list[str], str]:
    """Paths without what they all begin and end with, and the pattern that has it.

    ``["model.layers.0.attn", "model.layers.1.attn"]`` becomes ``["0", "1"]`` and
    ``"model.layers.*.attn"``; no path becomes empty.
    """
    parts = [path.split(".") for path in paths]
    most = min(map(len, parts), default=1) - 1
    before = _alike([part[:most] for part in parts])
    after = _alike([part[before + 1 :][::-1] for part in parts])
    if not before + after:
        return list(paths), ""
    names = [".".join(part[before : len(part) - after]) for part in parts]
    ends = parts[0][:before], parts[0][len(parts[0]) - after :]
    return names, ".".join([*ends[0], "*", *ends[1]])


def folded(rows: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Neighbouring layers with the same cells as one: ``layers.0-29.self_attn`` for thirty."""
    runs: list[tuple[re.Match[str] | None, str, int, Sequence[str]]] = []
    latest: dict[str, int] = {}  # where the last run of a kind of module stands
    for path, cells in rows.items():
        layer = re.search(r"(?<=\.)\d+(?=\.)", path)
        kind = path if layer is None else f"{path[: layer.start()]}*{path[layer.end() :]}"
        place = latest.get(kind)
        if layer is not None and place is not None:
            first, start, last, before = runs[place]
            if tuple(before) == tuple(cells) and int(layer[0]) == last + 1:
                runs[place] = first, start, last + 1, before
                continue
        latest[kind] = len(runs)
        runs.append((layer, path, int(layer[0]) if layer else 0, cells))
    names = {}
    for layer, path, last, cells in runs:
        if layer is not None and int(layer[0]) != last:
            path = f"{path[: layer.end()]}-{last}{path[layer.end() :]}"
        names[path] = cells
    return names


def head_picture(part: AttentionPlan) -> Text:
    """One layer's heads by id, kept and gone, with a gap between KV groups: ``■■■ ··· ■■■``."""
    from headprune.export.card import KEPT, heads_line  # with torch: not for every table

    picture = Text()
    for sign in heads_line(part):
        picture.append(sign, "green" if sign == KEPT else "bright_black")
    return picture


def plan_picture(console: Console, plan: Plan) -> None:
    """All layers of a plan, one line each."""
    rows = {
        name: (head_picture(part), f"{len(part.keep)}/{part.query_heads}")
        for name, part in plan.attentions.items()
    }
    module_table(console, ("heads", "kept"), rows, numbers_from=2)


def before_after(rows: list[tuple[str, int, int]]) -> Table:
    """A table of counts before and after, with the share that is left."""
    grid = table("", "before", "after", "left")
    for name, before, after in rows:
        left = f"{after / before:.1%}" if before else "-"
        grid.add_row(name, f"{before:,}", f"{after:,}", left)
    return grid


def step_numbers(record: GateStep) -> str:
    """The moving numbers beside the progress bar."""
    target = "" if record.target_heads is None else f"/{record.target_heads:.0f}"
    phase = " settled" if record.settled else ""
    return f"loss {record.loss:.3f} heads {record.expected_heads:.1f}{target}{phase}"


def gates_run(console: Console, run: GatesRun, next_command: str) -> None:
    """What train-gates ended with, and the command that comes next."""
    m = run.metadata
    share = m.kept_heads / max(m.query_heads, 1)
    console.print(
        f"Gates of [bold]{m.kept_heads} of {m.query_heads}[/] heads stay open ({share:.1%}, unit "
        f"{m.unit.value}) after {m.steps} steps; last {m.objective} loss {m.final_loss:.4f}."
    )
    console.print(f"Written to {escape(str(run.output))}.")
    if run.ragged:
        console.print(
            "[yellow]note:[/] single heads of a grouped-query model leave KV heads with unequal "
            "numbers of queries. Such a result loads through the runtime only; --unit kv-group and "
            "query-slot keep the groups equal."
        )
    next_line(console, next_command)


def next_line(console: Console, command: str) -> None:
    """The command that comes next, on one line, as it is pasted."""
    console.print("Next:\n")
    console.print(f"  {command}", soft_wrap=True, markup=False, emoji=False)


def preview(console: Console, preview: Preview) -> None:
    """The plan, drawn, and what it would leave."""
    plan_picture(console, preview.plan)
    console.print(
        before_after(
            [
                ("query heads", preview.plan.query_heads, preview.plan.kept_heads),
                ("KV heads", *preview.kv_heads),
                ("parameters", *preview.parameters),
            ]
        )
    )
    if preview.shapes:
        grid = table("--shape", "heads", "kept evidence", "stored", numbers_from=1)
        for cost in preview.shapes:
            if cost.why_not is None:
                grid.add_row(cost.shape, str(cost.heads), f"{cost.evidence:.1%}", cost.stored)
            else:
                grid.add_row(cost.shape, "-", "-", escape(cost.why_not))
        console.print(grid)
    counts = {len(part.keep) for part in preview.plan.attentions.values()}
    console.print(f"{_stored(preview.shape, len(counts) > 1)} Nothing was written (--dry-run).")


def pruned(console: Console, result: Pruned) -> None:
    """The heads that are left, the sizes, and the proof."""
    manifest = result.manifest
    plan_picture(console, result.plan)
    _sizes(console, manifest)
    if manifest.refit is not None:
        made = manifest.refit
        console.print(
            f"W_O refitted in {made.modules} modules on {made.tokens:,} tokens: error of the "
            f"outputs {made.error_before:.1%} -> {made.error_after:.1%}"
        )
    _proof(console, manifest)
    _written(console, result)


def imported(console: Console, result: Imported) -> None:
    """What came over from the pickles, what stayed behind, and the command that comes next."""
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in result.dtypes.items())
    console.print(
        f"[bold green]the same bytes[/]: {result.tensors:,} tensors of {result.weight_bytes:,} "
        f"bytes ({kinds}), from {escape(', '.join(result.files))}"
    )
    if result.modules:
        console.print(f"and the weights of {escape(', '.join(result.modules))}")
    if result.wrapper is not None:
        console.print(f"found under the key '{escape(result.wrapper)}'")
    for target, source in result.tied.items():
        console.print(f"left out: {escape(target)}, which loading ties to {escape(source)}")
    if result.left_out:
        console.print(f"left behind: {escape(', '.join(result.left_out))}")
    console.print(f"The pickles were read under: {', '.join(result.protections)}.")
    if "seccomp" not in result.protections:
        console.print("[yellow]note:[/] this platform has no seccomp filter to confine the reader.")
    console.print(f"Written to {escape(str(result.output))}. Next:\n")
    console.print(f"  headprune inspect {escape(shlex.quote(str(result.output)))}", soft_wrap=True)


def converted(console: Console, result: Converted) -> None:
    """How KV heads were merged, the sizes, and the proof."""
    manifest = result.pruned.manifest
    how = f"merge [bold]{result.merge}[/], grouping {result.grouping}"
    if result.calibration_tokens:
        how += f", calibrated on {result.calibration_tokens:,} tokens, layer after layer"
    console.print(how)
    counts = sorted(set(result.kv_heads.values()), reverse=True)
    if len(counts) > 1:
        rows = {path: list(map(str, counts)) for path, counts in result.kv_heads.items()}
        module_table(console, ("KV heads", "after"), rows)
    if result.own_keys:
        console.print(
            f"[yellow]note:[/] in {len(result.own_keys)} modules queries cannot absorb a map, as "
            "a norm stands between them and the scores, or the attention cannot be listened to: V "
            "is merged as asked, K is averaged or taken from one head of the group."
        )
    _sizes(console, manifest)
    _proof(console, manifest)
    _written(console, result.pruned)


def healed(console: Console, result: Healed) -> None:
    """What healing brought, and the proof of what was written."""
    grid = table("divergence from the teacher, held-out text", "")
    grid.add_row("before", f"{result.before:.4f}")
    grid.add_row(f"after {result.steps} steps", f"{result.after:.4f}")
    console.print(grid)
    manifest = result.pruned.manifest
    _proof(console, manifest)
    _written(console, result.pruned)


def _proof(console: Console, manifest: Manifest) -> None:
    from headprune.export.card import proof_rows

    console.print("[bold green]proved[/]: the same outputs, relative to the largest of them")
    grid = table("", "difference")
    for row in proof_rows(manifest):
        grid.add_row(*row)
    console.print(grid)


def _sizes(console: Console, manifest: Manifest) -> None:
    from headprune.export.card import sizes

    console.print(before_after(sizes(manifest)))


def verification(console: Console, result: Verification) -> None:
    """What was looked at, and what was found."""
    grid = table("", "check", "found", numbers_from=3)
    for check in result.checks:
        mark = Text("passed", "green") if check.passed else Text("FAILED", "bold red")
        grid.add_row(mark, escape(check.name), escape(check.found))
    console.print(grid)
    if result.not_run:
        console.print(f"[yellow]note:[/] {escape(result.not_run)}")


def _written(console: Console, result: Pruned) -> None:
    stored = _stored(result.manifest.shape, result.manifest.uneven)
    console.print(f"{stored} Written to {escape(str(result.output))}.")


def _stored(shape: Shape, uneven: bool) -> str:
    if shape is Shape.NATIVE:
        return "Plain config: loads anywhere, without extra code."
    why = "Uneven heads" if uneven else "Heads that the stock class has no setting for"
    return (
        f"{why}: loads with headprune.from_pretrained, or with "
        "AutoModel*.from_pretrained(..., trust_remote_code=True)."
    )


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
    grid = table("", *(escape(m.name) for m in models))
    for row in zip(*(_numbers(m) for m in models), strict=True):
        grid.add_row(row[0][0], *(value for _, value in row))
    console.print(grid)
    fidelity = {m.name: m for m in report.model.metrics}
    for name in ("mean_cosine", "similarity_correlation"):
        if name in fidelity:
            console.print(f"{name.replace('_', ' ')} with the base: {fidelity[name].value:.4f}")
    for d in report.differences:
        i = d.interval
        console.print(
            f"{d.name.replace('_', ' ')}, {d.kind}: [bold]{i.estimate:.4f}[/], "
            f"{i.confidence:.0%} interval {i.low:.4f} to {i.high:.4f} (n = {i.n}, paired)"
        )


def _numbers(model: ModelReport) -> list[tuple[str, str]]:
    rows = [
        (m.name.replace("_", " "), f"{m.value:.4f}")
        for m in model.metrics
        if m.name not in ("mean_cosine", "similarity_correlation")
    ]
    cost, speed = model.cost, model.speed
    rows += [
        ("query heads", f"{cost.query_heads:,}"),
        ("KV heads", f"{cost.kv_heads:,}"),
        ("parameters", f"{cost.parameters:,}"),
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
