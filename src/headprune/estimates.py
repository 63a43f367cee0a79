"""What a step of a recipe takes: time, memory and disk, by a rule of thumb."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

REACHED = 0.4  # of the FLOP/s of a large matrix product, by training steps of small batches
BYTES_PER_TOKEN = 4  # of English text
OVERHEAD_SECONDS = 10.0  # starting, probing
BYTES_PER_SECOND = 2e8  # of weights that are read, written and hashed
PASSAGE_TOKENS = 80  # of a passage that ends with the first sentence after 50 words
SPEED_SECONDS = 20.0  # timing prefill and decoding of one model
RECORD_BYTES = 100_000  # a plan, scores, a report
_AUTO = "auto"
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Estimate:
    """What a step takes.

    Attributes:
        seconds: Time; None where it depends on data that is not here.
        memory_bytes: Largest memory, where it computes.
        disk_bytes: What it leaves, and needs meanwhile.
        weights_bytes: Of this, weights, which are read into the memory of the host first.
        layers_bytes: Largest memory layer by layer; None where it does not run so.
    """

    seconds: float | None
    memory_bytes: int
    disk_bytes: int
    weights_bytes: int = 0
    layers_bytes: int | None = None


@dataclass(frozen=True)
class Sizes:
    """What estimates are made of.

    Attributes:
        parameters: Parameters of the original.
        attention_parameters: Those of its attention.
        layers: Its layers.
        hidden: Width of its hidden states.
        vocabulary: Tokens that it knows.
        causal: Whether it is a causal language model, of which evaluations read more.
        itemsize: Bytes of an element of the checkpoint.
        flops: FLOP/s that a large matrix product reaches here.
    """

    parameters: int
    attention_parameters: int
    layers: int
    hidden: int
    vocabulary: int
    causal: bool
    itemsize: int
    flops: float

    def forward(self, tokens: float | int) -> float:
        """Seconds of a forward pass over so many tokens."""
        return 2 * self.parameters * tokens / (REACHED * self.flops)

    def activations(self, tokens: int, itemsize: int, trained: bool) -> int:
        """Bytes that a batch of so many tokens holds: all layers', if gradients are to flow."""
        states = tokens * self.hidden * itemsize * (16 * self.layers if trained else 32)
        return states + 3 * 4 * tokens * self.vocabulary

    def calibration(self, tokens: int, dtype: str = _AUTO, streams: int = 1) -> int:
        """Bytes that a pass over so many tokens holds, of which every layer sees all at once.

        Where attention has to run on all sequences together, scores take 8.5 states of the width of
        the model per token, and a refit, which has the original's stream beside that of the cut
        model, 20; 6 and 13 where it need not, as in a Llama.

        Args:
            tokens: How many.
            dtype: What is computed in.
            streams: How many models see each of them.
        """
        return 11 * streams * tokens * self.hidden * self.computed_itemsize(dtype)

    def stored(self, dtype: str = _AUTO) -> int:
        """Bytes of the weights in an element type; "auto" is that of the checkpoint."""
        return self.parameters * self.itemsize_of(dtype)

    def computed(self, dtype: str = _AUTO) -> int:
        """Bytes of the weights in what is computed in; "auto" is float32 at least."""
        return self.parameters * self.computed_itemsize(dtype)

    def by_layers(self, weights: int) -> int:
        """Of so many bytes of weights, those that are there at once layer by layer.

        These are embeddings and head, and three layers: one that runs, one that is read, one that
        was let go.
        """
        outside = min(self.parameters, 2 * self.hidden * self.vocabulary)
        layers = 3 * (self.parameters - outside) / max(self.layers, 1)
        return int(weights * min(1.0, (outside + layers) / self.parameters))

    def itemsize_of(self, dtype: str) -> int:
        """Bytes of an element."""
        return _ITEMSIZE.get(dtype, self.itemsize)

    def computed_itemsize(self, dtype: str = _AUTO) -> int:
        """Bytes of an element of what is computed in."""
        return max(self.itemsize, 4) if dtype == _AUTO else self.itemsize_of(dtype)

    def writing(self, out_dtype: str) -> float:
        """Seconds of loading a model, cutting it, writing it and reading it back."""
        return OVERHEAD_SECONDS + 4 * self.stored(out_dtype) / BYTES_PER_SECOND

    def training(
        self,
        tokens: float | None,
        batch: int,
        trained: int,
        itemsize: int,
        checkpointing: bool,
        teacher: int = 0,
    ) -> Estimate:
        """A training: forward, backward through activations, and through weights that move.

        Args:
            tokens: How many are seen; None where that is not known.
            batch: Tokens per step.
            trained: Parameters that move.
            itemsize: Bytes of an element of what is computed in.
            checkpointing: Whether activations are computed again in the backward pass.
            teacher: Bytes of a second model that runs beside it.
        """
        passes = 2 + trained / self.parameters + bool(teacher) + checkpointing
        held = self.activations(batch, itemsize, trained=not checkpointing)
        weights = self.parameters * itemsize + teacher
        return Estimate(
            None if tokens is None else OVERHEAD_SECONDS + passes * self.forward(tokens),
            weights + 12 * trained + held,
            2 * 12 * trained,  # two checkpoints: weights and two moments
            weights,
        )

    def rule(self) -> str:
        """What the estimates stand on, in a sentence."""
        return (
            f"A rule of thumb: {self.parameters:,} parameters, 2 FLOPs each per token and pass, at "
            f"{REACHED:.0%} of the {self.flops / 1e9:,.0f} GFLOP/s that a matrix product just "
            f"reached here; sizes of the uncut model, {BYTES_PER_TOKEN} bytes of text per token."
        )


def tokens_in(source: str) -> float | None:
    """About how many tokens local files hold; None for a data set of the hub."""
    place = Path(source)
    if not place.exists():
        return None
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
    packed = {".gz": 3.0}
    return math.fsum(f.stat().st_size * packed.get(f.suffix, 1.0) for f in files) / BYTES_PER_TOKEN


def duration(seconds: float) -> str:
    """A time to be read: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
