"""The output of a command: refused before any work if it may not be written, then written whole.

An existing output is replaced only where headprune wrote all of it (``io.ownership``), once the new
one is complete.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
    refuse_link,
    refuse_strange_name,
    reserved,
    write_error,
)
from headprune.io.writing import write_whole as write_whole

F = TypeVar("F", bound=Callable[..., Any])
Input = str | Path | None


@contextmanager
def claimed(path: Path, overwrite: bool, inputs: Sequence[Input] = ()) -> Iterator[None]:
    """Reserve an output folder for a ``with`` block; free within an outer claim.

    Args:
        path: The folder.
        overwrite: Whether to replace an existing one that headprune wrote.
        inputs: Inputs of the command: folders and files; hub ids are skipped.

    Raises:
        CheckpointError: If it is a file, a link, the current folder, or overlaps an input; if it
            exists and must not be replaced; if another process is writing it, or nothing can be
            written there.
    """
    place = real(path)
    refuse_strange_name(path)
    _refuse_unwritable(path, place)
    if place.is_file():
        raise CheckpointError(f"The output '{path}' is a file; give a folder name.")
    if Path.cwd().resolve().is_relative_to(place):
        raise CheckpointError(
            f"The output '{path}' is the folder you are in, or holds it, which cannot be replaced "
            "as a whole. Give another name."
        )
    _refuse_input(path, place, inputs)
    looked_at = is_reserved(place)
    with reserved(place):
        if not looked_at:
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
    path: Path, is_ours: Callable[[Path], bool], overwrite: bool, inputs: Sequence[Input] = ()
) -> Iterator[None]:
    """Reserve an output file, which ``write_whole`` writes, for a ``with`` block.

    Args:
        path: The file.
        is_ours: Returns whether an existing one is of the kind that the command writes.
        overwrite: Whether to replace such a one.
        inputs: As for ``claimed``.

    Raises:
        CheckpointError: If it is no regular file, an input, or part of one; if it exists and must
            not be replaced; if another process is writing it, or nothing can be written there.
    """
    place = real(path)
    _refuse_unwritable(path, place)
    if os.path.lexists(place) and not place.is_file():
        raise CheckpointError(f"The output '{path}' is no file; give the name of one.")
    for name, source in _places(inputs):
        if source == place or part_of(source, place):
            raise CheckpointError(
                f"The output '{path}' is, or belongs to, the input '{name}'. Choose another output."
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


def claims_output(*inputs: str, kind: FileKind | None = None) -> Callable[[F], F]:
    """Make a function claim its ``output``, by its ``overwrite`` or ``writing.overwrite``.

    Args:
        *inputs: Names of parameters that are inputs; "a.b" is the attribute b of a.
        kind: The kind of an output file, which may be None; without it the output is a folder.
    """

    def claiming(function: F) -> F:
        signature = inspect.signature(function)

        @wraps(function)
        def claimer(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            output, overwrite = values["output"], values.get("overwrite", False)
            overwrite |= getattr(values.get("writing"), "overwrite", False)
            places = [place_of(_reached(values, name)) for name in inputs]
            claim: AbstractContextManager[None] = nullcontext()
            if kind is None:
                claim = claimed(output, overwrite, places)
            elif output is not None:
                claim = claimed_file(output, kind, overwrite, places)
            with claim:
                return function(*args, **kwargs)

        return cast(F, claimer)

    return claiming


def _reached(values: Mapping[str, Any], name: str) -> Any:
    parameter, *attributes = name.split(".")
    return reduce(lambda value, name: getattr(value, name, None), attributes, values[parameter])


def place_of(value: Any) -> Input:
    """Return the path of an input, or of the source of a data set; None without one."""
    place = getattr(value, "source", value)
    return place if isinstance(place, (str, Path)) else None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of ``path`` once the block ends well.

    Raises:
        CheckpointError: If writing fails, or ``path`` holds a file that headprune did not write.
    """
    place = real(path)
    try:
        with claimed(path, overwrite=True), reserved(place) as new:
            new.mkdir()
            yield new
            for file in new.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)  # safetensors writes 0600
            refuse_foreign(path)  # it may have changed since
            put(new, place)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error


def refuse_foreign(path: Path) -> None:
    """Refuse a folder that holds a file that headprune did not write.

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


def _refuse_input(path: Path, place: Path, inputs: Sequence[Input]) -> None:
    for name, source in _places(inputs):
        if source == place:
            how = "is the input"
        elif source.is_relative_to(place):
            how = "holds the input"
        elif place.is_relative_to(source) and is_one_piece(source):
            how = "lies in the input"
        else:
            continue
        raise CheckpointError(f"The output '{path}' {how} '{name}'. Choose another output.")


def _places(inputs: Sequence[Input]) -> Iterator[tuple[Input, Path]]:
    """Yield the inputs on this machine, and their paths."""
    for name in inputs:
        if name is not None and is_there(name):
            yield name, real(Path(name), through=True)


def _refuse_unwritable(path: Path, place: Path) -> None:
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            place.lstat()  # fails where the name is too long
        refuse_link(place)
        above = next(parent for parent in place.parents if parent.exists())
        writable = above.is_dir() and os.access(above, os.W_OK)
    except OSError as error:
        raise write_error(path, error) from error
    if not writable:
        raise CheckpointError(
            f"The output '{path}' cannot be made: '{above}' is no folder that can be written to."
        )
