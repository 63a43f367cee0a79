"""The output of a command: refused before any work if it may not be written, then written whole.

An existing output is replaced only where headprune wrote all of it (``io.ownership``), only
when the new one is complete, and in one step where the system has such a step.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError

from headprune.errors import CheckpointError
from headprune.io.ownership import FileKind, foreign, is_one_piece, part_of
from headprune.io.writing import (
    abandoned,
    is_reserved,
    is_there,
    put,
    real,
    refuse_strange_name,
    reserved,
    work_folder,
    write_error,
)
from headprune.io.writing import write_whole as write_whole

F = TypeVar("F", bound=Callable[..., Any])
Input = str | Path | None


@contextmanager
def claimed(
    path: Path, overwrite: bool, inputs: Sequence[Input] = (), goes_on: bool = False
) -> Iterator[None]:
    """Reserves an output folder for as long as the block lasts, or the process lives.

    Within the block it may be claimed once more; what is there is then not looked at again. A link
    is followed: what it points to is the output.

    Args:
        path: The folder.
        overwrite: Whether an existing one may be replaced, if headprune wrote it.
        inputs: What the command reads: folders, files, or hub ids, which are not looked at.
        goes_on: Whether the command goes on in an existing one, which is then not replaced.

    Raises:
        CheckpointError: If it is a file, or the folder that the user is in; if it is, holds or lies
            in an input; if there is one already and it must not be replaced; if another process is
            writing it, or nothing can be written there.
    """
    place = real(path)
    _refuse_place(path, place)
    refuse_input(path, inputs)
    looked_at = goes_on or is_reserved(place)
    with reserved(place):
        if looked_at:
            yield
            return
        content = place.iterdir() if place.is_dir() else ()
        if not overwrite and not all(abandoned(entry) for entry in content):
            raise CheckpointError(
                f"The output folder '{path}' already exists. Choose another one, or replace it "
                "with --overwrite."
            )
        refuse_foreign(path)
        yield


@contextmanager
def claimed_file(
    path: Path,
    is_ours: Callable[[Path], bool],
    overwrite: bool,
    inputs: Sequence[Input] = (),
) -> Iterator[None]:
    """Reserves an output file for as long as the block lasts, or the process lives.

    Args:
        path: The file; ``write_whole`` writes it.
        is_ours: Tells whether an existing one is what the command writes.
        overwrite: Whether such a one may be replaced.
        inputs: What the command reads, as for ``claimed``.

    Raises:
        CheckpointError: If it is no regular file, an input, or part of one; if there is one already
            and it is not ours or must not be replaced; if another process is writing it, or nothing
            can be written there.
    """
    place = real(path)
    _refuse_unwritable(path, place)
    _refuse_dangling(path, place)
    if os.path.lexists(place) and not place.is_file():
        raise CheckpointError(f"The output '{path}' is no file; give the name of one.")
    for given, source in _places(inputs):
        if source == place or part_of(source, place):
            raise CheckpointError(
                f"The output '{path}' is, or belongs to, the input '{given}'. Choose another "
                "output."
            )
    with reserved(place):
        if place.exists() and not overwrite:
            raise CheckpointError(
                f"The output '{path}' already exists. Choose another one, or replace it with "
                "--overwrite."
            )
        if place.exists() and not is_ours(place):
            raise CheckpointError(
                f"'{path}' exists, and headprune did not write it; move it away, or choose another "
                "output."
            )
        yield


@contextmanager
def claimed_files(
    paths: Iterable[Path],
    is_ours: Callable[[Path], bool],
    overwrite: bool,
    inputs: Sequence[Input] = (),
) -> Iterator[None]:
    """Reserves several output files; arguments and errors as for ``claimed_file``."""
    with ExitStack() as claims:
        for path in paths:
            claims.enter_context(claimed_file(path, is_ours, overwrite, inputs))
        yield


def claims_output(*inputs: str, kind: FileKind | None = None) -> Callable[[F], F]:
    """Has a function claim its ``output`` while it runs, by its ``overwrite`` or ``writing``.

    Args:
        *inputs: The parameters that name what it reads; "a.b" is the attribute b of a.
        kind: What it writes, if that is a file; then it may be None, for none.
    """

    def claiming(function: F) -> F:
        signature = inspect.signature(function)

        @wraps(function)
        def claimer(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            output, overwrite = given["output"], given.get("overwrite", False)
            overwrite |= getattr(given.get("writing"), "overwrite", False)
            places = [place_of(_reached(given, name)) for name in inputs]
            claim: AbstractContextManager[None] = nullcontext()
            if kind is None:
                claim = claimed(output, overwrite, places)
            elif output is not None:
                claim = claimed_file(output, kind, overwrite, places)
            with claim:
                return function(*args, **kwargs)

        return cast(F, claimer)

    return claiming


def _reached(given: Mapping[str, Any], name: str) -> Any:
    parameter, *attributes = name.split(".")
    return reduce(lambda value, one: getattr(value, one, None), attributes, given[parameter])


def place_of(value: Any) -> Input:
    """Where an input, or the source of a data set, lies; None for what lies nowhere."""
    place = getattr(value, "source", value)
    return place if isinstance(place, (str, Path)) else None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that takes the place of ``path`` once the block ends well.

    An existing ``path`` stays until the new one is complete, and the two are exchanged in one step
    (renameat2, renamex_np) where the system has it; elsewhere a process that dies between the two
    steps leaves what the next one that writes there finishes. If the block fails, for want of disk
    space or by Ctrl-C, nothing is left behind.

    Raises:
        CheckpointError: If writing fails, or ``path`` holds what headprune did not write.
    """
    place = real(path)
    try:
        with claimed(path, overwrite=True), reserved(place) as new:
            new.mkdir()
            yield new
            for file in new.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)  # safetensors writes 0600
            refuse_foreign(path)  # as it may have changed since
            put(new, place, work_folder(place) / "old")
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error


def refuse_foreign(path: Path) -> None:
    """Refuses a folder that holds what headprune did not write.

    Raises:
        CheckpointError: Naming the first such file.
    """
    place = real(path)
    stranger = foreign(place) if place.is_dir() else None
    if stranger is not None:
        raise CheckpointError(
            f"'{stranger}' in '{path}' is no part of what headprune wrote there; move it away, or "
            "choose another output."
        )


def refuse_input(path: Path, inputs: Sequence[Input]) -> None:
    """Refuses an output folder that is or holds an input, or lies in a model or the like.

    Raises:
        CheckpointError: Naming the input.
    """
    place = real(path)
    for given, source in _places(inputs):
        if source == place:
            how = "is the input"
        elif source.is_relative_to(place):
            how = "holds the input"
        elif place.is_relative_to(source) and is_one_piece(source):
            how = "lies in the input"
        else:
            continue
        raise CheckpointError(f"The output '{path}' {how} '{given}'. Choose another output.")


def _places(inputs: Sequence[Input]) -> Iterator[tuple[Input, Path]]:
    """The inputs that lie on this machine, and where."""
    for given in inputs:
        if given is not None and is_there(given):
            yield given, real(Path(given))


def _refuse_place(path: Path, place: Path) -> None:
    refuse_strange_name(path)
    _refuse_unwritable(path, place)
    _refuse_dangling(path, place)
    if place.is_file():
        raise CheckpointError(f"The output '{path}' is a file; give a folder name.")
    if Path.cwd().resolve().is_relative_to(place):
        raise CheckpointError(
            f"The output '{path}' is the folder you are in, or holds it, which cannot be replaced "
            "as a whole. Give another name."
        )


def _refuse_dangling(path: Path, place: Path) -> None:
    if path.is_symlink() and not place.exists():  # or it leads in a circle
        raise CheckpointError(
            f"The output '{path}' is a link that leads nowhere ('{place}'). Remove it, or choose "
            "another output."
        )


def _refuse_unwritable(path: Path, place: Path) -> None:
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            place.lstat()  # fails where the name is too long
        above = next(parent for parent in place.parents if parent.exists())
        writable = above.is_dir() and os.access(above, os.W_OK)
    except OSError as error:
        raise write_error(path, error) from error
    if not writable:
        raise CheckpointError(
            f"The output '{path}' cannot be made: '{above}' is no folder that can be written to."
        )
