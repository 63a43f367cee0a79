"""How a model is evaluated, and held to its limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headprune.config.data import DataConfig
from headprune.config.values import (
    MEASURED,
    Batches,
    Count,
    Dtype,
    Few,
    Length,
    Memory,
    Names,
    Place,
    Seed,
)
from headprune.declaration import Options, Panel, Slot, option


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
    copying: Annotated[int, Field(ge=0, le=10**6)] = option(
        "Sequences of random tokens, each twice, on which copying is measured; 0 for none.", 16
    )
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
        asked = any(limit.strip().startswith("copying_nll") for limit in self.limits)
        copying = EvaluateConfig.model_fields["copying"].default if asked else 0
        given = {name: getattr(self, name) for name in shared}
        return EvaluateConfig(**given, copying=copying, speed=False)
