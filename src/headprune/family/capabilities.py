"""Capabilities of every family, read off the table."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.family import FAMILIES
from headprune.family.spec import Family


@dataclass(frozen=True)
class Capability:
    """One family.

    Attributes:
        family: ``config.model_type``.
        attention: Its kinds of attention.
        gates: Whether gates can be trained on it: on text, images or speech.
        cut: Whether heads can be cut out of it.
        uneven: How a cut with other counts in every layer loads.
        even: How a cut with equal counts in all layers loads.
        fewer_kv_heads: "native", "runtime", or the reason why it cannot have fewer.
        since: Lowest transformers for it; None for the lowest that headprune runs on.
        refused: Settings under which a model of the family is refused, with the reason.
    """

    family: str
    attention: tuple[str, ...]
    gates: bool
    cut: bool
    uneven: str
    even: str
    fewer_kv_heads: str
    since: str | None
    refused: dict[str, str]


def capabilities() -> list[Capability]:
    """One entry per row of the family table, in its order."""
    return [_capability(FAMILIES[name]) for name in FAMILIES]


def _capability(family: Family) -> Capability:
    unless = f", unless {' or '.join(family.native_unless)}" if family.native_unless else ""
    return Capability(
        family=family.model_type,
        attention=tuple(family.attention),
        gates="vision" not in family.attention,
        cut=True,
        uneven="runtime",
        even=f"native{unless}" if family.native else "runtime",
        fewer_kv_heads=family.fewer_kv_heads,
        since=family.min_transformers,
        refused=dict(family.refused),
    )
