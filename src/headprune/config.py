"""What a command is asked to do: frozen, validated, written beside every result."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headprune.errors import HeadpruneError
from headprune.parsing import read_yaml, shown
from headprune.registry import did_you_mean
from headprune.tensors.units import Unit
from headprune.writing import write_whole

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


Place = Annotated[str, AfterValidator(possible_place)]


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

    L0 = "l0"  # hard-concrete gates, drawn, and a Lagrangian
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


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(_Config):
    """Where examples come from.

    Attributes:
        source: A file (text, JSONL, CSV, TSV or parquet, also .gz), a folder of them, or a hub id
            with an optional configuration: ``wikitext:wikitext-2-raw-v1``.
        split: Split of a hub data set.
        text_column: Column with the text; two, comma-separated, for sentence pairs. By default
            the column named "text", or the only one that holds text.
        label_column: Column with the label or, for pairs, the similarity score.
    """

    source: Place
    split: str = "train"
    text_column: str | None = None
    label_column: str | None = None


class TrainGatesConfig(_Config):
    """How gates are trained. One of ``target_heads`` and ``l0_penalty`` is set.

    Attributes:
        target_heads: Query heads to keep: a share (a float up to 1.0) or a count.
        l0_penalty: Constant penalty per expected open head (Voita et al. 2019), instead of a
            target; the count is then what training ends with.
        attention: Kinds of attention that get gates ("encoder", "decoder", "cross"); the heads of
            the others all stay. Empty for all kinds.
        unit: What is removed as one piece; None for "head" with one query per KV head and
            "kv-group" otherwise.
        method: How heads are chosen; "cheapest" has neither draws nor rounds, nor a penalty.
        train: What moves beside the gates: "channels" is a factor per channel of what enters W_O,
            with weights frozen, the others are weights.
        objective: The loss; "auto" is "task" for a classifier with labels, "lm" or "mlm" for a
            language model, and "distill" otherwise.
        steps: Optimiser steps; None for as many as ``epochs`` take.
        epochs: Passes over the data, where ``steps`` is not given.
        batch_size: Sequences per step, of all processes together.
        seq_len: Tokens per sequence; documents are packed for language models and cut off at
            this length otherwise.
        gate_lr: Learning rate of drawn gates.
        scale_lr: Learning rate of the factors: of heads once they are chosen, and of channels.
        weight_lr: Learning rate of the weights, if any move.
        temperature: beta of the hard-concrete distribution.
        init_log_alpha: Where the gates start; 3 is open with probability 0.99.
        rounds: How often heads are chosen, each time an equal part of those to be removed; None
            for as many rounds as keep each from removing more than a quarter of all heads. A
            constant penalty, and units of unequal size, take one.
        warmup: Share of a round's choosing in which the target falls to that of the round.
        settle: Share of every round, at its end, in which its heads are chosen and only the
            factors of those that stay are trained; None for 0.6, and for 0.3 with "cheapest", which
            trains them all the way.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
            On a GPU a bfloat16 checkpoint stays in bfloat16 where its weights do not move.
        seed: Seed of the gates' noise and the order of the data.
        save_every: Steps between checkpoints that ``--resume`` can go on from; None for a tenth
            of the run.
    """

    target_heads: float | int | None = None
    l0_penalty: Positive | None = None
    attention: tuple[str, ...] = ()
    unit: Unit | None = None
    method: Method = Method.L0
    train: Train = Train.GATES
    objective: Objective = Objective.AUTO
    steps: Steps | None = None
    epochs: Positive = 1.0
    batch_size: Few = 4
    seq_len: Length = 256
    gate_lr: Positive = 0.5
    scale_lr: Positive = 0.02
    weight_lr: Positive = 5e-5
    temperature: Positive = 2 / 3
    init_log_alpha: Annotated[float, Field(ge=-100, le=100)] = 3.0
    rounds: Few | None = None
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.75
    settle: Annotated[float, Field(ge=0, lt=1)] | None = None
    gradient_checkpointing: bool = False
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
    save_every: Steps | None = None

    @model_validator(mode="after")
    def _one_goal(self) -> TrainGatesConfig:
        if (self.target_heads is None) == (self.l0_penalty is None):
            raise ValueError("give exactly one of target_heads and l0_penalty")
        return self

    @model_validator(mode="after")
    def _fitting_method(self) -> TrainGatesConfig:
        if self.method is Method.CHEAPEST and self.l0_penalty is not None:
            raise ValueError("l0_penalty goes with method l0; give target_heads")
        if self.method is Method.CHEAPEST and self.rounds not in (None, 1):
            raise ValueError("rounds goes with method l0; cheapest has none")
        if self.method is Method.CHEAPEST and self.objective is Objective.DISTILL:
            raise ValueError("objective distill goes with method l0")
        return self


class Grouping(str, Enum):
    """Which KV heads share."""

    ADJACENT = "adjacent"  # neighbours
    SIMILAR = "similar"  # those that lose least by it


class ConvertConfig(_Config):
    """How KV heads are merged. One of ``kv_heads`` and ``kv_budget`` is set.

    Attributes:
        kv_heads: KV heads of every attention module, or one number per module in order.
        kv_budget: Share of all KV heads to keep, spread over the modules by what merging costs
            each of them.
        merge: How the heads of a group become one; None for "lowrank" with calibration text and
            "mean" without.
        grouping: Which heads share.
        attention: Kinds of attention to convert ("encoder", "decoder", "cross"); empty for all.
        calibration_tokens: How much of the calibration text is used.
        seq_len: Tokens per calibration window.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
        seed: Seed of merges that draw.
    """

    kv_heads: Count | tuple[Count, ...] | None = None
    kv_budget: Annotated[float, Field(gt=0, le=1)] | None = None
    merge: str | None = None
    grouping: Grouping = Grouping.ADJACENT
    attention: tuple[str, ...] = ()
    calibration_tokens: Count = 16_384
    seq_len: Length = 512
    dtype: Dtype = Dtype.AUTO
    out_dtype: Dtype = Dtype.AUTO
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_goal(self) -> ConvertConfig:
        if (self.kv_heads is None) == (self.kv_budget is None):
            raise ValueError("give exactly one of kv_heads and kv_budget")
        return self


class HealTrain(str, Enum):
    """Which weights healing moves."""

    ATTENTION = "attention"
    LORA = "lora"
    ALL = "all"


class HealConfig(_Config):
    """How a converted or cut model is trained to match the one it came from.

    Attributes:
        steps: Optimiser steps.
        train: Which weights move; "lora" trains low-rank additions to the attention projections
            and merges them at the end.
        lora_rank: Rank of these additions.
        batch_size: Sequences per step, of all processes together.
        seq_len: Tokens per sequence.
        learning_rate: Highest learning rate, reached after a tenth of the steps and then lowered
            to zero along a cosine.
        bf16: Compute in bfloat16 (autocast); weights and optimiser stay in float32.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
        seed: Seed of the order of the data.
        save_every: Steps between checkpoints that ``--resume`` can go on from; None for a tenth
            of the run.
    """

    steps: Steps
    train: HealTrain = HealTrain.ATTENTION
    lora_rank: Few = 16
    batch_size: Few = 4
    seq_len: Length = 256
    learning_rate: Positive = 5e-4
    bf16: bool = False
    gradient_checkpointing: bool = False
    out_dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
    save_every: Steps | None = None


class CalibrationConfig(_Config):
    """Which part of the data shows what the heads do.

    Attributes:
        tokens: How much of it is used, spread evenly over all of it.
        seq_len: Tokens per sequence.
        batch_size: Sequences per forward pass; no result depends on it.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        seed: Seed of masked positions and of what is random.
    """

    tokens: Annotated[Count, Field(ge=2)] = 16_384
    seq_len: Length = 512
    batch_size: Few = 4
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0


class BudgetConfig(_Config):
    """What a plan may keep. At least one of ``keep`` and the three limits is set.

    Attributes:
        keep: Query heads: a share (a float up to 1.0) or a count, hit exactly.
        per_layer: The same share in every module, instead of the best of all modules together.
        min_per_layer: Query heads that every module keeps at least.
        max_params: Parameters of the whole model.
        max_kv_bytes: Bytes of KV cache per token, in the model's dtype.
        min_speedup: Prefill speed over that of the whole model, measured here.
    """

    keep: float | int | None = None
    per_layer: bool = False
    min_per_layer: Annotated[int, Field(ge=0)] = 0
    max_params: Count | None = None
    max_kv_bytes: Annotated[int, Field(ge=0)] | None = None
    min_speedup: Annotated[float, Field(ge=1)] | None = None

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


class EvaluateConfig(_Config):
    """How a model is evaluated.

    Attributes:
        seq_len: Tokens per window (language models) or at most per text (others).
        batch_size: Sequences per forward pass.
        max_windows: Use only the first so many windows or examples; None for all.
        confidence: Level of the interval of a paired difference.
        resamples: Bootstrap resamples behind it.
        speed: Whether to time prefill and decoding.
        decode_batches: Batch sizes at which decoding is timed.
        memory: Bytes of memory, also as "24GiB"; the report then says how long a context fits.
        dtype: Element type that the model is measured in; "auto" is the checkpoint's.
        seed: Seed of masked positions and of the bootstrap.
    """

    seq_len: Length = 512
    batch_size: Few = 4
    max_windows: Count | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    resamples: Few = 2000
    speed: bool = True
    decode_batches: tuple[Few, ...] = (1, 8)
    memory: Memory | None = None
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0


class CheckConfig(_Config):
    """How a model is held to its limits.

    Attributes:
        model: The model that is checked: a folder or a hub id.
        data: Where the examples come from: a file, a folder or a hub id.
        split: Split of a hub data set.
        text_column: Column with the text; two, comma-separated, for sentence pairs.
        label_column: Column with the label or the similarity score.
        baseline: File with the record of an earlier run, for limits such as ``<= +2 %``.
        against: The original model, for limits such as ``>= 98 %``.
        limits: What must hold; see ``headprune.regression.limits``.
        confidence: Level of the intervals that decide.
        resamples: Bootstrap resamples behind them.
        strict: Whether a limit that is too close to call counts as broken.
        seq_len: As for ``EvaluateConfig``; so are the settings after it.
        batch_size: Sequences per forward pass.
        max_windows: Use only the first so many windows or examples; None for all.
        dtype: Element type that the model is measured in; "auto" is the checkpoint's.
        seed: Seed of masked positions and of the bootstrap.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
    """

    model: Place
    data: Place
    split: str = "test"
    text_column: str | None = None
    label_column: str | None = None
    baseline: Place | None = None
    against: Place | None = None
    limits: tuple[str, ...] = ()
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.99
    resamples: Annotated[Few, Field(ge=1000)] = 10_000
    strict: bool = False
    seq_len: Length = 512
    batch_size: Few = 4
    max_windows: Count | None = None
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
    drop_unexpected: bool = False

    def data_config(self) -> DataConfig:
        """Where the examples come from."""
        return DataConfig(
            source=self.data,
            split=self.split,
            text_column=self.text_column,
            label_column=self.label_column,
        )

    def evaluate_config(self) -> EvaluateConfig:
        """How model and original are evaluated."""
        shared = ("seq_len", "batch_size", "max_windows", "dtype", "seed")
        return EvaluateConfig(**{name: getattr(self, name) for name in shared}, speed=False)


def build(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """Validates values into a config.

    Raises:
        HeadpruneError: Naming the first setting that is unknown or out of range.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if name == "trust_remote_code":
            raise HeadpruneError(
                "A file cannot allow code that comes with a model: leave out 'trust_remote_code', "
                "and give --trust-remote-code if you trust that code."
            ) from None
        if first["type"] == "extra_forbidden":
            raise HeadpruneError(
                f"There is no setting '{name}'.{did_you_mean(name, list(model.model_fields))}"
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        if not name:  # of several settings; all that was given would say nothing more
            raise HeadpruneError(f"These settings: {message}.") from None
        option = f"--{name.replace('_', '-')}"
        raise HeadpruneError(f"{option}: {message} (got {shown(first['input'])}).") from None


def read_train_gates(path: Path) -> dict[str, Any]:
    """Reads the ``train_gates`` settings of a YAML file, without those that are not set.

    Raises:
        HeadpruneError: If the file is missing, has no such section, or misspells a setting.
    """
    settings = read_section(path, "train_gates")
    build(TrainGatesConfig, settings)
    return settings


def read_check(path: Path) -> dict[str, Any]:
    """Reads the ``check`` settings of a YAML file, without those that are not set.

    Raises:
        HeadpruneError: If the file is missing, has no such section, or misspells a setting.
    """
    settings = read_section(path, "check")
    if isinstance(settings.get("limits"), str):
        settings["limits"] = [settings["limits"]]
    needed = {"model": "", "data": ""}  # may come as options
    build(CheckConfig, {**needed, **settings})
    return settings


def read_section(path: Path, name: str) -> dict[str, Any]:
    """Reads one section of a YAML file, without the settings that are not set.

    Raises:
        HeadpruneError: If the file is missing or has no such section; near misses are named.
    """
    try:
        content = read_yaml(path, HeadpruneError)
    except FileNotFoundError:
        raise HeadpruneError(f"--config: there is no file '{path}'.") from None
    section = content.get(name) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        found = [str(key)[:60] for key in content] if isinstance(content, dict) else []
        others = [key for key in found if key != name]
        near = next((f" It has '{k}'.{d}" for k in others if (d := did_you_mean(k, [name]))), "")
        raise HeadpruneError(f"--config {path}: it has no section '{name}' with settings.{near}")
    return {str(key): value for key, value in section.items() if value is not None}


def write_yaml(content: dict[str, Any], path: Path) -> None:
    """Writes a resolved config, whole or not at all."""
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
