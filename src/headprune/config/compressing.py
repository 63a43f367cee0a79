"""What a compression is asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headprune.config.cutting import Targeted
from headprune.config.data import CalibrationConfig
from headprune.config.values import NUMBER, WRITTEN, Amount, Count, Dtype, Length, Steps
from headprune.declaration import Panel, option

GOALS = ("keep", "kv_budget", "max_params", "max_kv_bytes", "min_speedup")
Share = Annotated[float, Field(gt=0, le=1), NUMBER]


class CompressConfig(CalibrationConfig, Targeted):
    """What may stay, and how it is chosen. Exactly one of the goals is set."""

    keep: Share | None = option(
        "Share to keep of what is saved: of the KV heads where queries share them, else of the "
        "heads.",
        None,
        Panel.MAIN,
    )
    kv_budget: Share | None = option("Share of the KV heads to keep.", None, Panel.MAIN)
    max_params: Count | None = option("Parameters of the whole model.", None, Panel.MAIN)
    max_kv_bytes: Amount | None = option(
        "KV cache per token in bytes, in the model's dtype.", None, Panel.MAIN
    )
    min_speedup: Annotated[float, Field(ge=1), NUMBER] | None = option(
        "Prefill speed over the whole model's, measured here.", None, Panel.MAIN
    )
    heal_steps: Steps | None = option(
        "Then train the best to match the original, so many steps; kept if that helps.",
        None,
        Panel.MAIN,
        flags="--heal",
    )
    # 512 would do for perplexity; what is far back in a context is lost by it (docs/benchmarks/gqa)
    seq_len: Length = option(
        "Tokens per sequence that is refitted and merged on, at most an eighth of "
        "--calibration-tokens and what the model reads; heads to remove are scored on 512.",
        2_048,
        Panel.CALIBRATION,
    )
    held_out_tokens: Count = option(
        "How much of the held-out text is used: half chooses, half says what the choice is worth.",
        16_384,
        Panel.CALIBRATION,
    )
    out_dtype: Dtype = option(WRITTEN, Dtype.AUTO, Panel.OUTPUT)

    @model_validator(mode="after")
    def _one_goal(self) -> CompressConfig:
        if sum(getattr(self, name) is not None for name in GOALS) != 1:
            raise ValueError(
                "give exactly one of --keep, --kv-budget, --max-params, --max-kv-bytes and "
                "--min-speedup"
            )
        return self
