"""roles.json as pictures and tables: what every head does, and its scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headprune.io.head_maps import Mark, MarkedHeads, ScoredHeads, marked_heads, scored_heads
from headprune.model.attention import layer_names
from headprune.schemas.roles import HeadRoles, ModuleRoles, RolesRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 8
Rows = tuple[tuple[str, ...], ...]


def roles_figure(record: RolesRecord) -> Figure:
    """Draw the role of every head, of a cut model beside its original.

    The commonest eight roles have colours; a mark's area is the head's effect, where measured.
    """
    models = [*([record.original] if record.original else []), record.modules]
    titles = ["before", "after"] if record.original else [record.model.name]
    everything = [head for modules in models for module in modules for head in module.heads]
    counts = Counter(head.role for head in everything if head.role)
    common = [name for name, _ in counts.most_common(COLOURS)]
    largest = max((_rise(head) for module in record.modules for head in module.heads), default=0.0)
    note = []
    if largest:
        note.append("Area: rise of the loss with the head set to its mean,")
        note.append(f"up to {largest:.2g} nats.")
    if any(module.kv_groups for module in models[0]):
        note.append("Frames: heads that share a KV head.")
    panels = [_panel(*pair, record, largest) for pair in zip(titles, models, strict=True)]
    kinds = [name for name in record.roles if name in common]
    return marked_heads(panels, _labels(record), kinds, "\n".join(note))


def scores_figure(record: RolesRecord) -> Figure:
    """Draw a small map per score; heads over the line are outlined."""
    panels, cut = [], _cut(record.modules, record)
    for name, facts in record.roles.items():
        rows = [
            {h.head: h.scores[name] for h in m.heads if name in h.scores} for m in record.modules
        ]
        if any(rows):
            panels.append(
                ScoredHeads(
                    f"{name}\n≥ {facts.line:g}",
                    [{head: score.score for head, score in row.items()} for row in rows],
                    [[h for h, score in row.items() if score.state == "over"] for row in rows],
                    cut,
                )
            )
    return scored_heads(panels, _labels(record))


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


def scores_table(record: RolesRecord) -> tuple[tuple[str, ...], Rows]:
    """Return columns and rows: heads by role."""

    def cell(head: HeadRoles, name: str) -> str:
        score = head.scores.get(name)
        return "-" if score is None else f"{score.score:.2f}{'*' if score.state == 'over' else ''}"

    rows = [
        (f"{label}.{head.head}", *(cell(head, name) for name in record.roles))
        for label, module in zip(_labels(record), record.modules, strict=True)
        for head in module.heads
    ]
    return ("head", *record.roles), tuple(rows)


def _panel(
    title: str, modules: Sequence[ModuleRoles], record: RolesRecord, largest: float
) -> MarkedHeads:
    heads = {module.path: module.heads for module in modules}
    groups = {m.path: m.kv_groups for m in (*record.modules, *(record.original or modules))}

    def mark(head: HeadRoles) -> Mark:
        size = None if head.effect is None or not largest else _rise(head) / largest
        return Mark(head.role or "", size)

    paths = [module.path for module in record.modules]
    rows = [{head.head: mark(head) for head in heads.get(path, ())} for path in paths]
    return MarkedHeads(title, rows, _cut(modules, record), [groups[path] for path in paths])


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
