"""The scores folder: ``score`` writes it, ``plan`` and ``prune`` read it.

scores.safetensors   one tensor per criterion, one entry per unit, in scores.json's order
scores.json          model, unit and modules; data and settings of the numbers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from headprune.config import CalibrationConfig, DataConfig
from headprune.errors import CheckpointError, PlanError
from headprune.io.folders import digest_of
from headprune.io.outputs import whole_folder
from headprune.io.parsing import read_as
from headprune.io.tensors import described, read_tensors
from headprune.registry import did_you_mean
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.records import Window
from headprune.schemas.values import Count, Digest, Record
from headprune.tensors.units import Unit, members

TENSORS, METADATA = "scores.safetensors", "scores.json"


class ScoresMetadata(Record):
    """Model, data and settings of scores.

    Attributes:
        created: UTC time.
        versions: Of headprune, torch and transformers.
        model: The scored model.
        unit: Unit of a score.
        modules: The attention modules, in the order of the scores.
        heads: Ids of the query heads of every module.
        group_sizes: Query heads of every KV head of every module.
        criteria: Per criterion, its source.
        data: Source of the examples; None where no criterion needed any.
        data_sha256: Digest of these files; None of data of the hub.
        calibration: Settings of the calibration.
        tokens: Number of tokens used.
        recalls: True if units that carry what only the passage tells were looked for.
        ragged: True if a cut may leave KV heads with unequal numbers of queries; ``prune`` then
            needs ``--layout ragged``.
        refits: True if W_O can be refitted on that text.
        window: The window that heads were scored for; None for scores of removal.
        id: ``Scores.id`` when they were written; None before.
    """

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    model: ModelIdentity
    unit: Unit
    modules: Annotated[tuple[str, ...], Field(min_length=1)]
    heads: tuple[tuple[Count, ...], ...]
    group_sizes: tuple[tuple[Count, ...], ...]
    criteria: Annotated[dict[str, str], Field(min_length=1)]
    data: DataConfig | None
    data_sha256: Digest | None = None
    calibration: CalibrationConfig
    tokens: Count
    recalls: bool = False
    ragged: bool = False
    refits: bool = True
    window: Window | None = None
    id: Digest | None = None

    @property
    def units(self) -> list[int]:
        """Return the number of units of each module."""
        return [len(members(self.unit, sizes)) for sizes in self.group_sizes]


@dataclass(frozen=True)
class Scores:
    """Scores of a model; per criterion a tensor of shape (units,), higher is kept first."""

    metadata: ScoresMetadata
    scores: dict[str, Tensor]

    @cached_property
    def id(self) -> str:
        """SHA-256 of scores, model and settings, without the time and names of model and data."""
        content = self.metadata.model_dump(
            mode="json",
            exclude={"id": True, "created": True, "model": {"name"}, "data": {"source"}},
            exclude_none=True,
        )
        return digest_of({**content, "scores": described(self.scores)})

    def of(self, criterion: str | None) -> tuple[str, Tensor]:
        """Return the name and scores of a criterion; None means the only one.

        Raises:
            PlanError: If there is none of that name, or several and none is named.
        """
        known = list(self.scores)
        if criterion is None and len(known) == 1:
            criterion = known[0]
        if criterion is None:
            raise PlanError(
                f"The scores hold {len(known)} criteria ({', '.join(known)}); say which one with "
                "--criterion."
            )
        if criterion not in self.scores:
            raise PlanError(
                f"The scores have no criterion '{criterion}'.{did_you_mean(criterion, known)} They "
                f"hold {', '.join(known)}."
            )
        return criterion, self.scores[criterion]


def write_scores(folder: Path, scores: Scores) -> None:
    """Write a scores folder, whole or not at all.

    Raises:
        CheckpointError: If it cannot be written.
    """
    with whole_folder(folder) as partial:
        save_file({n: t.contiguous() for n, t in scores.scores.items()}, partial / TENSORS)
        metadata = scores.metadata.model_copy(update={"id": scores.id})
        text = metadata.model_dump_json(indent=2) + "\n"
        (partial / METADATA).write_text(text, encoding="utf-8")


def read_scores(folder: Path, model: ModelIdentity | None = None) -> Scores:
    """Read a scores folder.

    Args:
        folder: The folder.
        model: The model they must belong to; None for any.

    Raises:
        CheckpointError: If the folder holds no scores, or damaged ones.
        PlanError: If they belong to another model.
    """
    files = (folder / METADATA, folder / TENSORS)
    if not files[0].is_file():
        raise CheckpointError(
            f"'{folder}' is no scores folder (it has no {METADATA}); headprune score writes one."
        )
    now = [file.stat() for file in files if file.exists()]
    scores = _read(folder, tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in now))
    if model is not None:
        instead = "Score this model, or give the scored one."
        scores.metadata.model.refuse_other(model, f"The scores in '{folder}'", instead)
    return scores


@lru_cache(maxsize=4)  # a command asks more than once
def _read(folder: Path, state: tuple[tuple[int, ...], ...]) -> Scores:
    """Read the files of a folder in some state."""
    metadata = read_as(ScoresMetadata, folder / METADATA)
    tensors = read_tensors(folder / TENSORS)
    scores = Scores(metadata, tensors)
    if scores.id != metadata.id:
        raise CheckpointError(
            f"The scores in '{folder}' are damaged: they are not as they were written. Score again."
        )
    return replace(scores, scores={name: tensors[name] for name in metadata.criteria})
