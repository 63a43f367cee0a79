"""What a run says in words and rows; nothing here knows HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headprune.evaluation.metrics import label
from headprune.exporting import card
from headprune.reports.charts import mebibytes, short_name, speeds
from headprune.reports.view import Facts, Quality, ShownEvaluation, ShownRun
from headprune.schemas.manifest import LineageStep
from headprune.schemas.plan import Shape
from headprune.schemas.records import Healing, Merging, Migration


@dataclass(frozen=True)
class Tile:
    """One number of the first screen.

    Attributes:
        name: What it is.
        value: The number.
        detail: What it is to be read against.
        state: "good" for a proof that passed, otherwise "".
    """

    name: str
    value: str
    detail: str
    state: str = ""


def tiles(run: ShownRun) -> list[Tile]:
    """What came out, at a glance."""
    found = [*_size_tiles(run), *_quality_tiles(run), *_speed_tiles(run)]
    manifest = run.manifest
    if manifest is not None:
        proof = manifest.proof
        detail = "every tensor compared, no outputs"
        if proof is not None:
            detail = f"differs by {proof.gated_vs_reloaded:.1e}, allowed {proof.tolerance:.0e}"
        found.append(Tile("proof", "passed", detail, "good"))
        found.append(Tile("loads", *loads(manifest.shape)))
    elif run.head_map is not None and run.head_map.only_scored:
        heads = sum(len(layer.cells) for layer in run.head_map.layers)
        found.append(Tile("query heads", f"{heads:,}", "scored"))
    elif run.histories:
        history = run.histories[0]
        found.append(Tile("steps", f"{history.records:,}", f"last loss {history.loss[-1]:.4g}"))
    for check in run.checks:
        held = sum(verdict == "passed" for _, _, verdict in check.rows)
        detail = f"{held} of {len(check.rows)} limits hold"
        found.append(Tile("check", check.verdict, detail, "good" if check.passed else "bad"))
    return found


def loads(shape: Shape) -> tuple[str, str]:
    """How a result loads: in a word, and in a sentence."""
    if shape is Shape.NATIVE:
        return "anywhere", "a plain config; no other code"
    return "by runtime", "with remote code, or headprune installed"


def _size_tiles(run: ShownRun) -> list[Tile]:
    rows = size_rows(run)
    shown = []
    for name, before, after in rows:
        left = f"{after / before:.1%} left" if before else ""
        if name == "KV bytes per token":
            shown.append(Tile("KV cache per token", f"{after:,} B", f"{left} of {before:,} B"))
        elif name == "parameters":
            shown.append(Tile(name, short(after), f"{left} of {short(before)}"))
        else:
            shown.append(Tile(name, f"{after:,}", f"{left} of {before:,}"))
    return shown


def size_rows(run: ShownRun) -> list[tuple[str, int, int]]:
    """Counts before and after: of the original where it was evaluated, or of the chain's start."""
    evaluation, manifest = run.evaluation, run.manifest
    rows: list[tuple[str, int, int]] = []
    if evaluation is not None and evaluation.original_size is not None:
        before, after = evaluation.original_size, evaluation.size
        rows = [
            ("query heads", before.query_heads, after.query_heads),
            ("KV heads", before.kv_heads, after.kv_heads),
            ("parameters", before.parameters, after.parameters),
        ]
        if before.kv_cache_bytes_per_token:
            cache = before.kv_cache_bytes_per_token, after.kv_cache_bytes_per_token
            rows.append(("KV bytes per token", *cache))
    elif manifest is not None:
        rows = card.sizes((run.chain[0], manifest))
    elif run.head_map is not None and not run.head_map.only_scored:
        heads = sum(len(layer.cells) for layer in run.head_map.layers)
        rows = [("query heads", heads, sum(layer.kept for layer in run.head_map.layers))]
    return rows


def _quality_tiles(run: ShownRun) -> list[Tile]:
    main = run.evaluation.main if run.evaluation else None
    if run.evaluation is None or main is None:
        return []
    return [Tile(label(main.name), f"{main.value:.4g}", compared(main, run.evaluation.the_base))]


def compared(quality: Quality, the_base: str) -> str:
    """A metric against that of the base, with its interval."""
    interval, base = quality.interval, quality.base
    if interval is not None:
        sign = f"× {the_base}" if interval.kind == "ratio" else f"from {the_base}"
        plus = "" if interval.kind == "ratio" else "+"
        return (
            f"{interval.estimate:{plus}.3f} {sign} ({100 * interval.confidence:g}%: "
            f"{interval.low:{plus}.3f} to {interval.high:{plus}.3f})"
        )
    return f"n = {quality.n:,}" if base is None else f"{the_base} has {base:.4g}"


def _speed_tiles(run: ShownRun) -> list[Tile]:
    evaluation = run.evaluation
    if evaluation is None:
        return []
    ours = speeds(evaluation.size)
    theirs = speeds(evaluation.base_size) if evaluation.base_size else {}
    names = [n for n in ours if n != "prefill"] or list(ours)
    if not names:
        return []
    name = names[-1]
    what = f"decoding, {name}" if name != "prefill" else "prefill"
    if theirs.get(name):
        times = f"{ours[name] / theirs[name]:.2f} ×"
        return [Tile(what, times, f"{evaluation.the_base}'s tokens/s")]
    return [Tile(what, f"{ours[name]:,.1f}", "tokens/s")]


def short(count: int) -> str:
    """A large count in a few characters."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


def comparison(runs: Sequence[ShownRun]) -> tuple[list[str], list[list[str]]]:
    """Runs side by side: one column each, one row per number that any of them has."""
    columns: list[dict[str, str]] = []
    for run in runs:
        column = {"started from": run.source}
        for name, before, after in size_rows(run):
            column[name] = f"{after:,} of {before:,} ({after / before:.1%})" if before else "-"
        evaluation = run.evaluation
        if evaluation is not None:
            column["measured on"] = short_name(evaluation.data)
            for quality in evaluation.qualities:
                name = label(quality.name)
                column[name] = f"{quality.value:.4f}"
                if quality.interval is not None:
                    against = evaluation.the_base
                    column[f"{name}, against {against}"] = compared(quality, against)
            for name, value in speed_cells(evaluation).items():
                column[name] = value
        if run.manifest is not None:
            column["proof"] = f"passed, {run.manifest.proven}"
            column["loads"] = loads(run.manifest.shape)[0]
        columns.append(column)
    names = list(dict.fromkeys(name for column in columns for name in column))
    return ["", *(run.name for run in runs)], [
        [name, *(column.get(name, "-") for column in columns)] for name in names
    ]


def speed_cells(evaluation: ShownEvaluation) -> dict[str, str]:
    """Tokens per second, with ratios to the base where it was timed."""
    theirs = speeds(evaluation.base_size) if evaluation.base_size else {}
    cells = {}
    for name, rate in speeds(evaluation.size).items():
        what = "prefill tokens/s" if name == "prefill" else f"decoded tokens/s, {name}"
        ratio = f" ({rate / theirs[name]:.2f} ×)" if theirs.get(name) else ""
        cells[what] = f"{rate:,.1f}{ratio}"
    # without a GPU it is that of the whole process, which held both models
    if evaluation.size.peak_memory_bytes and str(evaluation.size.device).startswith("cuda"):
        cells["peak memory"] = mebibytes(evaluation.size.peak_memory_bytes)
    return cells


def measured(evaluation: ShownEvaluation) -> tuple[list[str], list[list[str]]]:
    """All numbers of one evaluation, beside its base."""
    rows = [
        [
            label(q.name),
            f"{q.value:.4f}",
            "-" if q.base is None else f"{q.base:.4f}",
            "-" if q.interval is None else compared(q, evaluation.the_base),
        ]
        for q in evaluation.qualities
    ]
    sizes: list[tuple[str, Callable[[object], object]]] = [
        ("parameters", lambda size: getattr(size, "parameters", None)),
        ("attention parameters", lambda size: getattr(size, "attention_parameters", None)),
        ("query heads", lambda size: getattr(size, "query_heads", None)),
        ("KV heads", lambda size: getattr(size, "kv_heads", None)),
        ("KV bytes per token", lambda size: getattr(size, "kv_cache_bytes_per_token", None)),
    ]
    for name, get in sizes:
        if get(evaluation.size):  # an encoder has no cache
            rows.append([name, *_both(get(evaluation.size), get(evaluation.base_size))])
    ours = speeds(evaluation.size)
    theirs = speeds(evaluation.base_size) if evaluation.base_size else {}
    for name, rate in ours.items():
        what = "prefill tokens/s" if name == "prefill" else f"decoded tokens/s, {name}"
        rows.append([what, *_both(rate, theirs.get(name))])
    beside = evaluation.beside
    return ["", "model", beside, f"model against {beside}"], rows


def _both(ours: object, theirs: object) -> list[str]:
    def text(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.1f}"
        return f"{value:,}" if isinstance(value, int) else "-"

    ratio = "-"
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and theirs:
        ratio = f"{ours / theirs:.3f} ×"
    return [text(ours), text(theirs), ratio]


def route_rows(run: ShownRun) -> Facts:
    """Which ways of loading lead to the result."""
    if run.manifest is None:
        return ()
    native = run.manifest.shape is Shape.NATIVE
    return (
        ("AutoModel*.from_pretrained", "yes" if native else "refuses: sizes differ"),
        ("the same, with trust_remote_code=True", "not needed" if native else "yes"),
        ("headprune.from_pretrained", "yes"),
    )


def chain_rows(run: ShownRun) -> list[tuple[str, str, str]]:
    """How the result came about, one row per command: time, what, proof."""
    return [(step.created, _made(step), step.proven) for step in run.chain]


def _made(step: LineageStep) -> str:
    done = step.done
    if isinstance(done, Healing):
        known = done.before is not None and done.after is not None
        moved = f" (divergence {done.before:.4g} to {done.after:.4g})" if known else ""
        return f"healed for {done.steps} steps{moved}"
    if isinstance(done, Migration):
        return "rewritten for transformers 5"
    name, (before, after) = "query heads", step.query_heads
    if isinstance(done, Merging):
        name, (before, after) = "KV heads", step.kv_heads
    return f"{name} {before} to {after}" + (", W_O refitted" if step.refit is not None else "")
