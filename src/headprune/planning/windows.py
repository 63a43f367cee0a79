"""From scores of windows and a budget to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import PlanError
from headprune.model.cost import KVCache, kv_width
from headprune.model.open import Model
from headprune.model.units import fitted_scores
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Window
from headprune.schemas.scores import Scores
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit

Narrow = dict[str, tuple[int, ...]]  # ids of the KV heads with a window, by module


def plan_windows(
    model: Model,
    scores: Scores,
    keep_full: float | int | None,
    max_kv_bytes: int | None = None,
    context: int | None = None,
) -> Plan:
    """Return the plan that gives the KV heads, or layers, with the lowest scores a window.

    Args:
        model: The model.
        scores: Scores of windows; see ``evidence.windows``.
        keep_full: Share or number of the scored units that keep the whole past.
        max_kv_bytes: Instead, bytes of the cache of one sequence, in the model's element type.
        context: Its tokens.

    Raises:
        PlanError: If the scores are not of windows, or no plan keeps to the budget.
    """
    window = scores.metadata.window
    if window is None:
        raise PlanError(
            "The scores are of heads to remove, not of windows: score again with --form window."
        )
    attentions, values = fitted_scores(model.net, scores), scores.of(None)[1].tolist()
    if max_kv_bytes is not None and context is not None:
        count = _within(model, attentions, scores, window, max_kv_bytes, context)
    else:
        assert keep_full is not None
        count = _count(keep_full, len(values), scores.metadata.unit)
    return _plan(model, attentions, scores, window, count)


def _count(keep_full: float | int, total: int, unit: Unit) -> int:
    """Return how many units keep the whole past; of a share above 0 at least one."""
    if isinstance(keep_full, int) and keep_full > total:
        said = "layers" if unit is Unit.LAYER else "KV heads"
        raise PlanError(f"--keep-full {keep_full}: the model has {total} {said} with a whole past.")
    share = keep_full if isinstance(keep_full, float) else keep_full / total
    return max(round(share * total), int(share > 0))


def _narrow(attentions: Sequence[Attention], scores: Scores, count: int) -> Narrow:
    values = scores.of(None)[1].tolist()
    kept, index, narrow = set(keep_best(values, [1] * len(values), count)), 0, Narrow()
    for attention in attentions:
        ids = attention.kv_ids
        groups = [ids] if scores.metadata.unit is Unit.LAYER and ids else [(head,) for head in ids]
        numbered = enumerate(groups, index)
        narrow[attention.path] = tuple(
            head for number, group in numbered if number not in kept for head in group
        )
        index += len(groups)
    return narrow


def _plan(
    model: Model, attentions: Sequence[Attention], scores: Scores, window: Window, count: int
) -> Plan:
    narrow = _narrow(attentions, scores, count)
    parts = {
        a.path: AttentionPlan(
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            keep=tuple(sorted(a.query_ids)),
            window=tuple(sorted(narrow.get(a.path, ()))),
        )
        for a in model.attentions
    }
    return Plan(unit=scores.metadata.unit, model=model.identity, window=window, attentions=parts)


def _within(
    model: Model,
    attentions: Sequence[Attention],
    scores: Scores,
    window: Window,
    most: int,
    context: int,
) -> int:
    """Return the largest number of units with a whole past that a cache of ``most`` bytes holds."""
    size, beyond = model.net.dtype.itemsize, max(0, context - window.size - window.sinks)
    whole = KVCache.of(model.net).elements(context) * size
    for count in range(len(scores.of(None)[1]), -1, -1):
        narrow = _narrow(attentions, scores, count)
        saved = sum(len(narrow[a.path]) * kv_width(a) for a in attentions) * beyond * size
        if whole - saved <= most:
            return count
    raise PlanError(
        f"--max-kv-bytes {most:,}: with a window for every KV head the cache of {context:,} tokens "
        f"takes {whole - saved:,} bytes. Give more, or a smaller --window."
    )
