"""headprune convert-gqa: fewer KV heads, shared by more queries, proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import ConvertConfig, DataConfig, Grouping, LayoutOption
from headprune.data.calibration import merge_calibration
from headprune.data.samples import CalibrationSample
from headprune.data.sources import refuse_missing_file
from headprune.errors import DataError, PlanError
from headprune.export.publish import (
    Changes,
    OnModule,
    Pruned,
    Stage,
    check_shape,
    refuse_unprovable,
    write_proven,
)
from headprune.io.outputs import claims_output
from headprune.model import probes
from headprune.model.attention import attention_of, family_of, of_kinds, refuse_unknown_kinds
from headprune.model.heads import read_heads, write_heads
from headprune.model.opening import load, result_dtypes
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, ModelIdentity, Plan
from headprune.schemas.records import MadeBy, Merging
from headprune.surgery.conversion import convert_in_sequence, geometry
from headprune.surgery.cut import resolve, result_shape
from headprune.surgery.merges import MERGES, NEEDS_CALIBRATION, Groups, HeadWeights, MergeContext
from headprune.surgery.merges.budget import spread
from headprune.surgery.merges.grouping import Cost, adjacent, lowrank_cost, measured_cost, similar
from headprune.surgery.transfer import has_twin
from headprune.tensors.units import Unit


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
    """

    pruned: Pruned
    merge: str
    grouping: str
    kv_heads: dict[str, tuple[int, int]]
    own_keys: tuple[str, ...]
    calibration_tokens: int

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.pruned.manifest.model_dump(mode="json")


@claims_output("model", "calibrate")
def convert_gqa(
    model: str | Path,
    output: Path,
    config: ConvertConfig,
    calibrate: DataConfig | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_stage: Stage = lambda stage: None,
    on_module: OnModule = lambda done, total: None,
    made_by: MadeBy | None = None,
) -> Converted:
    """Merges KV heads and writes the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        config: How many KV heads, and how they are merged.
        calibrate: Text that shows what the heads do; some merges need it.
        layout: What the result may look like.
        overwrite: Replace an existing output.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        on_stage: Called with a few words before every stage.
        on_module: Called after every attention module.
        made_by: The command, for the record, if it was one.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute what the merged original computes.
    """
    name = config.merge or ("lowrank" if calibrate is not None else "mean")
    merge = MERGES[name]
    if name in NEEDS_CALIBRATION and calibrate is None:
        raise PlanError(
            f"--merge {name} needs text to learn what the heads do: give --calibrate DATA. "
            "Without text there is procrustes, or mean with training afterwards (--heal)."
        )
    refuse_unknown_kinds(config.attention)
    if calibrate is not None:
        refuse_missing_file(calibrate.source)
    on_stage("loading the model")
    net, source = load(model, config.dtype, trust_remote_code, assume_supported, drop_unexpected)
    stored = result_dtypes(net, model, config.out_dtype)
    attentions = [a for a in of_kinds(attention_of(net), config.attention) if a.kv_heads]
    _refuse(net, attentions)
    counts = None if config.kv_heads is None else _counts(config.kv_heads, attentions)
    sample = None
    if calibrate is not None and name in NEEDS_CALIBRATION:
        sample = merge_calibration(net, model, calibrate, config, trust_remote_code)
    settings: dict[str, MergeContext] = {}
    compares = name == "procrustes" or config.grouping is Grouping.SIMILAR or not counts
    if sample is None and compares:
        settings = geometry(net, attentions, probes.probe_inputs(net))

    def cost_of(heads: HeadWeights, setting: MergeContext) -> Cost:
        if name in NEEDS_CALIBRATION:
            return lowrank_cost(heads, setting)
        return measured_cost(merge, heads, setting)

    def groups_of(heads: HeadWeights, setting: MergeContext, count: int) -> Groups:
        if config.grouping is Grouping.ADJACENT or count in (1, len(heads.k)):
            return adjacent(len(heads.k), count)
        return similar(len(heads.k), count, cost_of(heads, setting))

    if counts is None and layout is LayoutOption.UNIFORM:
        counts = _equal_counts(config.kv_budget or 1.0, attentions)
    if counts is None:
        on_stage("spreading the budget over the layers")
        costs = _costs(net, attentions, sample, settings, groups_of, cost_of)
        counts = _spread(config.kv_budget or 1.0, attentions, costs)
    wanted = dict(zip((a.path for a in attentions), counts, strict=True))
    _check_native(layout, net, attentions, wanted)
    groups: dict[str, Groups] = {}
    own_keys: list[str] = []

    def converted(attention: Attention, heads: HeadWeights, setting: MergeContext) -> HeadWeights:
        chosen = groups_of(heads, setting, wanted[attention.path])
        groups[attention.path] = chosen
        if not setting.linear and name in ("lowrank", "procrustes"):
            own_keys.append(attention.path)
        shared = [group for group in chosen if len(group) > 1]
        merged = merge(heads, chosen, replace(setting, seed=config.seed)) if shared else heads
        _refuse_not_finite(merged, attention.path, name)
        on_module(len(groups), len(attentions))
        return merged

    on_stage("testing the verification")
    refuse_unprovable(net, _plan(net, source, {}))
    on_stage(f"merging KV heads ({name})")
    if sample is not None:
        convert_in_sequence(net, attentions, sample.whole(), converted)
    else:
        for attention in attentions:
            setting = settings.get(attention.path, MergeContext())
            write_heads(attention, converted(attention, read_heads(attention), setting))

    plan = _plan(net, source, groups)
    plan = plan.model_copy(update={"merge": name if plan.merged else None})
    # its weights are others by now than those of the model the plan names
    ragged = layout is LayoutOption.RAGGED
    cuts = resolve(plan.model_copy(update={"model": None}), net, ragged=ragged)
    if not (has_twin(net) and set(counts) == {1}):
        check_shape(layout, result_shape(cuts, net.config))
    tokens = sample.tokens if sample is not None else 0
    merging = Merging(
        merge=name,
        grouping=config.grouping.value,
        calibration_tokens=tokens,
        seed=config.seed,
    )
    work = Changes(merging, made_by=made_by)
    pruned = write_proven(net, source, model, plan, cuts, output, stored, work, on_stage)
    before = {a.path: len(plan.attentions[a.path].groups or ()) for a in attentions}
    kv_heads = {path: (plan.attentions[path].kv_heads, after) for path, after in before.items()}
    return Converted(pruned, name, config.grouping.value, kv_heads, tuple(own_keys), tokens)


def _refuse_not_finite(merged: HeadWeights, path: str, merge: str) -> None:
    weights = (merged.q, merged.k, merged.v, merged.o)
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise DataError(
            f"--merge {merge} makes no finite weights of '{path}': those it has, or what they make "
            "of the text, are too large to multiply. Use --merge mean, or repair the checkpoint."
        )


def _refuse(net: PreTrainedModel, attentions: Sequence[Attention]) -> None:
    family = family_of(net.config)
    if family.fewer_kv_heads not in ("native", "runtime"):
        raise PlanError(
            f"{family.model_type} cannot have fewer KV heads: {family.fewer_kv_heads}. Its heads "
            "can still be cut (headprune prune)."
        )
    if all(attention.kv_heads <= 1 for attention in attentions):
        raise PlanError("The model has one KV head per layer already; there is nothing to merge.")
    for attention in attentions:
        parameters = [name for name, _ in attention.module.named_parameters()]
        of_keys = [name for name, role in family.per_head.items() if role == "k"]
        per_head = [n for n in of_keys if any(f"{p}.".startswith(f"{n}.") for p in parameters)]
        if per_head:
            raise PlanError(
                f"'{attention.path}' has a norm with weights of its own for every KV head "
                f"({', '.join(per_head)}), which no shared key can satisfy."
            )


def _counts(asked: int | tuple[int, ...], attentions: Sequence[Attention]) -> list[int]:
    counts = [asked] * len(attentions) if isinstance(asked, int) else list(asked)
    if len(counts) != len(attentions):
        raise PlanError(
            f"--kv-heads lists {len(counts)} numbers; the model has {len(attentions)} attention "
            "modules to convert."
        )
    for attention, count in zip(attentions, counts, strict=True):
        fits = _fitting(attention)
        if count not in fits:
            more = count > attention.kv_heads
            raise PlanError(
                f"'{attention.path}' has {attention.kv_heads} KV heads, "
                + (f"fewer than {count}." if more else f"which {count} does not divide.")
                + f" Possible: {', '.join(map(str, fits))}."
            )
    return counts


def _equal_counts(share: float, attentions: Sequence[Attention]) -> list[int]:
    """The largest number of KV heads within a budget that all modules can have alike."""
    common = set.intersection(*(set(_fitting(attention)) for attention in attentions))
    budget = share * sum(attention.kv_heads for attention in attentions) / len(attentions)
    return [max([count for count in common if count <= budget], default=1)] * len(attentions)


def _fitting(attention: Attention) -> list[int]:
    """Numbers of KV heads that leave groups of equal size."""
    heads = attention.kv_heads
    return [count for count in range(1, heads + 1) if heads % count == 0]


def _costs(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    sample: CalibrationSample | None,
    settings: dict[str, MergeContext],
    groups_of: Callable[[HeadWeights, MergeContext, int], Groups],
    cost_of: Callable[[HeadWeights, MergeContext], Cost],
) -> list[dict[int, float]]:
    """Per module, what every possible number of KV heads costs."""
    costs: dict[str, dict[int, float]] = {}

    def measured(attention: Attention, heads: HeadWeights, setting: MergeContext) -> HeadWeights:
        cost = cost_of(heads, setting)
        costs[attention.path] = {
            count: sum(cost(tuple(group)) for group in groups_of(heads, setting, count))
            for count in _fitting(attention)
        }
        return heads

    if sample is not None:
        convert_in_sequence(net, attentions, sample.whole(), measured)
    else:
        for attention in attentions:
            measured(attention, read_heads(attention), settings[attention.path])
    return [costs[attention.path] for attention in attentions]


def _spread(
    share: float, attentions: Sequence[Attention], costs: Sequence[dict[int, float]]
) -> list[int]:
    total = sum(attention.kv_heads for attention in attentions)
    budget = round(share * total)
    try:
        return spread(costs, budget)
    except ValueError:
        raise PlanError(
            f"--kv-budget {share} keeps {budget} of {total} KV heads, fewer than one for each of "
            f"the {len(attentions)} attention modules; the least is {len(attentions) / total:.3f}."
        ) from None


def _check_native(
    layout: LayoutOption,
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    wanted: dict[str, int],
) -> None:
    """Refuses what --layout uniform cannot hold before anything is computed."""
    if layout is not LayoutOption.UNIFORM:
        return
    family = family_of(net.config)
    if has_twin(net) and set(wanted.values()) == {1}:
        return
    if family.fewer_kv_heads != "native":
        raise PlanError(
            f"--layout uniform: the stock class of {family.model_type} has no setting for the "
            "number of KV heads; leave out --layout for the runtime."
        )
    if len(set(wanted.values())) > 1:
        raise PlanError(
            "--layout uniform needs the same number of KV heads in every layer; give one number to "
            "--kv-heads."
        )


def _plan(net: PreTrainedModel, source: ModelIdentity, groups: dict[str, Groups]) -> Plan:
    parts = {}
    for attention in attention_of(net):
        chosen = groups.get(attention.path)
        ids = attention.kv_ids
        parts[attention.path] = AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(sorted(attention.query_ids)),
            groups=None
            if chosen is None
            else tuple(tuple(ids[position] for position in group) for group in chosen),
        )
    return Plan(unit=Unit.KV_GROUP, model=source, attentions=parts)
