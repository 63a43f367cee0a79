"""headprune evaluate."""

from __future__ import annotations

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
    Domains,
    EvaluateConfig,
    NeedleConfig,
    Place,
)
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.evaluation.report import Report


class EvaluateOptions(OneModel, EvaluateConfig, Columns, Loading, Placed):
    """Measure quality, size and speed, also against another model."""

    data: Domains = option(f"{DATA} {NAMED}", panel=Panel.MAIN)
    against: Place | None = option("Base model: report paired differences to it.", None, Panel.MAIN)
    output: Path | None = output("Write the report as JSON, also over an earlier one.", None)
    card: bool = option("Also show it on the model card of the result that is measured.", False)
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
    from headprune.render.models import evaluation

    evaluation(console, result)


declare(
    Command(
        "evaluate",
        Chapter.JUDGE,
        EvaluateOptions,
        run,
        show,
        needs={
            **dict.fromkeys(NeedleConfig.model_fields, "needle"),
            "decode_batches": "speed",
        },
    ),
)
