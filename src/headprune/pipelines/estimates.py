"""What a step of a recipe takes: time, memory and disk, by a rule of thumb."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headprune.config import DataConfig, Dtype, HealTrain, Train
from headprune.models.attention import attention_of
from headprune.models.cost import attention_parameters
from headprune.models.loading import load_config, native_of, parse_dtype
from headprune.models.sizes import without_weights
from headprune.recipe import (
    CheckStep,
    ConvertStep,
    EvaluateStep,
    HealStep,
    PlanStep,
    PruneStep,
    Recipe,
    ReportStep,
    ScoreStep,
    TrainGatesStep,
)

REACHED = 0.4  # of the FLOP/s of a large matrix product, by training steps of small batches
BYTES_PER_TOKEN = 4  # of English text
OVERHEAD_SECONDS = 10.0  # starting, probing
BYTES_PER_SECOND = 2e8  # of weights that are read, written and hashed
SPEED_SECONDS = 20.0  # timing prefill and decoding of one model


@dataclass(frozen=True)
class Estimate:
    """What a step takes.

    Attributes:
        seconds: Time; None where it depends on data that is not here.
        memory_bytes: Largest memory.
        disk_bytes: What it leaves, and needs meanwhile.
    """

    seconds: float | None
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What estimates are made of.

    Attributes:
        parameters: Parameters of the original.
        attention_parameters: Those of its attention.
        layers: Its layers.
        hidden: Width of its hidden states.
        vocabulary: Tokens that it knows.
        itemsize: Bytes of an element of the checkpoint.
        flops: FLOP/s that a large matrix product reaches here.
    """

    parameters: int
    attention_parameters: int
    layers: int
    hidden: int
    vocabulary: int
    itemsize: int
    flops: float

    def forward(self, tokens: float | int) -> float:
        """Seconds of a forward pass over so many tokens."""
        return 2 * self.parameters * tokens / (REACHED * self.flops)

    def activations(self, tokens: int, itemsize: int, trained: bool) -> int:
        """Bytes that a batch of so many tokens holds: all layers', if gradients are to flow."""
        states = tokens * self.hidden * itemsize * (16 * self.layers if trained else 32)
        return states + 3 * 4 * tokens * self.vocabulary

    def stored(self, dtype: Dtype = Dtype.AUTO) -> int:
        """Bytes of the weights in an element type; "auto" is that of the checkpoint."""
        return self.parameters * self.itemsize_of(dtype)

    def computed(self, dtype: Dtype = Dtype.AUTO) -> int:
        """Bytes of the weights in what is computed in; "auto" is float32 at least."""
        return self.parameters * self.computed_itemsize(dtype)

    def itemsize_of(self, dtype: Dtype) -> int:
        """Bytes of an element."""
        parsed = parse_dtype(dtype.value)
        return self.itemsize if isinstance(parsed, str) else parsed.itemsize

    def computed_itemsize(self, dtype: Dtype) -> int:
        """Bytes of an element of what is computed in."""
        return max(self.itemsize, 4) if dtype is Dtype.AUTO else self.itemsize_of(dtype)


def sizes_of(recipe: Recipe) -> Sizes:
    """Measures the recipe's model without its weights, and how fast this machine is."""
    config = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code)
    net = without_weights(native_of(config), config)
    text = config.get_text_config()
    attentions = attention_of(net)
    return Sizes(
        parameters=net.num_parameters(),
        attention_parameters=sum(map(attention_parameters, attentions)),
        layers=len(attentions),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        itemsize=(getattr(config, "dtype", None) or torch.float32).itemsize,
        flops=_flops(),
    )


def _flops(seconds: float = 0.3) -> float:
    """FLOP/s that matrix products reach on the device that would be used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.ones(width, width, device=device, dtype=dtype)
    float((a @ a)[0, 0])  # the first one is slow
    start, count = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < seconds:
        float((a @ a)[0, 0])
        count += 1
    return 2 * width**3 * count / took


def rule_of_thumb(sizes: Sizes) -> str:
    """What the estimates stand on, in a sentence."""
    return (
        f"A rule of thumb: {sizes.parameters:,} parameters, 2 FLOPs each per token and pass, at "
        f"{REACHED:.0%} of the {sizes.flops / 1e9:,.0f} GFLOP/s that a matrix product just "
        f"reached here; sizes of the uncut model, {BYTES_PER_TOKEN} bytes of text per token."
    )


def _tokens(data: DataConfig) -> float | None:
    """About how many tokens local files hold; None for a data set of the hub."""
    place = Path(data.source)
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
    if not place.exists():
        return None
    packed = {".gz": 3.0}
    return math.fsum(f.stat().st_size * packed.get(f.suffix, 1.0) for f in files) / BYTES_PER_TOKEN


def training_gates(step: TrainGatesStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """train-gates."""
    trained = {
        Train.GATES: 0,
        Train.CHANNELS: 0,  # but for a factor per column of W_O
        Train.ATTENTION: sizes.attention_parameters,
        Train.ALL: sizes.parameters,
    }[step.train]
    batch = step.batch_size * step.seq_len
    all_tokens = _tokens(recipe.data[step.data])
    tokens = None if all_tokens is None else float(step.epochs * all_tokens)
    if step.steps is not None:
        tokens = float(step.steps * batch)
    return _training(step, sizes, tokens, batch, trained, teacher=0)


def healing(step: HealStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """Heal."""
    trained = {
        HealTrain.ATTENTION: sizes.attention_parameters,
        HealTrain.LORA: 0,
        HealTrain.ALL: sizes.parameters,
    }[step.train]
    batch = step.batch_size * step.seq_len
    teacher = sizes.parameters * (2 if step.bf16 else 4)
    needs = _training(step, sizes, float(step.steps * batch), batch, trained, teacher)
    return replace(needs, disk_bytes=needs.disk_bytes + sizes.stored(step.out_dtype))


def _training(
    step: TrainGatesStep | HealStep,
    sizes: Sizes,
    tokens: float | None,
    batch: int,
    trained: int,
    teacher: int,
) -> Estimate:
    """Forward, backward through the activations, and through the weights that move."""
    passes = 2 + trained / sizes.parameters + bool(teacher) + step.gradient_checkpointing
    itemsize = sizes.computed_itemsize(getattr(step, "dtype", Dtype.FLOAT32))
    held = sizes.activations(batch, itemsize, trained=not step.gradient_checkpointing)
    return Estimate(
        None if tokens is None else OVERHEAD_SECONDS + passes * sizes.forward(tokens),
        sizes.parameters * itemsize + teacher + 12 * trained + held,
        2 * 12 * trained,  # two checkpoints: weights and two moments
    )


def cutting(step: PruneStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """prune: loaded, cut and read back."""
    stored, held = sizes.stored(step.out_dtype), sizes.computed(step.dtype)
    return Estimate(OVERHEAD_SECONDS + 4 * stored / BYTES_PER_SECOND, 2 * held, stored)


def converting(step: ConvertStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """convert-gqa."""
    stored, weights = sizes.stored(step.out_dtype), sizes.computed(step.dtype)
    seconds = OVERHEAD_SECONDS + 4 * stored / BYTES_PER_SECOND
    if step.calibrate is not None:
        seconds += 3 * sizes.forward(step.calibration_tokens)
    held = step.calibration_tokens * sizes.hidden * 4 * 8
    return Estimate(seconds, 2 * weights + held, stored)


def scoring(step: ScoreStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """score: forward and backward over the calibration text."""
    batch = step.batch_size * step.seq_len
    held = sizes.activations(batch, sizes.computed_itemsize(step.dtype), trained=True)
    seconds = OVERHEAD_SECONDS + 2 * sizes.forward(step.tokens if step.data else 0)
    return Estimate(seconds, sizes.computed(step.dtype) + held, 100_000)


def planning(step: PlanStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """plan: the model is loaded, and timed where a speed-up is asked for."""
    seconds = step.rounds * OVERHEAD_SECONDS + SPEED_SECONDS * (step.min_speedup is not None)
    return Estimate(seconds, sizes.computed(), 100_000)


def checking(step: CheckStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """check: an evaluation without timing."""
    shared = {n: getattr(step, n) for n in CheckStep.model_fields if n in EvaluateStep.model_fields}
    return evaluating(EvaluateStep(**{**shared, "speed": False}), recipe, sizes)


def reporting(step: ReportStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """report: drawings."""
    return Estimate(2 * OVERHEAD_SECONDS, 2**28, 2_000_000)


def evaluating(step: EvaluateStep, recipe: Recipe, sizes: Sizes) -> Estimate:
    """Evaluate."""
    models = 1 + (step.against is not None)
    tokens = _tokens(recipe.data[step.data])
    if step.max_windows is not None:
        tokens = min(tokens or math.inf, float(step.max_windows * step.seq_len))
    one = None if tokens is None else sizes.forward(tokens) + SPEED_SECONDS * step.speed
    batch = step.batch_size * step.seq_len
    held = sizes.activations(batch, sizes.itemsize_of(step.dtype), trained=False)
    seconds = None if one is None else OVERHEAD_SECONDS + models * one
    return Estimate(seconds, models * sizes.stored(step.dtype) + held, 100_000)
