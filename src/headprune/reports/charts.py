"""The charts of a report: which there are, and what each says in words and in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.evaluation import metrics
from headprune.io import figures
from headprune.io.figures import Series
from headprune.reports.view import History, Quality, ShownEvaluation, ShownRun
from headprune.role import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS = (4_096, 32_768, 131_072)


@dataclass(frozen=True)
class Chart:
    """A figure with what it says to those who cannot see it.

    Attributes:
        title: Its title.
        figure: The drawing, without a title.
        alt: What it shows, in a sentence.
        columns: Heads of its table.
        rows: The numbers.
        note: What to know when reading it.
        wide: Whether it needs the width of the page.
    """

    title: str
    figure: Figure
    alt: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    wide: bool = False


def quality_charts(runs: Sequence[ShownRun]) -> list[Chart]:
    """Quality against size: one chart per metric, data, conditions and base."""
    groups: dict[tuple[object, ...], list[tuple[ShownRun, ShownEvaluation, Quality]]] = {}
    for run in runs:
        for evaluation in run.evaluations:
            main = evaluation.main
            whole = evaluation.base_size.attention_parameters if evaluation.base_size else 0
            if main is not None and main.base is not None and whole:
                base = evaluation.measured_base or evaluation.base or ""
                key = (main.name, evaluation.data_sha256, base, evaluation.conditions)
                groups.setdefault(key, []).append((run, evaluation, main))
    return [_quality_chart(members, alone=len(groups) == 1) for members in groups.values()]


def _quality_chart(
    members: Sequence[tuple[ShownRun, ShownEvaluation, Quality]], alone: bool
) -> Chart:
    _, first, main = members[0]
    assert first.base_size is not None
    assert main.base is not None
    whole = first.base_size.attention_parameters
    series, rows = [], []
    origin = Series(first.beside, [100.0], [main.base], reference=True)
    for run, evaluation, quality in members:
        share = 100 * evaluation.size.attention_parameters / whole
        own = evaluation is run.evaluation
        label = run.name if own else f"{run.name}: {evaluation.model}"
        low, high = _bounds(quality)
        series.append(Series(label, [share], [quality.value], [low], [high]))
        between = f"{low:.4g} to {high:.4g}" if low != high else "-"
        rows.append((label, f"{share:.1f}%", f"{quality.value:.4f}", between))
    rows.append((first.beside, "100.0%", f"{main.base:.4f}", "-"))
    name = metrics.label(main.name)
    figure = figures.curve(
        [*series, origin],
        "",
        f"attention parameters, % of {first.the_base}",
        name,
        main.base,
        f"quality of {first.the_base}",
        main.higher_is_better,
    )
    better = "higher" if main.higher_is_better else "lower"
    known = any(quality.interval for _, _, quality in members)
    intervals = "; bars are paired intervals" if known else ""
    conditions = "" if alone else f"; {', '.join(first.conditions)}"
    return Chart(
        title="Quality against size",
        figure=figure,
        alt=f"{name} against the share of attention parameters that is left, for "
        f"{len(series)} models and {first.the_base}.",
        columns=("", "attention parameters", name, "interval"),
        rows=tuple(rows),
        note=f"{name} on {short_name(first.data)}, {better} is better{intervals}{conditions}.",
    )


def _bounds(quality: Quality) -> tuple[float, float]:
    """The interval of the model's own number: that of the difference, moved to the base's."""
    interval, base = quality.interval, quality.base
    if interval is None or base is None:
        return quality.value, quality.value
    if interval.kind == "ratio" and not interval.estimate:
        return quality.value, quality.value
    if interval.kind == "ratio":
        # the base's number over other windows can differ by rounding from value / estimate
        return quality.value * interval.low / interval.estimate, (
            quality.value * interval.high / interval.estimate
        )
    shift = quality.value - interval.estimate
    return shift + interval.low, shift + interval.high


def training_charts(run: ShownRun) -> list[Chart]:
    """How the expected number of heads fell, and how losses went."""
    return [
        chart
        for history in run.histories
        for chart in (_heads_chart(history), _loss_chart(history))
        if chart is not None
    ]


def roles_charts(run: ShownRun) -> list[Chart]:
    """What heads do, before and after a cut where both are known, and their scores."""
    if run.role_record is None:
        return []
    record, figure = run.role_record, pictures.roles_figure(run.role_record)
    columns, rows = pictures.roles_table(record)
    counts = {n: sum(h.role == n for m in record.modules for h in m.heads) for n in record.roles}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    of = f"{record.model.name}, on {short_name(record.data.source)}"
    scored = pictures.scores_table(record)
    return [
        Chart("What heads do", figure, f"Heads with a role: {told}.", columns, rows, of, True),
        Chart(
            "Scores of roles",
            pictures.scores_figure(record),
            "One small map of layers by heads for each score.",
            *scored,
            f"{of}; outlined, and with a * in the table: the whole interval is over the line.",
            True,
        ),
    ]


def _thinned(history: History) -> str:
    shown = len(history.steps)
    if shown == history.records:
        return f"All {shown:,} steps."
    width = -(-history.records // shown)
    return (
        f"{history.records:,} steps drawn as {shown:,} points: losses are means of {width} steps, "
        "other numbers those of the last of them."
    )


def _heads_chart(history: History) -> Chart | None:
    if len({*history.expected}) < 2:  # unknown, or chosen before the first step
        return None
    series = [Series("expected open heads", history.steps, history.expected)]
    if history.target:
        series.append(Series("asked for", history.steps, history.target))
    figure = figures.trajectories(series, "", "step", "query heads", history.phases)
    return Chart(
        title="Open heads while gates are trained",
        figure=figure,
        alt=f"The expected number of open heads goes from {history.expected[0]:.1f} to "
        f"{history.expected[-1]:.1f} in {history.records:,} steps.",
        columns=("step", *(s.label for s in series)),
        rows=_some(history.steps, *(s.y for s in series)),
        note=_thinned(history),
    )


def _loss_chart(history: History) -> Chart:
    series = [Series("loss", history.steps, history.loss)]
    figure = figures.trajectories(series, "", "step", "loss", history.phases)
    return Chart(
        title="Loss while gates are trained" if history.kind == "gates" else "Healing",
        figure=figure,
        alt=f"The loss goes from {history.loss[0]:.4g} to {history.loss[-1]:.4g} in "
        f"{history.records:,} steps.",
        columns=("step", "loss"),
        rows=_some(history.steps, history.loss),
        note=_thinned(history),
    )


def _some(steps: Sequence[int], *columns: Sequence[float]) -> tuple[tuple[str, ...], ...]:
    """About ten rows of a history, first and last among them."""
    last = len(steps) - 1
    places = sorted({round(i * last / 10) for i in range(11)})
    return tuple((f"{steps[i]:,}", *(f"{column[i]:.4g}" for column in columns)) for i in places)


def speed_chart(runs: Sequence[ShownRun]) -> Chart | None:
    """Decoding by batch size: tokens per second of one run, ratios to the original of several."""
    timed = [
        (run, run.evaluation, run.evaluation.original_size)
        for run in runs
        if run.evaluation is not None and run.evaluation.size.prefill_tokens_per_s
    ]
    if not timed:
        return None
    if len(timed) == 1 or any(base is None for _, _, base in timed):
        return _absolute_speed(timed[0][0], timed[0][1]) if len(timed) == 1 else None
    ratios = {}
    for run, evaluation, base in timed:
        assert base is not None
        ratios[run.name] = _ratios(evaluation, base)
    names = sorted(set.intersection(*map(set, ratios.values())), key=_batch_order)
    values = {name: [of_run[n] for n in names] for name, of_run in ratios.items()}
    figure = figures.bars(names, values, "", "times the original's", baseline=1.0)
    return Chart(
        title="Speed, compared with the original",
        figure=figure,
        alt="Ratios of tokens per second to the original, by run.",
        columns=("", *names),
        rows=tuple((run, *(f"{v:.3f}" for v in row)) for run, row in values.items()),
        note="Each model and its original were timed in turn, in the same process.",
    )


def _batch_order(name: str) -> int:
    return int(name.split()[-1]) if name.startswith("batch") else 0


def _ratios(evaluation: ShownEvaluation, base: object) -> dict[str, float]:
    ours, theirs = speeds(evaluation.size), speeds(base)
    return {n: ours[n] / theirs[n] for n in ours if theirs.get(n)}


def speeds(size: object) -> dict[str, float]:
    """Tokens per second: prefill, and decoding by batch size."""
    prefill = getattr(size, "prefill_tokens_per_s", None)
    found = {"prefill": prefill} if prefill else {}
    return found | {f"batch {b}": rate for b, rate in getattr(size, "decode_by_batch", ())}


def _absolute_speed(run: ShownRun, evaluation: ShownEvaluation) -> Chart | None:
    ours = {n: v for n, v in speeds(evaluation.size).items() if n != "prefill"}
    theirs = speeds(evaluation.base_size)
    if not ours:
        return None
    values = {run.name: list(ours.values())}
    if all(n in theirs for n in ours):
        values[evaluation.beside] = [theirs[n] for n in ours]
    figure = figures.bars(list(ours), values, "", "decoded tokens/s", reference=evaluation.beside)
    device = evaluation.size.device or "one machine"
    return Chart(
        title="Decoding speed by batch size",
        figure=figure,
        alt="Decoded tokens per second by batch size.",
        columns=("", *ours),
        rows=tuple((name, *(f"{v:,.1f}" for v in row)) for name, row in values.items()),
        note=f"All sequences of a batch together, on {device}; both models in turn.",
    )


def cache_chart(runs: Sequence[ShownRun]) -> Chart | None:
    """Bytes of KV cache, per token and at usual lengths."""
    sized = [
        (run, run.evaluation)
        for run in runs
        if run.evaluation is not None and run.evaluation.size.kv_cache_bytes_per_token
    ]
    if not sized:
        return None
    per_token: dict[str, int] = {}
    longest: dict[str, str] = {}
    for run, evaluation in sized:
        per_token[run.name] = evaluation.size.kv_cache_bytes_per_token
        longest[run.name] = _fits(evaluation.size.longest_context, evaluation.memory)
    alike = len({run.source for run, _ in sized}) == 1
    for run, evaluation in sized:
        base = evaluation.original_size
        if base is not None:
            label = "original" if alike else run.source
            per_token.setdefault(label, base.kv_cache_bytes_per_token)
            fits = _fits(base.longest_context, evaluation.memory)
            longest.setdefault(label, fits)
    at = CONTEXTS[1]
    values = {name: [size * at / 2**20] for name, size in per_token.items()}
    figure = figures.bars([f"{at:,} tokens"], values, "", "KV cache, MiB", "original")
    rows = tuple(
        (name, f"{size:,}", *(mebibytes(size * length) for length in CONTEXTS), longest[name])
        for name, size in per_token.items()
    )
    columns = ("", "bytes per token", *(f"at {length:,}" for length in CONTEXTS), "longest context")
    return Chart(
        title="KV cache and context length",
        figure=figure,
        alt=f"KV cache of one sequence of {at:,} tokens, in MiB.",
        columns=columns,
        rows=rows,
        note="One sequence, in the dtype that was evaluated. The longest context is what fits into "
        "memory beside the weights; activations come on top.",
    )


def _fits(tokens: int | None, memory: int | None) -> str:
    return "-" if tokens is None or memory is None else f"{tokens:,} in {mebibytes(memory)}"


def short_name(source: str) -> str:
    """The last part of a path or hub id."""
    return Path(source).name or source


def mebibytes(size: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
