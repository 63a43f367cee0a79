"""How heads are scored."""

from __future__ import annotations

from headprune.config.data import CalibrationConfig
from headprune.config.heads import InUnits, OfKinds
from headprune.config.values import Names
from headprune.declaration import Panel, option


class ScoreConfig(CalibrationConfig, OfKinds, InUnits):
    """By what heads are scored, and which."""

    criterion: Names = option(
        "compensated, gradient, fisher, fluctuation, wanda, reconstruction, leave-one-out, "
        "confidence, magnitude, random or gates (repeatable: what needs the same pass shares it).",
        ("compensated",),
        Panel.MAIN,
    )
