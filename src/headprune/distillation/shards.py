"""Healing in shards: what cannot be, and the result, which is written from the best checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from headprune import processes
from headprune.config import HealConfig, HealTrain
from headprune.errors import HeadpruneError
from headprune.io.shards import StoredTensor, tensors_in
from headprune.model.attention import attention_of
from headprune.model.open import Model
from headprune.model.residency import sources
from headprune.model.sharding import refuse_to_shard
from headprune.model.skeleton import Unmapped
from headprune.model.stored import StoredDtypes
from headprune.proof import equivalence
from headprune.surgery.cut import uncut
from headprune.training.checkpoints import STATE


def refuse_sharded(config: HealConfig) -> None:
    """Refuses what cannot be split over processes.

    Raises:
        HeadpruneError: Saying why, and what to do instead.
    """
    refuse_to_shard()
    if config.train is HealTrain.LORA:
        raise HeadpruneError(
            "--shard splits the weights of the model itself, and --train lora adds others. Use "
            "--train attention, or leave out --shard."
        )


def refuse_uneven_ties(net: PreTrainedModel, model: str | Path) -> None:
    """Refuses a tied weight of which the processes would hold parts of unequal size.

    FSDP pads these, once for each place of the weight, and trains one of the copies alone.

    Args:
        net: The model, with or without weights.
        model: Its folder or hub id.

    Raises:
        HeadpruneError: Naming the weight.
    """
    places = Counter(id(weight) for _, weight in net.named_parameters(remove_duplicate=False))
    for name, weight in net.named_parameters():
        if places[id(weight)] > 1 and len(weight) % processes.count():
            raise HeadpruneError(
                f"--shard: '{name}' of '{model}' stands in {places[id(weight)]} places, and its "
                f"{len(weight):,} rows cannot be split evenly over {processes.count()} processes. "
                "Start a number of them that divides the rows, or leave out --shard."
            )


def refuse_unmapped(model: Model) -> None:
    """Refuse a model whose result could not be written from a checkpoint of the training.

    Raises:
        HeadpruneError: Naming what it is made of.
    """
    try:
        if model.skeleton.device.type != "meta":
            raise Unmapped("Some output projections are no tensors of the checkpoint.")
        sources(model.skeleton, model.tensors)
    except Unmapped as why:
        raise HeadpruneError(
            f"--shard: '{model.source}' cannot be written tensor by tensor. {why} Leave out "
            "--shard, if every GPU holds both models."
        ) from None


@dataclass(frozen=True)
class ShardedResult:
    """A model that was healed in shards.

    Attributes:
        healed: The best checkpoint; None where the weights stay.
        expected: Outputs of the model with these weights.
    """

    healed: Path | None
    expected: equivalence.Expectation

    @classmethod
    def of(
        cls, in_shards: PreTrainedModel, healed: Path | None, stored: StoredDtypes
    ) -> ShardedResult:
        """Probe a healed model, in all processes.

        Args:
            in_shards: The model; afterwards it is rounded to the stored element types.
            healed: The checkpoint of its weights; None where they stay.
            stored: The element types to write.

        Raises:
            ProofError: If a proof would show nothing.
        """
        cuts = [uncut(attention) for attention in attention_of(in_shards)]
        expected, _ = equivalence.expect_stored(in_shards, cuts, stored)
        return cls(healed, expected)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the trained weights by name, in the file of the checkpoint."""
        held = {} if self.healed is None else tensors_in(self.healed / STATE)
        start = "trained.model."
        return {n.removeprefix(start): t for n, t in held.items() if n.startswith(start)}
