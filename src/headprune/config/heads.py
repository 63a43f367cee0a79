"""Which heads a stage is about, and in what pieces."""

from __future__ import annotations

from headprune.config.values import Names
from headprune.declaration import Options, Panel, option
from headprune.tensors.units import Unit


class OfKinds(Options):
    """Of which kinds of attention."""

    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are.",
        (),
        Panel.CUT,
    )


class InUnits(Options):
    """In what pieces."""

    unit: Unit | None = option(
        "What is scored and removed as one piece. Default: head for MHA, kv-group for GQA.",
        None,
        Panel.CUT,
    )
