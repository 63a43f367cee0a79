"""From scores of windows and a budget to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from headprune.errors import PlanError
from headprune.model.cost import KVCache, kv_width
from headprune.model.open import Model
from headprune.model.units import fitted_gates, fitted_scores
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import TrainedGates
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Window
from headprune.schemas.scores import Scores
from headprune.surgery.layer_windows import no_layer_windows
from headprune.tensors.units import Unit


def plan_windows(
    model: Model,
    scores: Scores,
    keep_full: float | int | None,
    max_kv_bytes: int | None = None,
    context: int | None = None,
    element: torch.dtype = torch.bfloat16,
) -> Plan:
    """Return the plan that gives the KV heads, or layers, with the lowest scores a window.

    Args:
        model: The model.
        scores: Scores of windows; see ``evidence.windows``.
        keep_full: Share or number of the scored units that keep the whole past.
        max_kv_bytes: Instead, bytes of the cache of one sequence.
        context: Its tokens.
        element: Its element type.

    Raises:
        PlanError: If the scores are not of windows, no plan keeps to the budget, or nothing would
            get a window.
    """
    window, layers = scores.metadata.window, scores.metadata.unit is Unit.LAYER
    if window is None:
        raise PlanError(
            "The scores are of heads to remove, not of windows: score again with --form window."
        )
    units = _units(fitted_scores(model.any_net, scores), scores.metadata.unit)
    values = scores.of(None)[1].tolist()
    order = sorted(range(len(units)), key=lambda number: (-values[number], number))
    if max_kv_bytes is not None and context is not None:
        lasting = window.size + window.sinks
        if layers and not window.sinks and no_layer_windows(model.any_net.config, lasting) is None:
            lasting -= 1  # a plain config caches all that the next token sees beside itself
        beyond = max(0, context - lasting) * element.itemsize
        saved = [len(heads) * kv_width(attention) * beyond for attention, heads in units]
        total = KVCache.of(model.any_net).elements(context) * element.itemsize - sum(saved)
        if total > max_kv_bytes:
            raise PlanError(
                f"--max-kv-bytes {max_kv_bytes:,}: with a window for every KV head the cache of "
                f"{context:,} tokens takes {total:,} bytes. Give more, or a smaller --window."
            )
        count = 0
        while count < len(units) and total + saved[order[count]] <= max_kv_bytes:
            total, count = total + saved[order[count]], count + 1
    else:
        assert keep_full is not None
        count = full_units(keep_full, len(units), layers)
    if count == len(units):
        raise PlanError("Nothing would get a window: keep less of the past full.")
    return _plan(model, window, scores.metadata.unit, (units[n] for n in order[count:]))


def windows_of_gates(model: Model, folder: Path) -> tuple[Plan, TrainedGates]:
    """Return the plan that gates were trained to, and these.

    Raises:
        HeadpruneError: If they are not of windows, or of another model.
    """
    gates, attentions = fitted_gates(model.any_net, model.identity, folder)
    unit, window = gates.metadata.unit, gates.metadata.window
    if window is None:
        raise PlanError(
            f"The gates in '{folder}' remove heads: cut with 'headprune prune --gates', or train "
            "gates with --form window."
        )
    units = _units(attentions, unit)
    near = (units[n] for n, kept in enumerate(gates.kept.tolist()) if not kept)
    return _plan(model, window, unit, near), gates


def _units(attentions: Sequence[Attention], unit: Unit) -> list[tuple[Attention, list[int]]]:
    """Return the KV heads of every unit, with their module."""
    return [
        (attention, list(heads))
        for attention in attentions
        for heads in (
            [attention.kv_ids] if unit is Unit.LAYER else [(head,) for head in attention.kv_ids]
        )
        if heads
    ]


def _plan(
    model: Model, window: Window, unit: Unit, units: Iterable[tuple[Attention, list[int]]]
) -> Plan:
    """Return the plan that gives some units a window."""
    near: dict[str, tuple[int, ...]] = {}
    for attention, heads in units:
        near[attention.path] = (*near.get(attention.path, ()), *heads)
    parts = {
        a.path: AttentionPlan(
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            keep=tuple(sorted(a.query_ids)),
            window=tuple(sorted(near.get(a.path, ()))),
        )
        for a in model.attentions
    }
    return Plan(unit=unit, model=model.identity, window=window, attentions=parts)


def full_units(keep_full: float | int, total: int, layers: bool) -> int:
    """Return how many units keep the whole past; of a share above 0 at least one."""
    if isinstance(keep_full, int) and keep_full > total:
        said = "layers" if layers else "KV heads"
        raise PlanError(f"--keep-full {keep_full}: the model has {total} {said} with a whole past.")
    share = keep_full if isinstance(keep_full, float) else keep_full / total
    return max(round(share * total), int(share > 0))
