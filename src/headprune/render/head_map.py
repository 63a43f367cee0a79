"""The map of heads: states, facts and the places of its cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from headprune.runtime.modeling_headprune import kv_owners
from headprune.tensors.units import Unit, members

State = Literal["kept", "window", "merged", "removed", "earlier"]
STATES: dict[State, str] = {
    "kept": "stays",
    "window": "stays, sees a window",
    "merged": "stays, shares merged keys and values",
    "removed": "removed",
    "earlier": "gone before this run",
}
_STAY = ("kept", "window", "merged")
PerHead = Mapping[tuple[str, int], Any]  # by module path and head id
_CELL, _GAP = 18, 3  # of the drawing, in its own units
_WIDE = 16  # heads; with more of them the map gets the width of the page, and larger labels


@dataclass
class Cell:
    """One head, by its id."""

    head: int
    state: State
    evidence: float | None = None
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """One attention module before the run."""

    path: str
    ids: Sequence[int]  # of its query heads
    sizes: Sequence[int]  # query heads of every KV head; empty where these are not known
    cells: list[Cell]

    @staticmethod
    def of(path: str, ids: Sequence[int], sizes: Sequence[int]) -> Layer:
        """Return the layer, with a cell per id up to the largest."""
        cells = range(max(ids, default=-1) + 1)
        return Layer(path, ids, sizes, [Cell(h, "kept" if h in ids else "earlier") for h in cells])

    @property
    def group(self) -> int:
        """Query heads per KV head where equal; 1 otherwise."""
        whole = len(set(self.sizes)) == 1 and len(self.cells) == len(self.ids)
        return self.sizes[0] if whole else 1


@dataclass
class HeadMap:
    """The heads of a model, layer by head."""

    layers: list[Layer]
    evidence: str | None = None  # name of the shown number
    name: str = ""  # of its run, beside others

    def keep(self, kept: Set[tuple[str, int]]) -> None:
        """Mark heads as kept or removed, by path and id."""
        for layer in self.layers:
            for cell in layer.cells:
                if cell.state != "earlier":
                    cell.state = "kept" if (layer.path, cell.head) in kept else "removed"

    def mark(self, state: State, heads: Set[tuple[str, int]]) -> None:
        """Give heads that stay a state, by path and id."""
        for layer in self.layers:
            for cell in layer.cells:
                if cell.state in _STAY and (layer.path, cell.head) in heads:
                    cell.state = state

    def show(self, label: str, values: PerHead) -> None:
        """Draw a number per head."""
        self.evidence = label
        for layer in self.layers:
            for cell in layer.cells:
                cell.evidence = values.get((layer.path, cell.head))

    def tell(self, name: str, facts: PerHead) -> None:
        """Add a fact to heads."""
        for layer in self.layers:
            for cell in layer.cells:
                value = facts.get((layer.path, cell.head))
                if value is not None and cell.state != "earlier":
                    cell.facts[name] = f"{value:.4g}" if isinstance(value, float) else str(value)

    def tell_kv_heads(self, merged: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Add the KV head of every query head, and the KV heads merged with it."""
        for layer in self.layers:
            if [*layer.ids] != [*range(sum(layer.sizes))]:
                continue  # it was cut before: the ids of its KV heads are not their positions
            shared = {kv: group for group in merged.get(layer.path, ()) for kv in group}
            if set(layer.sizes) == {1} and not shared:
                continue
            of_head = kv_owners(layer.sizes)
            for cell, kv in zip(layer.cells, of_head, strict=True):
                others = ", ".join(str(one) for one in shared.get(kv, ()) if one != kv)
                cell.facts["KV head"] = f"{kv}, merged with {others}" if others else str(kv)

    @property
    def cells(self) -> list[Cell]:
        return [cell for layer in self.layers for cell in layer.cells]

    @property
    def counts(self) -> tuple[int, int]:
        """Heads that stay, and all heads."""
        return sum(cell.state in _STAY for cell in self.cells), len(self.cells)

    @property
    def states(self) -> dict[State, str]:
        """The states of heads that occur, and their meaning."""
        present = {cell.state for cell in self.cells}
        return {state: words for state, words in STATES.items() if state in present}

    @property
    def title(self) -> str:
        stay, heads = self.counts
        of = f" of {self.name}" if self.name else ""
        return f"Heads{of}: {stay} of {heads} stay"

    def labels(self) -> list[str]:
        """Return the distinctive parts of module paths, such as ``7``."""
        parts = [layer.path.split(".") for layer in self.layers]
        if len(parts) < 2 or len(set(map(len, parts))) > 1:
            return [layer.path for layer in self.layers]
        differing = [i for i, names in enumerate(zip(*parts, strict=True)) if len({*names}) > 1]
        return [".".join(names[i] for i in differing) for names in parts]

    def geometry(self) -> dict[str, Any]:
        """Return the cells of the drawing, in its own units."""
        step, labels = _CELL + _GAP, self.labels()
        columns = max((len(layer.cells) for layer in self.layers), default=0)
        letter = 17 if columns > _WIDE else 7
        left = min(max(8 + letter * max(map(len, labels), default=0), 24), 200)
        low, high = self._scale()
        cells, right = [], 0
        for y, layer in enumerate(self.layers):
            for x, cell in enumerate(layer.cells):
                gaps = x // layer.group * 5 if layer.group > 1 else 0
                at = left + x * step + gaps
                strength = _strength(cell.evidence, low, high) if self.evidence else 0.75
                cells.append((at, 18 + y * step, cell.state[0], strength))
                right = max(right, at + _CELL)
        return {
            "cells": cells,
            "labels": [(label, 18 + y * step + 13) for y, label in enumerate(labels)],
            "label_width": left,
            "width": right + 4,
            "height": 18 + len(self.layers) * step + 2,
            "columns": columns,
            "wide": columns > _WIDE,
            "data": self._facts(),
        }

    def _scale(self) -> tuple[float, float]:
        """The evidence that is palest, and darkest: of a probability 0 and 1."""
        values = (cell.evidence for cell in self.cells)
        known = [value for value in values if value is not None and math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)

    def _facts(self) -> dict[str, Any]:
        names = list(dict.fromkeys(name for cell in self.cells for name in cell.facts))
        cells = [
            [y, cell.head, cell.state[0], [cell.facts.get(name) for name in names]]
            for y, layer in enumerate(self.layers)
            for cell in layer.cells
        ]
        paths = [layer.path for layer in self.layers]
        states = {state[0]: words for state, words in STATES.items()}
        return {"paths": paths, "names": names, "cells": cells, "states": states}


def _strength(value: float | None, low: float, high: float) -> float:
    if value is None or not math.isfinite(value):
        return 0.0
    return round((value - low) / (high - low), 3) if high > low else 0.5


def per_head(layers: Iterable[Layer], unit: Unit, values: Sequence[Any]) -> PerHead:
    """Return values of units, counted through all layers, by head."""
    numbers: dict[tuple[str, int], Any] = {}
    start = 0
    for layer in layers:
        units = members(unit, layer.sizes)
        for value, inside in zip(values[start : start + len(units)], units, strict=True):
            numbers |= {(layer.path, layer.ids[place]): value for place in inside}
        start += len(units)
    return numbers
