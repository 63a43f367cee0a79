"""Ask the hub once whether it can be reached, where libraries ask many times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not among the names that it says it exports

from headprune.errors import CheckpointError
from headprune.io.writing import is_there

PATIENCE_S = 5.0
REMEMBERED_S = 60.0  # networks come back


def why_not() -> str | None:
    """Return why the hub cannot be asked; None where it can."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _why_not(constants.ENDPOINT, int(time.monotonic() / REMEMBERED_S))


@cache
def _why_not(endpoint: str, _when: int) -> str | None:
    try:
        get_session().head(endpoint, timeout=PATIENCE_S)
    except Exception as error:  # each version of huggingface_hub has its own kinds
        return f"{endpoint} cannot be reached: {error}"
    return None


def may_be_id(name: str | Path) -> bool:
    """Return whether a name could be a repository of the hub, and is no file or folder."""
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return False
    return not is_there(name)


def fetched(name: str | Path, file: str, **where: Any) -> Path | None:
    """Return the cached path of a file of a hub model; None where it has none or the hub refuses.

    ``where`` holds ``revision`` and ``cache_dir``.
    """
    if not may_be_id(name) or why_not() is not None:
        return None
    with suppress(EntryNotFoundError, HfHubHTTPError, OSError):
        return Path(hf_hub_download(str(name), file, **where))
    return None


def refuse_no_id(model: str | Path) -> None:
    """Refuse a name that is neither a folder nor a hub id.

    Raises:
        CheckpointError: Naming it.
    """
    if not Path(model).is_dir() and not may_be_id(model):
        raise CheckpointError(
            f"'{model}' is neither a folder nor a hub id. Give a model folder, or a hub id."
        )


def refuse_absent(model: str | Path) -> None:
    """Refuse the name of no model, before any work.

    Raises:
        CheckpointError: Naming it.
    """
    if is_there(model):
        return
    refuse_no_id(model)
    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=str(model), repo_type="model")
    if not kept.is_dir() and (why := why_not()):
        raise CheckpointError(f"'{model}': {uncached(why)}")


def uncached(why: str) -> str:
    """Return the finding on a name that only the hub could know."""
    return (
        "there is no such folder, and none of that name in the cache of the hub, which cannot "
        f"be asked ({why}). Check the name and the network."
    )


@contextmanager
def asked_once(name: str | Path) -> Iterator[None]:
    """Let libraries load ``name`` from the hub's cache alone, where the hub cannot be reached."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or (may_be_id(name) and why_not() is not None)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
