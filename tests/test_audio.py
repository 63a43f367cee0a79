"""Recordings and transcripts: models of speech."""

import json
import math
from dataclasses import replace

import jiwer
import numpy as np
import pytest
import soundfile
import torch
import transformers
from datasets import Audio
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

import headprune
from headprune import packages
from headprune.config import DataConfig
from headprune.data.audio import features_of, read_recordings, recording_rows, speech_of
from headprune.errors import HeadpruneError, HeadpruneWarning
from headprune.evaluation.written import transcribe
from headprune.model.attention import attention_of
from headprune.model.batch import SpeechProcessor
from headprune.model.open import open_model
from tests import tiny

RATE, COUNT = 16_000, 24
EXTRACTOR = WhisperFeatureExtractor(feature_size=8, hop_length=400, chunk_length=1)
PROCESSOR = SpeechProcessor(EXTRACTOR, tiny.tokenizer())


def tone(number, rate):
    """Half a second at a pitch of its own."""
    seconds = np.arange(rate // 2) / rate
    return np.sin(2 * np.pi * (150 + 60 * number) * seconds).astype(np.float32)


@pytest.fixture
def model(tmp_path):
    EXTRACTOR.save_pretrained(tiny.save(tiny.model("whisper"), tmp_path / "model"))
    return tmp_path / "model"


@pytest.fixture
def recordings(tmp_path):
    """A folder of tones, transcribed by the model itself."""
    folder = tmp_path / "sound"
    folder.mkdir()
    names = [f"{number:02}.wav" for number in range(COUNT)]
    for number, name in enumerate(names):
        soundfile.write(folder / name, tone(number, RATE), RATE)
    transcribed(folder, names, ["w1"] * COUNT)
    read = read_recordings(DataConfig(source=str(folder)))
    said = transcribe(tiny.model("whisper"), read, PROCESSOR, 8, 6)
    transcribed(folder, names, [text or "w1" for text in said])
    return folder


def transcribed(folder, names, texts):
    rows = [f"{name},{text}" for name, text in zip(names, texts, strict=True)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]) + "\n")


def metric(report, name, side="model"):
    return float(next(m.value for m in getattr(report, side).metrics if m.name == name))


def heads(net):
    return sum(attention.query_heads for attention in attention_of(net))


def test_a_model_of_speech_is_scored_refitted_and_measured(model, recordings, tmp_path):
    how = {"calibration_tokens": 20 * 16}
    scores = headprune.score(model, tmp_path / "scores", data=recordings, **how)
    assert scores.metadata.tokens == 20 * 16  # positions of the encoder
    out = tmp_path / "out"
    result = headprune.prune(model, out, scores=tmp_path / "scores", keep=0.5, layout="ragged")
    assert heads(result.model) == heads(tiny.model("whisper")) // 2
    assert result.manifest.refit is not None
    given = {"metrics": ["wer", "cer"], "max_new_tokens": 6}
    report = headprune.evaluate(out, data=recordings, against=model, **given)
    # the references are the original's own texts
    assert metric(report, "wer", "against") == metric(report, "cer", "against") == 0
    assert metric(report, "perplexity") != metric(report, "perplexity", "against")
    assert "wer" in {one.name for one in report.differences}
    said = read_recordings(DataConfig(source=str(recordings))).transcripts
    other = [text if number % 3 else "w9 w8 w7" for number, text in enumerate(said)]
    transcribed(recordings, [f"{number:02}.wav" for number in range(COUNT)], other)
    report = headprune.evaluate(model, data=recordings, **given)
    assert metric(report, "wer") == pytest.approx(jiwer.wer(other, said)) and jiwer.wer(other, said)


def test_the_loss_is_that_of_the_model(model, recordings):
    net, read = tiny.model("whisper"), read_recordings(DataConfig(source=str(recordings)))
    rows = list(recording_rows(read, net, PROCESSOR))
    batch = speech_of(read, net, PROCESSOR)(rows)
    with torch.no_grad():
        losses = net(input_features=batch["input_features"], labels=batch["labels"]).loss
    report = headprune.evaluate(model, data=recordings, speed=False)
    assert metric(report, "nll_nats_per_token") == pytest.approx(float(losses), rel=1e-5)
    turned = speech_of(read, net, PROCESSOR)(rows[::-1])
    with torch.no_grad():
        other = net(input_features=turned["input_features"], labels=batch["labels"]).loss
    assert float(other) != pytest.approx(float(losses), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_and_healing_learn_from_speech(dtype, model, recordings, tmp_path):
    small = {"data": recordings, "steps": 3}
    run = headprune.train_gates(model, tmp_path / "scored", target_heads=0.5, dtype=dtype, **small)
    assert run.metadata.judgement is not None
    headprune.train_gates(
        model, tmp_path / "gates", target_heads=0.5, dtype=dtype, train="attention", **small
    )
    cut = headprune.prune(model, tmp_path / "cut", gates=tmp_path / "gates", layout="ragged")
    assert heads(cut.model) == heads(tiny.model("whisper")) // 2
    healed = tiny.healed(tmp_path / "cut", model, tmp_path / "healed", recordings)
    assert healed.taken_after > 0


@pytest.mark.parametrize("kind", ["parquet", "saved", "jsonl", "other rate", "stereo"])
def test_recordings_are_the_same_from_everywhere(kind, recordings, tmp_path):
    folder = read_recordings(DataConfig(source=str(recordings)))
    table, source = folder.table.cast_column("audio", Audio()), recordings
    if kind == "parquet":
        folder.table.to_parquet(source := tmp_path / "sound.parquet")
    elif kind == "saved":
        folder.table.save_to_disk(source := tmp_path / "saved")
    elif kind == "jsonl":
        rows = zip((f"{n:02}.wav" for n in range(COUNT)), folder.transcripts, strict=True)
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
        (recordings / "metadata.jsonl").write_text("\n".join(lines))
        (recordings / "metadata.csv").unlink()
    elif kind == "stereo":
        both = np.stack([tone(3, RATE) * 1.5, tone(3, RATE) * 0.5], axis=1)
        soundfile.write(recordings / "03.wav", both / 2, RATE, subtype="FLOAT")
        soundfile.write(recordings / "04.wav", tone(4, RATE) / 2, RATE)
    else:
        soundfile.write(recordings / "03.wav", tone(3, 2 * RATE), 2 * RATE)
    assert len(table) == COUNT
    read = read_recordings(DataConfig(source=str(source), text_column="text"))
    assert read.transcripts == folder.transcripts
    if kind in ("parquet", "saved", "jsonl"):
        assert read.sha256 == folder.sha256
    ours, theirs = (torch.tensor(each.sound(3, RATE)) for each in (read, folder))
    near = torch.nn.functional.cosine_similarity(ours, torch.tensor(tone(3, RATE)), dim=0)
    assert len(ours) == len(theirs) == RATE // 2 and near > 0.999
    other = torch.nn.functional.cosine_similarity(ours, torch.tensor(tone(4, RATE)), dim=0)
    assert other < 0.5
    assert features_of(read, tiny.model("whisper"), PROCESSOR, [0, 3])["input_features"].shape == (
        2,
        8,
        40,
    )


def test_what_is_no_speech_is_said(model, recordings, tmp_path, monkeypatch):
    def refused(why, **data):
        with pytest.raises(HeadpruneError, match=why) as caught:
            headprune.evaluate(model, **data)
        assert "\n" not in str(caught.value)

    (tmp_path / "text.txt").write_text("w1 w2")
    refused("holds no recordings", data=tmp_path / "text.txt")
    refused("--text-column names the transcripts", data=recordings, text_column="audio")
    (tmp_path / "speakers" / "anna").mkdir(parents=True)
    (tmp_path / "speakers" / "anna" / "0.wav").write_bytes((recordings / "00.wav").read_bytes())
    refused("has the columns audio: one must hold", data=tmp_path / "speakers")
    (recordings / "03.wav").write_bytes(b"no sound")
    refused("Recording 3 cannot be read", data=recordings)
    (model / "preprocessor_config.json").unlink()
    refused("has no usable preprocessor_config.json", data=recordings)
    with pytest.raises(HeadpruneError, match="and compress reads text"):
        headprune.compress(model, tmp_path / "out", data=recordings, keep=0.5)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match="Sound needs soundfile: pip install soundfile"):
        read_recordings(DataConfig(source=str(recordings)))


def test_recordings_that_are_cut_are_counted(recordings):
    soundfile.write(recordings / "05.wav", np.tile(tone(5, RATE), 3), RATE)
    read = read_recordings(DataConfig(source=str(recordings)))
    with pytest.warns(HeadpruneWarning, match="1 of 24 recordings are longer than 1 seconds"):
        recording_rows(read, tiny.model("whisper"), PROCESSOR)


LETTERS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5, "b": 6, "c": 7}
SAMPLES = Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)


@pytest.fixture
def listener(tmp_path):
    """A folder of wav2vec2 with CTC."""
    folder = tiny.save(by_samples("Wav2Vec2ForCTC"), tmp_path / "listener")
    (tmp_path / "vocab.json").write_text(json.dumps(LETTERS))
    tokenizer = Wav2Vec2CTCTokenizer(tmp_path / "vocab.json")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    SAMPLES.save_pretrained(folder)
    return folder


def by_samples(name):
    config = tiny.model("wav2vec2").config
    config.vocab_size, config.pad_token_id, config.ctc_zero_infinity = len(LETTERS), 0, True
    config.ctc_loss_reduction, config.num_labels = "mean", 2
    torch.manual_seed(0)
    net = getattr(transformers, name)(config).eval()
    for attention in attention_of(net):
        attention.output_projection.weight.data.mul_(30)
    for layer in net.wav2vec2.feature_extractor.conv_layers:  # sounds differ, as do frames
        layer.conv.weight.data.mul_(20)
    net.wav2vec2.feature_projection.projection.weight.data.mul_(20)
    if name == "Wav2Vec2ForCTC":  # it says all letters alike
        net.lm_head.weight.data.mul_(50)
        tones = SAMPLES([tone(n, RATE) for n in range(8)], sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            net.lm_head.bias -= net(**tones).logits.mean((0, 1))
            net.lm_head.bias[:5] -= 1e4
    return net


@pytest.fixture
def letters(recordings, listener):
    """The same tones, transcribed by that model, one of them longer."""
    names = [f"{number:02}.wav" for number in range(COUNT)]
    longer = np.concatenate([tone(0, RATE), tone(5, RATE)])
    soundfile.write(recordings / names[0], longer, RATE)
    net, processor = headprune.from_pretrained(listener), open_model(listener).tokenizer
    read = read_recordings(DataConfig(source=str(recordings), text_column="text"))
    said = [transcribe(net, one, processor, 1, 1)[0] for one in alone(read)]
    transcribed(recordings, names, [text or "a" for text in said])
    return recordings


def alone(read):
    for number in range(len(read.table)):
        yield replace(read, table=read.table.select([number]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_ctc_is_cut_trained_and_measured(dtype, listener, letters, tmp_path):
    how = {"calibration_tokens": 1_000, "data": letters, "dtype": dtype}
    headprune.score(listener, tmp_path / "scores", criterion=["compensated", "gradient"], **how)
    cut = {"keep": 0.5, "layout": "ragged", "criterion": "compensated"}
    result = headprune.prune(listener, tmp_path / "out", scores=tmp_path / "scores", **cut)
    assert 2 * heads(result.model) == heads(headprune.from_pretrained(listener))
    given = {"metrics": ["cer"], "against": listener, "batch_size": 8}
    report = headprune.evaluate(tmp_path / "out", data=letters, **given)
    # its norm over time would read the padding of a batch
    assert metric(report, "cer", "against") == 0 < metric(report, "cer")
    small = {"data": letters, "steps": 3}
    run = headprune.train_gates(listener, tmp_path / "g", target_heads=4, dtype=dtype, **small)
    assert math.isfinite(run.metadata.final_loss)
    headprune.prune(listener, tmp_path / "cut", gates=tmp_path / "g", layout="ragged")
    healed = tiny.healed(tmp_path / "cut", listener, tmp_path / "healed", letters)
    assert healed.taken_after > 0
    with pytest.raises(HeadpruneError, match="give --metric wer"):
        headprune.evaluate(listener, data=letters)


def test_a_classifier_of_sounds_reads_folders_by_class(recordings, tmp_path):
    net = by_samples("Wav2Vec2ForSequenceClassification")
    net.config.id2label, net.config.label2id = {0: "low", 1: "high"}, {"low": 0, "high": 1}
    folder = tiny.save(net, tmp_path / "classifier")
    SAMPLES.save_pretrained(folder)
    for number, file in enumerate(sorted(recordings.glob("*.wav"))):
        place = tmp_path / "classes" / ("low" if number < COUNT // 2 else "high") / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    data = tmp_path / "classes"
    for name in (".ipynb_checkpoints/a.wav", "__MACOSX/a.wav", "low/._a.wav", "low/Thumbs.db"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(b"\0\5\x16\7")
    report = headprune.evaluate(folder, data=data)
    read = read_recordings(DataConfig(source=str(data)), labelled=True)
    right = 0
    for number, label in enumerate(read.labels or ()):
        inputs = SAMPLES([read.sound(number, RATE)], sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            right += net.config.id2label[int(net(**inputs).logits.argmax())] == label
    assert metric(report, "accuracy") == right / COUNT
    small = {"data": data, "steps": 2, "batch_size": 4}
    run = headprune.train_gates(folder, tmp_path / "gates", target_heads=4, **small)
    assert math.isfinite(run.metadata.final_loss)
