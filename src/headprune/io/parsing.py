"""Reading JSON and YAML: finite numbers, and errors in one sentence.

Every file is read once, where it is needed, into an object with types; what lies behind trusts it.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from headprune.errors import CheckpointError, HeadpruneError

M = TypeVar("M", bound=BaseModel)
Error = type[HeadpruneError]

# escapes that may stand for what is no character of a text: NUL, or half of a pair of UTF-16
_ODD_ESCAPE = re.compile(r"\\(?:0|x00|[uU](?:0000)?(?:0000|[dD][89a-fA-F]))")
_ODD = re.compile("[\0\ud800-\udfff]")

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 60, 60


def read_json(
    path: Path,
    error: Error = CheckpointError,
    distinct: bool = False,
    any_text: bool = False,
) -> Any:
    """The content of a JSON file; its numbers are finite.

    Args:
        path: The file.
        error: What is raised.
        distinct: Refuse names that are given twice, of which JSON takes the last.
        any_text: Take texts with NUL as well, which a token may be, but no name of a file.

    Raises:
        error: If it cannot be read, or is no JSON; ``FileNotFoundError`` passes.
    """
    return _read(path, lambda text: parse_json(text, distinct, any_text), "JSON", error)


def refuse_pointer(file: Path) -> None:
    """Refuses what git-lfs puts in place of a file until the file is downloaded.

    Raises:
        CheckpointError: Saying how to get the file.
    """
    with file.open("rb") as stream:
        if stream.read(64).startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"'{file}' is a pointer of git-lfs, not the file itself. Run 'git lfs pull' in its "
                "folder."
            )


def read_json_lines(path: Path) -> list[Any]:
    """The content of every line of a JSONL file that is not empty.

    Raises:
        CheckpointError: As for ``read_json``; ``FileNotFoundError`` passes.
    """
    lines = _read(path, _parse_lines, "JSON lines", CheckpointError)
    return list(lines)


def read_yaml(path: Path, error: Error = CheckpointError) -> Any:
    """The content of a YAML file; tags make no objects.

    Raises:
        error: If it cannot be read, or is no YAML; ``FileNotFoundError`` passes.
    """
    return _read(path, parse_yaml, "YAML", error)


def read_as(model: type[M], path: Path) -> M:
    """Reads a JSON file that headprune wrote.

    Args:
        model: What it holds; its ``schema_version`` is the latest that is known.
        path: The file.

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


def shown(value: object) -> str:
    """A value as Python writes it, in a few characters whatever it holds."""
    return _short.repr(value)


def parse_json(text: str, distinct: bool = False, any_text: bool = False) -> Any:
    """The content of JSON text.

    Raises:
        ValueError: If it is none, a number in it is not finite, or a text has an invalid
            character.
        RecursionError: If it is nested too deeply.
    """
    content = json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        object_pairs_hook=_distinct if distinct else None,
    )
    return content if any_text else _sound(content, text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"'{name}' is given twice")
        content[name] = value
    return content


def parse_yaml(text: str) -> Any:
    """The content of YAML text.

    Raises:
        ValueError: If a text has an invalid character.
        RecursionError: If it is nested too deeply.
        yaml.YAMLError: If it is no YAML.
    """
    try:
        content = yaml.safe_load(text)
    except (LookupError, AttributeError, TypeError, OverflowError):
        # what PyYAML raises where a value is not of its tag: "!!timestamp x", "!!bool x"
        raise yaml.YAMLError("a value does not fit its tag") from None
    return _sound(content, text)


def _parse_lines(text: str) -> list[Any]:
    return [parse_json(line) for line in text.split("\n") if line.strip()]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _sound(content: Any, text: str) -> Any:
    """The content, if all its texts are of characters."""
    odd = _ODD_ESCAPE.search(text) and next(filter(_ODD.search, _texts(content)), None)
    if odd:
        raise ValueError(f"the text {ascii(odd)[:40]} has an invalid character")
    return content


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from _texts([*content, *content.values()])
    elif isinstance(content, list | tuple | set):
        for inside in content:
            yield from _texts(inside)


def _read(path: Path, parse: Callable[[str], Any], form: str, error: Error) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise error(f"'{path}' is a folder; give the file of {form} that is meant.") from None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as problem:
        why = " ".join(str(problem).split())
    except RecursionError:
        why = "it is nested too deeply"
    raise error(f"'{path}' is not readable as {form} ({why[:200]}).")


def _kind(content: object) -> str:
    return {list: "a list", str: "a text", type(None): "nothing"}.get(type(content), "a number")
