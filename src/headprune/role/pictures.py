"""roles.json as pictures and tables: layers by heads, with roles and scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from headprune.io.figures import GRID, MARKERS, MUTED, PAPER, SERIES, drawable, style
from headprune.model.attention import layer_names
from headprune.schemas.roles import HeadRoles, ModuleRoles, RolesRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 8
Rows = tuple[tuple[str, ...], ...]
Places = Sequence[tuple[int, int]]
_CELL = 0.26  # inches of a head with a mark
_SMALL, _LARGE = 10.0, 125.0  # area of a mark, in square points
_FRAME: dict[str, Any] = {"fill": False, "edgecolor": MUTED, "linewidth": 0.6}
_WIDE = 10.0  # inches that small multiples fill before a second row begins


@style()
def roles_figure(record: RolesRecord) -> Figure:
    """Draw the role of every head, of a cut model beside its original.

    The commonest eight roles have colours; a mark's area is the head's effect, where measured.
    """
    from matplotlib.figure import Figure

    models = [*([record.original] if record.original else []), record.modules]
    titles = ["before", "after"] if record.original else [record.model.name]
    everything = [head for modules in models for module in modules for head in module.heads]
    counts = Counter(head.role for head in everything if head.role)
    common = [name for name, _ in counts.most_common(COLOURS)]
    kinds = [name for name in record.roles if name in common]
    largest = max((_rise(head) for module in record.modules for head in module.heads), default=0.0)
    labels, cut = _labels(record), [_cut(modules, record) for modules in models]

    columns = max(_columns(modules, gone) for modules, gone in zip(models, cut, strict=True))
    letters = max(map(len, labels), default=0)
    width = max(len(models) * (_CELL * columns + 0.45) + 0.08 * letters + 0.3, 3.6)
    across = max(1, min(len(kinds) + 1, int(width / 1.75)))
    legend = 0.2 * -(-(len(kinds) + 2) // across) + 0.35
    size = width, _CELL * len(labels) + 0.75 + legend
    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    several = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, title, modules, gone in zip(several, titles, models, cut, strict=True):
        _cells(axes, columns, labels, drawable(title))
        _roles(axes, modules, gone, record, kinds, largest)
    handles = [_handle(kinds, kind) for kind in kinds]
    handles.append(_handle(kinds, "", label="no role, or another"))
    if any(row for gone in cut for row in gone):
        handles.append(_handle(kinds, "", label="cut", marker="s", markerfacecolor="none"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=across,
        title=_note(models[0], largest),
        title_fontsize=9,
        alignment="left",
        handletextpad=0.2,
        columnspacing=1.2,
    )
    return figure


def _note(modules: Sequence[ModuleRoles], largest: float) -> str:
    note = []
    if largest:
        note.append("Area: rise of the loss with the head set to its mean,")
        note.append(f"up to {largest:.2g} nats.")
    if any(module.kv_groups for module in modules):
        note.append("Frames: heads that share a KV head.")
    return "\n".join(note)


def _roles(
    axes: Axes,
    modules: Sequence[ModuleRoles],
    gone: Sequence[Collection[int]],
    record: RolesRecord,
    kinds: Sequence[str],
    largest: float,
) -> None:
    from matplotlib.patches import Rectangle

    by_path = {module.path: module.heads for module in modules}
    groups = {m.path: m.kv_groups for m in (*record.modules, *(record.original or modules))}
    heads = [
        (head.head, y, head)
        for y, module in enumerate(record.modules)
        for head in by_path.get(module.path, ())
    ]
    places = [(x, y) for x, y, _ in heads]
    _squares(axes, places, 0.44, facecolor=GRID, alpha=0.35, linewidth=0)
    hollow: dict[str, Any] = {"facecolor": "none", "edgecolor": MUTED, "linestyle": (0, (2, 2))}
    _squares(axes, _places(gone), 0.34, **hollow)
    for y, module in enumerate(record.modules):
        for group in groups[module.path]:
            low, high = min(group), max(group)
            axes.add_patch(Rectangle((low - 0.47, y - 0.47), high - low + 0.94, 0.94, **_FRAME))
    for kind in dict.fromkeys(head.role or "" for _, _, head in heads):
        marks = [(x, y, head) for x, y, head in heads if (head.role or "") == kind]
        _marks(axes, marks, kind, kinds, largest)


def _marks(
    axes: Axes,
    heads: Sequence[tuple[int, int, HeadRoles]],
    kind: str,
    kinds: Sequence[str],
    largest: float,
) -> None:
    """Draw the heads of a kind, in ten sizes: a file holds each shape once."""
    known = kinds.index(kind) if kind in kinds else None
    usual, least = (0.6, 0.2) if kind else (0.0, 0.0)
    by_size: dict[float, list[tuple[int, int]]] = {}
    for x, y, head in heads:
        share = usual
        if head.effect is not None and largest:
            share = min(max(_rise(head) / largest, least), 1.0)
        by_size.setdefault(round(share, 1), []).append((x, y))
    for share, places in by_size.items():
        xs, ys = zip(*places, strict=True)
        axes.scatter(
            xs,
            ys,
            s=_SMALL + share * (_LARGE - _SMALL),
            marker="o" if known is None else MARKERS[known],
            color=MUTED if known is None else SERIES[known],
            alpha=0.55 if known is None else 1.0,
            linewidths=0,
            zorder=3,
        )


@style()
def scores_figure(record: RolesRecord) -> Figure:
    """Draw a small map per score, on one scale; heads above the threshold are outlined."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    labels, cut = _labels(record), _cut(record.modules, record)
    measured = {name for m in record.modules for head in m.heads for name in head.scores}
    names = [name for name in record.roles if name in measured]
    columns = _columns(record.modules, cut)
    cell = 0.13 if max(columns, len(labels)) > 12 else 0.2
    letters = max(map(len, labels), default=0)
    width = max(cell * columns + 0.07 * letters + 0.2, 1.3)
    across = max(1, min(len(names), int(_WIDE / width)))
    down = -(-len(names) // across)
    # transparent where there is nothing, so that paper of any colour shows through
    scale = LinearSegmentedColormap.from_list("scores", [(SERIES[0], 0.0), (SERIES[0], 1.0)])
    figure = Figure(
        figsize=(max(across * width, 4.2), down * (cell * len(labels) + 0.75) + 0.6),
        layout="constrained",
        facecolor=PAPER,
    )
    for place, axes in enumerate(figure.subplots(down, across, squeeze=False).flat):
        if place >= len(names):
            axes.set_visible(False)
            continue
        _cells(axes, columns, labels if place % across == 0 else [""] * len(labels), "")
        axes.tick_params(labelsize=7)
        _scores(axes, record, names[place], columns, cut, scale)
    shades = [
        Patch(facecolor=(SERIES[0], n / 4), edgecolor=GRID, label=f"{n / 4:g}") for n in range(5)
    ]
    key = [Patch(facecolor="none", edgecolor=SERIES[1], linewidth=1.3, label="above its threshold")]
    if any(cut):
        key.append(_handle((), "cut", marker="x", markersize=4))
    figure.legend(
        handles=[*shades, *key],
        loc="outside lower left",
        ncols=7,
        handlelength=1,
        columnspacing=1.2,
    )
    return figure


def _scores(
    axes: Axes,
    record: RolesRecord,
    name: str,
    columns: int,
    cut: Sequence[Collection[int]],
    scale: Any,
) -> None:
    import numpy as np

    axes.set_title(f"{name}\n≥ {record.roles[name].threshold:g}", fontsize=8.5)
    rows = [{h.head: h.scores[name] for h in m.heads if name in h.scores} for m in record.modules]
    grid = np.full((len(rows), columns), np.nan)
    for y, row in enumerate(rows):
        for x, score in row.items():
            grid[y, x] = score.score
    axes.imshow(grid, cmap=scale, vmin=0, vmax=1, aspect="equal")
    _squares(axes, _places(rows), 0.5, facecolor="none", edgecolor=GRID, linewidth=0.4)
    over = [[head for head, score in row.items() if score.state == "over"] for row in rows]
    _squares(axes, _places(over), 0.5, facecolor="none", edgecolor=SERIES[1], linewidth=1.3)
    if any(cut):
        xs, ys = zip(*_places(cut), strict=True)
        axes.plot(xs, ys, "x", color=MUTED, markersize=3, markeredgewidth=0.7)
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(len(rows) - 0.4, -0.6))


def _places(rows: Sequence[Collection[int]]) -> Places:
    return [(x, y) for y, row in enumerate(rows) for x in row]


def _columns(modules: Sequence[ModuleRoles], cut: Sequence[Collection[int]]) -> int:
    heads = [head.head for module in modules for head in module.heads]
    return max(1, 1 + max([*heads, *(head for row in cut for head in row)], default=0))


def _cells(axes: Axes, columns: int, labels: Sequence[str], title: str) -> None:
    axes.set_title(title)
    axes.set_facecolor("none")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    rows = len(labels)
    step = 1 if rows <= 40 else math.ceil(rows / 40)
    axes.set_yticks(range(0, rows, step), [drawable(label) for label in labels[::step]])
    axes.set_xticks(range(0, columns, 1 if columns <= 10 else 2 if columns <= 16 else 4))
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))


def _squares(axes: Axes, places: Places, half: float, **look: Any) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((x - half, y - half), 2 * half, 2 * half) for x, y in places]
    axes.add_collection(PatchCollection(squares, **look))


def _handle(kinds: Sequence[str], kind: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    known = kinds.index(kind) if kind in kinds else None
    colour = MUTED if known is None else SERIES[known]
    usual = {
        "label": drawable(kind),
        "marker": "o" if known is None else MARKERS[known],
        "color": colour,
        "markersize": 6.5,
        "linestyle": "",
        "markeredgewidth": 1.0,
        "markeredgecolor": colour,
    }
    return Line2D([], [], **{**usual, **look})


def roles_table(record: RolesRecord) -> tuple[tuple[str, ...], Rows]:
    """Return columns and rows: layers by role, and cut heads."""
    original = {module.path: module.heads for module in record.original}
    rows = []
    for label, module, cut in zip(
        _labels(record), record.modules, _cut(record.modules, record), strict=True
    ):
        cells = [_heads_by_role(module.heads, effects=True), ", ".join(map(str, cut)) or "-"]
        before = [_heads_by_role(original.get(module.path, ()))] if record.original else []
        rows.append((label, *before, *cells))
    columns = ("layer", "before", "after", "cut") if record.original else ("layer", "roles", "cut")
    return columns, tuple(rows)


def _heads_by_role(heads: Sequence[HeadRoles], effects: bool = False) -> str:
    by_role: dict[str, list[str]] = {}
    for head in heads:
        if head.role is not None:
            rise = f" ({head.effect.mean.nats:+.3f})" if effects and head.effect else ""
            by_role.setdefault(head.role, []).append(f"{head.head}{rise}")
    return "; ".join(f"{name}: {', '.join(heads)}" for name, heads in by_role.items()) or "-"


def _cut(modules: Sequence[ModuleRoles], record: RolesRecord) -> list[list[int]]:
    """Return missing heads of the original, or else gaps below the largest id."""
    before = {m.path: [head.head for head in m.heads] for m in record.original}
    now = {m.path: [head.head for head in m.heads] for m in modules}
    cut = []
    for module in record.modules:
        ids = now.get(module.path, [])
        known = before.get(module.path, list(range(max(ids, default=-1) + 1)))
        cut.append([head for head in known if head not in ids])
    return cut


def _labels(record: RolesRecord) -> list[str]:
    return [*layer_names([(module.path, module.kind) for module in record.modules]).values()]


def _rise(head: HeadRoles) -> float:
    return 0.0 if head.effect is None else max(0.0, head.effect.mean.nats)
