"""Reading JSON and YAML that nobody vouches for: bounded, finite, and wrong in one sentence.

Every file is read once, where it is needed, into an object with types; what lies behind trusts it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from headprune.errors import CheckpointError, HeadpruneError

M = TypeVar("M", bound=BaseModel)
Error = type[HeadpruneError]

MOST_BYTES = 100_000_000  # the samples of a baseline are the largest that headprune writes


def read_json(path: Path, error: Error = CheckpointError, distinct: bool = False) -> Any:
    """The content of a JSON file; its numbers are finite.

    Args:
        path: The file.
        error: What is raised.
        distinct: Refuse names that are given twice, of which JSON takes the last.

    Raises:
        error: If it cannot be read, is too large, or is no JSON; ``FileNotFoundError`` passes.
    """
    return _read(path, lambda text: parse_json(text, distinct), "JSON", error)


def read_yaml(path: Path, error: Error = CheckpointError, loader: Any = yaml.SafeLoader) -> Any:
    """The content of a YAML file; tags make no objects.

    Raises:
        error: If it cannot be read, is too large, or is no YAML; ``FileNotFoundError`` passes.
    """
    return _read(path, lambda text: yaml.load(text, loader), "YAML", error)


def read_as(model: type[M], path: Path, error: Error = CheckpointError) -> M:
    """Reads a JSON file that headprune wrote.

    Args:
        model: What it holds; its ``schema_version`` is the latest that is known.
        path: The file.
        error: What is raised.

    Raises:
        error: If it is missing, damaged, or of a later schema.
    """
    try:
        content = read_json(path, error)
    except FileNotFoundError:
        raise error(f"There is no file '{path}'.") from None
    return validated(model, content, path, error)


def validated(
    model: type[M], content: object, path: Path | str, error: Error = CheckpointError
) -> M:
    """Content of a file as a typed object.

    Raises:
        error: Naming the first place that is not as it should be, or the later schema.
    """
    if not isinstance(content, dict):
        raise error(f"'{path}' is damaged: it holds {_kind(content)}, and settings are needed.")
    refuse_later(model, content, path, error)
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        raise error(f"'{path}' is not valid: {first_problem(problem)}.") from None
    except RecursionError:
        raise error(f"'{path}' is damaged: it is nested too deeply.") from None


def refuse_later(
    model: type[BaseModel], content: dict[str, Any], path: Path | str, error: Error
) -> None:
    """Refuses what a later headprune wrote.

    Raises:
        error: Naming both schemas.
    """
    if "schema_version" not in model.model_fields:
        return
    known = max(get_args(model.model_fields["schema_version"].annotation))
    version = content.get("schema_version", known)
    if isinstance(version, int) and version > known:
        raise error(
            f"'{path}' has schema {version}; this headprune reads up to {known}. Upgrade headprune."
        )


def first_problem(problem: ValidationError) -> str:
    """Where a typed object went wrong first, and how."""
    first = problem.errors()[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def parse_json(text: str, distinct: bool = False) -> Any:
    """The content of JSON text.

    Raises:
        ValueError: If it is none, or a number in it is not finite or without end.
        RecursionError: If it is nested too deeply.
    """
    pairs = _distinct if distinct else None
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=pairs
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"'{name}' is given twice")
        content[name] = value
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _read(path: Path, parse: Callable[[str], Any], form: str, error: Error) -> Any:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise error(f"'{path}' has {size:,} bytes, far more than such a file can need.")
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, yaml.YAMLError) as problem:
        why = " ".join(str(problem).split())
    except RecursionError:
        why = "it is nested too deeply"
    raise error(f"'{path}' is not readable as {form} ({why[:200]}).")


def _kind(content: object) -> str:
    return {list: "a list", str: "a text", type(None): "nothing"}.get(type(content), "a number")
