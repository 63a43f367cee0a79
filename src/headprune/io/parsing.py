"""Read JSON and YAML: finite numbers, and errors in one sentence.

``pydantic_core.from_json`` would accept repeated names and numbers such as 1e999.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from headprune.errors import CheckpointError, HeadpruneError

M = TypeVar("M", bound=BaseModel)
Error = type[HeadpruneError]

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 60, 60


def read_json(path: Path, error: Error = CheckpointError, distinct: bool = False) -> Any:
    """Return the content of a JSON file.

    Args:
        path: The file.
        error: The error to raise.
        distinct: Refuse repeated names; JSON takes the last.

    Raises:
        error: If it cannot be read, or is no JSON; ``FileNotFoundError`` passes.
    """
    infinite = path.name == "config.json"  # Nemotron-H has such a setting
    return _read(path, lambda text: parse_json(text, distinct, infinite), "JSON", error)


def refuse_pointer(file: Path) -> None:
    """Refuse the pointer that git-lfs puts in place of a file until it is downloaded.

    Raises:
        CheckpointError: Saying how to get the file.
    """
    with file.open("rb") as stream:
        if stream.read(64).startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"'{file}' is a pointer of git-lfs, not the file itself. Run 'git lfs pull' in its "
                "folder."
            )


def read_yaml(path: Path, error: Error = CheckpointError) -> Any:
    """Return the content of a YAML file; tags make no objects.

    Raises:
        error: If it cannot be read, or is no YAML; ``FileNotFoundError`` passes.
    """
    return _read(path, parse_yaml, "YAML", error)


def read_as(model: type[M], path: Path) -> M:
    """Return a JSON file of headprune as a typed object.

    Raises:
        CheckpointError: If it is missing, damaged, or of a later schema.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file '{path}'.") from None
    return validated(model, content, path)


def validated(
    model: type[M], content: object, path: Path | str, error: Error = CheckpointError
) -> M:
    """Return the content of a file as a typed object.

    Raises:
        error: Naming the first invalid field, or the later schema.
    """
    if not isinstance(content, dict):
        kinds = {list: "a list", str: "a text", type(None): "nothing"}
        kind = kinds.get(type(content), "a number")
        raise error(f"'{path}' is damaged: it holds {kind}, and settings are needed.")
    if "schema_version" in model.model_fields:
        known = max(get_args(model.model_fields["schema_version"].annotation))
        version = content.get("schema_version", known)
        if isinstance(version, int) and version > known:
            raise error(
                f"'{path}' has schema {version}; this headprune reads up to {known}. Upgrade "
                "headprune."
            )
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        raise error(f"'{path}' is not valid: {first_problem(problem)}.") from None


def first_problem(problem: ValidationError) -> str:
    """Return the first invalid field and its problem."""
    first = problem.errors()[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def shown(value: object) -> str:
    """Return a value as Python writes it, in a few characters."""
    return _short.repr(value)


def parse_json(text: str, distinct: bool = False, infinite: bool = False) -> Any:
    """Return the content of JSON text; ``distinct`` as for ``read_json``.

    ``infinite`` allows Infinity, also as transformers tags it.

    Raises:
        ValueError: If it is no JSON, or a number is not finite.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(
        text,
        parse_constant=_no_nan if infinite else _finite,
        parse_float=_finite,
        object_hook=_untagged if infinite else None,
        object_pairs_hook=_distinct if distinct else None,
    )


def parse_yaml(text: str) -> Any:
    """Return the content of YAML text.

    Raises:
        RecursionError: If it is nested too deeply.
        yaml.YAMLError: If it is no YAML.
    """
    try:
        return yaml.safe_load(text)
    except (LookupError, AttributeError, TypeError, OverflowError):
        # PyYAML raises these where a value is not of its tag: "!!timestamp x", "!!bool x"
        raise yaml.YAMLError("a value does not fit its tag") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(n for n in names if names.count(n) > 1)}' is given twice")
    return content


def _untagged(content: dict[str, Any]) -> Any:
    tagged = content.keys() == {"__float__"}
    return _no_nan(str(content["__float__"])) if tagged else content


def _no_nan(text: str) -> float:
    return float(text) if text.endswith("Infinity") else _finite(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]} is not finite")
    return float(text)


def _read(path: Path, parse: Callable[[str], Any], form: str, error: Error) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise error(f"'{path}' is a folder; give a file of {form}.") from None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as problem:
        why = " ".join(str(problem).split())
    except RecursionError:
        why = "it is nested too deeply"
    raise error(f"'{path}' is not readable as {form} ({why[:200]}).")
