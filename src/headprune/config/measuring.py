"""How a model is evaluated, and held to its limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headprune.config.data import FEWER_LONG, DataConfig, Domains, data_configs
from headprune.config.values import (
    COMPUTED,
    MEASURED,
    NUMBER,
    Batches,
    CommaNames,
    Count,
    Dtype,
    Few,
    Length,
    Memory,
    Names,
    Place,
    Seed,
)
from headprune.declaration import Options, Panel, option

TASKS = (
    "Tasks of the package lm-eval, comma-separated: names, YAML files of tasks, or folders of them."
)
MEASURED_ON = (
    "Text that it was not trained on: a file, a folder or a hub id. Repeatable and named, "
    "as in wiki=a.txt: metrics of all but the first carry the name, as in perplexity[NAME]."
)
# measures that take passes of their own, by the setting that says how much is read for them
_ON_DEMAND = {
    "copying": ("copying_nll", "repeated_passage_nll"),
    "last_words": ("last_word_accuracy", "seen_last_word_accuracy"),
}
_NEEDLE = "needle_accuracy"
NEEDLE_LENGTHS = (512, 1024, 2048)  # as far as model and tokenizer go
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class RecallConfig(Options):
    """How much is read to see what a model recalls from far back."""

    copying: Annotated[int, Field(ge=0, le=10**6), NUMBER] = option(
        "Runs of random tokens, and passages of the text, that are read twice to measure copying; "
        "0 for none.",
        16,
    )
    last_words: Annotated[int, Field(ge=0, le=10**6), NUMBER] = option(
        "Passages of the text whose last word is to be predicted; 0 for none.", 200
    )


class NeedleConfig(Options):
    """In which contexts a fact is hidden."""

    needle_lengths: Batches = option(
        "Tokens of the contexts that a needle is hidden in, comma-separated. Default: 512, 1024 "
        "and 2048, as far as model and text go.",
        (),
        as_text=True,
    )
    needle_trials: Few = option("Needles per length and depth.", 4)


class EvaluateConfig(RecallConfig, NeedleConfig):
    """How a model is evaluated."""

    needle: bool = option(
        "Also hide a number in the text, and see whether it is found, at several context lengths "
        "and depths.",
        False,
        Panel.MAIN,
    )
    seq_len: Length = option(
        "Tokens per window (language models) or at most per text (others).", 512
    )
    batch_size: Few = option("Sequences per forward pass.", 4)
    max_windows: Count | None = option(
        "Number of windows or examples to measure, spread evenly over the text.",
        None,
        Panel.MAIN,
    )
    confidence: Annotated[float, Field(gt=0, lt=1), NUMBER] = option(
        "Level of the intervals.", 0.95
    )
    resamples: Few = option("Bootstrap resamples behind them.", 2000)
    tasks: CommaNames = option(TASKS, (), Panel.MAIN, as_text=True)
    speed: bool = option("Time prefill and decoding.", True, Panel.MAIN)
    decode_batches: Batches = option(
        "Batch sizes at which decoding is timed, comma-separated.", (1, 8), as_text=True
    )
    memory: Memory | None = option(
        "Memory such as 24GiB: say how long a context fits beside the weights.", None, as_text=True
    )
    dtype: Dtype = option(MEASURED, Dtype.AUTO)
    seed: Seed = option("Seed of masked positions and of the bootstrap.", 0)


class RolesConfig(Options):
    """How it is measured what heads do."""

    sequences: Annotated[Few, Field(ge=4)] = option(  # two choose an offset, two judge it
        "Sequences of the text, spread evenly, and of random tokens.", 64, Panel.MAIN
    )
    ablation_tokens: Annotated[int, Field(ge=0, le=10**9), NUMBER] = option(
        "Also take out every head for itself, and measure the loss on so many tokens (2048 will "
        "do); 0 for none.",
        0,
        Panel.MAIN,
    )
    trees: Place | None = option(
        "Parsed sentences, for syntactic and rare-token heads: a CoNLL-U file of Universal "
        "Dependencies (also .gz).",
        None,
        Panel.MAIN,
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable).",
        (),
        Panel.MAIN,
    )
    needle_lengths: Batches = option(
        "Also tell retrieval heads: hide a number in contexts of so many tokens, comma-separated "
        "(1024 will do); as many contexts as --sequences.",
        (),
        Panel.MAIN,
        as_text=True,
    )
    seq_len: Length = option("Tokens per sequence of the text.", 512)
    batch_size: Few = option(f"Sequences per forward pass{FEWER_LONG}; no result depends on it.", 4)
    confidence: Annotated[float, Field(gt=0, lt=1), NUMBER] = option(
        "Level of the intervals.", 0.95
    )
    resamples: Few = option("Bootstrap resamples behind them.", 1000)
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    seed: Seed = option("Seed of random tokens and of the bootstrap.", 0)


class RanksConfig(Options):
    """How much is read to see how wide heads are."""

    calibration_tokens: Annotated[Count, Field(ge=2)] = option(
        "With --ranks: how much of the text is read, spread evenly.", 16_384, Panel.CALIBRATION
    )
    seq_len: Length = option("With --ranks: tokens per sequence.", 512, Panel.CALIBRATION)
    batch_size: Few = option(
        f"With --ranks: sequences per pass{FEWER_LONG}; no result depends on it.",
        4,
        Panel.CALIBRATION,
    )
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)


class CheckConfig(NeedleConfig):
    """How a model is held to its limits."""

    model: Place = option(
        "A model folder or a hub id.", panel=Panel.INPUT, positional=True, metavar="MODEL"
    )
    data: Domains = option(MEASURED_ON, panel=Panel.MAIN)
    tasks: CommaNames = option(TASKS, (), Panel.MAIN, as_text=True)
    split: str = option("Split of a hub data set.", "test", Panel.INPUT)
    text_column: str | None = option(
        "Column with the text; two, comma-separated, for pairs.",
        None,
        Panel.INPUT,
    )
    label_column: str | None = option(
        "Column with the label or the similarity score.", None, Panel.INPUT
    )
    baseline: Place | None = option(
        "Record of an earlier run, for limits such as '<= +2 %'.", None, Panel.MAIN
    )
    against: Place | None = option(
        "The original model, for limits such as '>= 98 %'.", None, Panel.MAIN
    )
    limits: Names = option(
        "What must hold (repeatable): 'perplexity <= 25', 'perplexity <= +2 %' (since the "
        "baseline), 'perplexity[wiki] <= 105 %' (of the original, on that data), "
        "'perplexity recovery >= 98 %' (likewise), 'query_heads == 201', "
        "'kv_cache_bytes_per_token <= 50 %', 'decode_tokens_per_s >= 120 %', "
        "'load_route == native', 'roles_lost == 0', 'copying_nll <= 110 %'.",
        (),
        Panel.MAIN,
        flags="--limit",
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1), NUMBER] = option(
        "Level of the intervals that decide.", 0.99
    )
    resamples: Annotated[Few, Field(ge=1000)] = option("Bootstrap resamples behind them.", 10_000)
    seq_len: Length = option(
        "Tokens per window (language models) or at most per text (others).", 512
    )
    batch_size: Few = option("Sequences per forward pass.", 4)
    max_windows: Count | None = option(
        "Number of windows or examples to measure, spread evenly over the text.", None
    )
    dtype: Dtype = option(MEASURED, Dtype.AUTO)
    role_sequences: Annotated[Few, Field(ge=10)] = option(  # fewer decide nothing
        "Sequences that roles are measured on, for 'roles_lost'; at least 10.", 16
    )
    seed: Seed = option("Seed of masked positions and of the bootstrap.", 0)
    drop_unexpected: bool = option(
        "Go on where the checkpoint has tensors that the model's class does not take.",
        False,
    )

    def domains(self) -> dict[str, DataConfig]:
        """Where the examples come from; the first are the main ones."""
        return data_configs(self.data, self.part(DataConfig, source=""))

    def evaluate_config(self) -> EvaluateConfig:
        """How model and original are evaluated."""
        shared = ("seq_len", "batch_size", "max_windows", "dtype", "seed", "tasks")
        given = {name: getattr(self, name) for name in (*shared, *NeedleConfig.model_fields)}
        given["needle"] = any(limit.strip().startswith(_NEEDLE) for limit in self.limits)
        for setting, metrics in _ON_DEMAND.items():
            asked = any(limit.strip().startswith(metrics) for limit in self.limits)
            given[setting] = EvaluateConfig.model_fields[setting].default if asked else 0
        return EvaluateConfig(**given, speed=False)
