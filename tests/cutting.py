"""Uneven plans, and the way from a plan to a proven folder."""

import torch

import headprune
from headprune.model import probes
from headprune.model.attention import attention_of, identity
from headprune.model.open import open_model
from headprune.model.units import default_unit
from headprune.planning.choose import CutRequest, choose, refuse_request
from headprune.proof import equivalence
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import cut_heads
from headprune.tensors.units import Unit


def uneven_plan(model, *empty):
    """Another number of units in every layer, gate values that are not 1, some layers without.

    Args:
        model: The model.
        *empty: Positions, among the modules of each kind, of those that lose every head.
    """
    attentions, parts = attention_of(model), {}
    for kind in {a.kind: None for a in attentions}:
        modules = [a for a in attentions if a.kind == kind]
        gone = {position % len(modules) for position in empty}
        for layer, attention in enumerate(modules):
            heads = layer not in gone and attention.kv_heads > 0  # an earlier cut may leave none
            group = attention.query_heads // max(attention.kv_heads, 1)
            units = [g for g in range(attention.kv_heads) if g != layer]
            units = units[: max(1, attention.kv_heads - 1 - layer)] or [0]
            keep = [g * group + j for g in units for j in range(group)] if heads else []
            parts[attention.path] = AttentionPlan(
                query_heads=attention.query_heads,
                kv_heads=attention.kv_heads,
                keep=tuple(keep),
                scale=tuple(1 - 0.05 * h for h in keep),
            )
    unit = default_unit(attentions)
    return Plan(unit=unit, model=identity(model, "tiny"), attentions=parts)


def ragged_plan(model):
    """One head less in the first group of every layer: KV heads with unequal numbers of queries."""
    parts = {
        a.path: AttentionPlan(
            query_heads=a.query_heads, kv_heads=a.kv_heads, keep=tuple(range(1, a.query_heads))
        )
        for a in attention_of(model)
    }
    return Plan(unit=Unit.HEAD, model=identity(model, "tiny"), attentions=parts)


def prove(model, cuts, folder):
    """Gates, cuts, writes, reloads and compares."""
    expected = equivalence.expect(model, cuts)
    cut_heads(model, cuts)
    equivalence.conclude(expected, probes.probe(model, expected.inputs))
    reloaded = _reloaded(model, folder)
    return equivalence.conclude(expected, probes.probe(reloaded, expected.inputs))


def gap(model, cuts, folder):
    """How far the reloaded cut is from the gated original: a proof without what measures it."""
    inputs = probes.probe_inputs(model)
    wanted = equivalence.probe_gated(model, cuts, inputs)
    cut_heads(model, cuts)
    return equivalence.difference(wanted, probes.probe(_reloaded(model, folder), inputs))


def _reloaded(model, folder):
    model.save_pretrained(folder)
    attn = model.config._attn_implementation
    return headprune.from_pretrained(folder, attn_implementation=attn)


def expecting(wanted, control=None, rounding=0.0, dtype=torch.float32):
    """What a proof compares with, from outputs."""
    return equivalence.Expectation({}, wanted, control, equivalence.Rounding(rounding), dtype)


def chosen(folder, scores, **budget):
    """The cut by scores, as prune chooses it."""
    request = CutRequest(scores=scores, **budget)
    refuse_request(request)
    return choose(open_model(folder), request)
