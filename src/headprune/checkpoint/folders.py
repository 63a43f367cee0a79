"""Writing folders and files whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from headprune.errors import CheckpointError

# Of a model folder, what a result takes over as it is: what belongs to tokenizers and processors.
# Weights and config are written anew; whatever else lies there is the user's own.
_COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "*.jinja", "*processor*.json", "preprocessor_config.json"),
    *("modules.json", "sentence_*config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors"),  # pooling and dense layers
    *("spm*.json", "source.spm", "target.spm", "normalizer.json", "dict.txt"),
)


def check_output(path: Path, overwrite: bool) -> None:
    """Refuses an output path that exists, before any work is done.

    Raises:
        CheckpointError: If it exists and may not be overwritten, or is no folder.
    """
    if path.is_file():
        raise CheckpointError(f"The output '{path}' is a file; give a folder name.")
    if path.resolve() == Path.cwd():
        raise CheckpointError(
            f"The output '{path}' is the folder you are in, which cannot be replaced as a whole. "
            "Give another name."
        )
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise CheckpointError(
            f"The output '{path}' cannot be made: '{above}' is no folder that can be written to."
        )
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, by way of a temporary sibling.

    Raises:
        CheckpointError: If writing fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # where the parent is a file, there is nothing to remove
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
    """Copies tokenizer and processor files, chat templates, pooling settings."""
    files = {file for pattern in _COMPANIONS for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        inside = file.relative_to(source)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / inside)


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
