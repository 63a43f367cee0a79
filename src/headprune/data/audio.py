"""Recordings and their transcripts: folders with a metadata.csv, tables, the hub.

As of images, a row repeats the number of its recording, once per position of the encoder.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Audio, Dataset
from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Wav2Vec2FeatureExtractor

from headprune.config import DataConfig
from headprune.data.columns import label_texts
from headprune.data.files import visible
from headprune.data.images import media_table
from headprune.data.sequences import Label
from headprune.data.text import Collate, evenly
from headprune.data.tokens import BYTES, TextBytes
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.batch import Batch, SpeechProcessor, decoder_inputs, most_tokens
from headprune.packages import refuse_missing

_POSITIONS = 1500  # of an encoder that does not say


@dataclass(frozen=True)
class Recordings:
    """Recordings, and their transcripts or labels.

    Attributes:
        table: A row per recording.
        column: The column of the sound.
        text_column: That of the transcripts, or of the labels.
        labelled: Whether it has labels.
        width: Parts of an example: sound and text.
    """

    table: Dataset
    column: str
    text_column: str
    labelled: bool = False
    width: int = 2

    @property
    def transcripts(self) -> list[str]:
        """The transcripts."""
        return [said or "" for said in self.table[self.text_column]]

    @property
    def labels(self) -> list[str] | None:
        """The labels as strings; None of transcripts."""
        if not self.labelled:
            return None
        read = label_texts(self.table, self.text_column)
        return read(self.table.select_columns([self.text_column]).to_dict())

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
        from scipy.signal import resample_poly  # late: it takes half a second

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


def read_recordings(data: DataConfig, labelled: bool = False) -> Recordings:
    """Read the recordings that a data config names.

    ``text_column`` is that of the transcripts, or the only one with text. If ``labelled``,
    ``label_column`` is that of the labels, or the only one beside the sound.

    Raises:
        HeadpruneError: If there are none, it is unclear which, or soundfile is not installed.
    """
    refuse_missing("Sound", "soundfile")
    of_folder = partial(_of_folder, labelled=labelled)
    table = media_table(data, "recordings", "a folder with a metadata.csv", of_folder)
    sounds = [name for name, kind in table.features.items() if isinstance(kind, Audio)]
    others = [
        name
        for name, kind in table.features.items()
        if name not in sounds and (labelled or kind.dtype == "string")
    ]
    named = data.label_column if labelled else data.text_column
    text = named or (others[0] if len(others) == 1 else "")
    if len(sounds) != 1 or text not in others:
        names = (
            "--label-column names the labels" if labelled else "--text-column names the transcripts"
        )
        raise DataError(
            f"'{data.source}' has the columns {', '.join(table.column_names)}: one must hold "
            f"sound, and {names}."
        )
    return Recordings(table.cast_column(sounds[0], Audio(decode=False)), sounds[0], text, labelled)


def _of_folder(folder: Path, labelled: bool) -> Dataset:
    """Return the files of subfolders, with the names of these as labels."""
    files = [file for file in visible(folder) if file.parent.parent == folder]
    sounds = [file for file in files if file.suffix.lower() in AudioFolder.EXTENSIONS]
    columns = {"audio": list(map(str, sounds))}
    if labelled:
        columns["label"] = [file.parent.name for file in sounds]
    return Dataset.from_dict(columns).cast_column("audio", Audio(decode=False))


def recording_rows(
    recordings: Recordings,
    net: PreTrainedModel,
    processor: SpeechProcessor,
    read_label: Callable[[str], Label] | None = None,
) -> Dataset:
    """Return a row per recording: its number once per position, and its label or transcript.

    A transcript comes with the bytes of its tokens.
    """
    count, rate = len(recordings.table), processor.feature_extractor.sampling_rate
    if net.main_input_name == "input_values" and hasattr(net, "_get_feat_extract_output_lengths"):
        samples = [len(recordings.sound(number, rate)) for number in range(count)]
        positions = [max(1, int(net._get_feat_extract_output_lengths(many))) for many in samples]
    else:
        positions = [getattr(net.config, "max_source_positions", None) or _POSITIONS] * count
    if longest := getattr(processor.feature_extractor, "n_samples", None):  # of Whisper
        cut = sum(len(recordings.sound(number, rate)) > longest for number in range(count))
        if cut:
            warnings.warn(
                f"{cut:,} of {count:,} recordings are longer than {longest / rate:.0f} seconds, "
                "and the model hears no more of them: split them.",
                HeadpruneWarning,
                stacklevel=2,
            )
    columns: dict[str, Any] = {}
    if read_label is not None:
        labels: Any = [read_label(label) for label in recordings.labels or ()]
    else:
        first = getattr(net.config, "decoder_start_token_id", None)
        most = most_tokens(net, sides=["decoder"]) if net.config.is_encoder_decoder else None
        how = {"truncation": most is not None, "max_length": most, "verbose": False}
        said = list(recordings.transcripts)
        labels = processor.tokenizer(said, **how)["input_ids"]
        sizes = TextBytes(processor.tokenizer).of_rows(said, labels, text=said, **how)
        starts = [int(ids[:1] == [first]) for ids in labels]
        labels = [ids[start:] for ids, start in zip(labels, starts, strict=True)]
        columns[BYTES] = [row[start:] for row, start in zip(sizes, starts, strict=True)]
    columns |= {
        "input_ids": [[number] * many for number, many in enumerate(positions)],
        "labels": labels,
    }
    return Dataset.from_dict(columns)


def recordings_per_pass(net: PreTrainedModel, batch_size: int) -> int:
    """Return the recordings of a pass: 1 where a norm over time reads the padding of others."""
    return 1 if getattr(net.config, "feat_extract_norm", None) == "group" else batch_size


def features_of(
    recordings: Recordings,
    net: PreTrainedModel,
    processor: SpeechProcessor,
    numbers: Sequence[int],
    samples: int | None = None,
) -> dict[str, Tensor]:
    """Return the inputs of a model for some recordings, in its element type.

    ``samples`` cuts or repeats recordings to one length: padding of samples masks no position.
    """
    extract = processor.feature_extractor
    rate = extract.sampling_rate
    sounds = [recordings.sound(number, rate) for number in numbers]
    if samples is not None:
        sounds = [np.resize(sound, samples) for sound in sounds]
    how: dict[str, Any] = {}
    if isinstance(extract, Wav2Vec2FeatureExtractor):  # others pad to a length of their own
        extract.padding_side = "right"  # positions count from the beginning of a recording
        how = {"padding": True, "return_attention_mask": samples is None}
    features = extract(sounds, sampling_rate=rate, return_tensors="pt", **how)
    return {name: x.to(net.dtype) if x.is_floating_point() else x for name, x in features.items()}


def speech_of(
    recordings: Recordings, net: PreTrainedModel, processor: SpeechProcessor, whole: bool = True
) -> Collate:
    """Return a function that makes a batch of rows: features, labels and decoder inputs.

    Unless ``whole``, a model that reads samples gets pieces of one length, without labels.
    """
    rate, count = processor.feature_extractor.sampling_rate, len(recordings.table)
    pieces = not whole and isinstance(processor.feature_extractor, Wav2Vec2FeatureExtractor)
    length = None
    if pieces:
        length = int(np.median([len(recordings.sound(number, rate)) for number in range(count)]))

    def collate(features: list[dict[str, Any]]) -> Batch:
        numbers = [feature["input_ids"][0] for feature in features]
        batch = features_of(recordings, net, processor, numbers, length)
        labels = [feature["labels"] for feature in features]
        if not isinstance(labels[0], list):
            batch["labels"] = torch.tensor(labels)
        elif not pieces:
            rows = [torch.tensor(row) for row in labels]
            batch["labels"] = pad_sequence(rows, batch_first=True, padding_value=-100)
        if "labels" in batch and batch["labels"].dim() == 2 and net.config.is_encoder_decoder:
            batch["decoder_input_ids"] = decoder_inputs(net, batch["labels"])
        return cast(Batch, batch)

    return collate
