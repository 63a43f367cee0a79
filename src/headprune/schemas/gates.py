"""The gates folder: train-gates writes it, prune reads it.

gates.safetensors    log_alpha and kept: one entry per unit, in gates.json's order; and their course
gates.json           model, unit and modules; training and data
weights.safetensors  trained weights, if there are any
history.jsonl        one record per step
config.yaml          the resolved settings
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.io.folders import digest_of
from headprune.io.parsing import read_as
from headprune.io.tensors import described, read_tensors
from headprune.io.writing import write_error, write_whole
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.records import Window
from headprune.schemas.values import Count, Digest, Finite, Record
from headprune.tensors import hard_concrete
from headprune.tensors.units import Unit, members

TENSORS, METADATA, WEIGHTS = "gates.safetensors", "gates.json", "weights.safetensors"


class Judgement(Record):
    """Choices of heads by scores and by gates, and how far they are from the original.

    Attributes:
        taken_after: Step of the written gates; 0 for the choice by scores.
        exchanged: Units that gates keep and scores do not; of the last gates, where scores won.
        choose: Divergence by scores and by these gates, the geometric mean of the rows that decide.
        report: The same on other rows.
    """

    taken_after: Count
    exchanged: Count
    choose: tuple[Finite, Finite]
    report: tuple[Finite, Finite]


class GatesMetadata(Record):
    """Model, training and data of gates.

    Attributes:
        headprune_version: Version that wrote them.
        model: The model they were trained on.
        unit: Unit of a gate.
        window: The window of heads with closed gates; None if these go.
        temperature: beta of the hard-concrete distribution.
        modules: The attention modules, in the order of the gates.
        heads: Ids of the query heads of every module.
        group_sizes: Query heads of every KV head of every module.
        query_heads: Query heads of the model.
        kept_heads: Query heads whose gates stay open.
        steps: Optimiser steps.
        data: Source of the training data.
        final_loss: Loss of the last step.
        judgement: The choice beside that of scores; None without these, or where weights move too.
        refitted: True if W_O is refitted to the heads that stay.
        trained_weights: True if weights.safetensors belongs to them.
        seed: Seed of the training.
        id: ``TrainedGates.id`` when they were written; None before.
    """

    schema_version: Literal[1] = 1
    headprune_version: str
    model: ModelIdentity
    unit: Unit
    window: Window | None = None
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    modules: Annotated[tuple[str, ...], Field(min_length=1)]
    heads: tuple[tuple[Count, ...], ...]
    group_sizes: tuple[tuple[Count, ...], ...]
    query_heads: Count
    kept_heads: Count
    steps: Count
    data: str
    final_loss: Finite
    judgement: Judgement | None = None
    refitted: bool = False
    trained_weights: bool
    seed: Count
    id: Digest | None = None

    def unit_sizes(self) -> list[int]:
        """Return the number of query heads of each gate."""
        return [len(unit) for sizes in self.group_sizes for unit in members(self.unit, sizes)]


class TrainedGates(BaseModel):
    """Gates read from a folder.

    Attributes:
        log_alpha: Shape (units,).
        kept: Units that stay, shape (units,).
        course: Probability of every gate to be open, evenly over the training, shape (places,
            units).
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    metadata: GatesMetadata
    log_alpha: Tensor
    kept: Tensor
    course: Tensor
    weights: dict[str, Tensor] | None

    @cached_property
    def id(self) -> str:
        """SHA-256 of gates, weights and metadata, without names of model and data."""
        content = self.metadata.model_dump(
            mode="json",
            exclude={"id": True, "data": True, "model": {"name"}},
            exclude_none=True,
        )
        gates = {"log_alpha": self.log_alpha, "kept": self.kept, "course": self.course}
        return digest_of(
            {**content, "gates": described(gates), "weights": described(self.weights or {})}
        )

    def open_probability(self) -> Tensor:
        """Return the probability that each gate is open."""
        return hard_concrete.open_probability(self.log_alpha, self.metadata.temperature)


def write_gates(
    folder: Path,
    metadata: GatesMetadata,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor] | None,
) -> GatesMetadata:
    """Write finished gates; gates.json comes last, as the mark of complete ones.

    Returns:
        The metadata with the id.
    """
    gates = TrainedGates(metadata=metadata, weights=weights, **tensors)
    metadata = metadata.model_copy(update={"id": gates.id})
    try:
        if weights is not None:
            _save(weights, folder / WEIGHTS)
        _save(tensors, folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error
    write_whole(folder / METADATA, metadata.model_dump_json(indent=2) + "\n")
    return metadata


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_gates(folder: Path, model: ModelIdentity) -> TrainedGates:
    """Read a gates folder for a model.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If the gates were trained on another model.
    """
    metadata = read_metadata(folder)
    instead = "Give the model they were trained on, or train gates for this one."
    metadata.model.refuse_other(model, f"The gates in '{folder}'", instead)
    weights = read_tensors(folder / WEIGHTS) if metadata.trained_weights else None
    tensors = read_tensors(folder / TENSORS)
    gates = None
    if tensors.keys() == {"log_alpha", "kept", "course"}:
        gates = TrainedGates(metadata=metadata, weights=weights, **tensors)
    if gates is None or gates.id != metadata.id:
        raise CheckpointError(
            f"The gates in '{folder}' are damaged: they are not as they were written. Get the "
            "folder again, or train anew."
        )
    return gates


def read_metadata(folder: Path) -> GatesMetadata:
    """Read gates.json.

    Raises:
        CheckpointError: If it is missing or not valid.
    """
    path = folder / METADATA
    if not path.is_file():
        unfinished = folder.with_name(f"{folder.name}-checkpoints").is_dir()
        raise CheckpointError(
            f"The training in '{folder}' is not finished; resume it with train-gates --resume."
            if unfinished
            else f"'{folder}' is no gates folder (it has no {METADATA}); headprune train-gates "
            "writes one."
        )
    return read_as(GatesMetadata, path)
