"""How gates are trained, and how a smaller model is healed."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import Field, model_validator

from headprune.config.heads import InUnits, OfKinds
from headprune.config.values import (
    COMPUTED,
    NUMBER,
    WRITTEN,
    Dtype,
    Few,
    Kept,
    Length,
    Positive,
    Seed,
    Steps,
    one_or_all,
)
from headprune.declaration import Options, Panel, option


class Objective(str, Enum):
    """What the gates are trained on."""

    AUTO = "auto"
    LM = "lm"
    MLM = "mlm"
    DISTILL = "distill"
    LM_DISTILL = "lm+distill"  # half each
    TASK = "task"


class Train(str, Enum):
    """Which weights move beside the gates."""

    GATES = "gates"
    ATTENTION = "attention"
    ALL = "all"


class Method(str, Enum):
    """How training chooses the heads that go."""

    AUTO = "auto"
    REFIT = "refit"  # by scores, before any step; W_O is refitted, and factors are trained
    L0 = "l0"  # hard-concrete gates, sampled, and a Lagrangian


OF_L0 = (
    "l0_penalty",
    "gate_lr",
    "temperature",
    "init_log_alpha",
    "sparsity_warmup",
    "finetune_fraction",
)


class TrainGatesConfig(OfKinds, InUnits):
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
    method: Method = option(
        "How heads are chosen. refit: by compensated scores at the start; W_O is refitted to those "
        "that stay, and one factor per head is trained. l0: hard-concrete gates. auto: refit for a "
        "causal language model and 4,096 tokens of text or more, else l0.",
        Method.AUTO,
        Panel.CUT,
    )
    train: Train = option(
        "What is trained: gates alone, or weights too.", Train.GATES, Panel.TRAINING
    )
    objective: Objective = option(
        "The loss. auto: task for a classifier with labels, lm or mlm for a language model, else "
        "distill, which needs no labels: it matches the ungated model. With --method refit "
        "auto is lm+distill for a language model, half each.",
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
    scale_lr: Positive = option("Learning rate of the factors of heads.", 0.02)
    weight_lr: Positive = option("Learning rate of the weights, if any move.", 5e-5)
    temperature: Positive = option("beta of the hard-concrete gates (l0).", 2 / 3)
    # as far as hard_concrete.BOUND
    init_log_alpha: Annotated[float, Field(ge=-4.6, le=4.6), NUMBER] = option(
        "Where sampled gates start (l0); 3 is open with probability 0.99.", 3.0
    )
    sparsity_warmup: Annotated[float, Field(ge=0, le=1), NUMBER] = option(
        "Share of the choosing in which the target is reached (l0).", 0.75
    )
    finetune_fraction: Annotated[float, Field(ge=0, lt=1), NUMBER] = option(
        "Share of the steps, at the end, with the heads chosen (l0).", 0.6
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
        if self.method is not Method.REFIT:
            return self
        if self.l0_penalty is not None:
            raise ValueError("--l0-penalty goes with --method l0; give --target-heads")
        if self.train is not Train.GATES:
            raise ValueError("--method refit goes with --train gates")
        return self

    @property
    def leaves_method(self) -> bool:
        """Whether all that is set goes with any method, so that the best may be taken."""
        of_l0 = any(
            getattr(self, name) != TrainGatesConfig.model_fields[name].default for name in OF_L0
        )
        return self.method is Method.AUTO and self.train is Train.GATES and not of_l0


class HealTrain(str, Enum):
    """Which weights healing moves."""

    ATTENTION = "attention"
    LORA = "lora"
    ALL = "all"


class HealOptimizer(str, Enum):
    """What moves the weights in healing."""

    AUTO = "auto"
    MUON = "muon"  # matrices of the layers, orthogonalised; the rest with AdamW
    ADAMW = "adamw"


class HealObjective(str, Enum):
    """What healing trains on."""

    AUTO = "auto"
    DISTILL = "distill"
    LM_DISTILL = "lm+distill"


class HealConfig(Options):
    """How a converted or cut model is trained to match the one it came from."""

    steps: Steps = option("Optimiser steps.", panel=Panel.MAIN)
    train: HealTrain = option(
        "What is trained. lora: low-rank additions to the attention projections, merged at the "
        "end.",
        HealTrain.ALL,
        Panel.TRAINING,
    )
    objective: HealObjective = option(
        "The loss. distill: divergence from the teacher. lm+distill: a share of it is the language "
        "model's own, as large as the divergence that it begins with and at most half. auto: "
        "lm+distill for a causal language model, else distill. Checkpoints are judged by the "
        "divergence alone.",
        HealObjective.AUTO,
        Panel.TRAINING,
    )
    lora_rank: Few = option("With --train lora: its rank.", 16, Panel.TRAINING)
    batch_size: Few = option(
        "Sequences of --seq-len tokens per step, of all processes; of shorter texts as many more "
        "as take no more tokens, those much longer than most cut.",
        4,
        Panel.TRAINING,
    )
    seq_len: Length = option("Tokens per sequence.", 256, Panel.TRAINING)
    optimizer: HealOptimizer = option(
        "muon: Muon for the matrices of the layers, AdamW for the rest. auto: muon where the "
        "device has bfloat16 in hardware, else adamw.",
        HealOptimizer.AUTO,
        Panel.TRAINING,
    )
    learning_rate: Positive | None = option(
        "Highest learning rate, reached after a tenth of the steps and then lowered to zero along "
        "a cosine. Default: 2e-4 with muon, 1e-4 with adamw.",
        None,
        Panel.TRAINING,
    )
    bf16: bool = option(
        "Compute in bfloat16 (autocast) where the device has it in hardware; weights and optimiser "
        "stay in float32.",
        True,
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

    @model_validator(mode="after")
    def _fitting_optimizer(self) -> HealConfig:
        if self.optimizer is HealOptimizer.MUON and self.train is HealTrain.LORA:
            raise ValueError("--optimizer muon does not go with --train lora")
        return self
