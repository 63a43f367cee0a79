"""Labelled images: folders with a subfolder per class, tables with a column of images, the hub.

A row repeats the number of its image, once per patch. So budgets of tokens count patches, and
pixels are made batch by batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import datasets
import torch
from datasets import Audio, ClassLabel, Dataset, Image
from transformers import PreTrainedModel

from headprune.config import DataConfig
from headprune.data.columns import label_texts
from headprune.data.files import visible
from headprune.data.read import of_files, of_split, of_the_hub
from headprune.data.sequences import Label
from headprune.data.text import Collate, evenly
from headprune.errors import DataError
from headprune.model.batch import Batch

Media = Literal["images", "recordings"]


@dataclass(frozen=True)
class Images:
    """Images and their labels.

    Attributes:
        table: A row per image.
        column: The column of the images.
        label_column: That of the labels; None without.
        width: Images of an example.
    """

    table: Dataset
    column: str
    label_column: str | None
    width: int = 1

    @property
    def labels(self) -> list[str] | None:
        """The labels as strings."""
        if self.label_column is None:
            return None
        read = label_texts(self.table, self.label_column)
        return read(self.table.select_columns([self.label_column]).to_dict())

    @property
    def sha256(self) -> str:
        """Digest of the images and labels, in order."""
        digest = hashlib.sha256()
        for row in self.table.cast_column(self.column, Image(decode=False)):
            image = row[self.column]
            digest.update(image["bytes"] or Path(image["path"]).read_bytes())
        for label in self.labels or ():
            digest.update(f"{label}\0".encode())
        return digest.hexdigest()

    def spread(self, count: int | None) -> Images:
        """Return ``count`` images, evenly from all over them; None for all."""
        if count is None or count >= len(self.table):
            return self
        return replace(self, table=self.table.select(evenly(len(self.table), count)))


def read_images(data: DataConfig) -> Images:
    """Read the images that a data config names.

    The image column is ``text_column`` or the only one. The label column of a folder is the
    subfolders' names.

    Raises:
        DataError: If there are none, or it is unclear which.
    """
    table = media_table(data, "images", "a folder with a subfolder per class", _of_folder)
    of_images = [name for name, kind in table.features.items() if isinstance(kind, Image)]
    column = data.text_column or next(iter(of_images), "")
    if column not in of_images or (data.text_column is None and len(of_images) > 1):
        raise DataError(
            f"'{data.source}' has the columns {', '.join(table.column_names)}. Images are in "
            f"{', '.join(of_images) or 'none'}: name one with --text-column."
        )
    classes = [name for name, kind in table.features.items() if isinstance(kind, ClassLabel)]
    label = data.label_column or (classes[0] if len(classes) == 1 else None)
    if label is not None and label not in table.column_names:
        raise DataError(
            f"--label-column {label}: '{data.source}' has the columns "
            f"{', '.join(table.column_names)}."
        )
    return Images(table, column, label)


def _of_folder(folder: Path) -> Dataset:
    return of_files(visible(folder), "imagefolder")


def media_table(
    data: DataConfig, kind: Media, folder_is: str, of_folder: Callable[[Path], Dataset]
) -> Dataset:
    """Return the rows of a folder, a file, or a data set of the hub.

    Raises:
        DataError: If it holds none of the kind.
    """
    place = Path(data.source)
    try:
        if (place / "state.json").is_file():
            return datasets.load_from_disk(str(place))
        if not place.exists():
            return of_the_hub(data)
        files = [place] if place.is_file() else visible(place, "*.parquet")
        files = of_split(place, files, data)
        if files:
            return of_files(files, "parquet")
        lists = (place / f"metadata.{ending}" for ending in ("csv", "jsonl"))
        if listed := next(filter(Path.is_file, lists), None):
            return _of_list(listed, kind)
        return of_folder(place)
    except DataError:
        raise
    except Exception as error:  # builders raise whatever their parser raises
        first = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise DataError(
            f"'{data.source}' holds no {kind}: {first}. Give {folder_is}, a parquet file with a "
            f"column of {kind}, or a hub id."
        ) from None


def _of_list(file: Path, kind: Media) -> Dataset:
    """Return the rows of a list whose column ``file_name`` names files beside it."""
    table = of_files([file], "csv" if file.suffix == ".csv" else "json")
    places = [str(file.parent / str(name)) for name in table["file_name"]]
    column, feature = ("image", Image()) if kind == "images" else ("audio", Audio(decode=False))
    return table.remove_columns("file_name").add_column(column, places).cast_column(column, feature)


def image_rows(
    images: Images, net: PreTrainedModel, read_label: Callable[[str], Label] | None
) -> Dataset:
    """Return a row per image: its number once per patch, and its label if one is read."""
    count = len(images.table)
    rows: dict[str, Sequence[Any]] = {"input_ids": [[n] * _patches(net) for n in range(count)]}
    if read_label is not None:
        rows["labels"] = [read_label(label) for label in images.labels or ()]
    return Dataset.from_dict(rows)


def _patches(net: PreTrainedModel) -> int:
    """Return the patches of an image: at least one, where the config does not say."""
    sizes = (getattr(net.config, name, None) for name in ("image_size", "patch_size"))
    image, patch = (max(size) if isinstance(size, list | tuple) else size for size in sizes)
    return max(1, (image // patch) ** 2) if image and patch else 1


def pixels_of(images: Images, processor: Any) -> Collate:
    """Return a function that makes a batch of rows: pixels, and labels if there are any.

    Raises:
        DataError: If an image cannot be read.
    """

    def collate(features: list[dict[str, Any]]) -> Batch:
        numbers = [feature["input_ids"][0] for feature in features]
        try:
            pictures = [images.table[n][images.column].convert("RGB") for n in numbers]
        except (OSError, AttributeError) as error:
            raise DataError(f"An image of rows {numbers} cannot be read: {error}") from None
        batch = dict(processor(images=pictures, return_tensors="pt"))
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([feature["labels"] for feature in features])
        return cast(Batch, batch)

    return collate
