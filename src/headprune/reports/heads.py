"""Layer by head: which unit a head belongs to, what speaks for it, and whether it stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headprune.reports.view import Cell, HeadMap, Layer, State
from headprune.schemas.plan import Plan
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Row:
    """One attention module that evidence was gathered on.

    Attributes:
        path: Module path.
        heads: Ids of its query heads.
        group_sizes: Query heads of every KV head.
        units: Head id to the position of its unit among all units.
    """

    path: str
    heads: tuple[int, ...]
    group_sizes: tuple[int, ...]
    units: dict[int, int]


@dataclass(frozen=True)
class HeadEvidence:
    """Numbers per unit.

    Attributes:
        label: What the number is that the map shows.
        rows: Where the units are.
        values: That number.
        others: Further numbers, by name, to be told of a head.
    """

    label: str
    rows: tuple[Row, ...]
    values: Sequence[float]
    others: Mapping[str, Sequence[float]]


def rows_of(
    modules: Sequence[str],
    unit: Unit,
    ids: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
) -> tuple[Row, ...]:
    """Rows with their units, which are counted through all modules."""
    rows, start = [], 0
    for path, heads, group_sizes in zip(modules, ids, sizes, strict=True):
        units: dict[int, int] = {}
        for position, inside in enumerate(members(unit, group_sizes)):
            units |= {heads[place]: start + position for place in inside}
        start += len(set(units.values()))
        rows.append(Row(path, tuple(heads), tuple(group_sizes), units))
    return tuple(rows)


def known_sizes(modules: Sequence[str], plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Query heads of every KV head by a plan for the model; empty if it does not tell."""
    if not set(modules) <= set(plan.attentions):
        return ()
    parts = [plan.attentions[path] for path in modules]
    if any(part.kv_heads and part.query_heads % part.kv_heads for part in parts):
        return ()
    return tuple((p.query_heads // max(1, p.kv_heads),) * p.kv_heads for p in parts)


def head_map(
    rows: Sequence[Row],
    kept: Mapping[str, set[int]] | None,
    groups: Mapping[str, Sequence[Sequence[int]]],
    evidence: HeadEvidence | None,
) -> HeadMap:
    """The map of a run.

    Args:
        rows: The attention modules before the run.
        kept: Per module path, the heads that stay; None where heads were only scored.
        groups: Per module path, ids of the KV heads that became one, where some did.
        evidence: What speaks for heads.
    """
    of_module = {row.path: row.units for row in evidence.rows} if evidence else {}
    labels = short_labels([row.path for row in rows])
    layers = []
    for row, label in zip(rows, labels, strict=True):
        cells = []
        shared = {kv: group for group in groups.get(row.path, ()) for kv in group}
        kv_of = [kv for kv, size in enumerate(row.group_sizes) for _ in range(size)]
        for head in range(max(row.heads, default=-1) + 1):
            unit = of_module.get(row.path, {}).get(head)
            if head not in row.heads:
                cells.append(Cell(head, "earlier", None))
                continue
            facts = _facts(row, kv_of, head, shared)
            if evidence is not None and unit is not None:
                facts += [(name, _number(v[unit])) for name, v in evidence.others.items()]
            value = evidence.values[unit] if evidence and unit is not None else None
            state: State = "scored"
            if kept is not None:
                state = "kept" if head in kept.get(row.path, set()) else "removed"
            cells.append(Cell(head, state, value, tuple(facts)))
        sizes = set(row.group_sizes)
        group = sizes.pop() if len(sizes) == 1 and len(cells) == len(row.heads) else 1
        layers.append(Layer(row.path, label, tuple(cells), group))
    return HeadMap(tuple(layers), evidence.label if evidence else None)


def _facts(
    row: Row, kv_of: Sequence[int], head: int, shared: Mapping[int, Sequence[int]]
) -> list[tuple[str, str]]:
    # of a model that was cut before, the ids of KV heads are not those of their positions
    if row.heads != tuple(range(len(row.heads))) or head >= len(kv_of):
        return []
    kv = kv_of[head]
    if set(row.group_sizes) == {1} and kv not in shared:
        return []
    others = [str(other) for other in shared.get(kv, ()) if other != kv]
    return [("KV head", f"{kv}, merged with {', '.join(others)}" if others else str(kv))]


def _number(value: float) -> str:
    return f"{value:.4g}"


def short_labels(paths: Sequence[str]) -> list[str]:
    """What of module paths differs: ``model.layers.7.self_attn`` among its like is ``7``."""
    parts = [path.split(".") for path in paths]
    if len(parts) < 2:
        return list(paths)
    if len({len(names) for names in parts}) == 1:
        differing = [i for i, names in enumerate(zip(*parts, strict=True)) if len(set(names)) > 1]
        return [".".join(names[i] for i in differing) for names in parts]
    shortest = min(map(len, parts))
    columns = enumerate(zip(*parts, strict=False))
    same = next((i for i, names in columns if len(set(names)) > 1), shortest - 1)
    return [".".join(names[same:]) for names in parts]
