"""Encoder heads against the word error rate of a small Whisper, by commands alone.

    pip install espeakng-loader jiwer soundfile
    python scripts/bench_speech.py FOLDER

eSpeak NG speaks one to four digits in several voices, speeds and pitches. A Whisper of 3 + 2 layers
learns them from nothing; other speeds and pitches judge.
"""

from __future__ import annotations

import csv
import ctypes
import itertools
from pathlib import Path

import espeakng_loader
import numpy as np
import soundfile
import torch
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import headprune

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOICES = ("en-us", "en-gb", "en+f3", "en+m3")
_SECONDS, _MELS, _STEPS, _BATCH = 3, 40, 2_000, 32


class Speaker:
    """eSpeak NG, which gives the sound to a callback."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = self.lib.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
        self.parts: list[NDArray[np.int16]] = []
        shorts = ctypes.POINTER(ctypes.c_short)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, shorts, ctypes.c_int, ctypes.c_void_p)

        def heard(samples: object, count: int, _: object) -> int:
            if count > 0:
                self.parts.append(np.ctypeslib.as_array(samples, (count,)).copy())  # type: ignore[arg-type, unused-ignore]
            return 0

        self.callback = kind(heard)  # the library keeps no reference
        self.lib.espeak_SetSynthCallback(self.callback)

    def say(self, text: str, voice: str, speed: int, pitch: int) -> NDArray[np.int16]:
        """Return the sound of a text."""
        self.parts.clear()
        self.lib.espeak_SetVoiceByName(voice.encode())
        for parameter, value in ((1, speed), (3, pitch)):
            self.lib.espeak_SetParameter(parameter, value, 0)
        spoken = text.encode() + b"\0"
        self.lib.espeak_Synth(spoken, len(spoken), 0, 1, 0, 1, None, None)
        self.lib.espeak_Synchronize()
        return np.concatenate(self.parts)


def write_recordings(folder: Path, count: int, part: int) -> None:
    """Write recordings; even speeds and pitches are to learn from, odd ones judge."""
    speaker, draw = Speaker(), np.random.default_rng(part)
    folder.mkdir(parents=True)
    rows = [("file_name", "text")]
    for number in range(count):
        text = " ".join(draw.choice(WORDS, draw.integers(1, 5)))
        voice = VOICES[number % len(VOICES)]
        speed, pitch = (2 * draw.integers(low, high) + part for low, high in ((70, 110), (15, 40)))
        sound = speaker.say(text, voice, int(speed), int(pitch))
        name = f"{number}.wav"
        soundfile.write(folder / name, sound, speaker.rate)
        rows.append((name, text))
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word each."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({t: n for n, t in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def train(folder: Path) -> Path:
    """Train the model; return its folder."""
    from headprune.config import DataConfig
    from headprune.data.audio import read_recordings, recording_rows, speech_of
    from headprune.model.batch import SpeechProcessor

    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    net = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=4 + len(WORDS),
            num_mel_bins=_MELS,
            d_model=96,
            encoder_layers=3,
            decoder_layers=2,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            max_source_positions=50 * _SECONDS,
            max_target_positions=64,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **ends,
        )
    )
    net.generation_config = GenerationConfig(**ends)
    extractor = WhisperFeatureExtractor(feature_size=_MELS, chunk_length=_SECONDS)
    processor = SpeechProcessor(extractor, tokenizer())
    recordings = read_recordings(DataConfig(source=str(folder / "train")))
    rows = list(recording_rows(recordings, net, processor.tokenizer))
    whole = speech_of(recordings, net, processor)(rows)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=_STEPS)
    order = itertools.chain.from_iterable(
        torch.randperm(len(rows)).split(_BATCH) for _ in itertools.count()
    )
    for step, some in zip(range(_STEPS), order, strict=False):
        loss = net(input_features=whole["input_features"][some], labels=whole["labels"][some]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step} of {_STEPS}, loss {float(loss):.3f}", flush=True)
    output = folder / "model"
    net.eval().save_pretrained(output)
    extractor.save_pretrained(output)
    processor.tokenizer.save_pretrained(output)
    return output


def main(folder: Path) -> None:
    """Speak, train, cut and judge."""
    if not folder.exists():
        write_recordings(folder / "train", 2_000, 0)
        write_recordings(folder / "test", 300, 1)
    model = folder / "model" if (folder / "model").exists() else train(folder)
    data, test, scores = folder / "train", folder / "test", folder / "scores"

    def judge(name: str, what: Path) -> None:
        report = headprune.evaluate(
            what, data=test, against=model, metrics=["wer"], max_new_tokens=8
        )
        wer = next(one.value for one in report.model.metrics if one.name == "wer")
        (gap,) = (one.in_words() for one in report.differences if one.name == "wer")
        print(f"| {name} | {100 * wer:.1f} % | {gap} |", flush=True)

    judge("whole", model)
    headprune.score(model, scores, data=data, unit="head", attention="encoder")
    for keep in (0.75, 0.5, 0.25):
        for how in (data, "none"):
            cut = folder / f"cut-{keep}-{'refit' if how is data else 'plain'}"
            headprune.prune(model, cut, scores=scores, keep=keep, layout="ragged", refit=how)
            judge(f"{keep} of the encoder heads, {'refit' if how is data else 'no refit'}", cut)


if __name__ == "__main__":
    typer.run(main)
