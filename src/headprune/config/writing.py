"""What becomes of what lies at an output, and how a result is written there."""

from __future__ import annotations

from headprune.config.cutting import ProofOption
from headprune.config.values import WRITTEN, Dtype, ShardSize
from headprune.declaration import Options, Panel, option


class Replacing(Options):
    """Whether an output may take the place of another."""

    overwrite: bool = option("Replace an existing output.", False, Panel.OUTPUT)


class Resuming(Replacing):
    """Whether a training goes on."""

    resume: bool = option("Go on from the last checkpoint.", False, Panel.OUTPUT)


class Writing(Replacing):
    """How weights that need not be in memory are written and proven."""

    out_dtype: Dtype = option(WRITTEN, Dtype.AUTO, Panel.OUTPUT)
    proof: ProofOption = option(
        "outputs: the result, read back, computes what the gated original computes. tensors: every "
        "tensor, read back, holds the slices of the original; in any memory, and nothing is run. "
        "auto: outputs where the model fits into memory.",
        ProofOption.AUTO,
        Panel.OUTPUT,
    )
    max_shard_size: ShardSize = option("Largest size of a file of weights.", "50GB", Panel.OUTPUT)
