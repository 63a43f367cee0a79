"""What was trained, cut, merged, healed and verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headprune.schemas.plan import Shape

if TYPE_CHECKING:
    from headprune.distillation.heal import Healed
    from headprune.exporting.convert_gqa import Converted, KvPreview
    from headprune.exporting.preview import Preview, ShapeCost
    from headprune.exporting.write import Pruned
    from headprune.formats.export import Exported
    from headprune.gates.train_gates import GatesRun
    from headprune.planning.kv_heads import KvPlan
    from headprune.proof.verify import Verification
    from headprune.schemas.manifest import Manifest
from headprune.console.scores import roles_lost
from headprune.console.tables import before_after, module_table, next_line, plan_picture, table


def gates_run(console: Console, run: GatesRun, next_command: str) -> None:
    """What train-gates ended with, and the command that comes next."""
    m = run.metadata
    share = m.kept_heads / max(m.query_heads, 1)
    console.print(
        f"Gates of [bold]{m.kept_heads} of {m.query_heads}[/] heads stay open ({share:.1%}, unit "
        f"{m.unit.value}, method {m.method.value}) after {m.steps} steps; last {m.objective} loss "
        f"{m.final_loss:.4f}."
    )
    console.print(f"Written to {escape(str(run.output))}.")
    if run.ragged:
        console.print(
            "[yellow]note:[/] single heads of a grouped-query model leave KV heads with unequal "
            "numbers of queries. Such a result loads through the runtime only; --unit kv-group and "
            "query-slot keep the groups equal."
        )
    next_line(console, next_command)


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
    roles_lost(console, preview.roles_lost)
    _costs(console, "--layout", preview.shapes)
    _costs(console, "--for", preview.engines)
    counts = {len(part.keep) for part in preview.plan.attentions.values()}
    console.print(f"{_stored(preview.shape, len(counts) > 1)} Nothing was written (--dry-run).")


def _costs(console: Console, option: str, costs: Sequence[ShapeCost]) -> None:
    """What the values of an option would keep of the evidence; a row for all that are alike."""
    if not costs:
        return
    grid = table(option, "heads", "kept evidence", "stored", numbers_from=1)
    rows: dict[tuple[str, ...], list[str]] = {}
    for cost in costs:
        share = "-" if cost.evidence is None else f"{cost.evidence:.1%}"
        cells = [str(cost.heads), share, str(cost.stored)]
        if cost.why_not is not None:
            cells = ["-", "-", escape(cost.why_not)]
        rows.setdefault(tuple(cells), []).append(cost.shape)
    for row, names in rows.items():
        grid.add_row(", ".join(names), *row)
    console.print(grid)


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
        if made.held_out is not None:
            worth = made.held_out
            console.print(
                f"on {worth.tokens:,} tokens that it was not fitted to: {worth.measure} "
                f"{worth.without:.4g} without -> {worth.refitted:.4g} with it"
            )
    proof(console, manifest)
    written(console, result)


def converted(console: Console, result: Converted) -> None:
    """How KV heads were merged, the sizes, and the proof."""
    manifest = result.pruned.manifest
    how = f"merge [bold]{result.merge}[/], grouping {result.grouping}"
    if result.calibration_tokens:
        how += f", calibrated on {result.calibration_tokens:,} tokens, layer after layer"
    console.print(how)
    counts = sorted(set(result.kv_heads.values()), reverse=True)
    if result.planned is not None:
        _ways(console, result.planned)
    elif len(counts) > 1:
        rows = {path: list(map(str, counts)) for path, counts in result.kv_heads.items()}
        module_table(console, ("KV heads", "after"), rows)
    if result.own_keys:
        console.print(
            f"[yellow]note:[/] in {len(result.own_keys)} modules queries cannot absorb a map, as "
            "a norm stands between them and the scores, or the attention cannot be recorded: V "
            "is merged as asked, K is averaged or taken from one head of the group."
        )
    _sizes(console, manifest)
    proof(console, manifest)
    written(console, result.pruned)


def kv_preview(console: Console, preview: KvPreview) -> None:
    """What every layer would keep, merge or lose, and what the other ways would have cost."""
    _ways(console, preview.planned)
    console.print(before_after([("KV heads", *preview.kv_heads)]))
    free = preview.free or 1.0
    grid = table("--for", "expected cost", numbers_from=2)
    for name, cost in preview.engines.items():
        x = escape(cost) if isinstance(cost, str) else f"{cost / free:.2f} x the free choice's"
        grid.add_row(name, x)
    console.print(grid)
    console.print("Nothing was written (--dry-run).")


def _ways(console: Console, planned: KvPlan) -> None:
    """One line per module: the way it goes, and what every way was expected to cost, of all."""
    records = planned.records()
    names = list(dict.fromkeys(way.said for ways in planned.ways.values() for way in ways))
    total = planned.cost or 1.0
    rows = {}
    for path, record in records.items():
        costs = {record.way: record.cost, **record.others}
        cells = [f"{costs[name] / total:.2%}" if name in costs else "" for name in names]
        rows[path] = (record.way, *cells)
    module_table(console, ("chosen", *names), rows, numbers_from=2)
    console.print("Costs as shares of what the whole choice is expected to cost.")


def healed(console: Console, result: Healed) -> None:
    """What healing brought, and the proof of what was written."""
    grid = table("divergence from the teacher, held-out text", "")
    grid.add_row("before", f"{result.before:.4f}")
    grid.add_row(f"best, after {result.taken_after} of {result.steps} steps", f"{result.after:.4f}")
    console.print(grid)
    manifest = result.pruned.manifest
    proof(console, manifest)
    written(console, result.pruned)


def proof(console: Console, manifest: Manifest) -> None:
    """What the verification measured."""
    from headprune.exporting.card import proof_columns, proof_rows

    said = "every tensor holds slices of the original; no outputs were compared"
    if manifest.proof is not None:
        said = "outputs match; differences relative to the largest output"
    console.print(f"[bold green]verified[/]: {said}")
    grid = table(*proof_columns(manifest))
    for row in proof_rows(manifest):
        grid.add_row(*row)
    console.print(grid)


def _sizes(console: Console, manifest: Manifest) -> None:
    from headprune.exporting.card import sizes

    console.print(before_after(sizes([manifest])))


def exported(console: Console, result: Exported) -> None:
    """What was written, and how it was proven."""
    record = result.record
    for change in record.changes:
        console.print(f"[yellow]note:[/] {escape(change)}")
    console.print(f"[bold green]verified[/], {escape(str(record.proof))}")
    console.print(
        f"Written to {escape(str(result.output))}: {escape(', '.join(record.files))} "
        f"({result.bytes:,} bytes)."
    )
    if result.serve:
        console.print(f"Serve it: {escape(result.serve)}", soft_wrap=True)


def verification(console: Console, result: Verification) -> None:
    """What was looked at, and what was found."""
    grid = table("", "check", "found", numbers_from=3)
    if console.width < 100:  # a call breaks between its words
        words = [word for check in result.checks for word in check.name.split()]
        grid.columns[1].width = min(max(map(len, words), default=5), console.width // 2)
    for check in result.checks:
        mark = Text("passed", "green") if check.passed else Text("FAILED", "bold red")
        grid.add_row(mark, escape(check.name), escape(check.found))
    console.print(grid)
    if result.not_run:
        console.print(f"[yellow]note:[/] {escape(result.not_run)}")


def written(console: Console, result: Pruned) -> None:
    """How the result loads, where it lies, and the commands that serve it."""
    from headprune.console.next_commands import after_cut
    from headprune.exporting.engines import serving
    from headprune.packages import missing

    stored = _stored(result.manifest.shape, result.manifest.uneven)
    console.print(f"{stored} Written to {escape(str(result.output))}.")
    if measured := after_cut(result):
        console.print(
            f"\nMeasure it on text that it was not made on:\n  {escape(measured)}", soft_wrap=True
        )
    for engine, line in serving(result.manifest, result.output, result.output):
        if "--to gguf" in line and missing("gguf"):
            continue
        console.print(f"\n{engine}:\n  {escape(line)}", soft_wrap=True)


def _stored(shape: Shape, uneven: bool) -> str:
    if shape is Shape.NATIVE:
        return "Plain config: loads anywhere, without extra code."
    why = "Uneven heads" if uneven else "Heads that the stock class has no setting for"
    return (
        f"{why}: loads with headprune.from_pretrained, or with "
        "AutoModel*.from_pretrained(..., trust_remote_code=True)."
    )
