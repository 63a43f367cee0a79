"""Recordings and their transcripts: folders with a metadata.csv, tables, the hub.

As of images, a row repeats the number of its recording, once per position of the encoder.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Audio, Dataset
from numpy.typing import NDArray
from scipy.signal import resample_poly
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.config import DataConfig
from headprune.data.images import media_table
from headprune.data.text import Collate, evenly
from headprune.errors import DataError
from headprune.model.batch import Batch, SpeechProcessor, decoder_inputs
from headprune.packages import refuse_missing

_POSITIONS = 1500  # of an encoder that does not say


@dataclass(frozen=True)
class Recordings:
    """Recordings and transcripts.

    Attributes:
        table: A row per recording.
        column: The column of the sound.
        text_column: That of the transcripts.
        width: Parts of an example: sound and text.
    """

    table: Dataset
    column: str
    text_column: str
    width: int = 2
    labels: None = None

    @property
    def transcripts(self) -> list[str]:
        """The transcripts."""
        return list(self.table[self.text_column])

    @property
    def sha256(self) -> str:
        """Digest of the recordings and transcripts, in order."""
        digest = hashlib.sha256()
        for row in self.table:
            digest.update(_bytes(row[self.column]) + f"{row[self.text_column]}\0".encode())
        return digest.hexdigest()

    def spread(self, count: int | None) -> Recordings:
        """Return ``count`` recordings, evenly from all over them; None for all."""
        if count is None or count >= len(self.table):
            return self
        return replace(self, table=self.table.select(evenly(len(self.table), count)))

    def sound(self, number: int, rate: int) -> NDArray[np.float32]:
        """Return a recording as numbers, its channels mixed, at ``rate`` per second.

        Raises:
            DataError: If it cannot be read.
        """
        import soundfile

        try:
            samples, own = soundfile.read(io.BytesIO(_bytes(self.table[number][self.column])))
        except (OSError, RuntimeError) as error:
            raise DataError(f"Recording {number} cannot be read: {error}") from None
        mixed = samples if samples.ndim == 1 else samples.mean(1)
        heard = mixed if own == rate else resample_poly(mixed, rate, own)
        return np.asarray(heard, dtype=np.float32)


def _bytes(sound: dict[str, Any]) -> bytes:
    data: bytes = sound["bytes"] or Path(sound["path"]).read_bytes()
    return data


def read_recordings(data: DataConfig) -> Recordings:
    """Read the recordings that a data config names.

    ``text_column`` is that of the transcripts, or the only one with text.

    Raises:
        HeadpruneError: If there are none, it is unclear which, or soundfile is not installed.
    """
    refuse_missing("Sound", "soundfile")
    table = media_table(data, "recordings", "a folder with a metadata.csv", _of_folder)
    sounds = [name for name, kind in table.features.items() if isinstance(kind, Audio)]
    texts = [name for name, kind in table.features.items() if kind.dtype == "string"]
    text = data.text_column or (texts[0] if len(texts) == 1 else "")
    if len(sounds) != 1 or text not in texts:
        raise DataError(
            f"'{data.source}' has the columns {', '.join(table.column_names)}: one must hold "
            "sound, and --text-column names the transcripts."
        )
    return Recordings(table.cast_column(sounds[0], Audio(decode=False)), sounds[0], text)


def _of_folder(folder: Path) -> Dataset:
    """Return the rows of metadata.csv, which has a column ``file_name`` and transcripts."""
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sounds = [str(folder / row.pop("file_name")) for row in rows]
    table = Dataset.from_list(rows).add_column("audio", sounds)
    return table.cast_column("audio", Audio(decode=False))


def recording_rows(recordings: Recordings, net: PreTrainedModel, tokenizer: Any) -> Dataset:
    """Return a row per recording: its number once per position, and its transcript in tokens."""
    positions = getattr(net.config, "max_source_positions", None) or _POSITIONS
    first = getattr(net.config, "decoder_start_token_id", None)
    labels = tokenizer(recordings.transcripts, verbose=False)["input_ids"]
    labels = [ids[1:] if ids[:1] == [first] else ids for ids in labels]
    numbers = [[number] * positions for number in range(len(labels))]
    return Dataset.from_dict({"input_ids": numbers, "labels": labels})


def features_of(
    recordings: Recordings, net: PreTrainedModel, processor: SpeechProcessor, numbers: Sequence[int]
) -> dict[str, Tensor]:
    """Return the inputs of a model for some recordings, in its element type."""
    extract = processor.feature_extractor
    rate = extract.sampling_rate
    sounds = [recordings.sound(number, rate) for number in numbers]
    features = extract(sounds, sampling_rate=rate, return_tensors="pt")
    return {name: x.to(net.dtype) if x.is_floating_point() else x for name, x in features.items()}


def speech_of(recordings: Recordings, net: PreTrainedModel, processor: SpeechProcessor) -> Collate:
    """Return a function that makes a batch of rows: features, labels and decoder inputs."""

    def collate(features: list[dict[str, Any]]) -> Batch:
        numbers = [feature["input_ids"][0] for feature in features]
        batch = features_of(recordings, net, processor, numbers)
        labels = [torch.tensor(feature["labels"]) for feature in features]
        batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
        batch["decoder_input_ids"] = decoder_inputs(net, batch["labels"])
        return cast(Batch, batch)

    return collate
