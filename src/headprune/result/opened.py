"""A model before its KV heads are merged: loaded, its ways weighed under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, ConvertConfig, DataConfig, LayoutOption
from headprune.context import Context
from headprune.data.batches import calibration, merge_calibration
from headprune.data.text import Sequences
from headprune.errors import PlanError
from headprune.model.attention import attention_of, family_of, of_kinds, refuse_unknown_kinds
from headprune.model.loading import CLASSIFIERS, task_of
from headprune.model.open import Model
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.kv_counts import stated_counts
from headprune.planning.kv_heads import KvPlan, Texts, plan_kv_heads
from headprune.result.prune import whole
from headprune.result.write import refuse_unprovable
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.merges.merger import Merger

WEIGHED = 4_096  # tokens that the ways of a budget are weighed on; merges take the whole text
_WEIGHED_LENGTH = 512  # of a sequence, at most: the cost of attention grows with it


@dataclass(frozen=True)
class Opened:
    """A model before its conversion.

    Attributes:
        model: The model.
        attentions: The modules to convert.
        merger: What merges them.
        sample: The text that it merges by, if it does.
        held_out: Text of a language model to choose by; None where the text is short.
        planned: The way of every module, if weighed.
        constraints: Shapes of the result.
    """

    model: Model
    attentions: list[Attention]
    merger: Merger
    sample: Sequences | None
    held_out: Sequences | None
    planned: KvPlan | None
    constraints: Constraints


def weighs(config: ConvertConfig, calibrate: DataConfig | None, layout: LayoutOption) -> bool:
    """Return whether every module may go its own way: only a budget was set."""
    free = config.kv_budget is not None and config.merge is None
    return free and calibrate is not None and layout is not LayoutOption.UNIFORM


def refuse_request(
    config: ConvertConfig, calibrate: DataConfig | None, layout: LayoutOption
) -> None:
    """Refuse what does not fit together, whatever the model, before it is loaded.

    Raises:
        HeadpruneError: Saying what does not fit.
    """
    if layout is LayoutOption.PADDED:
        raise PlanError(
            "--layout padded is for removed heads (headprune prune). A layer that loses "
            "its attention here gets a zero head by headprune export --to vllm."
        )
    merger = Merger.of(config, calibrate is not None)
    if merger.calibrates and calibrate is None:
        raise PlanError(
            f"--merge {merger.name} needs text to calibrate on: give --calibrate DATA. "
            "Without text there is procrustes, or mean with training afterwards (--heal)."
        )
    refuse_unknown_kinds(config.attention)
    if not weighs(config, calibrate, layout):
        _refuse_unmeasured(config, layout is LayoutOption.UNIFORM or bool(config.targets))


def prepare_merging(
    model: Model,
    config: ConvertConfig,
    calibrate: DataConfig | None,
    layout: LayoutOption,
    context: Context,
    empty_layers: bool = True,
    curvature: Mapping[str, Tensor] | None = None,
) -> Opened:
    """Read the calibration text of a model, and weigh the ways of each module under a budget.

    Raises:
        HeadpruneError: If the input does not fit together.
        ProofError: If a proof of the result would show nothing.
    """
    merger, weighing = Merger.of(config, calibrate is not None), weighs(config, calibrate, layout)
    net = model.any_net
    constraints = constraints_of(net, layout, config.targets, empty_layers)
    attentions = _to_merge(net, config)
    _refuse(net, attentions)
    if config.kv_heads is not None:
        stated_counts(config.kv_heads, attentions)
    if not weighing:
        _refuse_unmeasured(config, constraints.even_kv_heads)
    text = None
    if calibrate is not None and merger.calibrates:
        text = merge_calibration(net, model.tokenizer, calibrate, config)
    context.stage("testing the verification")
    refuse_unprovable(model, whole(model).plan)  # before the weights come: it may take its own
    context.stage("loading the model")
    net = model.net
    attentions = _to_merge(net, config)
    sample, held_out, planned = None, None, None
    if text is not None:
        assert calibrate is not None
        sample = text.fit
        if len(text.choose.rows) and task_of(net) == "causal-lm":
            held_out = text.choose
        if weighing:
            scored = None
            if not curvature and _has_loss(net, calibrate):
                settings = config.part(CalibrationConfig)
                scores = calibration(net, model.tokenizer, calibrate, settings, "--kv-budget")
                scored = scores.fit.some(WEIGHED)
            some = replace(sample, longest=_WEIGHED_LENGTH).some(WEIGHED)
            texts = Texts(some.whole(), scored, curvature or {})
            planned = plan_kv_heads(net, attentions, texts, merger, config, constraints, context)
    return Opened(model, attentions, merger, sample, held_out, planned, constraints)


def _to_merge(net: PreTrainedModel, config: ConvertConfig) -> list[Attention]:
    return [a for a in of_kinds(attention_of(net), config.attention) if a.kv_heads]


def _refuse_unmeasured(config: ConvertConfig, even: bool) -> None:
    """Refuses a budget of layers that may differ, where nothing says what each may lose."""
    if config.kv_budget is not None and not even:
        raise PlanError(
            "--kv-budget is spent layer by layer, as measured on text: give --calibrate DATA and "
            "no --merge, or --layout uniform for the same number in every layer."
        )


def _has_loss(net: PreTrainedModel, data: DataConfig) -> bool:
    """Return whether the model's task has a loss on the text."""
    task = task_of(net)
    if task in CLASSIFIERS:
        return data.label_column is not None
    return task != "seq2seq-lm" or data.pairs


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
