"""Types of settings, and how text is read as one."""

from __future__ import annotations

import json
import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from headprune.io.parsing import shown
from headprune.io.writing import is_there


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("give a number, not true or false")
    return value


_NUMBER = BeforeValidator(_no_truth_value)
MOST_STEPS = 10**9
# the upper bounds refuse slips of the hand that would run for years
Positive = Annotated[float, Field(gt=0, le=1e9), _NUMBER]
Share = Annotated[float, Field(gt=0, le=1), _NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), _NUMBER]
Level = Annotated[float, Field(gt=0, lt=1), _NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), _NUMBER]
Count = Annotated[int, Field(ge=1, le=2**53), _NUMBER]
Tokens = Annotated[int, Field(ge=2, le=2**53), _NUMBER]
Length = Annotated[int, Field(ge=2, le=10**9), _NUMBER]  # tokens of a sequence
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS), _NUMBER]
PositiveInt = Annotated[int, Field(ge=1, le=10**6), _NUMBER]
Seed = Annotated[int, Field(ge=0, lt=2**32), _NUMBER]


def _memory_bytes(text: object) -> object:
    if not isinstance(text, str):
        return text
    units = {"GIB": 2**30, "MIB": 2**20, "GB": 10**9, "MB": 10**6}
    unit = next((u for u in units if text.upper().endswith(u)), None)
    try:
        if unit is None:
            raise ValueError
        return int(float(text[: -len(unit)]) * units[unit])
    except (ValueError, OverflowError):  # the latter of "inf"
        raise ValueError("give a number with its unit, such as 24GiB (or MiB, GB, MB)") from None


Memory = Annotated[Count, BeforeValidator(_memory_bytes)]


def _shard_size(text: object) -> object:
    if re.fullmatch("[1-9][0-9]*(KB|MB|GB|TB)", str(text), re.IGNORECASE) is None:
        raise ValueError("give a number with its unit, such as 5GB (or KB, MB, TB)")
    return text


ShardSize = Annotated[str, BeforeValidator(_shard_size)]


def possible_place(value: object) -> object:
    """Refuse a name that no file system takes; a folder such as "." gets the name that it has."""
    text = os.fspath(value) if isinstance(value, Path) else value
    if isinstance(text, str):
        longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
        if longest > 255 or len(text) > 4_000:
            raise ValueError(f"no name is that long: {shown(text)}")
        if "\0" in text:
            raise ValueError("no name holds a NUL")
        if text and Path(text).name in ("", "..") and Path(text).is_dir():
            return str(Path(text, "..", Path(text).resolve().name))
    return text


def path(value: object) -> object:
    """Read a path."""
    return Path(value) if isinstance(value, str) and possible_place(value) else value


Place = Annotated[str, BeforeValidator(possible_place)]


def _fraction_or_count(value: object) -> object:
    """Read a fraction (a float) or a count (an int)."""
    if isinstance(value, bool):
        raise ValueError("give a share such as 0.75, or a count such as 202, not true or false")
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.strip().lstrip("-").isdigit() else float(value)
    except ValueError:
        raise ValueError("give a share such as 0.75, or a count such as 202") from None


FractionOrCount = Annotated[float | int, BeforeValidator(_fraction_or_count)]


def listed(value: object) -> object:
    """Read a list: of text at its commas, also of several texts."""
    values = [value] if isinstance(value, str | Path | int | float) else value
    if not isinstance(values, list | tuple):
        return value
    parts = (each.split(",") if isinstance(each, str) else [each] for each in values)
    return tuple(
        each.strip() if isinstance(each, str) else each
        for part in parts
        for each in part
        if each != ""
    )


def several(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
Texts = Annotated[tuple[str, ...], BeforeValidator(several)]
Lengths = Annotated[tuple[PositiveInt, ...], BeforeValidator(listed)]


def kv_head_counts(value: object) -> object:
    """Read one number, a list, or a file with a list."""
    if isinstance(value, list) and len(value) == 1:  # as at the command line
        value = value[0]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return value
    try:
        file = Path(value)
        is_file = is_there(file) and file.is_file()
        text = file.read_text(encoding="utf-8-sig") if is_file else value
        content = json.loads(text) if text.lstrip().startswith("[") else text
        numbers = content if isinstance(content, list) else list(map(int, content.split(",")))
        if not all(type(number) is int for number in numbers):
            raise ValueError
    except (ValueError, OSError):
        raise ValueError(
            "give a number such as 2, a list such as 4,4,2,2 with one per attention module, or a "
            "JSON file that holds such a list"
        ) from None
    return numbers[0] if isinstance(content, str) and "," not in content else tuple(numbers)


KvHeads = Annotated[Count | tuple[Count, ...], BeforeValidator(kv_head_counts)]


class Dtype(str, Enum):
    """An element type."""

    AUTO = "auto"  # of the checkpoint where a model is measured, else float32 or wider
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"
