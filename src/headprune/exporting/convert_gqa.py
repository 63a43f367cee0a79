"""headprune convert-gqa: fewer KV heads, shared by more queries, proven."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import ConvertConfig, DataConfig, Grouping, LayoutOption, Target
from headprune.context import Context
from headprune.errors import DataError, PlanError
from headprune.exporting.opened import Opened, open_for_merging, weighs
from headprune.exporting.publish import (
    Changes,
    Pruned,
    WriteOrder,
    refuse_unprovable,
)
from headprune.exporting.streamed import write_changed
from headprune.io.outputs import claims_output
from headprune.model import probes
from headprune.model.attention import attention_of, family_of
from headprune.model.heads import read_heads, write_heads
from headprune.model.opening import result_dtypes
from headprune.model.residency import residency_of
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.kv_counts import equal_counts, stated_counts
from headprune.planning.kv_heads import KvPlan, Way, choose
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, ModelIdentity, Plan
from headprune.schemas.records import Merging
from headprune.surgery.conversion import convert_in_sequence, geometry
from headprune.surgery.cut import resolve
from headprune.surgery.merges import Groups, HeadWeights, MergeContext
from headprune.surgery.merges.outputs import without
from headprune.surgery.transfer import has_twin
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Converted:
    """A finished conversion.

    Attributes:
        pruned: The result, as of every command that cuts.
        merge: How the heads of a group became one.
        grouping: Which heads share.
        kv_heads: KV heads before and after, per module.
        own_keys: Modules where a norm kept queries from absorbing a map, so that the group takes
            the keys of one of its heads.
        calibration_tokens: How much text it was calibrated on; 0 without.
        planned: The way every module went, where that was weighed.
    """

    pruned: Pruned
    merge: str
    grouping: str
    kv_heads: dict[str, tuple[int, int]]
    own_keys: tuple[str, ...]
    calibration_tokens: int
    planned: KvPlan | None = None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.pruned.manifest.model_dump(mode="json")


@dataclass(frozen=True)
class KvPreview:
    """What a conversion would do.

    Attributes:
        plan: The plan.
        kv_heads: KV heads before and after, of the modules that are converted.
        planned: The way every module goes, and the others that were measured.
        free: What the choice among all ways is expected to cost.
        engines: Per ``--for``, the expected cost of what it leaves to choose from, or why nothing.
    """

    plan: Plan
    kv_heads: tuple[int, int]
    planned: KvPlan
    free: float
    engines: Mapping[str, float | str]

    def as_json(self) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        ways = self.planned.records()
        return {
            "kv_heads": list(self.kv_heads),
            "expected_cost": self.planned.cost,
            "engines": dict(self.engines),
            "ways": {path: way.model_dump(mode="json") for path, way in ways.items()},
            "plan": self.plan.model_dump(mode="json"),
        }


@claims_output("model", "calibrate")
def convert_gqa(  # noqa: PLR0913  (the last is for compress, and no option)
    model: str | Path,
    output: Path,
    config: ConvertConfig,
    calibrate: DataConfig | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    overwrite: bool = False,
    context: Context = Context(),
    empty_layers: bool = True,
) -> Converted:
    """Merges KV heads and writes the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        config: How many KV heads, and how they are merged.
        calibrate: Text that shows what the heads do; some merges need it.
        layout: What the result may look like.
        overwrite: Replace an existing output.
        context: What it runs in.
        empty_layers: Whether a budget may take all heads of a layer.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute what the merged original computes.
    """
    opened = open_for_merging(model, config, calibrate, layout, context, empty_layers)
    net, merger, attentions = opened.net, opened.merger, opened.attentions
    planned, sample = opened.planned, opened.sample
    stored = result_dtypes(net, model, config.out_dtype)
    settings: dict[str, MergeContext] = {}
    compares = merger.name == "procrustes" or config.grouping is Grouping.SIMILAR
    if sample is None and compares:
        settings = geometry(net, attentions, probes.probe_inputs(net))
    ways = {} if planned is None else planned.chosen
    wanted = {path: way.kv_heads for path, way in ways.items()}
    if planned is None:
        wanted = _wanted(config, attentions)
    _check_native(opened.constraints, net, wanted)
    if has_twin(net) and set(wanted.values()) == {1} and residency_of(net) is not None:
        raise PlanError(
            "With one KV head this model becomes one of another class, which is made of all its "
            "weights at once. Give --config placement=whole."
        )
    groups: dict[str, Groups] = {}
    own_keys: list[str] = []
    done = itertools.count(1)

    def converted(attention: Attention, heads: HeadWeights, setting: MergeContext) -> HeadWeights:
        way = ways.get(attention.path)
        if way is not None and not way.merges:
            assert setting.activations is not None
            changed = without(heads, way.kept, setting.activations)
        else:
            chosen = merger.groups(heads, setting, wanted[attention.path])
            groups[attention.path] = chosen
            if not setting.linear and merger.name in ("lowrank", "procrustes"):
                own_keys.append(attention.path)
            changed = merger.merged(heads, setting, chosen)
        _refuse_not_finite(changed, attention.path, merger.name)
        context.step(next(done), len(attentions))
        return changed

    context.stage("testing the verification")
    refuse_unprovable(net, _plan(net, opened.source, {}))
    context.stage(f"merging KV heads ({merger.name})")
    if sample is not None:
        convert_in_sequence(net, attentions, sample.whole(), converted)
    else:
        for attention in attentions:
            setting = settings.get(attention.path, MergeContext())
            write_heads(attention, converted(attention, read_heads(attention), setting))

    plan = _plan(net, opened.source, groups, ways)
    plan = plan.model_copy(update={"merge": merger.name if plan.merged else None})
    # its weights are others by now than those of the model the plan names
    ragged = layout is LayoutOption.RAGGED
    cuts = resolve(plan.model_copy(update={"model": None}), net, ragged=ragged)
    if not (has_twin(net) and set(wanted.values()) == {1}):
        opened.constraints.check(cuts)
    tokens = sample.tokens if sample is not None else 0
    merging = Merging(
        merge=merger.name,
        grouping=config.grouping.value,
        calibration_tokens=tokens,
        seed=config.seed,
        ways=None if planned is None else planned.records(),
    )
    kv_heads = {a.path: (a.kv_heads, wanted[a.path]) for a in attentions}
    work = Changes(merging, made_by=context.made_by)
    order = WriteOrder(opened.source, model, plan, output, stored, work)
    pruned = write_changed(net, cuts, order, context)
    grouping = config.grouping.value
    return Converted(pruned, merger.name, grouping, kv_heads, tuple(own_keys), tokens, planned)


def preview(
    model: str | Path,
    config: ConvertConfig,
    calibrate: DataConfig | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    context: Context = Context(),
) -> KvPreview:
    """Says how ``convert_gqa`` would spend a budget, and writes nothing; arguments as there.

    Raises:
        PlanError: If there is nothing to weigh.
    """
    if not weighs(config, calibrate, layout):
        raise PlanError(
            "--dry-run shows how a budget is spent: give --kv-budget and --calibrate, and neither "
            "--merge nor --layout uniform, which leave nothing to choose."
        )
    opened = open_for_merging(model, config, calibrate, layout, context)
    assert opened.planned is not None
    ways = opened.planned.chosen
    groups = {path: way.groups for path, way in ways.items() if way.merges}
    plan = _plan(opened.net, opened.source, groups, ways)
    plan = plan.model_copy(update={"merge": opened.merger.name if plan.merged else None})
    before = sum(a.kv_heads for a in opened.attentions)
    after = sum(way.kv_heads for way in ways.values())
    assert config.kv_budget is not None
    budget = round(config.kv_budget * before)
    free = choose(opened.planned.ways, budget, "the budget").cost
    engines = _costs_for(opened, budget)
    return KvPreview(plan, (before, after), opened.planned, free, engines)


def _costs_for(opened: Opened, budget: int) -> dict[str, float | str]:
    """What the choice would cost if it was made for an engine."""
    assert opened.planned is not None
    found: dict[str, float | str] = {}
    for target in Target:
        try:
            constraints = constraints_of(opened.net, LayoutOption.PER_LAYER, (target,))
            chosen = choose(opened.planned.ways, budget, "the budget", constraints)
            wanted = {path: way.kv_heads for path, way in chosen.chosen.items()}
            _check_native(constraints, opened.net, wanted)
            found[target.value] = chosen.cost
        except PlanError as error:
            found[target.value] = str(error).split(". ")[0] + "."
    return found


def _wanted(config: ConvertConfig, attentions: Sequence[Attention]) -> dict[str, int]:
    """KV heads per module, where nothing was weighed: as they were given, or equal."""
    if config.kv_heads is not None:
        counts = stated_counts(config.kv_heads, attentions)
    else:
        counts = equal_counts(config.kv_budget or 1.0, attentions)
    return dict(zip((a.path for a in attentions), counts, strict=True))


def _refuse_not_finite(merged: HeadWeights, path: str, merge: str) -> None:
    weights = (merged.q, merged.k, merged.v, merged.o)
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise DataError(
            f"--merge {merge} makes no finite weights of '{path}': those it has, or what they make "
            "of the text, are too large to multiply. Use --merge mean, or repair the checkpoint."
        )


def _check_native(constraints: Constraints, net: PreTrainedModel, wanted: dict[str, int]) -> None:
    """Refuses what a plain config cannot hold, where it must, before anything is computed."""
    if not constraints.even_kv_heads:
        return
    family = family_of(net.config)
    if has_twin(net) and set(wanted.values()) == {1}:
        return
    if family.fewer_kv_heads != "native":
        raise PlanError(
            f"{constraints.said}: the stock class of {family.model_type} has no setting for the "
            "number of KV heads; leave that out for the runtime."
        )
    if len(set(wanted.values())) > 1:
        raise PlanError(
            f"{constraints.said} needs the same number of KV heads in every layer; give one number "
            "to --kv-heads."
        )


def _plan(
    net: PreTrainedModel,
    source: ModelIdentity,
    groups: Mapping[str, Groups],
    ways: Mapping[str, Way] | None = None,
) -> Plan:
    parts = {}
    for attention in attention_of(net):
        chosen, way = groups.get(attention.path), (ways or {}).get(attention.path)
        kept = range(attention.kv_heads) if way is None else way.kept
        queries_of = members(Unit.KV_GROUP, attention.group_sizes)
        ids = attention.kv_ids
        parts[attention.path] = AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(
                sorted(attention.query_ids[query] for head in kept for query in queries_of[head])
            ),
            groups=None
            if chosen is None
            else tuple(tuple(ids[position] for position in group) for group in chosen),
        )
    return Plan(unit=Unit.KV_GROUP, model=source, attentions=parts)
