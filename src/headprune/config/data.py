"""Where examples come from, and how much of them shows what heads do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from headprune.config.values import COMPUTED, Count, Dtype, Few, Length, Place, Seed
from headprune.declaration import Options, Panel, option


class DataConfig(Options):
    """Where examples come from."""

    source: Place = option(
        "A text, JSONL, CSV, TSV or parquet file (also .gz), a folder of them, or a hub id such as "
        "wikitext:wikitext-2-raw-v1."
    )
    split: str = option("Split of a hub data set.", "train")
    text_column: str | None = option(
        "Column with the text; two, comma-separated, for pairs. Default: the one named 'text', or "
        "the only one that holds text.",
        None,
    )
    label_column: str | None = option("Column with the label or the similarity score.", None)

    @property
    def pairs(self) -> bool:
        """Whether examples are two texts each."""
        return "," in (self.text_column or "")


class Domain(Options):
    """Data with a name, which the metrics of all but the first carry in brackets."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    source: Place
    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None


def data_configs(domains: Sequence[Domain], shared: DataConfig) -> dict[str, DataConfig]:
    """Where the examples of domains come from; what one does not say, ``shared`` says for all."""
    said = {
        domain.name: domain.model_dump(exclude={"name"}, exclude_none=True) for domain in domains
    }
    return {name: shared.model_copy(update=own) for name, own in said.items()}


def named(value: object) -> object:
    """One place or several, each with or without a name, as a list of domains."""
    if isinstance(value, Mapping):
        return [_named(place, str(name)) for name, place in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_named(one) for one in value]
    return [_named(value)]


def _named(place: Any, name: str | None = None) -> Any:
    """A domain: without a name it has that of its file; a place with "=" in it is none with one."""
    if isinstance(place, Mapping):
        return place if name is None else {"name": name, **place}
    if not isinstance(place, str | Path):
        return place
    said = re.fullmatch(r"([\w.-]+)=(.+)", str(place), re.DOTALL)
    if name is None and said is not None and not Path(place).exists():
        name, place = said.groups()
    return {"name": name or _stem(str(place)), "source": place}


def _stem(place: str) -> str:
    """The name of a file without its endings, or of a data set."""
    path = Path(place)
    stem = Path(path.stem).stem if path.suffix == ".gz" else path.stem
    return domain_name(stem)


def domain_name(said: str) -> str:
    """The same of signs that the name of a domain can have."""
    return re.sub(r"[^\w.-]+", "-", said) or "data"


def _apart(domains: tuple[Domain, ...]) -> tuple[Domain, ...]:
    names = [domain.name for domain in domains]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two are called {twice}; give names, as in {twice}=FILE other=FILE")
    return domains


AnyDomains = Annotated[tuple[Domain, ...], BeforeValidator(named), AfterValidator(_apart)]
Domains = Annotated[AnyDomains, Field(min_length=1)]

_USUAL = 512  # tokens of a sequence
FEWER_LONG = f", fewer of those with more than {_USUAL} tokens"


def sequences_per_pass(batch_size: int, length: int) -> int:
    """Of long sequences fewer, as the memory of a pass grows with its tokens."""
    return max(1, batch_size * min(length, _USUAL) // length)


class CalibrationConfig(Options):
    """Which part of the data shows what the heads do."""

    calibration_tokens: Annotated[Count, Field(ge=2)] = option(
        "How much of the text is used, spread evenly.", 16_384, Panel.CALIBRATION
    )
    seq_len: Length = option(
        "Tokens per sequence, about as many as the model will see.", 512, Panel.CALIBRATION
    )
    batch_size: Few = option(
        f"Sequences per pass{FEWER_LONG}; no result depends on it.", 4, Panel.CALIBRATION
    )
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    seed: Seed = option("Seed of masked positions and of what is random.", 0)
