"""Source and amount of examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from headprune.config.base import Settings, build
from headprune.config.values import Dtype, Length, Place, PositiveInt, Seed, Tokens
from headprune.errors import DataError
from headprune.io.writing import is_there

BUILDERS = {  # of datasets, by the ending of a file
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".md": "text",
}


_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)(?![a-z])")
_SPLITS = dict.fromkeys(("valid", "val", "dev"), "validation")


class Loss(str, Enum):
    """Tokens that count in a loss."""

    ALL = "all"
    ANSWERS = "answers"  # of the assistant, in chats


class DataConfig(Settings):
    """Source of examples: a file, a folder or a hub id.

    Attributes:
        text_column: Column with the text; two, comma-separated, for pairs.
        label_column: Column with the label or the similarity score.
        loss: Tokens that count.
    """

    source: Place
    split: str = "train"
    text_column: str | None = None
    label_column: str | None = None
    loss: Loss = Loss.ALL

    @property
    def pairs(self) -> bool:
        """True if examples are two texts each."""
        return "," in (self.text_column or "")


def refuse_pairs(task: str, data: DataConfig) -> None:
    """Refuse pairs of texts for a language model, which would read the first ones alone.

    Raises:
        DataError: With what to do.
    """
    if data.pairs and task in ("causal-lm", "masked-lm"):
        raise DataError(
            f"--text-column {data.text_column} names pairs, and a language model reads single "
            "texts. Name one column, or write prompts and answers as chats."
        )


def refuse_missing_file(source: str) -> None:
    """Refuse the path of a missing file or folder; other names may be of the hub.

    Raises:
        DataError: If there is no such file.
    """
    path = Path(source)
    named = suffix(path) in BUILDERS or path.is_absolute() or source.startswith(".")
    if named and not is_there(path):
        raise DataError(f"There is no file '{source}'. Paths are relative to where you are.")


def suffix(file: Path) -> str:
    """Return the ending of a file, without .gz."""
    return Path(file.stem).suffix.lower() if file.suffix == ".gz" else file.suffix.lower()


def data_config(
    place: str | Path,
    text_column: str | None,
    label_column: str | None,
    split: str = "train",
    loss: Loss = Loss.ALL,
) -> DataConfig:
    """Return the data at a place; a split may stand behind "@", as in ``wikitext@test``.

    Raises:
        DataError: If it is a path, and nothing is there, or nothing has splits.
    """
    source = str(place)
    name, at, given = source.rpartition("@")
    if at and name and "/" not in given and not is_there(source):
        source, split = name, given
        path = Path(name)
        saved = (path / "dataset_dict.json").is_file()
        files = (file for file in path.rglob("*.*") if suffix(file) in {*BUILDERS} - {".md"})
        if is_there(path) and not (saved or splits_of(path, files)):
            raise DataError(
                f"'{name}' is a local {'folder' if path.is_dir() else 'file'} without splits, so "
                f"@{split} names none. Give the file of that split."
            )
    refuse_missing_file(source)
    return DataConfig(
        source=source,
        split=split,
        text_column=text_column,
        label_column=label_column,
        loss=loss,
    )


def splits_of(folder: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return files by the split that their name, or that of a folder, begins with.

    As datasets does for ``train.txt``, ``test-00000-of-00001.parquet`` or ``dev/a.txt``. Empty if
    there are fewer than two splits.
    """
    splits = dict[str, list[Path]]()
    for file in files:
        parts = file.relative_to(folder).parts
        names = [match[1] for part in parts if (match := _SPLIT.match(part.lower()))]
        if names:
            splits.setdefault(_SPLITS.get(names[0], names[0]), []).append(file)
    return splits if len(splits) > 1 else {}


class Domain(Settings):
    """Data with a name; metrics of all but the first carry it in brackets."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    source: Place
    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    loss: Loss | None = None


def data_configs(domains: Sequence[Domain], shared: DataConfig) -> dict[str, DataConfig]:
    """Return the data of domains; ``shared`` fills their gaps."""
    return {
        each.name: data_config(
            each.source,
            each.text_column or shared.text_column,
            each.label_column or shared.label_column,
            each.split or shared.split,
            each.loss or shared.loss,
        )
        for each in domains
    }


def _named(value: object) -> object:
    """Read one place or several, each with or without a name, as a list of domains."""
    if isinstance(value, Mapping):
        return [_domain(place, str(name)) for name, place in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_domain(each) for each in value]
    return [_domain(value)]


def _domain(place: Any, name: str | None = None) -> Any:
    if isinstance(place, Mapping):
        return place if name is None else {"name": name, **place}
    if not isinstance(place, str | Path):
        return place
    match = re.fullmatch(r"([\w.-]+)=(.+)", str(place), re.DOTALL)
    if name is None and match is not None and not is_there(place):
        name, place = match.groups()
    stem = Path(str(place).removesuffix(".gz")).stem
    return {"name": name or re.sub(r"[^\w.-]+", "-", stem) or "data", "source": place}


def _distinct(domains: tuple[Domain, ...]) -> tuple[Domain, ...]:
    names = [domain.name for domain in domains]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two are called {twice}; give names, as in {twice}=FILE other=FILE")
    return domains


Domains = Annotated[tuple[Domain, ...], BeforeValidator(_named), AfterValidator(_distinct)]


class _Texts(Settings):
    data: Domains


def domains(data: object) -> tuple[Domain, ...]:
    """Read one place or several, each with or without a name.

    Raises:
        HeadpruneError: If a name is wrong, or two are the same.
    """
    return build(_Texts, data=data).data


_USUAL = 128  # tokens of a sequence: more of long ones at once take memory, and no less time


def sequences_per_pass(batch_size: int, length: int) -> int:
    """Return fewer of long sequences, as the memory of a pass grows with its tokens."""
    return max(1, batch_size * min(length, _USUAL) // length)


class CalibrationConfig(Settings):
    """Amount of data to read; ``dtype`` is the element type of the computation."""

    calibration_tokens: Tokens = 16_384
    seq_len: Length = 512
    batch_size: PositiveInt = 4
    dtype: Dtype = Dtype.AUTO
    seed: Seed = 0
