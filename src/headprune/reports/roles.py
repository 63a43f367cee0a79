"""Roles in a report: which record belongs to which run, and what it says of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headprune.exporting.role_rows import role_rows
from headprune.reports.view import Cell, HeadMap
from headprune.schemas.manifest import Manifest
from headprune.schemas.roles import HeadRoles, RolesRecord


@dataclass(frozen=True)
class RolesTold:
    """What records say of the heads of a result.

    Attributes:
        manifest: Of the result.
        original: The record of what it was made from, if there is one, with its folder.
        cut: The record of the result against that, if there is one, with its folder.
    """

    manifest: Manifest
    original: tuple[Path, RolesRecord] | None
    cut: tuple[Path, RolesRecord] | None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the records lie."""
        return tuple(one[0] for one in (self.original, self.cut) if one is not None)

    @property
    def pictured(self) -> RolesRecord | None:
        """The record to draw: where there is one with the original beside the result, that."""
        told = self.cut or self.original
        return None if told is None else told[1]

    def rows(self) -> list[list[str]]:
        """A row per role; none without a record."""
        if self.cut is not None:
            return role_rows(self.cut[1])
        return [] if self.original is None else role_rows(self.original[1], self._kept())

    def on(self, head_map: HeadMap) -> HeadMap:
        """A map with what heads do; as it is without a record."""
        told = self.original or self.cut
        if told is None:
            return head_map
        heads = _heads(told[1])
        layers = []
        for layer in head_map.layers:
            cells = [_with_role(cell, heads.get((layer.path, cell.head))) for cell in layer.cells]
            layers.append(replace(layer, cells=tuple(cells)))
        return replace(head_map, layers=tuple(layers))

    def _kept(self) -> set[tuple[str, int]]:
        left = self.manifest.layout
        heads = () if self.original is None else _heads(self.original[1])
        return {(p, head) for p, head in heads if p not in left or head in left[p].query_heads}


def roles_told(manifest: Manifest, records: Mapping[Path, RolesRecord]) -> RolesTold:
    """Finds the records that are of a result or of what it was made from."""
    source, left = manifest.steps[0].source.fingerprint, manifest.layout

    def is_of_cut(record: RolesRecord) -> bool:
        ids = {module.path: tuple(head.head for head in module.heads) for module in record.modules}
        same = all(path in left and left[path].query_heads == heads for path, heads in ids.items())
        return record.against is not None and record.against.fingerprint == source and same

    found = records.items() if left else ()
    original = next((one for one in found if one[1].model.fingerprint == source), None)
    return RolesTold(manifest, original, next((one for one in found if is_of_cut(one[1])), None))


def _heads(record: RolesRecord) -> dict[tuple[str, int], HeadRoles]:
    return {(module.path, head.head): head for module in record.modules for head in module.heads}


def _with_role(cell: Cell, head: HeadRoles | None) -> Cell:
    if head is None:
        return cell
    facts = [("role", head.role or "none")]
    if head.effect is not None:
        facts.append(("loss without it, nats", f"{head.effect.zero.nats:+.3f}"))
    return replace(cell, facts=(*cell.facts, *facts))
