"""headprune evaluate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    NAMED,
    Columns,
    Loading,
    OneModel,
    Placed,
    output,
    split,
)
from headprune.config import (
    NEEDLE_DEPTHS,
    NEEDLE_LENGTHS,
    Domain,
    Domains,
    EvaluateConfig,
    Place,
)
from headprune.declaration import (
    Chapter,
    Command,
    Context,
    InRecipe,
    Made,
    Panel,
    Slot,
    declare,
    option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.estimates import Estimate, Sizes
    from headprune.evaluation.report import Report


class EvaluateOptions(OneModel, EvaluateConfig, Columns, Loading, Placed):
    """Measure quality, size and speed, also against another model."""

    data: Domains = option(f"{DATA} {NAMED}", panel=Panel.MAIN, slot=Slot.DATA)
    against: Place | None = option(
        "Base model: report paired differences to it.", None, Panel.MAIN, slot=Slot.MODEL
    )
    output: Path | None = output("Write the report as JSON, also over an earlier one.", None)
    card: bool = option(
        "Also show it on the model card of the result that is measured.", False, in_recipes=False
    )
    split: str = split("test")


def run(options: EvaluateOptions, context: Context) -> Report:
    """Measures it, and writes the report if that was asked for."""
    from headprune.evaluation.evaluate import evaluate
    from headprune.exporting.card import rewrite_card
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import EVALUATION
    from headprune.schemas.manifest import read_manifest

    if options.card:
        read_manifest(Path(options.model))  # refuses early what is no result
    context.stage("evaluating")
    inputs = (options.model, *(domain.source for domain in options.data), options.against)
    claim: AbstractContextManager[None] = nullcontext()
    if options.output is not None:
        claim = claimed_file(options.output, EVALUATION, overwrite=True, inputs=inputs)
    with claim:
        report = evaluate(
            options.model,
            options.domains(options.data),
            options.part(EvaluateConfig),
            against=options.against,
            context=context,
        )
        if options.output is not None:
            report.write(options.output)
    if options.card:
        rewrite_card(Path(options.model), report.rows())
    return report


def show(result: Report, options: EvaluateOptions, console: Console) -> None:
    """Prints metrics, sizes and speed."""
    from headprune.console.models import evaluation

    evaluation(console, result)


def _summary(result: Report) -> str:
    from headprune.evaluation.metrics import label

    found = [f"{label(m.name)} {m.value:.4f}" for m in result.model.metrics[:1]]
    for difference in result.differences[:1]:
        i = difference.interval
        found.append(f"{difference.kind} {i.estimate:.4f} ({i.low:.4f} to {i.high:.4f})")
    return ", ".join(found)


def estimate(
    options: EvaluateConfig, data: Sequence[Domain], models: int, sizes: Sizes
) -> Estimate:
    """What an evaluation takes."""
    from headprune.estimates import (
        OVERHEAD_SECONDS,
        PASSAGE_TOKENS,
        RECORD_BYTES,
        SPEED_SECONDS,
        Estimate,
        tokens_in,
    )

    texts = [tokens_in(domain.source) for domain in data]
    most = math.inf if options.max_windows is None else options.max_windows * options.seq_len
    found = [most if tokens is None else min(tokens, most) for tokens in texts]
    if sizes.causal:
        again = options.copying * options.seq_len
        ends = options.last_words * PASSAGE_TOKENS
        repeated = [min(tokens, again) for tokens in found]
        passages = [ends if tokens is None else min(tokens, ends) for tokens in texts]
        found += [again, *repeated, *passages]
    if options.needle:
        lengths = options.needle_lengths or NEEDLE_LENGTHS
        found.append(sum(lengths) * len(NEEDLE_DEPTHS) * options.needle_trials)
    tokens = None if math.inf in found else math.fsum(found)
    one = None if tokens is None else sizes.forward(tokens) + SPEED_SECONDS * options.speed
    batch = options.batch_size * options.seq_len
    held = sizes.activations(batch, sizes.itemsize_of(options.dtype), trained=False)
    seconds = None if one is None else OVERHEAD_SECONDS + models * one
    weights = models * sizes.stored(options.dtype)
    layers = sizes.by_layers(weights) + held
    return Estimate(seconds, weights + held, RECORD_BYTES, weights, layers)


def _estimate(options: EvaluateOptions, sizes: Sizes) -> Estimate:
    return estimate(options, options.data, 1 + (options.against is not None), sizes)


declare(
    Command(
        "evaluate",
        Chapter.JUDGE,
        EvaluateOptions,
        run,
        show,
        step=InRecipe(
            Made.REPORT,
            _summary,
            _estimate,
            outputs={"output": "report.json"},
            defaults={"data": ("test",), "against": "original"},
        ),
    ),
)
