"""Zero heads for engines that know no ragged groups and no layer without heads.

Zero heads are removed heads that stay in the weights: their columns of W_O are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from headprune.config import LayoutOption
from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.model.cost import kv_width
from headprune.planning.constraints import Constraints
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import Cut, refuse_foreign, resolve
from headprune.tensors.units import Unit, members


def laid_out(plan: Plan, constraints: Constraints) -> tuple[Plan, list[Cut], tuple[str, ...]]:
    """Return a plan in its layout.

    Args:
        plan: The plan.
        constraints: The layout, the engines and the model.

    Returns:
        The plan, its cuts, and the padding, a sentence each.

    Raises:
        PlanError: If the plan does not fit the model or the layout.
    """
    sentences: tuple[str, ...] = ()
    if constraints.layout is LayoutOption.PADDED:
        attentions = attention_of(constraints.net)
        refuse_foreign(plan, constraints.net)
        unpadded, plan = plan, _padded(plan, attentions)
        sentences = tuple(_sentences(unpadded, plan, attentions))
    cuts = resolve(plan, constraints.net, ragged=constraints.layout is LayoutOption.RAGGED)
    constraints.check(cuts)
    return plan, cuts, sentences


def _padded(plan: Plan, attentions: Sequence[Attention]) -> Plan:
    """Return the plan with zero heads: equal groups, and a head in every layer.

    Raises:
        PlanError: If it needs none, or they would take the place of all removed heads.
    """
    parts = {a.path: _part(plan.attentions[a.path], a) for a in attentions}
    padded = plan.model_copy(update={"attentions": parts})
    if padded == plan:
        raise PlanError(
            "--layout padded: the plan leaves no ragged groups and no layer without heads, so "
            "there is nothing to pad. Leave it out."
        )
    if padded.kept_heads == plan.query_heads:
        raise PlanError(
            "--layout padded: zero heads would take the place of all heads that go, so the result "
            "would be no smaller. Remove whole groups, or give --layout ragged."
        )
    return padded


def _part(part: AttentionPlan, attention: Attention) -> AttentionPlan:
    kept, ids = set(part.keep), attention.query_ids
    groups = [[ids[query] for query in g] for g in members(Unit.KV_GROUP, attention.group_sizes)]
    counts = [len(kept.intersection(group)) for group in groups]
    if not groups:
        raise PlanError(
            f"--layout padded: '{attention.path}' lost its heads in an earlier cut, and none is "
            "left to be a zero head. headprune export --to vllm makes one."
        )
    zero: set[int] = set()
    for number, (group, count) in enumerate(zip(groups, counts, strict=True)):
        wanted = max(counts) if count else int(not kept and number == 0)
        zero.update([head for head in group if head not in kept][: wanted - count])
    if not zero:
        return part
    gates = dict(zip(part.keep, part.scale or (1.0,) * len(part.keep), strict=True))
    keep = tuple(sorted(kept | zero))
    scale = tuple(gates.get(head, 0.0) for head in keep)
    return part.model_copy(update={"keep": keep, "scale": scale})


def _sentences(unpadded: Plan, padded: Plan, attentions: Sequence[Attention]) -> Iterator[str]:
    changed = [
        (layer, a, len(padded.attentions[a.path].keep))
        for layer, a in enumerate(attentions)
        if padded.attentions[a.path] != unpadded.attentions[a.path]
    ]
    ragged = [layer for layer, a, _ in changed if unpadded.attentions[a.path].keep]
    empty = {
        layer: kv_width(a) * heads
        for layer, a, heads in changed
        if not unpadded.attentions[a.path].keep
    }
    yield from zero_heads_said(ragged, empty)


def zero_heads_said(ragged: Sequence[int], empty: Mapping[int, int]) -> Iterator[str]:
    """Yield purpose and cost of zero heads, a sentence each.

    Args:
        ragged: Layers whose groups they make equal.
        empty: Layers without heads, and the numbers per token that they add to the KV cache.
    """
    if ragged:
        yield (
            f"{_layers(ragged)} with KV heads of unequal numbers of queries: zero query heads make "
            "them equal, at no cost in KV cache."
        )
    if empty:
        yield (
            f"{_layers([*empty])} without heads: zero heads, for which the KV cache "
            f"holds {sum(empty.values()):,} numbers per token that it keeps."
        )


def _layers(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, islice(layers, 8)))
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"Layer{'s' if len(layers) > 1 else ''} {shown}{more}"
