"""Healing in shards: what cannot be, and the result, which is written from the best checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from headprune import processes
from headprune.config import HealConfig, HealTrain
from headprune.context import Context
from headprune.errors import HeadpruneError
from headprune.exporting.publish import Pruned, WriteOrder
from headprune.exporting.streamed import write_trained
from headprune.io.shards import tensors_in
from headprune.model.attention import attention_of
from headprune.model.residency import sources
from headprune.model.sharding import refuse_to_shard
from headprune.model.skeleton import Unmapped
from headprune.model.stored import StoredDtypes, stored_tensors
from headprune.placements import Placement, placing, sharding
from headprune.proof import equivalence
from headprune.surgery.cut import uncut
from headprune.training import WEIGHTS


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


def refuse_unmapped(net: PreTrainedModel, model: str | Path) -> None:
    """Refuses a model whose result could not be written from a checkpoint of the training.

    Args:
        net: The model without weights, where its tensors allow that.
        model: Its folder or hub id.

    Raises:
        HeadpruneError: Naming what it is made of.
    """
    try:
        if net.device.type != "meta":
            raise Unmapped("Some output projections are no tensors of the checkpoint.")
        sources(net, stored_tensors(model))
    except Unmapped as why:
        raise HeadpruneError(
            f"--shard: '{model}' cannot be written tensor by tensor. {why} Leave out --shard, if "
            "every GPU holds both models."
        ) from None


@dataclass(frozen=True)
class ShardedResult:
    """What is written of a model that was healed in shards.

    Attributes:
        net: The model without weights.
        healed: The best checkpoint; None where the weights stay what they were.
        expected: What the model computes with these weights.
    """

    net: PreTrainedModel
    healed: Path | None
    expected: equivalence.Expectation

    @classmethod
    def of(
        cls,
        in_shards: PreTrainedModel,
        net: PreTrainedModel,
        healed: Path | None,
        stored: StoredDtypes,
    ) -> ShardedResult:
        """Probes a healed model, in all processes.

        Args:
            in_shards: The model; afterwards it is rounded to what is stored of it.
            net: The same without weights.
            healed: The checkpoint that holds its weights, if they are not those it began with.
            stored: The element types that are written.

        Raises:
            ProofError: If a proof would show nothing.
        """
        cuts = [uncut(attention) for attention in attention_of(in_shards)]
        expected, _ = equivalence.expect_stored(in_shards, cuts, stored)
        return cls(net, healed, expected)

    def write(self, order: WriteOrder, context: Context) -> Pruned:
        """Writes and proves it, in one process alone.

        Raises:
            CheckpointError: If a file cannot be read or written.
            ProofError: If the result does not compute what is expected.
        """
        held = {} if self.healed is None else tensors_in(self.healed / WEIGHTS)
        start = "model."
        trained = {n.removeprefix(start): t for n, t in held.items() if n.startswith(start)}
        with sharding(False), placing(Placement.AUTO):
            return write_trained(self.net, trained, order, context, self.expected)
