"""Healing of models in shards: refusals, and the result, written from the best checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from transformers import PreTrainedModel

from headprune import processes
from headprune.config import HealConfig, HealTrain
from headprune.errors import HeadpruneError
from headprune.io.shards import StoredTensor, tensors_in
from headprune.model.attention import attention_of
from headprune.model.open import Model
from headprune.model.placement import refuse_to_shard
from headprune.model.residency import sources
from headprune.model.skeleton import Unmapped
from headprune.model.stored import StoredDtypes
from headprune.proof import equivalence
from headprune.surgery.cut import uncut
from headprune.training import WEIGHTS


def refuse_sharded(config: HealConfig) -> None:
    """Refuse what cannot be split over processes.

    Raises:
        HeadpruneError: With the reason, and another way.
    """
    refuse_to_shard()
    if config.train is HealTrain.LORA:
        raise HeadpruneError(
            "--shard splits the weights of the model itself, and --train lora adds others. Use "
            "--train attention, or leave out --shard."
        )


def refuse_uneven_ties(net: PreTrainedModel, model: str | Path) -> None:
    """Refuse a tied weight whose rows the processes cannot share evenly.

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
        HeadpruneError: Naming its class.
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


def probed(net: PreTrainedModel, stored: StoredDtypes) -> equivalence.Expectation:
    """Probe a healed model in all processes; its weights are rounded to the stored types.

    Raises:
        ProofError: If a proof would show nothing.
    """
    cuts = [uncut(attention) for attention in attention_of(net)]
    return equivalence.expect_stored(net, cuts, stored)[0]


def stored_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return the trained weights by their names in the model, in the file of a checkpoint."""
    start, tensors = "model.", tensors_in(checkpoint / WEIGHTS)
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
