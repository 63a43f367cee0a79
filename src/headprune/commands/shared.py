"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headprune.config import (
    DataConfig,
    Domain,
    Place,
    data_configs,
)
from headprune.declaration import Options, Panel, option
from headprune.devices import AUTO
from headprune.errors import HeadpruneError
from headprune.placements import Placement

DATA = (
    "A text, JSONL, CSV, TSV or parquet file (also .gz), a folder of them, or a hub id such as "
    "wikitext:wikitext-2-raw-v1."
)

NAMED = (
    "Repeatable and named, as in wiki=a.txt: metrics of all but the first carry the name, as in "
    "perplexity[NAME]."
)


def model(default: Any = ..., metavar: str = "MODEL") -> Any:
    """The option of the model that a command works on."""
    return option(
        "A model folder or a hub id.",
        default,
        Panel.INPUT,
        positional=True,
        metavar=metavar,
    )


def split(default: str) -> Any:
    """The option of the split."""
    return option("Split of a hub data set.", default, Panel.INPUT)


def output(description: str, default: Any = ...) -> Any:
    """The option of what is written."""
    return option(description, default, Panel.MAIN)


def of_text(condition: str) -> dict[str, str]:
    """The ``needs`` of options that say what of a text is read."""
    return dict.fromkeys(("split", "text_column", "label_column"), condition)


class OneModel(Options):
    """What a command works on."""

    model: Place = model()


class OnDevice(Options):
    """Where models run."""

    device: str = option(
        "Where models run: auto (the accelerator, or else the CPU), cpu, cuda, cuda:N or mps.",
        AUTO,
    )


class Placed(OnDevice):
    """Where models run, and how much of one is there at once."""

    placement: Placement = option(
        "How much of a model is in memory at once. whole: all of it. layers: one layer, read from "
        "the checkpoint as it runs, in any memory. auto: whole where it fits.",
        Placement.AUTO,
    )


def refuse_healing_by_layers(options: Placed) -> None:
    """Refuses to heal what a command makes layer by layer.

    Raises:
        HeadpruneError: If that was asked for.
    """
    if options.placement is Placement.LAYERS:
        raise HeadpruneError(
            "--heal trains the whole model, which --placement layers has not in memory: leave out "
            "one of the two."
        )


class Trust(Options):
    """What a model may bring."""

    trust_remote_code: bool = option("Allow code that comes with the model.", False)


class Loading(Trust):
    """What a model may bring."""

    drop_unexpected: bool = option(
        "Go on where the checkpoint has tensors that the model's class does not take; they will be "
        "missing from a result.",
        False,
    )


class Columns(Options):
    """Which part of the data is meant."""

    split: str = split("train")
    text_column: str | None = option(
        "Column with the text; two, comma-separated, for pairs.",
        None,
        Panel.INPUT,
    )
    label_column: str | None = option(
        "Column with the label or the similarity score.", None, Panel.INPUT
    )

    def source(self, place: str | None) -> DataConfig | None:
        """Where the examples of a place come from; None for none."""
        return None if place is None else self.part(DataConfig, source=place)

    def examples(self, place: str) -> DataConfig:
        """Where the examples of a place come from."""
        return self.part(DataConfig, source=place)

    def domains(self, data: Sequence[Domain]) -> dict[str, DataConfig]:
        """Where the examples of domains come from."""
        return data_configs(data, self.examples(""))
