"""Roles in a report: which record belongs to which run, and what it says of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headprune.exporting.role_rows import role_rows
from headprune.reports.view import Cell, HeadMap
from headprune.schemas.manifest import Manifest
from headprune.schemas.roles import HeadRoles, RolesRecord


def with_roles(
    manifest: Manifest, head_map: HeadMap, records: Sequence[RolesRecord]
) -> tuple[HeadMap, list[list[str]]]:
    """The map with what heads do, and a row per role; as it is, and none, without a record."""
    original, cut = _of_original(manifest, records), _of_cut(manifest, records)
    told = original or cut
    if told is None or not manifest.layout:
        return head_map, []
    heads = {(module.path, head.head): head for module in told.modules for head in module.heads}
    left = manifest.layout
    kept = {(p, head) for p, head in heads if p not in left or head in left[p].query_heads}
    rows = role_rows(cut) if cut is not None else role_rows(told, kept)
    layers = []
    for layer in head_map.layers:
        cells = [_with_role(cell, heads.get((layer.path, cell.head))) for cell in layer.cells]
        layers.append(replace(layer, cells=tuple(cells)))
    return replace(head_map, layers=tuple(layers)), rows


def _of_original(manifest: Manifest, records: Sequence[RolesRecord]) -> RolesRecord | None:
    source = manifest.steps[0].source.fingerprint
    return next((one for one in records if one.model.fingerprint == source), None)


def _of_cut(manifest: Manifest, records: Sequence[RolesRecord]) -> RolesRecord | None:
    """The record against the original of a model with the heads of this one."""
    source, left = manifest.steps[0].source.fingerprint, manifest.layout
    for one in records:
        heads = {module.path: tuple(head.head for head in module.heads) for module in one.modules}
        same = all(path in left and left[path].query_heads == ids for path, ids in heads.items())
        if one.against is not None and one.against.fingerprint == source and same:
            return one
    return None


def _with_role(cell: Cell, head: HeadRoles | None) -> Cell:
    if head is None:
        return cell
    facts = [("role", head.role or "none")]
    if head.effect is not None:
        facts.append(("loss without it, nats", f"{head.effect.zero.nats:+.3f}"))
    return replace(cell, facts=(*cell.facts, *facts))
