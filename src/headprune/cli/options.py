"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.errors import HeadpruneError
from headprune.parsing import read_json
from headprune.tensors.units import Unit

Model = Annotated[str, typer.Argument(help="A model folder or a hub id.", metavar="MODEL")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on stdout.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with the model.")
]
Output = Annotated[Path, typer.Option(help="Folder for the result.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Data = Annotated[
    str,
    typer.Option(
        help="A text, JSONL, CSV, TSV or parquet file (also .gz), a folder of them, or a hub id "
        "such as wikitext:wikitext-2-raw-v1."
    ),
]
Split = Annotated[str, typer.Option(help="Split of a hub data set.")]
TextColumn = Annotated[
    str | None, typer.Option(help="Column with the text; two, comma-separated, for pairs.")
]
LabelColumn = Annotated[
    str | None, typer.Option(help="Column with the label or the similarity score.")
]
Assume = Annotated[
    bool,
    typer.Option(
        "--assume-supported",
        help="Go on where the model's config has settings that headprune's table does not know. "
        "The risk: heads may mean something else there, and the proof sees only its probe inputs.",
    ),
]
Drop = Annotated[
    bool,
    typer.Option(
        "--drop-unexpected",
        help="Go on where the checkpoint has tensors that the model's class does not take; they "
        "will be missing from a result.",
    ),
]
DtypeOption = Annotated[
    cfg.Dtype,
    typer.Option(
        help="Element type to compute in. auto: float32 for a checkpoint in half precision, since "
        "its weights are float32 numbers as well."
    ),
]
MeasuredDtype = Annotated[
    cfg.Dtype,
    typer.Option(help="Element type that the model is measured in. auto: the checkpoint's."),
]
OutDtype = Annotated[
    cfg.Dtype,
    typer.Option(help="Element type to write. auto: the checkpoint's, tensor by tensor."),
]

# what is cut, and what decides it
UnitOption = Annotated[
    Unit | None,
    typer.Option(help="What is removed as one piece. Default: head for MHA, kv-group for GQA."),
]
AttentionKinds = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are."
    ),
]
HeadsToKeep = Annotated[
    str | None,
    typer.Option(
        help="Heads to keep, hit exactly: a share (0.75; 1.0 is all) or a count (202; 1 is one)."
    ),
]
WhichScores = Annotated[str | None, typer.Option(help="Which of the scores, if there are several.")]

# how much of the data is used, and how
CalibrationTokens = Annotated[
    int, typer.Option(help="How much of the text is used, spread evenly.")
]
SeqLen = Annotated[int, typer.Option(help="Tokens per sequence.")]
MaxWindows = Annotated[
    int | None, typer.Option(help="Measure on the first so many windows or examples only.")
]
StepBatch = Annotated[int, typer.Option(help="Sequences per step, of all processes.")]
ScoreBatch = Annotated[int, typer.Option(help="Sequences per pass; no score depends on it.")]
EvaluateBatch = Annotated[int, typer.Option(help="Sequences per forward pass.")]
Confidence = Annotated[float, typer.Option(help="Level of the intervals.")]
Seed = Annotated[int, typer.Option(help="Seed of what is random.")]

# how a training runs
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Save memory, at a third more time.")
]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints. Default: a tenth.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]


def settings_read_by(
    read: Callable[[Path], dict[str, Any]],
) -> Callable[[typer.Context, Path | None], Path | None]:
    """A callback that makes the settings of a file the defaults of the options after it."""

    def settings(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = {**(context.default_map or {}), **read(path)}
        return path

    return settings


def share_or_count(text: str | None, option: str) -> float | int | None:
    """A share (a float) or a count (an int)."""
    if text is None:
        return None
    try:
        value = int(text) if text.strip().lstrip("-").isdigit() else float(text)
    except ValueError:
        raise HeadpruneError(
            f"{option} {text}: give a share such as 0.75, or a count such as 202."
        ) from None
    if value == 1 and isinstance(value, int):
        terminal.note(f"{option} 1 keeps one head; {option} 1.0 keeps all of them.")
    return value


def batch_sizes(text: str) -> tuple[int, ...]:
    """Comma-separated batch sizes."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise HeadpruneError(
            f"--decode-batches {text}: give whole numbers, such as 1,8,32."
        ) from None


def memory_bytes(text: str | None) -> int | None:
    """An amount of memory with its unit, in bytes."""
    if text is None:
        return None
    try:
        return cast(int, cfg.memory_bytes(text))
    except ValueError as error:
        raise HeadpruneError(f"--memory {text}: {error}.") from None


def kv_head_counts(text: str | None) -> int | tuple[int, ...] | None:
    """One number, a list, or a file with a list."""
    if text is None:
        return None
    try:
        if Path(text).is_file():
            content = read_json(Path(text), HeadpruneError)
            if not (isinstance(content, list) and all(type(n) is int for n in content)):
                raise ValueError
            return tuple(content)
        numbers = tuple(int(part) for part in text.split(","))
    except (ValueError, OSError):
        raise HeadpruneError(
            f"--kv-heads {text}: give a number such as 2, a list such as 4,4,2,2 with one per "
            "attention module, or a JSON file that holds such a list."
        ) from None
    return numbers if "," in text else numbers[0]


def data_config(
    source: str, split: str, text_column: str | None, label_column: str | None
) -> cfg.DataConfig:
    """Where examples come from."""
    values = {
        "source": source,
        "split": split,
        "text_column": text_column,
        "label_column": label_column,
    }
    config: cfg.DataConfig = cfg.build(cfg.DataConfig, values)
    return config
