"""Measured candidates, kept on disk until the compression is done."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.io.shards import rows_of
from headprune.io.writing import write_whole
from headprune.result.write import Changes, Proposal
from headprune.resuming import PROPOSAL, unwritable
from headprune.schemas.plan import Plan
from headprune.schemas.records import Contender, Done, Refit
from headprune.surgery.edit import Edit

_TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class Tried:
    """A candidate and its measurement."""

    proposal: Proposal
    contender: Contender


class _CandidateRecord(BaseModel):
    """A candidate, but for its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Plan
    done: Done
    refit: Refit | None
    warnings: tuple[str, ...]
    contender: Contender


def keep(folder: Path, tried: Tried) -> None:
    """Write a candidate to a folder; its record comes last.

    Raises:
        CheckpointError: If it cannot be written.
    """
    proposal = tried.proposal
    tensors = {
        name: (value if isinstance(value, Tensor) else rows_of(value)).detach().cpu().contiguous()
        for name, value in proposal.edit.tensors.items()
    }
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file(tensors, folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from None
    record = _CandidateRecord(
        plan=proposal.edit.plan,
        done=proposal.changes.done,
        refit=proposal.changes.refit,
        warnings=proposal.warnings,
        contender=tried.contender,
    )
    write_whole(folder / PROPOSAL, record.model_dump_json())


def kept(folder: Path) -> Tried | None:
    """Return the candidate in a folder; None where there is none.

    Raises:
        CheckpointError: If it is damaged.
    """
    if not (folder / PROPOSAL).is_file():
        return None
    try:
        record = _CandidateRecord.model_validate_json((folder / PROPOSAL).read_bytes())
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValidationError, SafetensorError) as error:
        raise CheckpointError(
            f"The candidate in '{folder}' is damaged: {str(error).splitlines()[0]}. Remove it, or "
            "start anew with --overwrite."
        ) from None
    changes = Changes(record.done, record.refit)
    return Tried(Proposal(Edit(record.plan, tensors), changes, record.warnings), record.contender)
