"""How heads are scored."""

from __future__ import annotations

from headprune.config.data import CalibrationConfig
from headprune.config.values import Names
from headprune.declaration import Panel, option
from headprune.tensors.units import Unit


class ScoreConfig(CalibrationConfig):
    """By what heads are scored, and which."""

    criterion: Names = option(
        "compensated, gradient, fisher, fluctuation, wanda, reconstruction, leave-one-out, "
        "confidence, magnitude, random or gates (repeatable: what needs the same pass shares it).",
        ("compensated",),
        Panel.MAIN,
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are.",
        (),
        Panel.CUT,
    )
    unit: Unit | None = option(
        "What is removed, and scored, as one piece. Default: head for MHA, kv-group for GQA.",
        None,
        Panel.CUT,
    )
