"""How KV heads are merged, and what a plan may keep."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from headprune.config.heads import OfKinds
from headprune.config.values import (
    COMPUTED,
    NUMBER,
    WRITTEN,
    Amount,
    CommaNames,
    Count,
    Dtype,
    Kept,
    KvHeads,
    Length,
    Place,
    Seed,
    listed,
    one_or_all,
)
from headprune.declaration import Options, Panel, option


class LayoutOption(str, Enum):
    """What a cut may look like."""

    PER_LAYER = "per-layer"  # other counts in every layer; equal groups within a layer
    UNIFORM = "uniform"  # the same counts everywhere, so that a plain config holds the result
    RAGGED = "ragged"  # any head, also where that leaves KV heads with unequal numbers of queries
    PADDED = "padded"  # the same, and zero heads make groups equal and fill layers without heads


class Target(str, Enum):
    """Where a result is to run."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    ONNX = "onnx"
    OPENVINO = "openvino"
    ANYWHERE = "anywhere"  # whatever loads the original


class Targeted(Options):
    """What a result is for."""

    targets: Annotated[tuple[Target, ...], BeforeValidator(listed)] = option(
        "Engine that the result is for (repeatable): what stays is chosen among what it can hold. "
        "anywhere: a plain config, as of the original.",
        (),
        Panel.CUT,
        flags="--for",
    )


class ProofOption(str, Enum):
    """What shows that a result is right."""

    AUTO = "auto"  # outputs where the model fits into memory, else tensors
    OUTPUTS = "outputs"  # the result computes what the gated original computes
    TENSORS = "tensors"  # every tensor of the result holds the slices of the original


class Grouping(str, Enum):
    """Which KV heads share."""

    ADJACENT = "adjacent"  # neighbours
    SIMILAR = "similar"  # those that lose least by it


class ConvertConfig(Targeted, OfKinds):
    """How KV heads are merged. One of ``kv_heads`` and ``kv_budget`` is set."""

    kv_heads: KvHeads | None = option(
        "KV heads per layer: one number, a comma-separated list with one per attention module, or "
        "a JSON file with such a list.",
        None,
        Panel.MAIN,
    )
    kv_budget: Annotated[float, Field(gt=0, le=1), NUMBER] | None = option(
        "Instead: the share of all KV heads to keep; --calibrate measures each layer.",
        None,
        Panel.MAIN,
    )
    merge: str | None = option(
        "How the heads of a group become one: mean, procrustes, lowrank. Default: lowrank with "
        "--calibrate, mean without.",
        None,
        Panel.CUT,
    )
    grouping: Grouping = option(
        "Which heads share: neighbours, or those that lose least by it.",
        Grouping.ADJACENT,
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


class BudgetConfig(Targeted):
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
    min_per_layer: Amount = option("Query heads that every layer keeps at least.", 0, Panel.CUT)
    max_params: Count | None = option("Parameters of the whole model.", None, Panel.MAIN)
    max_kv_bytes: Amount | None = option(
        "KV cache per token in bytes, in the model's dtype.", None, Panel.MAIN
    )
    min_speedup: Annotated[float, Field(ge=1), NUMBER] | None = option(
        "Prefill speed over the whole model's, measured here.", None, Panel.MAIN
    )
    keep_roles: CommaNames = option(
        "Roles whose heads all stay, comma-separated, such as induction,syntactic; needs --roles.",
        (),
        Panel.CUT,
        as_text=True,
    )
    roles: Place | None = option(
        "Folder from roles, or its roles.json: say which roles the plan loses.",
        None,
        Panel.CUT,
    )

    @model_validator(mode="after")
    def _some_goal(self) -> BudgetConfig:
        goals = (self.keep, self.max_params, self.max_kv_bytes, self.min_speedup)
        if all(goal is None for goal in goals):
            raise ValueError(
                "give what may stay: --keep, --max-params, --max-kv-bytes or --min-speedup"
            )
        return self


class PlanConfig(BudgetConfig):
    """What a plan may keep, and how that is chosen."""

    criterion: str | None = option("Which of the scores, if there are several.", None, Panel.CUT)
