"""Values that settings take, and how text is read as one."""

from __future__ import annotations

import json
import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from headprune.io.parsing import shown


def _no_truth_value(value: object) -> object:
    """Refuses what Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("give a number, not true or false")
    return value


NUMBER = BeforeValidator(_no_truth_value)


# bounds that no use comes near, so that a slip of the hand is refused and not run for years
Positive = Annotated[float, Field(gt=0, le=1e9), NUMBER]


Count = Annotated[int, Field(ge=1, le=2**53), NUMBER]


MOST_STEPS = 10**9


Steps = Annotated[int, Field(ge=1, le=MOST_STEPS), NUMBER]


Length = Annotated[int, Field(ge=2, le=10**9), NUMBER]  # tokens of a sequence


Few = Annotated[int, Field(ge=1, le=10**6), NUMBER]


Seed = Annotated[int, Field(ge=0, lt=2**32), NUMBER]


Amount = Annotated[int, Field(ge=0), NUMBER]


def memory_bytes(text: object) -> object:
    """An amount of memory with its unit, in bytes; other values as they are.

    Raises:
        ValueError: If it has no unit.
    """
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


Memory = Annotated[Count, BeforeValidator(memory_bytes)]


def shard_size(text: object) -> object:
    """The largest size of a file, as transformers takes it.

    Raises:
        ValueError: If it has no unit.
    """
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", str(text).upper()) is None:
        raise ValueError("give a number with its unit, such as 5GB (or KB, MB, TB)")
    return str(text).upper()


ShardSize = Annotated[str, BeforeValidator(shard_size)]


def _as_text(place: object) -> object:
    return os.fspath(place) if isinstance(place, Path) else place


def possible_place(text: str) -> str:
    """A name that a file, a folder or something on the hub can have.

    Raises:
        ValueError: If no file system takes it.
    """
    longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    if longest > 255 or len(text) > 4_000:
        raise ValueError(f"no name is that long: {shown(text)}")
    if "\0" in text:
        raise ValueError("no name holds a NUL")
    return text


Place = Annotated[str, BeforeValidator(_as_text), AfterValidator(possible_place)]


def share_or_count(value: object) -> object:
    """A share (a float) or a count (an int), which may come as text.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(value, bool):
        raise ValueError("give a share such as 0.75, or a count such as 202, not true or false")
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.strip().lstrip("-").isdigit() else float(value)
    except ValueError:
        raise ValueError("give a share such as 0.75, or a count such as 202") from None


def one_or_all(value: object) -> str | None:
    """Says what 1 means, which is easily meant otherwise."""
    if value == 1 and isinstance(value, int):
        return "{} 1 keeps one head; {} 1.0 keeps all of them."
    return None


Kept = Annotated[float | int, BeforeValidator(share_or_count)]


def listed(value: object) -> object:
    """A list, also of what stands alone."""
    return [value] if isinstance(value, (str, Path)) else value


Names = Annotated[tuple[str, ...], BeforeValidator(listed)]


def _between_commas(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


CommaNames = Annotated[tuple[str, ...], BeforeValidator(_between_commas)]


def _numbers(value: object) -> object:
    """Numbers between commas."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise ValueError("give whole numbers, such as 1,8,32") from None


Batches = Annotated[tuple[Few, ...], BeforeValidator(_numbers)]


def kv_head_counts(value: object) -> object:
    """One number, a list, or a file with a list.

    Raises:
        ValueError: If a text is none of these.
    """
    if not isinstance(value, str):
        return value
    try:
        listed = value
        if Path(value).is_file():
            listed = Path(value).read_text(encoding="utf-8-sig")
        content = json.loads(listed) if listed.lstrip().startswith("[") else listed
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
    """An element type; what "auto" stands for is said where it is asked for."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


COMPUTED = (
    "Element type to compute in. auto: float32 for a checkpoint in half precision, since its "
    "weights are float32 numbers as well."
)


MEASURED = "Element type that the model is measured in. auto: the checkpoint's."


WRITTEN = "Element type to write. auto: the checkpoint's, tensor by tensor."
