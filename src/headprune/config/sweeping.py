"""To which sizes a model is cut, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headprune.config.data import CalibrationConfig
from headprune.config.heads import InUnits
from headprune.config.measuring import RecallConfig
from headprune.config.values import NUMBER, Count, Names
from headprune.declaration import Panel, option


def _shares(value: object) -> object:
    """Shares between commas."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise ValueError("give shares between 0 and 1, such as 0.9,0.75,0.5") from None


Share = Annotated[float, Field(ge=0, le=1), NUMBER]
Shares = Annotated[tuple[Share, ...], BeforeValidator(_shares), Field(min_length=1)]


class SweepConfig(CalibrationConfig, RecallConfig, InUnits):
    """To which sizes a model is cut, by what, and how the results are measured."""

    keep: Shares = option(
        "Shares of heads to keep, comma-separated.", (0.9, 0.75, 0.5), Panel.MAIN, as_text=True
    )
    criterion: Names = option("What chooses the heads (repeatable).", ("compensated",), Panel.MAIN)
    refit: bool = option(
        "Whether W_O is refitted to make up for the heads that go.", True, Panel.CUT
    )
    max_windows: Count | None = option(
        "Number of windows or examples to measure, spread evenly over the text.",
        None,
        Panel.INPUT,
    )
