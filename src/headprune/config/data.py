"""Where examples come from, and how much of them shows what heads do."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headprune.config.values import COMPUTED, Count, Dtype, Few, Length, Place, Seed
from headprune.declaration import Options, Panel, option


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
