"""The gates folder: what train-gates writes and prune reads.

gates.safetensors    log_alpha, value and kept, one entry per unit, in the order of gates.json
gates.json           which model, which unit, which modules; where the numbers come from
weights.safetensors  trained weights, if any moved
history.jsonl        one record per step
config.yaml          the resolved settings
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headprune.config import Method
from headprune.errors import CheckpointError, PlanError
from headprune.plan import ModelIdentity
from headprune.tensors import hard_concrete
from headprune.tensors.units import Unit
from headprune.writing import write_error, write_whole

TENSORS, METADATA, WEIGHTS = "gates.safetensors", "gates.json", "weights.safetensors"


class GatesMetadata(BaseModel):
    """What the gates belong to and how they came about.

    Attributes:
        headprune_version: Version that wrote them.
        model: The model they were trained on.
        unit: What one gate opens and closes.
        method: How heads were chosen.
        temperature: beta of the hard-concrete distribution.
        modules: The attention modules, in the order of the gates.
        heads: Ids of the query heads of every module; empty in older files, as is the next.
        group_sizes: Query heads of every KV head of every module.
        query_heads: Query heads of the model.
        kept_heads: Query heads whose gates stay open.
        steps: Optimiser steps.
        objective: What they were trained on.
        data: Source of the training data.
        final_loss: Loss of the last step.
        trained_weights: Whether weights.safetensors belongs to them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    headprune_version: str
    model: ModelIdentity
    unit: Unit
    method: Method = Method.L0
    temperature: float
    modules: tuple[str, ...]
    heads: tuple[tuple[int, ...], ...] = ()
    group_sizes: tuple[tuple[int, ...], ...] = ()
    query_heads: int
    kept_heads: int
    steps: int
    objective: str
    data: str
    final_loss: float
    trained_weights: bool


class TrainedGates(BaseModel):
    """Gates read from a folder; tensors have shape (units,)."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    metadata: GatesMetadata
    log_alpha: Tensor
    value: Tensor
    kept: Tensor
    weights: dict[str, Tensor] | None

    def open_probability(self) -> Tensor:
        """How likely each gate is open; where none is drawn ``log_alpha`` is but an order."""
        if self.metadata.method is Method.CHEAPEST:
            return self.kept.float()
        return hard_concrete.open_probability(self.log_alpha, self.metadata.temperature)


def write_gates(
    folder: Path,
    metadata: GatesMetadata,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor] | None,
) -> None:
    """Writes finished gates; gates.json comes last, so that its presence says they are complete."""
    try:
        if weights is not None:
            _save(weights, folder / WEIGHTS)
        _save(tensors, folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error
    write_whole(folder / METADATA, metadata.model_dump_json(indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_gates(folder: Path, model: ModelIdentity) -> TrainedGates:
    """Reads a gates folder for a model.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If the gates were trained on another model.
    """
    metadata = read_metadata(folder)
    if metadata.model.fingerprint != model.fingerprint:
        raise PlanError(
            f"The gates in '{folder}' were trained on '{metadata.model.name}' "
            f"({metadata.model.architecture}, fingerprint {metadata.model.fingerprint}), not on "
            f"'{model.name}' ({model.architecture}, fingerprint {model.fingerprint}). Give the "
            "model they were trained on, or train gates for this one."
        )
    try:
        tensors = load_file(folder / TENSORS)
        weights = load_file(folder / WEIGHTS) if metadata.trained_weights else None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The gates in '{folder}' cannot be read: {error}.") from None
    return TrainedGates(metadata=metadata, weights=weights, **tensors)


def read_metadata(folder: Path) -> GatesMetadata:
    """Reads gates.json.

    Raises:
        CheckpointError: If it is missing or not valid.
    """
    path = folder / METADATA
    if not path.is_file():
        unfinished = folder.with_name(f"{folder.name}-checkpoints").is_dir()
        raise CheckpointError(
            f"The training in '{folder}' is not finished; go on with train-gates --resume."
            if unfinished
            else f"'{folder}' is no gates folder (it has no {METADATA}); headprune train-gates "
            "writes one."
        )
    try:
        return GatesMetadata.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or METADATA
        raise CheckpointError(f"'{path}' is not valid: {where}: {first['msg']}.") from None
