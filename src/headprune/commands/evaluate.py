"""headprune evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config import DataConfig, EvaluateConfig, build, data_configs, domains
from headprune.config.data import Loss
from headprune.config.values import Length, Level, Memory, PositiveInt, Seed
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.evaluation.report import Report


def _show(console: Console, result: Report, values: Mapping[str, Any]) -> None:
    from headprune.render.models import evaluation

    evaluation(console, result)


@command(
    Panel.JUDGE,
    _show,
    needs={
        **dict.fromkeys(("needle_lengths", "needle_trials", "needle_keys"), "needle"),
        **dict.fromkeys(("decode_batches", "speed_contexts"), "speed"),
        "max_new_tokens": "metrics",
    },
)
def evaluate(
    model: o.Model,
    output: Annotated[o.File, o.argument("OUTPUT", "JSON file to write; replaced.")] | None = None,
    *,
    data: o.Domains,
    text_column: o.TextColumn | None = None,
    label_column: o.LabelColumn | None = None,
    loss: o.Loss = "all",
    against: o.Against | None = None,
    tasks: o.Tasks = (),
    metrics: o.Metrics = (),
    needle: Annotated[bool, o.option("Also find numbers hidden at several depths.")] = False,
    speed: Annotated[bool, o.option("Time prefill and decoding.")] = True,
    max_windows: o.MaxWindows | None = None,
    seq_len: Annotated[Length, o.option("Tokens per window or text.")] = 512,
    card: bool = False,
    batch_size: PositiveInt = 4,
    confidence: Level = 0.95,
    resamples: PositiveInt = 2000,
    memory: Memory | None = None,
    decode_batches: o.Lengths = (1, 8),
    speed_contexts: o.Lengths = (),
    needle_lengths: o.Lengths = (),
    needle_trials: PositiveInt = 4,
    needle_keys: int = 4,
    last_words: int = 200,
    passage_words: int = 400,
    max_new_tokens: int = 128,
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    device: o.Device = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Report:
    """Measure quality, size and speed, also against another model."""
    from headprune.evaluation.evaluate import evaluate
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import EVALUATION
    from headprune.result.card import rewrite_card
    from headprune.schemas.manifest import read_manifest

    config = build(EvaluateConfig, locals())
    if card:
        read_manifest(Path(model))  # refuses a folder without a manifest early
    texts = domains(data)
    output = None if output is None else Path(output)
    context.stage("evaluating")
    inputs = (model, *(domain.source for domain in texts), against)
    claim = nullcontext() if output is None else claimed_file(output, EVALUATION, True, inputs)
    columns = {"text_column": text_column, "label_column": label_column}
    shared = DataConfig(source="", split="test", loss=Loss(loss), **columns)
    with claim:
        report = evaluate(model, data_configs(texts, shared), config, against, context)
        if output is not None:
            report.write(output)
    if card:
        rewrite_card(Path(model), report.rows())
    return report
