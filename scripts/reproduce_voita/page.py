"""The page of the docs: what was measured, beside what the paper has, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from headprune.io.figures import Series, curve, save
from headprune.role import ROLES

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks" / "voita.md"
TOP = HERE / "page.md"  # what does not depend on what was measured
ORIGINAL = "original"
NAMES = {
    "gates": "L0 gates, attention trained",
    "gates-only": "L0 gates, weights frozen",
    "compensated": "`compensated`, refit",
    "gradient": "`gradient`",
    "random": "random heads",
}
LOSSES = (0.5, 1.0)  # BLEU
FEW = range(1, 18)  # heads that are named one by one; with 17 the paper finds every role
SHOWN = 0.8  # of a role's line, from which on a head is shown


@dataclass(frozen=True)
class Point:
    """What was measured of one model.

    Attributes:
        method: How heads were chosen.
        seed: Which sentences they were chosen on, and the seed of what is random.
        heads: Heads left in the encoder.
        against_original: BLEU of its translations, the uncut model's as references.
        round_trip: BLEU of these translated back, what they were made of as references.
        round_trip_elsewhere: The same on text of another kind than that of the calibration.
        roles: By head, as layer.head of the uncut model, and role: the score, the offset or kind of
            token that it is of, and whether the head has the role.
    """

    method: str
    seed: int
    heads: int
    against_original: float
    round_trip: float
    round_trip_elsewhere: float
    roles: dict[str, dict[str, tuple[float, str, bool]]]


def write_page(points: Sequence[Point], protocol: Any, page: Path) -> None:
    """Writes the page, and its picture beside it.

    Args:
        points: What was measured; one is of the uncut model.
        protocol: How.
        page: The file.

    Raises:
        ValueError: If the uncut model was not measured.
    """
    whole = next((point for point in points if point.method == ORIGINAL), None)
    if whole is None:
        raise ValueError("There is no point of the uncut model yet; do the step points first.")
    cut = [point for point in points if point is not whole]
    settings = {name: getattr(protocol, name) for name in ("pairs", "sentences", "steps")}
    options = " ".join(f"--{name} {value}" for name, value in settings.items())
    said = {name: f"{value:,}" for name, value in settings.items()}
    top = TOP.read_text(encoding="utf-8")
    parts = [top.format(**said, batch_size=protocol.batch_size, options=options)]
    picture = page.with_name("voita.svg")
    series = [_series(cut, method) for method in _methods(cut)]
    figure = curve(
        series, "Heads against BLEU", "encoder heads left", "BLEU, round trip", whole.round_trip
    )
    save(figure, picture)
    parts += [
        "## Heads against BLEU\n\n",
        f"![Round-trip BLEU of every method by encoder heads left; its numbers are in the table "
        f"below]({picture.name})\n\n",
        "Round trip on text of the kind that was learned from; the uncut model: "
        f"{whole.round_trip:.1f}. {_spread(cut)}\n\n",
        _curve(cut, lambda point: point.round_trip),
        "\nRound trip on text of another kind than what was learned from; the uncut model: "
        f"{whole.round_trip_elsewhere:.1f}.\n\n",
        _curve(cut, lambda point: point.round_trip_elsewhere),
        "\nAgainst the uncut model's own output, which is 100 for that model:\n\n",
        _curve(cut, lambda point: point.against_original),
        _losses(cut, whole),
        _roles(cut, whole),
        _survivors(cut),
        _calibrated(cut),
    ]
    page.write_text("".join(parts), encoding="utf-8")


def _methods(points: Iterable[Point]) -> list[str]:
    present = {point.method for point in points}
    return [method for method in NAMES if method in present]


def _counts(points: Iterable[Point]) -> list[int]:
    return sorted({point.heads for point in points}, reverse=True)


def _of(points: Iterable[Point], method: str, heads: int | None = None) -> list[Point]:
    return [p for p in points if p.method == method and heads in (None, p.heads)]


def _series(points: Sequence[Point], method: str) -> Series:
    counts = _counts(_of(points, method))
    values = [[p.round_trip for p in _of(points, method, count)] for count in counts]
    return Series(
        NAMES[method].replace("`", ""),
        counts,
        [mean(value) for value in values],
        [min(value) for value in values],
        [max(value) for value in values],
    )


def _spread(points: Sequence[Point]) -> str:
    missing = [name for method, name in NAMES.items() if method not in _methods(points)]
    told = "Means over seeds, smallest and largest in brackets; one number alone is one seed."
    return told + (f" Not measured yet: {'; '.join(missing)}." if missing else "")


def _range(values: Sequence[float], form: str = ".1f") -> str:
    if not values:
        return "not measured"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _curve(points: Sequence[Point], value: Callable[[Point], float]) -> str:
    methods = _methods(points)
    rows = (
        [str(count), *(_range([value(p) for p in _of(points, m, count)]) for m in methods)]
        for count in _counts(points)
    )
    return _table(["heads left", *(NAMES[method] for method in methods)], rows)


def _losses(points: Sequence[Point], whole: Point) -> str:
    """Per method, the fewest heads down to which a loss is not passed."""

    def fewest(own: Sequence[Point], loss: float) -> int:
        least = whole.heads
        for point in sorted(own, key=lambda point: -point.heads):
            if whole.round_trip - point.round_trip > loss:
                break
            least = point.heads
        return least

    rows = []
    for method in _methods(points):
        own = _of(points, method)
        runs = [[p for p in own if p.seed == seed] for seed in sorted({p.seed for p in own})]
        found = ([fewest(run, loss) for run in runs] for loss in LOSSES)
        cells = (", ".join(map(str, counts)) for counts in found)
        rows.append([NAMES[method], *cells])
    return (
        "\nFewest heads, of the numbers in the table, with a loss of no more than so much "
        f"round-trip BLEU, they and all larger numbers; {whole.heads} where the first cut loses "
        "more. One number per seed.\n\n" + _table(["", *(f"{loss} BLEU" for loss in LOSSES)], rows)
    )


def _shown(whole: Point) -> list[tuple[str, str]]:
    """Heads and roles of the uncut model that a column is for, the best of every role first."""
    scores = {
        (head, role): score / ROLES[role].line
        for head, roles in whole.roles.items()
        for role, (score, _, _) in roles.items()
        if not ROLES[role].attribute
    }
    return sorted(key for key, share in scores.items() if share >= SHOWN)


def _roles(points: Sequence[Point], whole: Point) -> str:
    """What the heads with the highest scores of the uncut model do in the cut ones."""
    shown = _shown(whole)
    names = [f"{head} {role} {whole.roles[head][role][1]}".strip() for head, role in shown]
    rows = [["uncut", str(whole.heads), *(_left([whole], key) for key in shown), ""]]
    for method in _methods(points):
        for count in _counts(_of(points, method)):
            runs = _of(points, method, count)
            new = {key for run in runs for key in _had(run)} - _had(whole)
            said = ", ".join(f"{head} {role}" for head, role in sorted(new)) or "none"
            rows.append([NAMES[method], str(count), *(_left(runs, key) for key in shown), said])
    had = ", ".join(f"{head} {role}" for head, role in sorted(_had(whole))) or "none"
    return (
        "\n## Roles\n\n"
        "Scores of `headprune roles` ([What heads do](../guides/roles.md)) on the same sentences, "
        f"of the heads that have {SHOWN:.0%} of a line or more in the uncut model; means over the "
        "seeds that keep the head. A head has the role where its interval is over the line: in "
        f"the uncut model {had}; *new* are those that have one only after the cut. Heads are "
        "layer.head, counted from 0.\n\n" + _table(["", "heads left", *names, "new"], rows)
    )


def _had(point: Point) -> set[tuple[str, str]]:
    return {
        (head, role)
        for head, roles in point.roles.items()
        for role, (_, _, over) in roles.items()
        if over and not ROLES[role].attribute
    }


def _left(runs: Sequence[Point], key: tuple[str, str]) -> str:
    """The mean score of a head where it is left, and how often that is if not always."""
    head, role = key
    scores = [run.roles[head][role][0] for run in runs if head in run.roles]
    if not scores:
        return "cut"
    often = "" if len(scores) == len(runs) else f" ({len(scores)} of {len(runs)})"
    return f"{mean(scores):.2f}{often}"


def _survivors(points: Sequence[Point]) -> str:
    """Which heads every seed keeps."""
    rows = []
    for method in _methods(points):
        for count in filter(FEW.__contains__, _counts(_of(points, method))):
            runs = _of(points, method, count)
            every = set.intersection(*(set(point.roles) for point in runs))
            listed = ", ".join(sorted(every, key=lambda head: [int(n) for n in head.split(".")]))
            rows.append([NAMES[method], str(count), str(len(runs)), listed or "none"])
    if not rows:
        return ""
    return (
        "\n## Which survive\n\nHeads, as layer.head counted from 0, that every measured seed "
        "keeps.\n\n" + _table(["", "heads left", "seeds", "kept by all"], rows)
    )


def _calibrated(points: Sequence[Point]) -> str:
    return (
        ""
        if "compensated" not in _methods(points)
        else (
            "\nThe refit of `compensated` fits W_O of cross attention as well: the decoder is not "
            "frozen there. Scores and random heads without a refit change no weights.\n"
        )
    )
