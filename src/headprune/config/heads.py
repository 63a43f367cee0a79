"""Options of stages that are about some heads of a model, or about heads in groups."""

from __future__ import annotations

from headprune.config.values import Names
from headprune.declaration import Options, Panel, option
from headprune.tensors.units import Unit


class OfKinds(Options):
    """A stage that looks at some kinds of attention only."""

    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable). The others stay as they are.",
        (),
        Panel.CUT,
    )


class InUnits(Options):
    """A stage that takes heads one by one, or several as one."""

    unit: Unit | None = option(
        "What is scored and removed as one piece. Default: head for MHA, kv-group for GQA.",
        None,
        Panel.CUT,
    )
