"""Checkpoints of a training: what moves, as tensors and numbers; nothing in them can run.

checkpoint-40/state.safetensors   trained tensors, moments of the optimiser, random numbers
checkpoint-40/progress.json       the step, its loss, and the rest of where random numbers stand

A checkpoint appears whole or not at all, and is read whole or not at all. The two newest are kept,
so that there is one to fall back on, and the best, where a training is judged while it goes on.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from headprune import processes
from headprune.errors import CheckpointError
from headprune.io.parsing import read_as
from headprune.io.streaming import bytes_of, header
from headprune.tensors.dtypes import SAFETENSORS, dtype_name
from headprune.tensors.shards import whole

STATE, PROGRESS, PARTIAL = "state.safetensors", "progress.json", ".partial"
FOR_TRAINER = "trainer_state.json"  # made anew for every run that goes on from here
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{1,10})")

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and element type of a tensor."""
Words = tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]


class Draws(BaseModel):
    """Where the random numbers of Python and NumPy stand, in their own words."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    python: tuple[Literal[3], Annotated[Words, Field(min_length=625, max_length=625)], float | None]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[Words, Field(min_length=624, max_length=624)],
        Annotated[int, Field(ge=0, le=624)],  # NumPy does not look where this leads
        Literal[0, 1],
        float,
    ]

    def for_numpy(self) -> Any:
        """As NumPy takes it."""
        name, keys, *others = self.numpy
        return (name, np.array(keys, dtype=np.uint32), *others)


class Progress(BaseModel):
    """How far a training is.

    Attributes:
        step: Optimiser steps done.
        loss: Of the last of them.
        draws: Of every process that trains.
        held_out: Loss on rows that are not trained on; None where it is not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    step: int = Field(ge=1)
    loss: float
    draws: tuple[Draws, ...]
    held_out: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One that was read whole, and fits the training.

    Attributes:
        path: Its folder.
        progress: How far it is.
        tensors: By part ("trained", "moments", "draws") and name.
    """

    path: Path
    progress: Progress
    tensors: dict[str, Tensor]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, by their names in it."""
        start = f"{name}."
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


@dataclass(frozen=True)
class Expected:
    """What a checkpoint of a training holds.

    Attributes:
        trained: The tensors that move.
        moments: Of every parameter, in the optimiser's order; a checkpoint has all of a parameter
            or, where it has had no gradient yet, none.
        steps: Steps of the whole training.
        processes: How many train.
        unsound: Says what the trained tensors cannot be; empty if they may be what they are.
    """

    trained: Mapping[str, Kind]
    moments: Sequence[Mapping[str, Kind]]
    steps: int
    processes: int
    unsound: Callable[[Mapping[str, Tensor]], str]


def draws_here(device: torch.device) -> tuple[Draws, dict[str, Tensor]]:
    """Where the random numbers of this process stand: those of the libraries, and of torch."""
    name, keys, *others = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)  # or it is the state of no Mersenne twister
    numbers = Draws(python=random.getstate(), numpy=(name, keys.tolist(), *others))
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return numbers, states


def draw_on(checkpoint: Checkpoint, rank: int, device: torch.device) -> None:
    """Lets the random numbers of a process go on from where they stood."""
    draws, states = checkpoint.progress.draws[rank], checkpoint.part(f"draws.{rank}")
    random.setstate(draws.python)
    np.random.set_state(draws.for_numpy())
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def write(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint, and removes those that are too old.

    All processes call it; of a tensor that is split over them the main one has all while it writes
    it, and no more than one at once.

    Raises:
        CheckpointError: If it cannot be written; the one before stays.
    """
    text, order = header({name: kind_of(tensor)[::-1] for name, tensor in tensors.items()})
    coming = (whole(tensors[name]).cpu() for name in order)
    failed: list[OSError] = []
    if processes.is_main():
        try:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            (folder / PARTIAL).mkdir(parents=True)
            with (folder / PARTIAL / STATE).open("wb") as file:
                file.write(text)
                for tensor in coming:
                    file.write(bytes_of(tensor).numpy().data)
        except OSError as error:
            failed.append(error)
    for _ in coming:  # in the processes that do not write, or where writing came to an end
        pass
    processes.on_main(lambda: _appear(folder, progress, failed))


def _appear(folder: Path, progress: Progress, failed: Sequence[OSError]) -> None:
    """Has a checkpoint appear, of which the tensors are written unless that failed."""
    partial, place = folder / PARTIAL, folder / f"checkpoint-{progress.step}"
    try:
        for error in failed:
            raise error
        (partial / PROGRESS).write_text(progress.model_dump_json(), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        partial.rename(place)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise unwritable(folder, error) from error
    best = best_of(folder)
    for old in found(folder)[:-KEPT]:
        if best is None or old != best[0]:
            shutil.rmtree(old, ignore_errors=True)


def best_of(folder: Path) -> tuple[Path, float] | None:
    """The checkpoint with the lowest loss on held-out rows, and that; None where none has one."""
    judged: list[tuple[Path, float]] = []
    for path in found(folder):
        with suppress(CheckpointError):  # a damaged one is no candidate
            held_out = read_as(Progress, path / PROGRESS).held_out
            if held_out is not None:
                judged.append((path, held_out))
    return min(judged, key=lambda one: one[1], default=None)


def unwritable(folder: Path, error: Exception) -> CheckpointError:
    """Says that a training could not write, and how it goes on."""
    return CheckpointError(
        f"Could not write to '{folder}' ({str(error).splitlines()[0]}). Free some space, then go "
        "on from the last whole checkpoint with --resume."
    )


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    numbers = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [numbers[step] for step in sorted(numbers)]


def ours(path: Path) -> bool:
    """Whether a checkpoint, whole or not, holds nothing but what is written here."""
    if path.is_symlink() or not path.is_dir():
        return False
    known = path.name == PARTIAL or _NAME.fullmatch(path.name) is not None
    return known and {file.name for file in path.iterdir()} <= {STATE, PROGRESS, FOR_TRAINER}


def newest(folder: Path, expected: Expected) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if none was written.

    Raises:
        CheckpointError: If all that there are are damaged, or of another training.
    """
    problems = []
    for path in reversed(found(folder)):
        try:
            return read(path, expected)
        except CheckpointError as problem:
            problems.append(str(problem))
    if problems:
        raise CheckpointError(
            f"{problems[0]} There is no other checkpoint to go on from: bring it back from a copy, "
            "or start anew with --overwrite."
        )
    return None


def read(path: Path, expected: Expected) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        CheckpointError: If it is damaged, or not of such a training.
    """
    progress = read_as(Progress, path / PROGRESS)
    if path.name != f"checkpoint-{progress.step}" or progress.step > expected.steps:
        raise CheckpointError(
            f"'{path}' is damaged: it holds step {progress.step} of {expected.steps}."
        )
    if len(progress.draws) != expected.processes:
        raise CheckpointError(
            f"'{path}' was written by {len(progress.draws)} processes, and {expected.processes} "
            "were started; a training goes on with as many as it began with."
        )
    file = path / STATE
    try:
        problem = _misfit(_kinds(file), expected)
        if problem:
            raise CheckpointError(f"'{file}' does not fit this training: {problem}.")
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{file}' cannot be read: {error}.") from None
    checkpoint = Checkpoint(path, progress, tensors)
    infinite = first_infinite(checkpoint.part("trained"))
    if infinite is not None:
        raise CheckpointError(f"'{file}' is damaged: '{infinite}' is not finite.")
    if problem := expected.unsound(checkpoint.part("trained")):
        raise CheckpointError(f"'{file}' is damaged: {problem}.")
    _try_draws(checkpoint)
    return checkpoint


def first_infinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with a NaN or an infinity, if there is one."""
    floating = ((name, t) for name, t in tensors.items() if t.is_floating_point())
    return next((name for name, tensor in floating if not bool(tensor.isfinite().all())), None)


def _kinds(file: Path) -> dict[str, Kind | None]:
    """What a file says of its tensors; None for an element type that torch has not."""
    with safe_open(file, framework="pt") as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        return {
            name: (tuple(part.get_shape()), SAFETENSORS[part.get_dtype()])
            if part.get_dtype() in SAFETENSORS
            else None
            for name, part in slices.items()
        }


def _misfit(held: Mapping[str, Kind | None], expected: Expected) -> str:
    """What is wrong first with the tensors of a checkpoint; nothing if they fit."""
    wanted: dict[str, Kind] = {f"trained.{name}": kind for name, kind in expected.trained.items()}
    for index, moments in enumerate(expected.moments):
        named = {f"moments.{index}.{name}": kind for name, kind in moments.items()}
        if not held.keys().isdisjoint(named):
            wanted |= named
    for rank in range(expected.processes):
        states = {"cpu": torch.get_rng_state()}
        if f"draws.{rank}.cuda" in held and torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        wanted |= {f"draws.{rank}.{name}": kind_of(state) for name, state in states.items()}
    # a run that began on a GPU may go on without
    foreign = {name for name in held.keys() - wanted.keys() if not _of_cuda(name)}
    if missing := sorted(wanted.keys() - held.keys()):
        return f"it lacks '{missing[0]}'"
    if foreign:
        return f"it holds '{min(foreign)}', which this training has not"
    return next(
        (
            f"'{name}' is {_words(held[name])}, and it takes {_words(kind)}"
            for name, kind in wanted.items()
            if held[name] != kind
        ),
        "",
    )


def _of_cuda(name: str) -> bool:
    return name.startswith("draws.") and name.endswith(".cuda")


def kind_of(tensor: Tensor) -> Kind:
    """Shape and element type."""
    return tuple(tensor.shape), tensor.dtype


def _words(kind: Kind | None) -> str:
    if kind is None:
        return "of an unknown type"
    return f"{dtype_name(kind[1])} of {list(kind[0])}"


def _try_draws(checkpoint: Checkpoint) -> None:
    """Refuses states that no generator of random numbers takes."""
    try:
        for rank, draws in enumerate(checkpoint.progress.draws):
            random.Random().setstate(draws.python)
            np.random.RandomState().set_state(draws.for_numpy())
            torch.Generator().set_state(checkpoint.tensors[f"draws.{rank}.cpu"])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        why: Any = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"'{checkpoint.path}' is damaged: random numbers cannot go on from it ({why})."
        ) from None
