"""The JSON files of a model folder, looked at before transformers reads them.

transformers takes what they hold for granted, so that damage shows as any error from any depth.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from headprune import devices
from headprune.errors import CheckpointError, HeadpruneError
from headprune.io.parsing import read_as, read_json, validated
from headprune.runtime import MANIFEST
from headprune.schemas.records import Recorded

_WEIGHTS = (".safetensors", ".safetensors.index.json")


class ConfigFile(BaseModel):
    """What transformers looks at in config.json before it knows the class of the config."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    transformers_weights: str | None = None

    @field_validator("transformers_weights")
    @classmethod
    def _inside(cls, name: str | None) -> str | None:
        if name is not None and (Path(name).name != name or not name.endswith(_WEIGHTS)):
            raise ValueError(f"'{name}' is no safetensors file of the folder")
        return name


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads config.json.

    Raises:
        CheckpointError: If it is no JSON, or what every config has is damaged.
    """
    content: dict[str, Any] = read_json(path)
    validated(ConfigFile, content, path)
    return content


def refuse_damaged_json(folder: Path, *names: str) -> None:
    """Refuses files of a folder that hold no settings; missing ones are fine.

    Raises:
        CheckpointError: Naming the file.
    """
    for name in names:
        if (folder / name).is_file() and not isinstance(
            read_json(folder / name, any_text=True), dict
        ):
            raise CheckpointError(f"'{folder / name}' is damaged: it holds no settings.")


def read_record(folder: Path) -> Recorded | None:
    """What headprune.json says of a folder; None where headprune did not write it.

    Raises:
        CheckpointError: If it is damaged, or of a later schema.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return read_as(Recorded, path)


@contextmanager
def damage_is(refusal: Callable[[str], str]) -> Iterator[None]:
    """Refuses what a library cannot read; bugs of headprune itself pass.

    transformers raises whatever its code comes upon (KeyError, AttributeError, ImportError,
    RecursionError, errors of strict dataclasses), and tokenizers a bare Exception or, from Rust, a
    panic that is no Exception at all: so all of it is caught here, and only here.

    Args:
        refusal: Makes the message of what the library said.

    Raises:
        CheckpointError: With that message.
    """
    try:
        yield
    except HeadpruneError:
        raise
    except BaseException as error:
        if devices.gave_out(error):
            raise
        panic = type(error).__name__ == "PanicException"
        if not (isinstance(error, Exception) or panic) or _is_a_bug(error):
            raise
        raise CheckpointError(refusal(_said(error))) from error


def needs_package(model: str | Path, why: str) -> str | None:
    """The refusal of a model whose settings ask for a package that is not installed.

    Args:
        model: Folder or hub id.
        why: What ``damage_is`` was told.
    """
    if not why.startswith("ImportError: "):
        return None
    return (
        f"'{model}' needs what is not installed: {why.removeprefix('ImportError: ').rstrip('.')}. "
        "Install it, or take the setting that asks for it, such as attn_implementation, out of "
        "config.json."
    )


@contextmanager
def without_native_output() -> Iterator[None]:
    """Drops what native code prints while it reads a file.

    The Rust code of tokenizers prints keys that it does not know, line breaks and all, past
    Python's streams; at the start of a line they could be commands to a CI runner.
    """
    kept = {}
    with Path(os.devnull).open("wb") as nowhere:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            with suppress(OSError):  # where there is no such stream, nothing is printed there
                kept[number] = os.dup(number)
                os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, stream_before in kept.items():
            os.dup2(stream_before, number)
            os.close(stream_before)


def _is_a_bug(error: BaseException) -> bool:
    """Whether headprune's own code raised it; what the runtime refuses is a ValueError."""
    (frame, _), *_ = deque(walk_tb(error.__traceback__), maxlen=1)
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] == "headprune" and not isinstance(error, ValueError)


def _said(error: BaseException) -> str:
    """What an error says, on one line."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, OSError | ValueError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
