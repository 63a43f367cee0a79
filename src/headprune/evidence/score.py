"""headprune score: how much every head matters, by one or more criteria, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, ScoreConfig, WindowConfig
from headprune.context import Context
from headprune.data.batches import calibration
from headprune.data.passages import PassageWord, passage_words
from headprune.data.read import digest_of_data, read_examples
from headprune.data.text import Sequences
from headprune.errors import DataError, PlanError
from headprune.evidence import recall
from headprune.evidence.criteria import CRITERIA, per_unit
from headprune.evidence.statistics import Need, Statistics, collect, first_not_finite
from headprune.evidence.windows import window_scores
from headprune.io.outputs import claims_output
from headprune.model.attention import attention_of, of_kinds, refuse_unknown_kinds
from headprune.model.batch import most_tokens
from headprune.model.loading import CLASSIFIERS, task_of
from headprune.model.open import Model, open_model
from headprune.model.refusals import refuse_without_text
from headprune.model.units import default_unit, leaves_ragged
from headprune.proof.twins import refuse_unproven
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.manifest import utc_now, versions
from headprune.schemas.scores import Scores, ScoresMetadata, write_scores
from headprune.surgery.refit import refuse_singular
from headprune.tensors.units import Unit, members

NEEDS_LOSS: frozenset[Need] = frozenset({"gradients", "curvature"})
NEEDS_DATA: frozenset[Need] = NEEDS_LOSS | {"activations", "gram"}


@claims_output("model", "data")
def score(
    model: str | Path,
    output: Path,
    config: ScoreConfig | WindowConfig,
    data: DataConfig | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> Scores:
    """Scores the heads of a model and writes the scores to ``output``.

    Args:
        model: Folder or hub id.
        output: The scores folder; it appears whole or not at all.
        config: By which criteria (``headprune.evidence.criteria``), or for which window, and how
            much data is used.
        data: Where the examples come from; some criteria need none, and windows have a text.
        overwrite: Replace an existing output.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If model, data and criteria do not fit together.
    """
    if isinstance(config, ScoreConfig):
        refuse_request(config, data)
    context.stage("loading the model")
    reads = data is not None or isinstance(config, WindowConfig)
    opened = open_model(model, config.dtype, context.allowed, calibrates=reads)
    refuse_unproven(opened, context)
    if isinstance(config, WindowConfig):
        result = window_scores(opened, config, data, context)
    else:
        result, _ = scores_on(opened, config, data, context)
    write_scores(output, result)
    return result


def refuse_request(config: ScoreConfig, data: DataConfig | None) -> None:
    """Refuse what does not fit together, whatever the model, before it is loaded.

    Raises:
        HeadpruneError: Saying what does not fit.
    """
    criteria = config.criterion
    needs = needs_of(criteria)
    if needs & NEEDS_DATA and data is None:
        raise DataError(f"{_listed(criteria)} looks at what heads do on text: give --data DATA.")
    refuse_unknown_kinds(config.attention)


def scores_on(
    model: Model,
    config: ScoreConfig,
    data: DataConfig | None = None,
    context: Context = Context(),
) -> tuple[Scores, list[Statistics]]:
    """Score the heads of an opened model; arguments as for ``score``.

    Returns:
        The scores, and the statistics behind them.

    Raises:
        HeadpruneError: If model, data and criteria do not fit together.
    """
    criteria, unit, needs = config.criterion, config.unit, needs_of(config.criterion)
    net, source = model.net, model.identity
    attentions = of_kinds(attention_of(net), config.attention)
    unit = unit or default_unit(attentions)
    examples = None
    if data is not None and needs & NEEDS_DATA:
        refuse_without_text(net, "score")
        examples = calibration(net, model.tokenizer, data, config, "score").fit
        labelled = "labels" in examples.rows.column_names
        if task_of(net) in CLASSIFIERS and not labelled and needs & NEEDS_LOSS:
            raise DataError(
                f"{_listed(criteria)} needs the loss of the task, and so labels: name the "
                "--label-column, or use fluctuation, wanda or reconstruction."
            )
    config = config.model_copy(update={"unit": unit})
    words: Sequence[PassageWord] = ()
    if data is not None and "recall" in needs:
        words = words_of(model, data)
    evidence = gather(net, attentions, config, examples, words, context)
    values = {name: scores_of(name, evidence, attentions, unit) for name in criteria}
    metadata = ScoresMetadata(
        created=utc_now(),
        versions=versions(),
        model=source,
        unit=unit,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        criteria={name: CRITERIA[name].source for name in criteria},
        data=data if examples is not None else None,
        data_sha256=digest_of_data(data)
        if examples and data and Path(data.source).exists()
        else None,
        calibration=config.part(CalibrationConfig),
        tokens=examples.tokens if examples is not None else 0,
        recalls=all("recall" in part.collected for part in evidence),
        ragged=leaves_ragged(attentions, unit),
        refits=examples is not None and refits(evidence, examples),
    )
    return Scores(metadata, values), evidence


def words_of(model: Model, data: DataConfig) -> Sequence[PassageWord]:
    """Return words of a language model's text that stand earlier in their passage."""
    if model.task != "causal-lm":
        return ()
    most = most_tokens(model.any_net, model.tokenizer)
    examples = read_examples(data, model.tokenizer)
    return passage_words(examples, recall.PASSAGES, model.tokenizer, most, inside=True)


def needs_of(criteria: Sequence[str]) -> frozenset[Need]:
    """Return the statistics of some criteria.

    Raises:
        PlanError: If one is unknown, or none is given.
    """
    if not criteria:
        raise PlanError(f"Name a --criterion: {', '.join(CRITERIA)}.")
    return frozenset().union(*(CRITERIA[name].needs for name in criteria))


def gather(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    config: ScoreConfig,
    examples: Sequences | None,
    words: Sequence[PassageWord] = (),
    context: Context = Context(),
) -> list[Statistics]:
    """Collect the statistics of some criteria in one pass.

    Args:
        net: The model.
        attentions: The modules to score.
        config: Criteria, unit and seed.
        examples: The data.
        words: Words that stand earlier in their passage, for "recall".
        context: Progress.
    """
    needs = needs_of(config.criterion)
    context.stage("scoring")
    if examples is None:
        return collect(net, attentions, (), needs - NEEDS_DATA, seed=config.seed)
    passes = context.each(examples.batches())
    needs |= {"activations"}  # whose counts of tokens and runs say whether W_O can be refitted
    statistics = collect(net, attentions, passes, needs, config.seed)
    if "gram" in needs:
        needing = [name for name in config.criterion if "gram" in CRITERIA[name].needs]
        for part, attention in zip(statistics, attentions, strict=True):
            width = attention.query_heads * attention.head_dim
            if part.runs:
                tokens, instead = part.activations.tokens, f"leave out {_listed(needing)}"
                refuse_singular(attention, tokens, width, instead)
    if "recall" in needs and len(words) >= recall.FEWEST:
        context.stage("looking for words that only passages tell")
        told = recall.passage_dependent_words(net, words, config.batch_size, context.step)[
            : recall.WORDS
        ]
        if len(told) >= recall.FEWEST:  # fewer tell nothing
            context.stage("looking for the heads that carry them")
            effects = recall.effects(net, attentions, context.each(told))
            for part, effect in zip(statistics, effects, strict=True):
                part.collected["recall"] = effect
    return statistics


def scores_of(
    name: str, statistics: Sequence[Statistics], attentions: Sequence[Attention], unit: Unit
) -> Tensor:
    """Score all units by one criterion.

    Raises:
        DataError: If a score is not finite; its module is named.
    """
    parts = []
    for part, attention in zip(statistics, attentions, strict=True):
        units, where = members(unit, attention.group_sizes), f"of '{attention.path}'"
        idle = "gram" in CRITERIA[name].needs and not part.runs
        try:
            scores = CRITERIA[name].score(part, units) if units and not idle else None
        except ValueError as error:
            raise DataError(
                f"The input of the output projection {where} cannot be used: {error}. Try "
                "--config dtype=float32."
            ) from None
        scores = torch.zeros(len(units)) if scores is None else scores
        wrong = first_not_finite(scores)
        if wrong is not None:
            raise DataError(
                f"The {name} score of unit {wrong[0]} {where} is not finite: the model overflows "
                "in this dtype or its weights are damaged. Try --config dtype=float32."
            )
        parts.append(scores.double())
    scores = torch.cat(parts)
    if "recall" in CRITERIA[name].needs and all("recall" in s.collected for s in statistics):
        pairs = zip(statistics, attentions, strict=True)
        carried = [per_unit(s.recall, members(unit, a.group_sizes)) for s, a in pairs]
        scores = recall.raised(scores, torch.cat(carried))
    return scores


def refits(statistics: Sequence[Statistics], examples: Sequences) -> bool:
    """Return whether the examples suffice to refit W_O, and every W_O is in one place."""
    heads = [part.output_weight.shape for part in statistics]
    width = max((shape[0] * shape[2] for shape in heads), default=0)
    enough = len(examples.rows) >= 2 and examples.tokens >= width
    return enough and all(part.runs <= 1 for part in statistics)


def _listed(criteria: Sequence[str]) -> str:
    return f"--criterion {', '.join(criteria)}"


def refit_warnings(criterion: str) -> tuple[str, ...]:
    """Says what becomes of a cut by some criteria where W_O is not refitted."""
    if not CRITERIA[criterion].assumes_refit:
        return ()
    return (
        f"{criterion} scores assume that W_O is refitted, so cut with --refit DATA. "
        "SmolLM2-135M without a quarter of its heads, by compensated, has 1.1 times its "
        "perplexity with the refit, and twice without. For a cut without one, score by "
        "fisher.",
    )
