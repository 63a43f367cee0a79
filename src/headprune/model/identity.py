"""The id of a model, by which what was measured of it is found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headprune.io.folders import digest_of, hashing
from headprune.model.reading import read_record
from headprune.model.stored import model_files


def id_of_model(model: str | Path) -> str | None:
    """The id of a model, wherever it lies and whatever it is called.

    That of a result is the id in its manifest, as long as config and weights are those that were
    written; that of any other model is the digest of its config and weights.

    Args:
        model: Folder or hub id.

    Returns:
        The id; None for a hub model whose files are not in the cache.

    Raises:
        CheckpointError: If the manifest is damaged.
    """
    with identifying(model) as known:
        return known()


@contextmanager
def identifying(model: str | Path) -> Iterator[Callable[[], str | None]]:
    """Reads a model's files beside what the block does, for its id.

    Args:
        model: Folder or hub id.

    Yields:
        Waits for what ``id_of_model`` returns.
    """
    found = model_files(model)
    if not found:
        yield lambda: None
        return
    folder = found[0].parent
    with hashing(folder, (file.name for file in found)) as hashes:
        yield lambda: _id_of(folder, hashes())


def _id_of(folder: Path, files: dict[str, str]) -> str:
    record = read_record(folder)
    if record is not None and files.items() <= record.files.items():
        return record.id
    return digest_of(files)
