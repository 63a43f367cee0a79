"""headprune train-gates: hard-concrete gates that choose heads, trained to an exact count.

Gates start from scores. Training lowers the divergence of the gated model from itself without
gates. Checkpoints and scores each make a choice, and held-out text decides: the one nearest to the
original is written.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune._version import __version__
from headprune.config import (
    CalibrationConfig,
    DataConfig,
    Dtype,
    Form,
    Objective,
    Resuming,
    ScoreConfig,
    Train,
    TrainGatesConfig,
    WindowConfig,
)
from headprune.config import data as data_settings
from headprune.context import Context
from headprune.data.batches import Batches, batches, calibration
from headprune.data.far import far_rows
from headprune.data.read import digest_of_data
from headprune.data.text import Sequences, evenly
from headprune.data.tokens import around
from headprune.errors import DataError, HeadpruneError, PlanError
from headprune.evidence.criteria import CRITERIA
from headprune.evidence.score import scores_on
from headprune.evidence.windows import candidates, sequence_of, window_of, window_scores
from headprune.gates.forms import Correlation, narrowed, predicted
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation, Loss, labelled
from headprune.gates.sparsity import ConstantPenalty, HeadTarget, Sparsity
from headprune.gates.trainer import GateCallback, GatedModel, GateTrainer, freeze
from headprune.io.outputs import whole_folder
from headprune.model.attention import attention_of, family_of, of_kinds, refuse_unknown_kinds
from headprune.model.batch import modality_of, most_tokens
from headprune.model.embedding import head_of
from headprune.model.gating import GateSource, gated, open_elsewhere
from headprune.model.loading import CLASSIFIERS
from headprune.model.losses import recompute_activations
from headprune.model.open import Model, open_model
from headprune.model.placement import refuse_to_shard
from headprune.model.refusals import refuse_without_text
from headprune.model.units import (
    default_unit,
    head_budget,
    leaves_ragged,
    refuse_target,
)
from headprune.placements import in_shards
from headprune.planning.windows import full_units
from headprune.proof.twins import refuse_unproven
from headprune.resuming import CONFIG, Run, claimed_run
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import GatesMetadata, Judgement, write_gates
from headprune.schemas.records import Window
from headprune.surgery.refit import refit
from headprune.tensors.units import Unit, members
from headprune.training import (
    refuse_missing_reporter,
    stop_on_interrupt,
    train,
    training_arguments,
)

_AGAIN = "Continue with the same command and --resume."
# the second needs no labels, the last no Gram matrix, as of little text or of modules run twice
_CRITERIA = ("compensated", "reconstruction", "fisher")
_TEXT_PER_FAR = 3  # rows of text per row of questions about the far past
_JUDGES = 4  # rows of text, and as many of questions: each is four windows long
_CHECKPOINTS = 5  # held-out text takes the best of them
_SETTLES = 0.2  # share of the steps that weights train on, once the heads are chosen


@dataclass(frozen=True)
class GatesRun:
    """A finished training.

    Attributes:
        output: The gates folder.
        metadata: The content of gates.json.
        ragged: Whether a cut of these units leaves KV heads with unequal numbers of queries, as
            single heads of a grouped-query model do; ``prune`` then needs ``--layout ragged``.
    """

    output: Path
    metadata: GatesMetadata
    ragged: bool


@dataclass(frozen=True)
class _Start:
    """The start of gates, and their effect.

    Attributes:
        acting: Returns a context in which the gates of a source act.
        scores: Scores of the units; None to start with equal gates.
        examples: Text to refit W_O on; None without a refit.
        window: The window of heads with closed gates; None where heads go.
    """

    acting: Callable[[GateSource], AbstractContextManager[None]]
    scores: Float[Tensor, " units"] | None = None
    examples: Sequences | None = None
    window: Window | None = None


def train_gates(
    model: str | Path,
    data: DataConfig,
    output: Path,
    config: TrainGatesConfig,
    rerun: Resuming = Resuming(),
    context: Context = Context(),
) -> GatesRun:
    """Train gates for a model and write them to ``output``.

    Several processes share every batch (see ``processes``). Until the end, checkpoints lie beside
    ``output`` (see ``training``).

    Args:
        model: Folder or hub id.
        data: Training text.
        output: The gates folder (see ``schemas.gates``).
        config: Settings of the training.
        rerun: Whether an output is replaced, or a run resumed.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If model, data and settings do not fit together.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        TrainingError: If a number is not finite.
    """
    processes.share_of(config.batch_size or processes.count())
    if in_shards():
        _refuse_to_shard(config)
    if not processes.is_main():
        context = context.without_progress()
    digest = digest_of_data(data)
    run = Run.of(output, "train_gates", config, model=model, data=data, data_sha256=digest)
    with claimed_run(output, run, [model, data], rerun):
        refuse_missing_reporter(config.report_to)
        refuse_unknown_kinds(config.attention)
        refuse_target(config.target_heads)
        refuse_target(config.keep_full)
        context.stage("loading the model")
        frozen = config.train is Train.GATES
        opened = open_model(model, config.dtype, context.allowed, calibrates=frozen)
        refuse_unproven(opened, context)
        net, source = opened.net, opened.identity  # the fingerprint, before weights change
        refuse_without_text(net, "train-gates")
        removes = config.form is Form.REMOVED
        attentions = of_kinds(opened.attentions, config.attention) if removes else candidates(net)
        usual = default_unit(attentions) if removes else Unit.KV_GROUP
        config = config.model_copy(update={"unit": config.unit or usual})
        trained = _trained(run, opened, attentions, data, config, rerun.resume, context)
        about = {"model": source, "unit": config.unit, "data": data.source}
        metadata = processes.on_main(lambda: _finish(output, run, trained, attentions, about))
        ragged = removes and leaves_ragged(attentions, metadata.unit)
        return GatesRun(output, metadata, ragged)


@dataclass(frozen=True)
class _Trained:
    """Trained gates: their trainer, and the rest of their folder."""

    trainer: GateTrainer
    window: Window | None
    judgement: Judgement | None
    weights: dict[str, Tensor]
    refitted: bool


def _trained(
    run: Run,
    model: Model,
    attentions: list[Attention],
    data: DataConfig,
    config: TrainGatesConfig,
    resume: bool,
    context: Context,
) -> _Trained:
    """Train the gates, choose, and refit W_O."""
    net, unit, removes = model.net, config.unit, config.form is Form.REMOVED
    assert unit is not None
    gates = Gates(attentions, unit, config.init_log_alpha, config.temperature, by_heads=removes)
    sparsity = _sparsity(config, net, attentions, gates)
    start = (_removal if removes else _narrowing)(model, attentions, data, config, context)
    context.stage("reading the data")
    text, choose, report = _rows(model, data, config, start)
    judged = config.train is Train.GATES and config.l0_penalty is None
    by_scores = None
    if start.scores is not None:
        by_scores = sparsity.best(start.scores, gates.unit_sizes)
        gates.start_from(start.scores, len(by_scores))
        sparsity.after_step(gates)
    gates.record(0, config.steps)
    gates.draws = 1 if start.examples is not None else None  # all make up for the same heads
    gates.to(devices.chosen())  # Trainer moves no model that is in shards
    loss = _loss(net, config)
    freeze(net, attentions, config.train)
    if config.gradient_checkpointing:
        recompute_activations(net)
    if not resume:
        processes.on_main(run.begin)
    trainer = GateTrainer(
        config,
        sparsity,
        None if config.train is Train.GATES else math.ceil(config.steps * (1 - _SETTLES)),
        choose if judged else None,
        GatedModel(net, gates, loss),
        remedies=_remedies(config),
        args=training_arguments(
            run,
            config.steps,
            text.of_step,
            config.seed,
            config.save_every or max(1, config.steps // _CHECKPOINTS),
            max_grad_norm=1.0,
        ),
        train_dataset=text.rows,
        data_collator=text.collate,
    )
    trainer.before = math.inf
    with start.acting(gates.source), stop_on_interrupt() as stopped:
        if judged and by_scores is not None:
            context.stage("measuring the choice by scores")
            trainer.before = trainer.divergence = trainer.divergence_of(by_scores, choose)
        context.stage("training")
        callback = GateCallback(trainer, context.step, stopped.is_set)
        train(trainer, run, callback, config.report_to, resume, _AGAIN)
        judgement = None
        if judged:
            course = gates.course.clone()
            step = trainer.take_best()
            gates.course.copy_(course)  # whole, not up to the best checkpoint
            if start.scores is not None and by_scores is not None:
                judgement = _judge(trainer, step, by_scores, choose, report)
                if not step:
                    gates.start_from(start.scores, len(by_scores))
                    gates.choose(by_scores)
        if not gates.chosen:
            gates.choose(sparsity.choice(gates))
    changed = set[int]()
    if start.examples is not None:
        context.stage("refitting")
        refitting = partial(_refit, net, attentions, gates, start.examples, context)
        if processes.on_main(refitting):
            changed = set(map(id, _output_weights(model.attentions)))
    weights = {
        name: weight.detach().cpu().contiguous()
        for name, weight in net.named_parameters()
        if weight.requires_grad or id(weight) in changed
    }
    return _Trained(trainer, start.window, judgement, weights, bool(changed))


def _judge(
    trainer: GateTrainer, step: int, by_scores: list[int], choose: Dataset, report: Dataset
) -> Judgement:
    """Return how far the choices by scores and by gates are from the original."""
    by_gates, before = trainer.sparsity.choice(trainer.gates), trainer.before
    of_gates = trainer.divergence_of(by_gates, choose)
    first = trainer.divergence_of(by_scores, report)
    return Judgement(
        taken_after=step,
        exchanged=len({*by_gates} - {*by_scores}),
        choose=(before, of_gates),
        report=(first, trainer.divergence_of(by_gates, report)),
    )


def _sparsity(
    config: TrainGatesConfig, net: PreTrainedModel, attentions: list[Attention], gates: Gates
) -> Sparsity:
    """Return what closes gates: the budget, or a constant penalty."""
    if config.l0_penalty is not None:
        return ConstantPenalty(config.l0_penalty)
    if config.form is Form.WINDOW:
        kept, units = config.keep_full, len(gates.unit_sizes)
        full = full_units(0.5 if kept is None else kept, units, gates.unit is Unit.LAYER)
        if full == units:
            raise PlanError("Nothing would get a window: keep less of the past full.")
        return HeadTarget(full)
    assert config.target_heads is not None
    counts = [len(members(gates.unit, a.group_sizes)) for a in attentions]
    of_module = counts if family_of(net.config).keeps_a_head else None
    return HeadTarget(head_budget(config.target_heads, gates.unit_sizes), of_module)


def _removal(
    model: Model,
    attentions: list[Attention],
    data: DataConfig,
    config: TrainGatesConfig,
    context: Context,
) -> _Start:
    """Start gates of removal from scores, and have open heads make up for closed ones.

    Without scores all gates start equal: in the setting of Voita et al., and in shards.
    """
    equal, net = _Start(partial(gated, attentions)), model.net
    if in_shards():
        context.line("shards have no scores: all gates start equal, and W_O stays as it is")
    if config.l0_penalty is not None or in_shards():
        return equal
    usual = CalibrationConfig().seq_len
    length = min(usual, most_tokens(model.any_net, model.tokenizer) or usual)
    with _in_float32(net):
        for criterion in _CRITERIA:
            how = config.part(ScoreConfig, criterion=(criterion,), seq_len=length, batch_size=4)
            try:
                scores, statistics = scores_on(model, how, data, context)
                break
            except (DataError, PlanError) as error:
                context.line(f"no scores by {criterion}: {error}")
        else:
            context.line("all gates start equal, and W_O stays as it is")
            return equal
    values = scores.scores[criterion].float()
    refits = scores.metadata.refits and "gram" in CRITERIA[criterion].needs
    if config.train is not Train.GATES or not refits:
        return _Start(equal.acting, values)
    device = devices.chosen()
    others = [
        Correlation.of(part, attention, device) if part.runs else None
        for part, attention in zip(statistics, attentions, strict=True)
    ]
    fit = calibration(net, model.tokenizer, data, how, "train-gates").fit
    return _Start(partial(predicted, attentions, correlations=others), values, fit)


def _narrowing(
    model: Model,
    attentions: list[Attention],
    data: DataConfig,
    config: TrainGatesConfig,
    context: Context,
) -> _Start:
    """Start gates of windows from their scores."""
    if data.loss is data_settings.Loss.ANSWERS:
        raise DataError(
            "Windows are chosen on running text and questions about it: leave out --config "
            "loss=answers."
        )
    assert config.unit is not None
    half = max(2, config.calibration_tokens // 2)  # as many of prompts
    how = config.part(WindowConfig, batch_size=4, calibration_tokens=half, unit=config.unit)
    window = window_of(model.net, model.tokenizer, how)
    acting = partial(narrowed, attentions, window=(window.size, window.sinks))
    scores = window_scores(model, how, data, context)
    return _Start(acting, scores.scores["window"].float(), window=window)


def _rows(
    model: Model, data: DataConfig, config: TrainGatesConfig, start: _Start
) -> tuple[Batches, Dataset, Dataset]:
    """Return rows to train on, to choose by, and to report of."""
    net, tokenizer = model.net, model.tokenizer
    window = start.window
    if window is not None:
        length = sequence_of(net, tokenizer, window, config.seq_len)
        config = config.model_copy(update={"seq_len": length})
    objective = Objective.DISTILL if config.l0_penalty is None else _natural(model, data)
    text = batches(objective, net, tokenizer, data, config, running=True)
    if config.l0_penalty is not None or config.train is not Train.GATES:
        return text, text.rows, text.rows
    fit, choose, report = text.split()
    if window is not None:
        first, edge = len(around(tokenizer).before), (window.size, window.sinks)
        few = [part.select(evenly(len(part), min(_JUDGES, len(part)))) for part in (choose, report)]
        fit, choose, report = (
            _with_far(part, far_rows(part["input_ids"], tokenizer, edge, first, seed), share)
            for part, seed, share in (
                (fit, config.seed, _TEXT_PER_FAR),
                (few[0], 1, 1),
                (few[1], 2, 1),
            )
        )

        def collate(features: list[dict[str, Any]]) -> Any:
            columns = {name: torch.tensor([f[name] for f in features]) for name in features[0]}
            return {**columns, "use_cache": False}

        # one row a step and process: the few answers of a row would drown among those of others
        of_step = config.batch_size or processes.count()
        text = text._replace(collate=collate, of_step=of_step)
    return text._replace(rows=fit), choose, report


def _with_far(rows: Dataset, far: list[dict[str, list[int]]], share: int) -> Dataset:
    """Mix rows of text with questions about its far past: one to ``share`` rows of text."""
    ids = rows["input_ids"]
    text = Dataset.from_dict({"input_ids": ids, "labels": ids})
    few = [far[at] for at in evenly(len(far), min(len(far), max(1, len(text) // share)))]
    return concatenate_datasets([text, Dataset.from_list(few)]) if few else text


def _loss(net: PreTrainedModel, config: TrainGatesConfig) -> Loss:
    """Return the loss; a teacher is the model as it is now."""
    if config.l0_penalty is not None:
        return labelled
    changed = () if config.train is Train.GATES else net.parameters()
    return Distillation(head_of(net), original_of(net, changed))


def original_of(net: PreTrainedModel, changed: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return a copy that shares all weights but the changed ones; None if none changes."""
    changing = {id(weight) for weight in changed}
    if not changing:
        return None
    shared = {id(p): p for p in net.parameters() if id(p) not in changing}
    original: nn.Module = copy.deepcopy(net, shared)
    return original.requires_grad_(False)


def _natural(model: Model, data: DataConfig) -> Objective:
    """Return the model's own loss.

    Raises:
        HeadpruneError: If the data has no labels for it.
    """
    of_task = {"causal-lm": Objective.LM, "seq2seq-lm": Objective.LM, "masked-lm": Objective.MLM}
    if model.task in of_task:
        return of_task[model.task]
    labelled = data.label_column or modality_of(model.net) != "text"
    if model.task == "ctc" or (labelled and model.task in (*CLASSIFIERS, "token-classification")):
        return Objective.TASK
    raise HeadpruneError(
        f"l0_penalty trains on the model's own loss, and {type(model.net).__name__} has none on "
        "this data: name the --label-column, or give --target-heads, which needs no labels."
    )


def _refit(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Gates,
    examples: Sequences,
    context: Context,
) -> bool:
    """Refit every W_O to the heads that stay; return whether the text sufficed."""
    of_head = gates.values().detach()[gates.unit_of_head].cpu()
    rows = of_head.split([attention.query_heads for attention in attentions])
    every = attention_of(net)
    try:
        with _in_float32(net):
            of_all = open_elsewhere(every, attentions, rows)
            refit(net, every, of_all, examples.whole(), context.step)
    except (DataError, PlanError) as error:
        context.line(f"W_O stays as it is: {error}")
        return False
    return True


def _output_weights(attentions: Sequence[Attention]) -> list[nn.Parameter]:
    """Return every W_O and its bias: the weights that a refit changes."""
    some = (a for a in attentions if a.query_heads)
    return [weight for a in some for weight in a.output_projection.parameters()]


@contextmanager
def _in_float32(net: PreTrainedModel) -> Iterator[None]:
    """Hold weights of half precision in float32 for a time: least squares need it."""
    half = [p for p in net.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    before = [weight.dtype for weight in half]
    for weight in half:
        weight.data = weight.data.float()
    try:
        yield
    finally:
        for weight, dtype in zip(half, before, strict=True):
            weight.data = weight.data.to(dtype)


def _refuse_to_shard(config: TrainGatesConfig) -> None:
    """Refuse settings that need whole weights or heads, which shards split.

    Raises:
        HeadpruneError: With the reason, and another way.
    """
    refuse_to_shard()
    if config.form is Form.WINDOW:
        raise HeadpruneError("--form window reads whole heads: leave out --shard.")
    if config.train is not Train.GATES:
        raise HeadpruneError(
            f"--shard leaves weights as they are, and --train {config.train.value} changes them. "
            "Use --train gates, or leave out --shard."
        )


def _remedies(config: TrainGatesConfig) -> tuple[str, str]:
    """Return advice where a number is not finite: before, and after training."""
    half = config.dtype in (Dtype.FLOAT16, Dtype.BFLOAT16)
    precision = "compute with --config dtype=float32, " if half else ""
    rates = "gate_lr" if config.train is Train.GATES else "gate_lr or weight_lr"
    return (
        f"Nothing was trained yet: {precision}or look at the model with 'headprune evaluate'.",
        f"Lower {rates}, {precision}and start anew with --overwrite.",
    )


def _finish(
    output: Path,
    run: Run,
    trained: _Trained,
    attentions: list[Attention],
    about: dict[str, Any],
) -> GatesMetadata:
    """Write the gates folder, and remove the checkpoints."""
    trainer = trained.trainer
    gates, config = trainer.gates.cpu(), trainer.config
    metadata = GatesMetadata(
        headprune_version=__version__,
        **about,
        window=trained.window,
        temperature=gates.temperature,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        query_heads=sum(a.query_heads for a in attentions),
        kept_heads=int(torch.bincount(gates.unit_of_head).mul(gates.kept).sum()),
        steps=trainer.state.global_step,
        final_loss=trainer.last_loss,
        judgement=trained.judgement,
        refitted=trained.refitted,
        trained_weights=bool(trained.weights),
        seed=config.seed,
    )
    tensors = {
        "log_alpha": gates.log_alpha.detach(),
        "kept": gates.kept,
        "course": gates.course,
    }
    with whole_folder(output) as folder:
        metadata = write_gates(folder, metadata, tensors, trained.weights or None)
        shutil.copyfile(run.folder / CONFIG, folder / CONFIG)
        trainer.write_history(folder)
    run.remove()
    return metadata
