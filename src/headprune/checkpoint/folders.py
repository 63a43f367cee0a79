"""Writing folders and files whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headprune.errors import CheckpointError

# of a model folder, what a result takes over as it is; weights and config are written anew
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_OWN = {"config.json", "generation_config.json", "plan.json", "headprune.json"}


def check_output(path: Path, overwrite: bool) -> None:
    """Refuses an output path that exists, before any work is done.

    Raises:
        CheckpointError: If it exists and may not be overwritten, or is no folder.
    """
    if path.is_file():
        raise CheckpointError(f"The output '{path}' is a file; give a folder name.")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise CheckpointError(
            f"The output folder '{path}' already exists. Choose another one, or replace it with "
            "--overwrite."
        )


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling that takes the place of ``path`` once the block ends well.

    An existing ``path`` stays until the new one is complete. If the block fails, for want of disk
    space or by Ctrl-C, nothing is left behind.

    Raises:
        CheckpointError: If writing fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)  # safetensors writes 0600
        if path.exists():
            retired = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(retired)
            temporary.rename(path)
            shutil.rmtree(retired)
        else:
            temporary.rename(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file by way of a temporary sibling.

    Raises:
        CheckpointError: If writing fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_error(path: Path, error: Exception) -> CheckpointError:
    """Says in one sentence why writing failed."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
    why = "the disk is full" if full else str(error)
    return CheckpointError(
        f"Could not write '{path}': {why}. Nothing was left there; free some space or choose "
        "another place."
    )


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer files, chat templates, pooling settings: all that is no weight or config."""
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        weights_index = file.name.endswith(".index.json")
        own = len(inside.parts) == 1 and file.name in _OWN
        if hidden or weights_index or own or file.suffix not in _COMPANIONS or not file.is_file():
            continue
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / inside)


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
