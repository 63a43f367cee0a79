"""What the stages of the work are asked to do: frozen, validated, written beside every result."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headprune.declaration import Options, Panel, Slot, option
from headprune.io.parsing import shown
from headprune.io.writing import write_whole
from headprune.tensors.units import Unit

# bounds that no use comes near, so that a slip of the hand is refused and not run for years
Positive = Annotated[float, Field(gt=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=2**53)]
MOST_STEPS = 10**9
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Length = Annotated[int, Field(ge=2, le=10**9)]  # tokens of a sequence
Few = Annotated[int, Field(ge=1, le=10**6)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Amount = Annotated[int, Field(ge=0)]


def memory_bytes(text: object) -> object:
    """An amount of memory with its unit, in bytes; other values as they are.

    Raises:
        ValueError: If it has no unit.
    """
    if not isinstance(text, str):
        return text
    units = {"GIB": 2**30, "MIB": 2**20, "GB": 10**9, "MB": 10**6}
    unit = next((u for u in units if text.upper().endswith(u)), None)
    try:
        if unit is None:
            raise ValueError
        return int(float(text[: -len(unit)]) * units[unit])
    except (ValueError, OverflowError):  # the latter of "inf"
        raise ValueError("give a number with its unit, such as 24GiB (or MiB, GB, MB)") from None


Memory = Annotated[Count, BeforeValidator(memory_bytes)]


def _as_text(place: object) -> object:
    return os.fspath(place) if isinstance(place, Path) else place


def possible_place(text: str) -> str:
    """A name that a file, a folder or something on the hub can have.

    Raises:
        ValueError: If no file system takes it.
    """
    longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    if longest > 255 or len(text) > 4_000:
        raise ValueError(f"no name is that long: {shown(text)}")
    if "\0" in text:
        raise ValueError("no name holds a NUL")
    return text


Place = Annotated[str, BeforeValidator(_as_text), AfterValidator(possible_place)]


def share_or_count(value: object) -> object:
    """A share (a float) or a count (an int), which may come as text.

    Raises:
        ValueError: If the text is neither.
    """
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.strip().lstrip("-").isdigit() else float(value)
    except ValueError:
        raise ValueError("give a share such as 0.75, or a count such as 202") from None


def one_or_all(value: object) -> str | None:
    """Says what 1 means, which is easily meant otherwise."""
    if value == 1 and isinstance(value, int):
        return "{} 1 keeps one head; {} 1.0 keeps all of them."
    return None


Kept = Annotated[float | int, BeforeValidator(share_or_count)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


def _numbers(value: object) -> object:
    """Numbers between commas."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise ValueError("give whole numbers, such as 1,8,32") from None


Batches = Annotated[tuple[Few, ...], BeforeValidator(_numbers)]


def kv_head_counts(value: object) -> object:
    """One number, a list, or a file with a list.

    Raises:
        ValueError: If a text is none of these.
    """
    if not isinstance(value, str):
        return value
    try:
        listed = value
        if Path(value).is_file():
            listed = Path(value).read_text(encoding="utf-8")
        content = json.loads(listed) if listed.lstrip().startswith("[") else listed
        numbers = content if isinstance(content, list) else list(map(int, content.split(",")))
        if not all(type(number) is int for number in numbers):
            raise ValueError
    except (ValueError, OSError, RecursionError):
        raise ValueError(
            "give a number such as 2, a list such as 4,4,2,2 with one per attention module, or a "
            "JSON file that holds such a list"
        ) from None
    return numbers[0] if isinstance(content, str) and "," not in content else tuple(numbers)


KvHeads = Annotated[Count | tuple[Count, ...], BeforeValidator(kv_head_counts)]


class Objective(str, Enum):
    """What the gates are trained on."""

    AUTO = "auto"
    LM = "lm"
    MLM = "mlm"
    DISTILL = "distill"
    TASK = "task"


class Train(str, Enum):
    """Which weights move beside the gates."""

    GATES = "gates"
    CHANNELS = "channels"  # a factor per channel of what enters W_O
    ATTENTION = "attention"
    ALL = "all"


class Method(str, Enum):
    """How training chooses the heads that go."""

    L0 = "l0"  # hard-concrete gates, sampled, and a Lagrangian
    CHEAPEST = "cheapest"  # gates are plain factors; what costs least to close goes, bit by bit


class Dtype(str, Enum):
    """An element type; what "auto" stands for is said where it is asked for."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class ShapeOption(str, Enum):
    """What a cut may look like."""

    AUTO = "auto"  # other counts in every layer; equal groups within a layer
    NATIVE = "native"  # the same counts everywhere, so that a plain config holds the result
    RAGGED = "ragged"  # any head, also where that leaves KV heads with unequal numbers of queries


COMPUTED = (
    "Element type to compute in. auto: float32 for a checkpoint in half precision, since its "
    "weights are float32 numbers as well."
)
MEASURED = "Element type that the model is measured in. auto: the checkpoint's."
WRITTEN = "Element type to write. auto: the checkpoint's, tensor by tensor."


class DataConfig(Options):
    """Where examples come from."""

    source: Place = option(
        "A text, JSONL, CSV, TSV or parquet file (also .gz), a folder of them, or a hub id such as "
        "wikitext:wikitext-2-raw-v1."
    )
    split: str = option("Split of a hub data set.", "train")
    text_column: str | None = option(
        "Column with the text; two, comma-separated, for pairs. Default: the one named 'text', or "
        "the only one that holds text.",
        None,
    )
    label_column: str | None = option("Column with the label or the similarity score.", None)


class TrainGatesConfig(Options):
    """How gates are trained. One of ``target_heads`` and ``l0_penalty`` is set."""

    target_heads: Kept | None = option(
        "Heads to keep, hit exactly: a share (0.75; 1.0 is all) or a count (202; 1 is one).",
        None,
        Panel.MAIN,
        note=one_or_all,
    )
    l0_penalty: Positive | None = option(
        "Instead of a target: Voita's constant penalty per open head (Voita et al. 2019).",
        None,
        Panel.CUT,
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are.",
        (),
        Panel.CUT,
    )
    unit: Unit | None = option(
        "What is removed as one piece. Default: head for MHA, kv-group for GQA.", None, Panel.CUT
    )
    method: Method = option(
        "How heads are chosen. l0: hard-concrete gates. cheapest: gates are plain factors, and "
        "what costs the loss least goes, a few heads at a time.",
        Method.L0,
        Panel.CUT,
    )
    train: Train = option(
        "What is trained beside the gates. channels: a factor per channel of what enters W_O, with "
        "weights frozen.",
        Train.GATES,
        Panel.TRAINING,
    )
    objective: Objective = option(
        "The loss. auto: task for a classifier with labels, lm or mlm for a language model, else "
        "distill, which needs no labels: it matches the ungated model.",
        Objective.AUTO,
        Panel.TRAINING,
    )
    steps: Steps | None = option(
        "Optimiser steps. Default: as many as --epochs take.", None, Panel.MAIN
    )
    epochs: Positive = option("Passes over the data, without --steps.", 1.0, Panel.TRAINING)
    batch_size: Few = option("Sequences per step, of all processes.", 4, Panel.TRAINING)
    seq_len: Length = option(
        "Tokens per sequence; documents are packed for language models, and cut off otherwise.",
        256,
        Panel.TRAINING,
    )
    gate_lr: Positive = option("Learning rate of gates that are sampled (l0).", 0.5)
    scale_lr: Positive = option("Learning rate of the factors of heads and channels.", 0.02)
    weight_lr: Positive = option("Learning rate of the weights, if any move.", 5e-5)
    temperature: Positive = option("beta of the hard-concrete gates (l0).", 2 / 3)
    init_log_alpha: Annotated[float, Field(ge=-100, le=100)] = option(
        "Where sampled gates start (l0); 3 is open with probability 0.99.", 3.0
    )
    rounds: Few | None = option(
        "How often heads are chosen, each time an equal part of those to be removed. Default: one "
        "per quarter of all heads.",
        None,
    )
    warmup: Annotated[float, Field(ge=0, le=1)] = option(
        "Share of a round's choosing in which its target is reached.", 0.75
    )
    settle: Annotated[float, Field(ge=0, lt=1)] | None = option(
        "Share of every round, at its end, with its heads chosen. Default: 0.6, and 0.3 with "
        "--method cheapest.",
        None,
    )
    gradient_checkpointing: bool = option(
        "Save memory, at a third more time.", False, Panel.TRAINING
    )
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    seed: Seed = option("Seed of the gates' noise and the order of the data.", 0)
    save_every: Steps | None = option(
        "Steps between checkpoints. Default: a tenth.", None, Panel.TRAINING
    )

    @model_validator(mode="after")
    def _one_goal(self) -> TrainGatesConfig:
        if (self.target_heads is None) == (self.l0_penalty is None):
            raise ValueError("give exactly one of --target-heads and --l0-penalty")
        return self

    @model_validator(mode="after")
    def _fitting_method(self) -> TrainGatesConfig:
        if self.method is Method.CHEAPEST and self.l0_penalty is not None:
            raise ValueError("--l0-penalty goes with --method l0; give --target-heads")
        if self.method is Method.CHEAPEST and self.rounds not in (None, 1):
            raise ValueError("--rounds goes with --method l0; cheapest has none")
        if self.method is Method.CHEAPEST and self.objective is Objective.DISTILL:
            raise ValueError("--objective distill goes with --method l0")
        return self


class Grouping(str, Enum):
    """Which KV heads share."""

    ADJACENT = "adjacent"  # neighbours
    SIMILAR = "similar"  # those that lose least by it


class ConvertConfig(Options):
    """How KV heads are merged. One of ``kv_heads`` and ``kv_budget`` is set."""

    kv_heads: KvHeads | None = option(
        "KV heads per layer: one number, a comma-separated list with one per attention module, or "
        "a JSON file with such a list.",
        None,
        Panel.MAIN,
    )
    kv_budget: Annotated[float, Field(gt=0, le=1)] | None = option(
        "Instead: the share of all KV heads to keep, spread over the layers.", None, Panel.MAIN
    )
    merge: str | None = option(
        "How the heads of a group become one: mean, first, random, medoid, norm-mean, procrustes, "
        "lowrank. Default: lowrank with --calibrate, mean without.",
        None,
        Panel.CUT,
    )
    grouping: Grouping = option(
        "Which heads share: neighbours, or those that lose least by it.",
        Grouping.ADJACENT,
        Panel.CUT,
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are.",
        (),
        Panel.CUT,
    )
    calibration_tokens: Count = option(
        "How much of the text is used, spread evenly.", 16_384, Panel.CALIBRATION
    )
    seq_len: Length = option("Tokens per sequence.", 512, Panel.CALIBRATION)
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    out_dtype: Dtype = option(WRITTEN, Dtype.AUTO, Panel.OUTPUT)
    seed: Seed = option("Seed of what is random.", 0)

    @model_validator(mode="after")
    def _one_goal(self) -> ConvertConfig:
        if (self.kv_heads is None) == (self.kv_budget is None):
            raise ValueError("give exactly one of --kv-heads and --kv-budget")
        return self


class HealTrain(str, Enum):
    """Which weights healing moves."""

    ATTENTION = "attention"
    LORA = "lora"
    ALL = "all"


class HealConfig(Options):
    """How a converted or cut model is trained to match the one it came from."""

    steps: Steps = option("Optimiser steps.", panel=Panel.MAIN)
    train: HealTrain = option(
        "What is trained. lora: low-rank additions to the attention projections, merged at the "
        "end.",
        HealTrain.ATTENTION,
        Panel.TRAINING,
    )
    lora_rank: Few = option("With --train lora: its rank.", 16, Panel.TRAINING)
    batch_size: Few = option("Sequences per step, of all processes.", 4, Panel.TRAINING)
    seq_len: Length = option("Tokens per sequence.", 256, Panel.TRAINING)
    learning_rate: Positive = option(
        "Highest learning rate, reached after a tenth of the steps and then lowered to zero along "
        "a cosine.",
        5e-4,
        Panel.TRAINING,
    )
    bf16: bool = option(
        "Compute in bfloat16 (autocast); weights and optimiser stay in float32.",
        False,
        Panel.TRAINING,
    )
    gradient_checkpointing: bool = option(
        "Save memory, at a third more time.", False, Panel.TRAINING
    )
    out_dtype: Dtype = option(WRITTEN, Dtype.AUTO, Panel.OUTPUT)
    seed: Seed = option("Seed of the order of the data.", 0)
    save_every: Steps | None = option(
        "Steps between checkpoints. Default: a tenth.", None, Panel.TRAINING
    )


class CalibrationConfig(Options):
    """Which part of the data shows what the heads do."""

    renamed: ClassVar = {"tokens": "calibration_tokens"}

    calibration_tokens: Annotated[Count, Field(ge=2)] = option(
        "How much of the text is used, spread evenly.", 16_384, Panel.CALIBRATION
    )
    seq_len: Length = option(
        "Tokens per sequence, about as many as the model will see.", 512, Panel.CALIBRATION
    )
    batch_size: Few = option("Sequences per pass; no result depends on it.", 4, Panel.CALIBRATION)
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    seed: Seed = option("Seed of masked positions and of what is random.", 0)


class BudgetConfig(Options):
    """What a plan may keep. At least one of ``keep`` and the three limits is set."""

    keep: Kept | None = option(
        "Heads to keep, hit exactly: a share (0.75; 1.0 is all) or a count (202; 1 is one).",
        None,
        Panel.MAIN,
        note=one_or_all,
    )
    per_layer: bool = option(
        "The same share in every layer, or the best of all layers together.",
        False,
        Panel.CUT,
        flags="--per-layer/--global",
    )
    min_per_layer: Annotated[int, Field(ge=0)] = option(
        "Query heads that every layer keeps at least.", 0, Panel.CUT
    )
    max_params: Count | None = option("Parameters of the whole model.", None, Panel.MAIN)
    max_kv_bytes: Annotated[int, Field(ge=0)] | None = option(
        "KV cache per token in bytes, in the model's dtype.", None, Panel.MAIN
    )
    min_speedup: Annotated[float, Field(ge=1)] | None = option(
        "Prefill speed over the whole model's, measured here.", None, Panel.MAIN
    )

    @model_validator(mode="after")
    def _some_goal(self) -> BudgetConfig:
        goals = (self.keep, self.max_params, self.max_kv_bytes, self.min_speedup)
        if all(goal is None for goal in goals):
            raise ValueError(
                "give what may stay: --keep, --max-params, --max-kv-bytes or --min-speedup"
            )
        if self.per_layer and self.keep is None:
            raise ValueError("--per-layer needs --keep, the number or share of heads to keep")
        return self


class EvaluateConfig(Options):
    """How a model is evaluated."""

    seq_len: Length = option(
        "Tokens per window (language models) or at most per text (others).", 512
    )
    batch_size: Few = option("Sequences per forward pass.", 4)
    max_windows: Count | None = option(
        "Measure on the first so many windows or examples only.", None, Panel.MAIN
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = option("Level of the intervals.", 0.95)
    resamples: Few = option("Bootstrap resamples behind them.", 2000)
    speed: bool = option("Time prefill and decoding.", True, Panel.MAIN)
    decode_batches: Batches = option(
        "Batch sizes at which decoding is timed, comma-separated.", (1, 8), as_text=True
    )
    memory: Memory | None = option(
        "Memory such as 24GiB: say how long a context fits beside the weights.", None, as_text=True
    )
    dtype: Dtype = option(MEASURED, Dtype.AUTO)
    seed: Seed = option("Seed of masked positions and of the bootstrap.", 0)


class CheckConfig(Options):
    """How a model is held to its limits."""

    model: Place = option("The model: a folder or a hub id.", panel=Panel.MAIN, slot=Slot.MODEL)
    data: Place = option(
        "Text that it was not trained on: a file, a folder or a hub id.",
        panel=Panel.MAIN,
        slot=Slot.DATA,
    )
    split: str = option("Split of a hub data set.", "test", Panel.INPUT, in_recipes=False)
    text_column: str | None = option(
        "Column with the text; two, comma-separated, for pairs.",
        None,
        Panel.INPUT,
        in_recipes=False,
    )
    label_column: str | None = option(
        "Column with the label or the similarity score.", None, Panel.INPUT, in_recipes=False
    )
    baseline: Place | None = option(
        "Record of an earlier run, for limits such as '<= +2 %'.", None, Panel.MAIN, slot=Slot.FILE
    )
    against: Place | None = option(
        "The original model, for limits such as '>= 98 %'.", None, Panel.MAIN, slot=Slot.MODEL
    )
    limits: Names = option(
        "What must hold (repeatable): 'perplexity <= 25', 'perplexity <= +2 %' (since the "
        "baseline), 'perplexity recovery >= 98 %' (of the original), 'query_heads == 201', "
        "'kv_cache_bytes_per_token <= 50 %', 'decode_tokens_per_s >= 120 %', "
        "'load_route == native'.",
        (),
        Panel.MAIN,
        flags="--limit",
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = option(
        "Level of the intervals that decide.", 0.99
    )
    resamples: Annotated[Few, Field(ge=1000)] = option("Bootstrap resamples behind them.", 10_000)
    strict: bool = option("Too close to call exits with 1, not with 0.", False, Panel.MAIN)
    seq_len: Length = option(
        "Tokens per window (language models) or at most per text (others).", 512
    )
    batch_size: Few = option("Sequences per forward pass.", 4)
    max_windows: Count | None = option(
        "Measure on the first so many windows or examples only.", None
    )
    dtype: Dtype = option(MEASURED, Dtype.AUTO)
    seed: Seed = option("Seed of masked positions and of the bootstrap.", 0)
    drop_unexpected: bool = option(
        "Go on where the checkpoint has tensors that the model's class does not take.",
        False,
        in_recipes=False,
    )

    def data_config(self) -> DataConfig:
        """Where the examples come from."""
        return self.part(DataConfig, source=self.data)

    def evaluate_config(self) -> EvaluateConfig:
        """How model and original are evaluated."""
        shared = ("seq_len", "batch_size", "max_windows", "dtype", "seed")
        return EvaluateConfig(**{name: getattr(self, name) for name in shared}, speed=False)


def write_yaml(content: dict[str, Any], path: Path) -> None:
    """Writes a resolved config, whole or not at all."""
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
