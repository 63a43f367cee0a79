"""Results of training, cutting, merging, healing, exporting and verifying, at a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headprune.render import records
from headprune.render.blocks import Block, Code, Paragraph, Table, before_after, percent, plural
from headprune.render.next_commands import Given, after_cut
from headprune.render.terminal import show

if TYPE_CHECKING:
    import torch

    from headprune.compression.compress import Compressed, Outline
    from headprune.distillation.heal import Healed
    from headprune.formats.export import Exported
    from headprune.gates.train_gates import GatesRun
    from headprune.planning.kv_heads import KvPlan
    from headprune.result.convert_gqa import Converted, KvPreview
    from headprune.result.preview import Preview, ShapeCost
    from headprune.result.verify import Verification
    from headprune.result.write import Pruned
    from headprune.schemas.gates import GatesMetadata
    from headprune.schemas.scores import Scores

SHADES = "·░▒▓█"  # from the first heads to go to the last
_DRY = "Nothing was written (--dry-run)."
_RAGGED = (
    "single heads of a grouped-query model leave KV heads with unequal numbers of queries. Such a "
    "result loads through the runtime only; --unit kv-group and query-slot keep the groups equal."
)
_OWN_KEYS = (
    "in {} modules queries cannot absorb a map, as a norm stands between them and the scores, or "
    "the attention cannot be recorded: K is averaged or taken from one head of the group."
)


def gates_run(console: Console, run: GatesRun, next_command: str) -> None:
    """Print the open gates, their worth beside scores, and the next command."""
    m = run.metadata
    kept, of = f"{m.kept_heads} of {m.query_heads}", percent(m.kept_heads, m.query_heads)
    does = "stay" if m.window is None else f"keep the whole past, others {m.window.size:,} tokens"
    words = f"{kept} query heads {does} ({of}, unit {m.unit.value}), after {m.steps} steps."
    page: list[Block] = [Paragraph(words), *_judged(m), Paragraph(f"Written to {run.output}.")]
    if run.ragged:
        page.append(Paragraph(_RAGGED, "note"))
    show(console, [*page, Code(next_command, title="Next")])


def _judged(m: GatesMetadata) -> list[Block]:
    """Say which choice is written, and by how much it is better."""
    if m.judgement is None:
        return []
    reported_first, reported = m.judgement.report
    if not m.judgement.taken_after:
        words = (
            "Scores made the choice: no checkpoint of the gates is nearer to the original. "
            f"Divergence on text that chose nothing: {reported_first:.4f}, and {reported:.4f} by "
            "the last gates."
        )
    else:
        words = (
            f"Gates of step {m.judgement.taken_after} are written; they exchange "
            f"{plural(m.judgement.exchanged, 'unit')} of the choice by scores. Divergence from the "
            f"original on text that chose nothing: {reported:.4f}, by scores {reported_first:.4f}."
        )
    return [Paragraph(words)]


def preview(console: Console, preview: Preview, saved: Path | None, following: str) -> None:
    """Print a plan, its sizes and its use of budgets, its file and the next command."""
    counts = [
        ("query heads", preview.plan.query_heads, preview.plan.kept_heads),
        ("KV heads", *preview.kv_heads),
        ("parameters", *preview.parameters),
    ]
    uneven = len({len(part.keep) for part in preview.plan.attentions.values()}) > 1
    page: list[Block] = [
        *records.heads(preview.plan, preview.layout),
        before_after(counts),
        *_spent(preview.spent),
        *roles_lost(preview.roles_lost),
        *_costs(preview.shapes),
        Paragraph(f"{records.stored(preview.shape, uneven)} {_DRY if saved is None else ''}"),
    ]
    page += [Paragraph(f"Written to {saved}.")] if saved is not None else []
    page += [Code(following, title="Next")] if following else []
    show(console, page)


def _spent(spent: Mapping[str, tuple[float, float]]) -> list[Block]:
    rows = [(name, f"{most:,.6g}", f"{total:,.6g}") for name, (most, total) in spent.items()]
    return [Table(("budget", "at most", "plan"), rows)] if rows else []


def roles_lost(lost: Sequence[str] | None) -> list[Block]:
    """Return the roles that a plan loses, where known."""
    if lost is None:
        return []
    if not lost:
        return [Paragraph("Every role that heads have keeps one.")]
    return [Paragraph(f"No head stays of these roles: {', '.join(lost)}.", "warning")]


def _costs(costs: Sequence[ShapeCost]) -> list[Block]:
    rows = []
    for cost in costs:
        share = "-" if cost.evidence is None else percent(cost.evidence)
        rows.append((cost.shape, str(cost.heads or "-"), share, cost.why_not or cost.stored or ""))
    return [Table(("shape", "heads", "kept evidence", "stored"), rows)] if costs else []


def pruned(console: Console, result: Pruned, given: Given = ({}, {})) -> None:
    """Print the heads left, the sizes and the proof."""
    manifest = result.manifest
    page = [
        *records.heads(result.plan, manifest.layout),
        records.sizes([manifest]),
        *records.refit(manifest),
    ]
    show(console, [*page, *written(result, given)])


def converted(console: Console, result: Converted, given: Given = ({}, {})) -> None:
    """Print the merges of KV heads, the sizes and the proof."""
    how = f"merge {result.merge}, grouping {result.grouping}"
    if result.calibration_tokens:
        how += f", calibrated on {result.calibration_tokens:,} tokens, layer after layer"
    page: list[Block] = [Paragraph(how)]
    if result.planned is not None:
        page += _ways(result.planned)
    elif len(set(result.kv_heads.values())) > 1:
        rows = [(path, *map(str, counts)) for path, counts in result.kv_heads.items()]
        page.append(Table(("attention module", "KV heads", "after"), rows, modules=True))
    if result.own_keys:
        page.append(Paragraph(_OWN_KEYS.format(len(result.own_keys)), "note"))
    show(
        console,
        [*page, records.sizes([result.pruned.manifest]), *written(result.pruned, given)],
    )


def kv_preview(console: Console, preview: KvPreview) -> None:
    """Print a plan for KV heads, and the cost of an even one."""
    even = preview.even
    if not isinstance(even, str):
        even = f"{even / (preview.planned.cost or 1.0):.2f} x this choice's"
    rows = [("the same number in every layer", even)]
    counts = before_after([("KV heads", *preview.kv_heads)])
    costs = Table(("instead", "expected cost"), rows, names=2)
    show(console, [*_ways(preview.planned), counts, costs, Paragraph(_DRY)])


def _ways(planned: KvPlan) -> list[Block]:
    names = list(dict.fromkeys(way.said for ways in planned.ways.values() for way in ways))
    rows = []
    for path, record in planned.records().items():
        costs = {record.way: record.cost, **record.others}
        cells = [f"{costs[n] / (planned.cost or 1.0):.2%}" if n in costs else "" for n in names]
        rows.append((path, record.way, *cells))
    columns = ("attention module", "chosen", *names)
    note = Paragraph("Costs as shares of the whole choice's expected cost.")
    return [Table(columns, rows, names=2, modules=True), note]


def windowed(console: Console, result: Pruned, given: Given = ({}, {})) -> None:
    """Print the heads with a window, the sizes and the proof."""
    manifest = result.manifest
    page = [*records.heads(result.plan, manifest.layout), records.sizes([manifest])]
    show(console, [*page, *written(result, given)])


def healed(console: Console, result: Healed, given: Given = ({}, {})) -> None:
    """Print the gain of healing and the proof."""
    rows = [
        ("before", f"{result.before:.4f}"),
        (f"best, after {result.taken_after} of {result.steps} steps", f"{result.after:.4f}"),
    ]
    if result.sink_logits:
        rows.append(("query heads with a sink logit", f"{result.sink_logits}"))
    table = Table(("loss of healing, held-out text", ""), rows)
    show(console, [table, *written(result.pruned, given)])


def exported(console: Console, result: Exported) -> None:
    """Print the files of an export and their proof."""
    record = result.record
    page: list[Block] = [Paragraph(change, "note") for change in record.changes]
    page.append(Paragraph(str(record.proof), "verified"))
    files = ", ".join(record.files)
    page.append(Paragraph(f"Written to {result.output}: {files} ({result.bytes:,} bytes)."))
    show(console, [*page, *[Code(str(result.serve), title="Serve it")] * bool(result.serve)])


def verification(console: Console, result: Verification) -> None:
    """Print all checks and their outcomes."""
    rows = [("passed" if c.passed else "FAILED", c.name, c.found) for c in result.checks]
    notes = [Paragraph(result.not_run, "note")] if result.not_run else []
    show(console, [Table(("", "check", "outcome"), rows, names=3), *notes])


def written(result: Pruned, given: Given) -> list[Block]:
    """Return the loss by windows, the proof, and commands that measure and serve the result."""
    from headprune.packages import missing
    from headprune.result.engines import serving

    manifest, output = result.manifest, result.output
    stored = records.how_stored(manifest)
    page: list[Block] = [*records.windows(manifest), *records.proof(manifest)]
    page.append(Paragraph(f"{stored} Written to {output}."))
    if measure := after_cut(result, given):
        page.append(Code(measure, title="Measure it on other text"))
    for engine, line in serving(manifest, output):
        if "--to gguf" not in line or not missing("gguf"):
            page.append(Code(line, title=engine))
    return page


def outline(console: Console, result: Outline) -> None:
    """Print the candidates of a dry run."""
    page = [
        f"To be kept: {result.goal}.",
        f"Text, a part of each held out: {', '.join(result.texts)}.",
        "Candidates, measured on the held-out text; the best is taken:",
        *(f"  {name}" for name in result.candidates),
    ]
    if result.heal_steps is not None:
        page.append(f"Then healed for {result.heal_steps} steps, if that helps.")
    show(console, [*map(Paragraph, page), Paragraph("Nothing was written (--dry-run).")])


def compressed(console: Console, result: Compressed, given: Given = ({}, {})) -> None:
    """Print all candidates, the choice and the proof."""
    choice = result.choice
    page: list[Block] = records.chosen(choice)
    texts = choice.chosen.by_text
    if len(texts) > 1:
        cells = [("", *(f"{value:.4f}" for value in texts.values()))]
        page.append(Table((f"{choice.measure}, taken", *texts), cells))
    page += written(result.pruned, given)
    if result.unseen_beyond is not None:
        words = (
            f"contexts of more than {result.unseen_beyond:,} tokens were not measured: "
            "evaluate it with --needle."
        )
        page.append(Paragraph(words, "note"))
    show(console, page)


def scores_json(scores: Scores) -> str:
    """Return metadata and scores for ``--json``."""
    content = scores.metadata.model_dump(mode="json")
    content["scores"] = {name: values.tolist() for name, values in scores.scores.items()}
    return json.dumps(content, indent=2)


def scores(console: Console, scores: Scores, output: Path, next_command: str) -> None:
    """Print scores and the next command."""
    heat_maps(console, scores)
    about = scores.metadata
    words = (
        f"{sum(about.units)} units ({about.unit.value}) of {len(about.modules)} attention modules, "
        f"{about.tokens:,} tokens. Written to {output}."
    )
    show(console, [Paragraph(words), Code(next_command, title="Next")])


def heat_maps(console: Console, scores: Scores) -> None:
    """Print a line per module and a sign per unit, by rank."""
    page: list[Block] = []
    for name, values in scores.scores.items():
        rows = []
        for module, ranks in _by_module(scores, values):
            shades = (SHADES[min(int(rank * len(SHADES)), len(SHADES) - 1)] for rank in ranks)
            rows.append((module, "".join(shades)))
        title = f"{name}  {scores.metadata.criteria[name]}"
        columns = ("attention module", scores.metadata.unit.value)
        page.append(Table(columns, rows, title, names=2, modules=True))
    becomes = "go" if scores.metadata.window is None else "get a window"
    show(console, [*page, Paragraph(f"{SHADES[0]} would {becomes} first, {SHADES[-1]} last")])


def _by_module(scores: Scores, values: torch.Tensor) -> Sequence[tuple[str, list[float]]]:
    order = values.argsort(stable=True).argsort(stable=True)
    ranks = order.double() / max(len(values) - 1, 1)
    parts = ranks.split(scores.metadata.units)
    return [(m, part.tolist()) for m, part in zip(scores.metadata.modules, parts, strict=True)]
