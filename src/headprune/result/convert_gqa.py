"""headprune convert-gqa: fewer KV heads, shared by more queries, proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import ConvertConfig, DataConfig, Grouping, LayoutOption, Writing
from headprune.context import Context
from headprune.data.text import Sequences
from headprune.errors import DataError, PlanError
from headprune.evidence.losses import mean_loss
from headprune.io.outputs import claims_output
from headprune.model import probes
from headprune.model.attention import family_of
from headprune.model.heads import read_heads, write_heads
from headprune.model.open import Model, open_model
from headprune.model.residency import residency_of
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.kv_counts import equal_counts, stated_counts
from headprune.planning.kv_heads import KvPlan, Way, choose
from headprune.proof.twins import refuse_unproven
from headprune.result.folder import ModelFolder
from headprune.result.opened import Opened, prepare_merging, refuse_request, weighs
from headprune.result.write import Changes, Pruned, write
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Merging
from headprune.surgery.conversion import convert_in_sequence, geometry
from headprune.surgery.edit import Edit, collecting
from headprune.surgery.merges import Groups, HeadWeights, MergeContext
from headprune.surgery.merges.merger import Merger
from headprune.surgery.merges.outputs import OutputMoments, with_fitted_outputs
from headprune.surgery.sharpness import larger_queries, sharpest
from headprune.surgery.transfer import has_twin
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Converted(ModelFolder):
    """A finished conversion.

    Attributes:
        pruned: The result, as of every command that cuts.
        merge: How the heads of a group became one.
        grouping: Which heads share.
        kv_heads: KV heads before and after, per module.
        own_keys: Modules where a norm kept queries from absorbing a map, so that the group takes
            the keys of one of its heads.
        calibration_tokens: How much text it was calibrated on; 0 without.
        planned: The way of every module, if weighed.
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
        return self.pruned.as_json()


@dataclass(frozen=True)
class KvPreview:
    """A conversion, before it is written.

    Attributes:
        plan: The plan.
        kv_heads: KV heads of the converted modules, before and after.
        planned: The way of every module, and the other measured ways.
        even: Expected cost of the same number in every layer, or the reason for none.
    """

    plan: Plan
    kv_heads: tuple[int, int]
    planned: KvPlan
    even: float | str

    def as_json(self) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        ways = self.planned.records()
        return {
            "kv_heads": list(self.kv_heads),
            "expected_cost": self.planned.cost,
            "even_cost": self.even,
            "ways": {path: way.model_dump(mode="json") for path, way in ways.items()},
            "plan": self.plan.model_dump(mode="json"),
        }


@claims_output("model", "calibrate")
def convert_gqa(
    model: str | Path,
    output: Path,
    config: ConvertConfig,
    calibrate: DataConfig | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    overwrite: bool = False,
    context: Context = Context(),
) -> Converted:
    """Merge KV heads and write the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        config: Number of KV heads, and the merge.
        calibrate: Calibration text; some merges need it.
        layout: Shapes that the result may have.
        overwrite: Replace an existing output.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute as the merged original.
    """
    refuse_request(config, calibrate, layout)
    context.stage("reading the headers")
    calibrates = calibrate is not None
    opened = open_model(model, config.dtype, context.allowed, calibrates)
    refuse_unproven(opened, context)
    merged = merged_of(opened, config, calibrate, layout, context)
    writing = Writing(out_dtype=config.out_dtype)
    record, kv_heads, own_keys = merged.record, merged.kv_heads, merged.own_keys
    pruned = write(opened, merged.edit, output, Changes(record), writing, context)
    how, tokens = (record.merge, record.grouping), record.calibration_tokens
    return Converted(pruned, *how, kv_heads, own_keys, tokens, merged.planned)


@dataclass(frozen=True)
class Merged:
    """KV heads merged in memory.

    Attributes:
        edit: The change.
        record: Its record.
        kv_heads: KV heads per module, before and after.
        own_keys: Modules whose queries could absorb nothing.
        planned: The way of every module, under a budget.
    """

    edit: Edit
    record: Merging
    kv_heads: dict[str, tuple[int, int]]
    own_keys: tuple[str, ...]
    planned: KvPlan | None


def merged_of(
    model: Model,
    config: ConvertConfig,
    calibrate: DataConfig | None,
    layout: LayoutOption,
    context: Context,
    empty_layers: bool = True,
    curvature: Mapping[str, Tensor] | None = None,
) -> Merged:
    """Merge the KV heads of an opened model; its weights stay as they are.

    Args:
        model: The model.
        config: Number of KV heads, and the merge.
        calibrate: Calibration text.
        layout: Shapes that the result may have.
        context: Progress.
        empty_layers: Let a budget take all heads of a layer.
        curvature: Curvature of the loss by module path, if known.

    Raises:
        HeadpruneError: If the input does not fit together.
        ProofError: If a proof of the result would show nothing.
    """
    opened = prepare_merging(model, config, calibrate, layout, context, empty_layers, curvature)
    net, merger, attentions = model.net, opened.merger, opened.attentions
    planned, sample = opened.planned, opened.sample
    model.result_dtypes(config.out_dtype)  # refuses an overflow before long work
    ways = {} if planned is None else planned.chosen
    wanted = {path: way.kv_heads for path, way in ways.items()}
    if planned is None:
        wanted = _wanted(config, attentions)
    _check_native(opened.constraints, net, wanted)
    becomes_twin = has_twin(net) and set(wanted.values()) == {1}
    if becomes_twin and residency_of(net) is not None:
        raise PlanError(
            "With one KV head this model changes its class, and that takes all its weights at "
            "once. Give --config placement=whole."
        )
    context.stage(f"merging KV heads ({merger.name})")
    merging = _Merging(merger, ways, wanted, lambda done: context.step(done, len(attentions)))
    held_out, sharpness = opened.held_out, 1.0
    original = 0.0 if held_out is None else mean_loss(net, held_out)
    with collecting(net, attentions) as tensors:
        merging.run(net, attentions, sample)
        if held_out is not None and merging.shared:
            context.stage("sharpening attention")
            sharpness = merging.sharpened(lambda: mean_loss(net, held_out), original)
    plan = _plan(model, merging.groups, ways)
    plan = plan.model_copy(update={"merge": merger.name if plan.merged else None})
    edit = Edit(plan, tensors)
    if not becomes_twin:
        opened.constraints.check(edit.cuts(net))
    record = Merging(
        merge=merger.name,
        grouping=config.grouping.value,
        calibration_tokens=sample.tokens if sample is not None else 0,
        sharpness=sharpness,
        seed=config.seed,
        ways=None if planned is None else planned.records(),
    )
    kv_heads = {a.path: (a.kv_heads, wanted[a.path]) for a in attentions}
    return Merged(edit, record, kv_heads, tuple(merging.own_keys), planned)


@dataclass
class _Merging:
    """A merge of modules one after the other.

    Attributes:
        merger: The merge.
        ways: The way of every module, under a budget.
        wanted: KV heads per module.
        step: Called with modules done.
        groups: KV heads that share, per merged module.
        own_keys: Modules whose queries could absorb nothing.
        shared: Modules with keys merged by maps that queries absorbed.
    """

    merger: Merger
    ways: Mapping[str, Way]
    wanted: Mapping[str, int]
    step: Callable[[int], None]
    groups: dict[str, Groups] = field(default_factory=dict)
    own_keys: list[str] = field(default_factory=list)
    shared: list[Attention] = field(default_factory=list)
    done: int = 0

    def run(
        self,
        net: PreTrainedModel,
        attentions: Sequence[Attention],
        sample: Sequences | None,
    ) -> None:
        """Merge all modules in place."""
        if sample is not None:
            convert_in_sequence(net, attentions, sample.whole(), self.convert)
            return
        settings: dict[str, MergeContext] = {}
        if self.merger.name == "procrustes" or self.merger.grouping is Grouping.SIMILAR:
            settings = geometry(net, attentions, probes.probe_inputs(net))
        for attention in attentions:
            setting = settings.get(attention.path, MergeContext())
            write_heads(attention, self.convert(attention, read_heads(attention), setting))

    def convert(
        self, attention: Attention, heads: HeadWeights, setting: MergeContext
    ) -> HeadWeights:
        """Return the weights of one module in which every group's KV heads are the same."""
        way = self.ways.get(attention.path)
        if way is not None and not way.merges:
            activations = setting.activations
            assert activations is not None
            moments = OutputMoments.of(activations.read(heads), activations.outputs)
            changed, _ = with_fitted_outputs(heads, moments, way.kept)
        else:
            chosen = self.merger.groups(heads, setting, self.wanted[attention.path])
            self.groups[attention.path] = chosen
            if not setting.linear and self.merger.name in ("lowrank", "procrustes"):
                self.own_keys.append(attention.path)
            elif len(chosen) < attention.kv_heads:
                self.shared.append(attention)
            changed = self.merger.merged(heads, setting, chosen)
        _refuse_not_finite(changed, attention.path, self.merger.name)
        self.done += 1
        self.step(self.done)
        return changed

    def sharpened(self, loss: Callable[[], float], original: float) -> float:
        """Multiply the queries on shared keys, in place, and return the factor; see ``sharpest``.

        Args:
            loss: Measures the loss of the model as it is, on held-out text.
            original: The loss before the merge.
        """

        def after(factor: float) -> float:
            with larger_queries(self.shared, factor):
                return loss()

        best = sharpest(after, original)
        if best > 1:
            for attention in self.shared:
                heads = read_heads(attention)
                larger = best * heads.affine("q")
                write_heads(attention, heads.with_affine("q", larger))
        return best


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
            "--merge nor layout uniform, which leave nothing to choose."
        )
    refuse_request(config, calibrate, layout)
    context.stage("reading the headers")
    loaded = open_model(model, config.dtype, context.allowed, calibrates=True)
    opened = prepare_merging(loaded, config, calibrate, layout, context)
    assert opened.planned is not None
    ways = opened.planned.chosen
    groups = {path: way.groups for path, way in ways.items() if way.merges}
    plan = _plan(loaded, groups, ways)
    plan = plan.model_copy(update={"merge": opened.merger.name if plan.merged else None})
    before = sum(a.kv_heads for a in opened.attentions)
    after = sum(way.kv_heads for way in ways.values())
    assert config.kv_budget is not None
    budget = round(config.kv_budget * before)
    return KvPreview(plan, (before, after), opened.planned, _even_cost(opened, budget))


def _even_cost(opened: Opened, budget: int) -> float | str:
    """Return the cost of the same number of KV heads in every layer, or the reason for none."""
    assert opened.planned is not None
    try:
        constraints = constraints_of(opened.model.net, LayoutOption.UNIFORM, ())
        chosen = choose(opened.planned.ways, budget, "the budget", constraints)
        wanted = {path: way.kv_heads for path, way in chosen.chosen.items()}
        _check_native(constraints, opened.model.net, wanted)
    except PlanError as error:
        return str(error).split(". ")[0] + "."
    return chosen.cost


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
            f"--merge {merge} makes no finite weights of '{path}': its weights or their products "
            "with the text are too large. Use --merge mean, or repair the checkpoint."
        )


def _check_native(constraints: Constraints, net: PreTrainedModel, wanted: dict[str, int]) -> None:
    """Refuse shapes that a plain config cannot hold, where it must, before long work."""
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
    model: Model,
    groups: Mapping[str, Groups],
    ways: Mapping[str, Way] | None = None,
) -> Plan:
    parts = {}
    for attention in model.attentions:
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
    return Plan(unit=Unit.KV_GROUP, model=model.identity, attentions=parts)
