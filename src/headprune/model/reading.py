"""The JSON files of a model folder, checked before transformers reads them.

transformers takes their content for granted, so that damage shows as any error from any depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headprune import devices
from headprune.errors import CheckpointError, HeadpruneError
from headprune.io.parsing import read_as, read_json, validated
from headprune.runtime import MANIFEST
from headprune.schemas.records import Recorded


def _beside(name: str) -> str:
    if Path(name).name != name or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(f"'{name}' is no safetensors file in its own folder")
    return name


Beside = Annotated[str, AfterValidator(_beside)]


class ConfigFile(BaseModel):
    """The entries of config.json to read before its class is known."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    transformers_weights: Beside | None = None


class Index(BaseModel):
    """The file of every tensor; transformers needs the metadata, whatever they are."""

    metadata: dict[str, Any]
    weight_map: Annotated[dict[str, Beside], Field(min_length=1)]


def read_config_file(path: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: If it is no JSON, or an entry of every config is damaged.
    """
    content: dict[str, Any] = read_json(path)
    validated(ConfigFile, content, path)
    return content


def read_index(path: Path) -> list[str]:
    """Return the names of the files in an index of shards, in order.

    Raises:
        CheckpointError: If it is damaged.
    """
    return sorted(set(validated(Index, read_json(path), path).weight_map.values()))


def refuse_damaged_json(folder: Path, *names: str) -> None:
    """Refuse files of a folder that hold no settings; missing ones are fine.

    Raises:
        CheckpointError: With the name of the file.
    """
    for name in names:
        file = folder / name
        if file.is_file() and not isinstance(read_json(file), dict):
            raise CheckpointError(f"'{file}' is damaged: it holds no settings.")


def read_record(folder: Path) -> Recorded | None:
    """Return the manifest of a folder; None for a folder that headprune did not write.

    Raises:
        CheckpointError: If it is damaged, or of a later schema.
    """
    path = folder / MANIFEST
    return read_as(Recorded, path) if path.is_file() else None


@contextmanager
def damage_is(refusal: Callable[[str], str], own: bool = False) -> Iterator[None]:
    """Turn whatever a library raises while it reads into a refusal; headprune's own bugs pass.

    transformers raises KeyError, AttributeError, ImportError, errors of strict dataclasses and
    more, and tokenizers a bare Exception or a panic of Rust, which is no Exception.

    Args:
        refusal: Makes the sentence from the library's message.
        own: Also for errors within headprune: compiled code that it calls leaves no other trace.

    Raises:
        CheckpointError: With that sentence.
    """
    try:
        yield
    except HeadpruneError:
        raise
    except BaseException as error:
        if devices.is_device_failure(error):
            raise
        panic = type(error).__name__ == "PanicException"
        if not (isinstance(error, Exception) or panic) or (_is_a_bug(error) and not own):
            raise
        raise CheckpointError(refusal(_message(error))) from error


def needs_package(model: str | Path, why: str) -> str | None:
    """Return the refusal of a model whose settings need a missing package."""
    if not why.startswith("ImportError: "):
        return None
    return (
        f"'{model}' needs a missing package: {why.removeprefix('ImportError: ').rstrip('.')}. "
        "Install it, or take the setting that asks for it, such as attn_implementation, out of "
        "config.json."
    )


def _is_a_bug(error: BaseException) -> bool:
    """Return whether headprune's own code raised it; refusals of the runtime are ValueErrors."""
    (frame, _), *_ = deque(walk_tb(error.__traceback__), maxlen=1)
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] == "headprune" and not isinstance(error, ValueError)


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, OSError | ValueError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
