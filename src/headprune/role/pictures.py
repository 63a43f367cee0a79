"""roles.json as pictures: what every head does, and its scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headprune.io.head_maps import Mark, MarkedHeads, ScoredHeads, marked_heads, scored_heads
from headprune.model.attention import layer_names
from headprune.schemas.roles import HeadRoles, ModuleRoles, RolesRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLOURS = 8
Rows = tuple[tuple[str, ...], ...]


def roles_figure(record: RolesRecord) -> Figure:
    """Layer by head: the role of each, of a cut model beside the original's.

    The commonest eight roles have colours; the larger a mark, the more the loss rises without the
    head, where that was measured.
    """
    models = [*([record.original] if record.original else []), record.modules]
    counts = Counter(head.role for modules in models for head in _heads(modules) if head.role)
    shown = [name for name, _ in counts.most_common(MOST_COLOURS)]
    kinds = [name for name in record.roles if name in shown]
    largest = max((_rise(head) for head in _heads(record.modules)), default=0.0)
    titles = ["before", "after"] if record.original else [record.model.name]
    panels = [
        _panel(title, modules, record, largest)
        for title, modules in zip(titles, models, strict=True)
    ]
    return marked_heads(panels, _labels(record), kinds, "\n".join(notes(record)))


def notes(record: RolesRecord) -> list[str]:
    """What sizes and frames say, as far as there are some."""
    largest = max((_rise(head) for head in _heads(record.modules)), default=0.0)
    said = []
    if largest:
        said.append("Area: rise of the loss with the head set to its mean,")
        said.append(f"up to {largest:.2g} nats.")
    if any(module.kv_groups for module in record.original or record.modules):
        said.append("Frames: heads that share a KV head.")
    return said


def scores_figure(record: RolesRecord) -> Figure:
    """One small map per score, on one scale; heads that are over the line are outlined."""
    panels = []
    for name, facts in record.roles.items():
        rows = [
            {head.head: head.scores[name] for head in module.heads if name in head.scores}
            for module in record.modules
        ]
        if any(rows):
            panels.append(
                ScoredHeads(
                    f"{name}\n≥ {facts.line:g}",
                    [{head: score.score for head, score in row.items()} for row in rows],
                    [[h for h, score in row.items() if score.state == "over"] for row in rows],
                    _gone(record.modules, record),
                )
            )
    return scored_heads(panels, _labels(record))


def roles_table(record: RolesRecord) -> tuple[tuple[str, ...], Rows]:
    """Columns and rows that say the same: layers by role, and the heads that are cut."""
    gone = _gone(record.modules, record)
    rows = []
    for label, module, cut in zip(_labels(record), record.modules, gone, strict=True):
        by_role: dict[str, list[str]] = {}
        for head in module.heads:
            if head.role is not None:
                rise = "" if head.effect is None else f" ({head.effect.mean.nats:+.3f})"
                by_role.setdefault(head.role, []).append(f"{head.head}{rise}")
        told = "; ".join(f"{name}: {', '.join(heads)}" for name, heads in by_role.items())
        before = [_before(record, module.path)] if record.original else []
        rows.append((label, *before, told or "-", ", ".join(map(str, cut)) or "-"))
    columns = ("layer", "before", "after", "cut") if record.original else ("layer", "roles", "cut")
    return columns, tuple(rows)


def scores_table(record: RolesRecord) -> tuple[tuple[str, ...], Rows]:
    """Columns and rows of scores: every head by every role."""
    names = list(record.roles)
    rows = [
        (f"{label}.{head.head}", *(_told(head, name) for name in names))
        for label, module in zip(_labels(record), record.modules, strict=True)
        for head in module.heads
    ]
    return ("head", *names), tuple(rows)


def _told(head: HeadRoles, name: str) -> str:
    score = head.scores.get(name)
    return "-" if score is None else f"{score.score:.2f}{'*' if score.state == 'over' else ''}"


def _before(record: RolesRecord, path: str) -> str:
    heads = [h for module in record.original if module.path == path for h in module.heads]
    names = dict.fromkeys(head.role for head in heads if head.role is not None)
    parts = (f"{n}: {', '.join(str(h.head) for h in heads if h.role == n)}" for n in names)
    return "; ".join(parts) or "-"


def _panel(
    title: str, modules: Sequence[ModuleRoles], record: RolesRecord, largest: float
) -> MarkedHeads:
    by_path = {module.path: module for module in modules}
    # of a path that only the other model has, there is an empty row
    ordered = [by_path.get(module.path) for module in record.modules]
    original = {module.path: module for module in record.original or modules}

    def mark(head: HeadRoles) -> Mark:
        size = None if head.effect is None or not largest else _rise(head) / largest
        return Mark(head.role or "", size)

    rows = [{} if m is None else {head.head: mark(head) for head in m.heads} for m in ordered]
    groups = [
        original[m.path].kv_groups if m.path in original else m.kv_groups for m in record.modules
    ]
    return MarkedHeads(title, rows, _gone(modules, record), groups)


def _gone(modules: Sequence[ModuleRoles], record: RolesRecord) -> list[list[int]]:
    """Ids of heads that are missing: those of the original, or else those below the largest."""
    before = {m.path: [head.head for head in m.heads] for m in record.original}
    there = {m.path: [head.head for head in m.heads] for m in modules}
    found = []
    for module in record.modules:
        ids = there.get(module.path, [])
        known = before.get(module.path, list(range(max(ids, default=-1) + 1)))
        found.append([head for head in known if head not in ids])
    return found


def _labels(record: RolesRecord) -> list[str]:
    return [*layer_names([(module.path, module.kind) for module in record.modules]).values()]


def _heads(modules: Sequence[ModuleRoles]) -> list[HeadRoles]:
    return [head for module in modules for head in module.heads]


def _rise(head: HeadRoles) -> float:
    return 0.0 if head.effect is None else max(0.0, head.effect.mean.nats)
