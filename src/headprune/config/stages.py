"""Settings of the stages. Types hold the bounds; expert settings have defaults."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from headprune.config.base import Settings
from headprune.config.data import CalibrationConfig, DataConfig, Domains, data_configs
from headprune.config.values import (
    Count,
    Dtype,
    FractionOrCount,
    KvHeads,
    Length,
    Lengths,
    Level,
    Memory,
    Names,
    NonNegativeInt,
    Place,
    Positive,
    PositiveInt,
    Seed,
    ShardSize,
    Share,
    Steps,
    Texts,
    Tokens,
    listed,
)
from headprune.tensors.units import Unit

NEEDLE_LENGTHS = (512, 1024, 2048, 4096, 8192)  # as far as model, tokenizer and text go
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NEEDLE = ("needle_accuracy", "needle_nats")
# metrics with passes of their own, by the setting that says how much is read for them
_ON_DEMAND = {
    "last_words": ("last_word_accuracy",),
    "passage_words": ("passage_words",),
}
# metrics of written text
WRITTEN = ("bleu", "chrf", "ter", "rouge1", "rouge2", "rouge_l", "wer", "cer", "exact_match")


def _exactly_one(settings: Settings, *names: str) -> None:
    if sum(getattr(settings, name) is not None for name in names) != 1:
        flags = [f"--{name.replace('_', '-')}" for name in names]
        raise ValueError(f"give exactly one of {', '.join(flags[:-1])} and {flags[-1]}")


class LayoutOption(str, Enum):
    """Shape of a cut."""

    PER_LAYER = "per-layer"  # counts differ between layers; equal groups within a layer
    UNIFORM = "uniform"  # the same counts everywhere, so that a plain config holds the result
    RAGGED = "ragged"  # any head, also where that leaves unequal groups
    PADDED = "padded"  # ragged, with zero heads that make groups equal and fill empty layers


class Target(str, Enum):
    """Engine that runs a result."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    ONNX = "onnx"
    OPENVINO = "openvino"
    ANYWHERE = "anywhere"  # whatever loads the original


Targets = Annotated[tuple[Target, ...], BeforeValidator(listed)]


class ProofOption(str, Enum):
    """Proof of a result."""

    AUTO = "auto"  # outputs where the model fits into memory, else tensors
    OUTPUTS = "outputs"  # compare outputs after reloading
    TENSORS = "tensors"  # compare stored tensors without running


class Grouping(str, Enum):
    """KV heads that share."""

    ADJACENT = "adjacent"  # neighbours
    SIMILAR = "similar"  # the least lossy groups


class Resuming(Settings):
    """Replace an output, or resume a training."""

    overwrite: bool = False
    resume: bool = False


class Writing(Settings):
    """Settings of writing and proof."""

    overwrite: bool = False
    out_dtype: Dtype = Dtype.AUTO
    proof: ProofOption = ProofOption.AUTO
    max_shard_size: ShardSize = "50GB"


class ScoreConfig(CalibrationConfig):
    """Criteria, the unit of a score, and the kinds of attention (all where empty)."""

    criterion: Names = ("compensated",)
    unit: Unit | None = None
    attention: Names = ()

    @model_validator(mode="after")
    def _removable(self) -> ScoreConfig:
        _refuse_layers(self.unit)
        return self


class _WindowSettings(Settings):
    """The window that heads may get, and the text that says which heads lose little by it.

    Attributes:
        window: Latest tokens that a head sees; None for 1,024, or a quarter of the context.
        context_tokens: Tokens the model is used with; None for 8,192, or its positions.
        calibration_tokens: Tokens of text, and about as many of prompts made from it.
        seq_len: Tokens per sequence, at most; None for four windows.
    """

    window: Count | None = None
    context_tokens: Length | None = None
    calibration_tokens: Tokens = 8_192
    seq_len: Length | None = None
    batch_size: PositiveInt = 4
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0


class WindowConfig(_WindowSettings):
    """Scores of windows with some ``sinks``, by the unit "kv-group" or "layer"."""

    unit: Unit = Unit.KV_GROUP
    sinks: NonNegativeInt = 4

    @model_validator(mode="after")
    def _whole_kv_heads(self) -> WindowConfig:
        _refuse_part_heads(self.unit)
        return self


class SwaConfig(_WindowSettings):
    """A window for KV heads, and how many keep the whole past.

    Attributes:
        targets: Engines of the result. They hold windows of whole layers, without sink tokens.
        level: The unit: "head", which is a KV head, or "layer"; None for that of the engines.
        sinks: First tokens that heads with a window see; None for 4, or none with engines.
        keep_full: Share or number of the units that keep it.
        max_kv_bytes: Instead, bytes of the cache of one sequence of ``context_tokens`` tokens.
    """

    targets: Targets = ()
    level: Literal["head", "layer"] | None = None
    sinks: NonNegativeInt | None = None
    keep_full: FractionOrCount | None = None
    max_kv_bytes: NonNegativeInt | None = None
    out_dtype: Dtype = Dtype.AUTO

    @model_validator(mode="after")
    def _one_budget(self) -> SwaConfig:
        if self.max_kv_bytes is not None and self.context_tokens is None:
            raise ValueError("--max-kv-bytes is of a context: give --context, its tokens")
        if self.max_kv_bytes is not None and self.keep_full is not None:
            raise ValueError("give --keep-full or --max-kv-bytes")
        if self.targets and (self.level == "head" or self.sinks):
            raise ValueError("--for takes whole layers without sinks: leave out --level, --sinks")
        return self

    @property
    def scoring(self) -> WindowConfig:
        """The settings of its scores."""
        layers = self.level == "layer" or bool(self.targets)
        sinks = (0 if self.targets else 4) if self.sinks is None else self.sinks
        return self.part(WindowConfig, unit=Unit.LAYER if layers else Unit.KV_GROUP, sinks=sinks)

    @property
    def kept(self) -> float | int | None:
        """The share or number; half where no budget is given."""
        return 0.5 if self.keep_full is None and self.max_kv_bytes is None else self.keep_full


class PlanConfig(Settings):
    """Budget and layout of a plan.

    ``out_dtype`` is the result's, which its KV cache has, in a context of ``context_tokens``;
    ``criterion`` is that of several scores.
    """

    targets: Targets = ()
    keep: FractionOrCount | None = None
    max_params: Count | None = None
    max_kv_bytes: NonNegativeInt | None = None
    context_tokens: Length | None = None
    keep_roles: Names = ()
    roles: Path | None = None
    out_dtype: Dtype = Dtype.AUTO
    criterion: str | None = None
    layout: LayoutOption = LayoutOption.PER_LAYER


class ConvertConfig(Settings):
    """Settings of a merge of KV heads."""

    targets: Targets = ()
    attention: Names = ()
    kv_heads: KvHeads | None = None
    kv_budget: Share | None = None
    merge: str | None = None
    grouping: Grouping = Grouping.ADJACENT
    calibration_tokens: Count = 16_384
    seq_len: Length = 512
    dtype: Dtype = Dtype.AUTO
    out_dtype: Dtype = Dtype.AUTO
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_goal(self) -> ConvertConfig:
        _exactly_one(self, "kv_heads", "kv_budget")
        return self


class LatentConfig(Settings):
    """Size of a latent attention, and its calibration.

    Attributes:
        kv_bytes: KV cache per token, in 16 bits, at most.
        rank: Width of the latent.
        rope_dim: Width of the rotary key.
    """

    kv_bytes: Count | None = None
    rank: Count | None = None
    rope_dim: Count | None = None
    calibration_tokens: Tokens = 16_384
    seq_len: Length = 512
    batch_size: PositiveInt = 4
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_goal(self) -> LatentConfig:
        whole = self.rank is not None and self.rope_dim is not None
        if (self.kv_bytes is None) != whole or (self.rank is None) != (self.rope_dim is None):
            raise ValueError("give --kv-bytes, or --rank and --rope-dim")
        return self


class CompressConfig(CalibrationConfig):
    """Budget and settings of a compression."""

    targets: Targets = ()
    keep: Share | None = None
    max_params: Count | None = None
    max_kv_bytes: NonNegativeInt | None = None
    context_tokens: Length | None = None  # of max_kv_bytes; windows are tried where it is given
    heal_steps: Steps | None = None
    # 512 suffices for perplexity, but loses facts far back in a context (docs/benchmarks/gqa)
    seq_len: Length = 2_048
    held_out_tokens: Count = 16_384
    metric: str | None = None
    max_new_tokens: Count = 128
    out_dtype: Dtype = Dtype.AUTO

    @model_validator(mode="after")
    def _one_goal(self) -> CompressConfig:
        _exactly_one(self, "keep", "max_params", "max_kv_bytes")
        if self.context_tokens is not None and self.max_kv_bytes is None:
            raise ValueError("--context is that of --max-kv-bytes: give both")
        if self.context_tokens is not None and self.metric is not None:
            raise ValueError("--metric reads short prompts, which show no windows: no --context")
        return self


class Objective(str, Enum):
    """Loss that a text is made into batches for."""

    LM = "lm"
    MLM = "mlm"
    DISTILL = "distill"
    TASK = "task"


class Train(str, Enum):
    """Weights that move beside the gates."""

    GATES = "gates"
    ATTENTION = "attention"
    ALL = "all"


class Form(str, Enum):
    """Fate of a head whose gate closes."""

    REMOVED = "removed"
    WINDOW = "window"


class Reporter(str, Enum):
    """Dashboard of a training."""

    NONE = "none"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class TrainGatesConfig(Settings):
    """Settings of gate training.

    Attributes:
        form: Fate of a head whose gate closes.
        target_heads: Share or number of query heads that stay.
        keep_full: With the form "window": of units with a whole past.
        l0_penalty: Instead: lambda of Voita et al. 2019, with their loss and their start.
        init_log_alpha: Start of all gates with ``l0_penalty``; others start from scores.
        window: Latest tokens that a head with a window sees; None as for ``SwaConfig``.
        context_tokens: Tokens the model is used with; None as for ``SwaConfig``.
        calibration_tokens: Tokens for the scores that gates start from, and for the refit of W_O.
        batch_size: Rows of a step; None for 1,024 tokens, or four examples; with windows, one.
        seq_len: Tokens per sequence; None for 1,024, or four windows.
        save_every: Steps between checkpoints; None for a fifth of all.
    """

    form: Form = Form.REMOVED
    attention: Names = ()
    unit: Unit | None = None
    target_heads: FractionOrCount | None = None
    keep_full: FractionOrCount | None = None
    l0_penalty: Positive | None = None
    train: Train = Train.GATES
    window: Count | None = None
    sinks: NonNegativeInt = 4
    context_tokens: Length | None = None
    calibration_tokens: Tokens = 16_384
    steps: Steps = 100
    batch_size: PositiveInt | None = None
    seq_len: Length | None = None
    gate_lr: Positive = 0.08
    weight_lr: Positive = 5e-5
    temperature: Positive = 2 / 3
    init_log_alpha: Annotated[float, Field(ge=-4.6, le=4.6)] = 3.0  # hard_concrete.BOUND
    gradient_checkpointing: bool = False
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
    save_every: Steps | None = None
    report_to: Reporter = Reporter.NONE

    @model_validator(mode="after")
    def _fitting(self) -> TrainGatesConfig:
        if self.form is Form.REMOVED:
            _exactly_one(self, "target_heads", "l0_penalty")
            _refuse_layers(self.unit)
        elif self.unit is not None:
            _refuse_part_heads(self.unit)
        return self


def _refuse_layers(unit: Unit | None) -> None:
    if unit is Unit.LAYER:
        raise ValueError("--unit layer goes with --form window; heads are removed by others")


def _refuse_part_heads(unit: Unit) -> None:
    if unit not in (Unit.KV_GROUP, Unit.LAYER):
        raise ValueError("a window is of whole KV heads: give --unit kv-group or layer")


class HealTrain(str, Enum):
    """Weights that healing moves."""

    ATTENTION = "attention"
    LORA = "lora"
    ALL = "all"


class HealOptimizer(str, Enum):
    """Optimiser of healing."""

    AUTO = "auto"
    MUON = "muon"  # matrices of the layers, orthogonalised; the rest with AdamW
    ADAMW = "adamw"


class HealObjective(str, Enum):
    """Loss of healing."""

    AUTO = "auto"
    DISTILL = "distill"
    LM_DISTILL = "lm+distill"


STEP_TOKENS = 1_024  # of healing


class HealConfig(Settings):
    """Settings of healing: training a smaller model to match its original."""

    steps: Steps
    train: HealTrain = HealTrain.ALL
    objective: HealObjective = HealObjective.AUTO
    lora_rank: PositiveInt = 16
    batch_size: PositiveInt | None = None  # as many as have STEP_TOKENS; of examples at least 4
    seq_len: Length | None = None  # STEP_TOKENS or two windows, as far as the model takes them
    optimizer: HealOptimizer = HealOptimizer.AUTO
    learning_rate: Positive | None = None  # 2e-4 with muon, 1e-4 with adamw
    bf16: bool = True  # autocast, where the device has it in hardware
    gradient_checkpointing: bool = False
    sink_logits: bool = True  # for windows of layers, where a stock class has them
    out_dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
    save_every: Steps | None = None  # a tenth of the steps
    report_to: Reporter = Reporter.NONE

    @model_validator(mode="after")
    def _fitting_optimizer(self) -> HealConfig:
        if self.optimizer is HealOptimizer.MUON and self.train is HealTrain.LORA:
            raise ValueError("--config optimizer=muon does not go with --train lora")
        return self


class NeedleConfig(Settings):
    """Contexts that facts are hidden in; ``NEEDLE_LENGTHS`` where none are given."""

    needle_lengths: Lengths = ()
    needle_trials: PositiveInt = 4
    needle_keys: Annotated[int, Field(ge=1, le=8)] = 4  # facts in a context
    seed: Seed = 0


class EvaluateConfig(NeedleConfig):
    """Settings of an evaluation."""

    last_words: Annotated[int, Field(ge=0, le=10**6)] = 200  # passages
    passage_words: Annotated[int, Field(ge=0, le=10**6)] = 400  # passages to look for them in
    needle: bool = False
    seq_len: Length = 512
    batch_size: PositiveInt = 4
    max_windows: Count | None = None
    confidence: Level = 0.95
    resamples: PositiveInt = 2000
    tasks: Names = ()
    metrics: Texts = ()
    max_new_tokens: Count = 128
    speed: bool = True
    decode_batches: Lengths = (1, 8)
    speed_contexts: Lengths = ()  # to time prompts of these lengths too
    memory: Memory | None = None
    dtype: Dtype = Dtype.AUTO


class RolesConfig(Settings):
    """Settings of role measurements."""

    sequences: Annotated[PositiveInt, Field(ge=4)] = 64  # two choose an offset, two judge it
    ablation_tokens: NonNegativeInt = 0
    trees: Place | None = None
    attention: Names = ()
    needle_lengths: Lengths = ()
    seq_len: Length = 512
    batch_size: PositiveInt = 4
    confidence: Level = 0.95
    resamples: PositiveInt = 1000
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0


class CheckConfig(NeedleConfig):
    """Settings of a check."""

    model: Place
    data: Domains
    tasks: Names = ()
    max_new_tokens: Count = 128
    split: str = "test"
    text_column: str | None = None
    label_column: str | None = None
    baseline: Place | None = None
    against: Place | None = None
    limits: Texts = ()
    confidence: Annotated[Level, Field(gt=0.5)] = 0.99
    resamples: Annotated[PositiveInt, Field(ge=1000)] = 10_000
    seq_len: Length = 512
    batch_size: PositiveInt = 4
    max_windows: Count | None = None
    dtype: Dtype = Dtype.AUTO
    drop_unexpected: bool = False

    def domains(self) -> dict[str, DataConfig]:
        """Return the data by name; the first is the main one."""
        return data_configs(self.data, self.part(DataConfig, source=""))

    def evaluate_config(self) -> EvaluateConfig:
        """Return how model and original are evaluated for these limits."""
        shared = ("seq_len", "batch_size", "max_windows", "dtype", "tasks")
        values = {name: getattr(self, name) for name in (*shared, *NeedleConfig.model_fields)}
        values["max_new_tokens"] = self.max_new_tokens
        values["metrics"] = tuple(name for name in WRITTEN if self._limits(name))
        values["needle"] = self._limits(*_NEEDLE)
        for setting, metrics in _ON_DEMAND.items():
            default = EvaluateConfig.model_fields[setting].default
            values[setting] = default if self._limits(*metrics) else 0
        return EvaluateConfig(**values, speed=False)

    def _limits(self, *metrics: str) -> bool:
        named = (re.match(r"\w*", limit.strip()) for limit in self.limits)
        return any(name is not None and name[0] in metrics for name in named)


class ExportDtype(str, Enum):
    """Element type of exported weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"  # of llama.cpp: blocks of 32 numbers of 8 bits, with a scale each


class ExportProofBy(str, Enum):
    """Proof of an exported model."""

    AUTO = "auto"  # the engine where it is installed
    ENGINE = "engine"
    READ_BACK = "read-back"


class ExportConfig(Settings):
    """The format of an export.

    Attributes:
        like: A GGUF file to take the tokenizer from.
        multiple_of: For "padded": the number that the heads divide by.
    """

    to: str
    out_dtype: ExportDtype = ExportDtype.AUTO
    like: Path | None = None
    multiple_of: Annotated[int, Field(ge=2, le=1024)] | None = None
    prove: ExportProofBy = ExportProofBy.AUTO
