"""Options that several commands have, each said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BeforeValidator

from headprune.config import values
from headprune.config.data import DataConfig, data_config

CALIBRATION, TRAINING, OUTPUT, ADVANCED = "Calibration", "Training", "Output", "Advanced"
_PLACE = BeforeValidator(values.possible_place)
_PATH = BeforeValidator(values.path)
_LISTED = BeforeValidator(values.listed)
_DATA = "Text, JSONL, CSV or parquet file, a folder, or a hub id (name:config@split)."


def option(help: str, panel: str | None = None, metavar: str | None = None) -> Any:
    """Return an option, spelt as ``config.base.flag`` does."""
    return typer.Option(help=help, rich_help_panel=panel, metavar=metavar)


def argument(metavar: str, help: str) -> Any:
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


File = Annotated[Path | str, _PATH]

# ---- input and output
Model = Annotated[str | Path, _PLACE, argument("MODEL", "A model folder or a hub id.")]
Output = Annotated[Path | str, _PATH, argument("OUTPUT", "The folder to write.")]
Against = Annotated[str | Path, _PLACE, option("The original model, to compare with.")]
Overwrite = Annotated[bool, option("Replace an existing output.", panel=OUTPUT)]
Resume = Annotated[bool, option("Resume an interrupted run.", panel=OUTPUT)]
DryRun = Annotated[bool, option("Show what would be written; write nothing.", panel=OUTPUT)]
SavePlan = Annotated[
    Path | str, _PATH, option("With --dry-run: write the plan to this file.", panel=OUTPUT)
]

# ---- data
Data = Annotated[str | Path, _PLACE, option(_DATA, metavar="DATA")]
Domains = Annotated[
    str | Path | Sequence[str | Path | Mapping[str, Any]] | Mapping[str, Any],
    BeforeValidator(values.several),
    option(f"{_DATA} Repeatable and named, as in wiki=a.txt.", metavar="DATA"),
]
TextColumn = Annotated[str, option("Column of the text; two, comma-separated, for pairs.")]
LabelColumn = Annotated[str, option("Column of the label or the similarity score.")]
Tokens = Annotated[
    values.Tokens, option("Tokens of the data to read, spread evenly.", panel=CALIBRATION)
]
SeqLen = Annotated[values.Length, option("Tokens per sequence.", panel=CALIBRATION)]
MaxWindows = Annotated[values.Count, option("Windows or examples to measure, spread evenly.")]
Tasks = Annotated[
    str | Sequence[str], _LISTED, option("Tasks of the package lm-eval, comma-separated.")
]
Metrics = Annotated[
    str | Sequence[str],
    BeforeValidator(values.several),
    option("Metric of written text: bleu, rouge_l, wer, ... (repeatable).", metavar="NAME"),
]

# ---- what to cut
MaxParams = Annotated[values.Count, option("Parameters of the whole model, at most.")]
MaxKvBytes = Annotated[
    values.NonNegativeInt,
    option("Bytes of KV cache per token, at most; with windows at 8,192 tokens."),
]
Unit = Annotated[
    Literal["head", "kv-group", "query-slot"],
    option("Unit of removal. Default: head for MHA, kv-group for GQA."),
]
Engine = Literal["llama.cpp", "vllm", "onnx", "openvino", "anywhere"]
Engines = Annotated[
    Engine | Sequence[Engine],
    _LISTED,
    option("Engine of the result (repeatable). anywhere: a plain config."),
]
HealSteps = Annotated[values.Steps, option("Then train to match the original, for N steps.")]

# ---- windows
Window = Annotated[
    values.Count,
    option(
        "Latest tokens that a head with a window sees. Default: 1024, or a quarter of --context."
    ),
]
Sinks = Annotated[values.NonNegativeInt, option("First tokens that it sees, too.")]
KeepFull = Annotated[
    values.FractionOrCount,
    option("Share or number of KV heads (or layers) with a whole past. Default: 0.5."),
]
FormUnit = Annotated[
    Literal["head", "kv-group", "query-slot", "layer"],
    option(
        "Unit of the choice. Default: head for MHA, kv-group for GQA and windows; layer is of "
        "windows only."
    ),
]
ContextTokens = Annotated[
    values.Length, option("Tokens the model is used with. Default: 8192, or its positions.")
]

# ---- training
Steps = Annotated[values.Steps, option("Optimiser steps.")]

# ---- the machine
Device = Annotated[str, option("auto, cpu, cuda, cuda:N or mps.", panel=ADVANCED)]
TrustRemoteCode = Annotated[bool, option("Allow code that comes with a model.", panel=ADVANCED)]

# ---- expert settings: for Python and files of --config
Loss = Literal["all", "answers"]  # tokens that count in chats
ReportTo = Literal["none", "tensorboard", "wandb", "trackio"]  # dashboard of the steps
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Placement = Literal["auto", "whole", "layers"]
Kinds = Annotated[str | Sequence[str], _LISTED]
Names = Annotated[str | Sequence[str], _LISTED]
Lengths = Annotated[str | int | Sequence[int], _LISTED]


def data_at(
    place: str | Path | None, text_column: str | None = None, label_column: str | None = None
) -> DataConfig | None:
    """Return the data at a place; None for none."""
    return None if place is None else data_config(place, text_column, label_column)
