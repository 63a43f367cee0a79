"""Voita's experiment on a tiny student: its file, its recurrence, the commands."""

import json
import runpy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("sacrebleu")
ROOT = Path(__file__).parents[1]
WIDTH, FFN, LAYERS, HEADS = 16, 32, 2, 4
WORDS = ["</s>", "<unk>", *(f"▁{a}{b}" for a in "bdfgklmnpr" for b in "aeiou")]
SETTINGS = f"""dec-cell: ssru
dec-depth: 1
enc-depth: {LAYERS}
transformer-heads: {HEADS}
transformer-dim-ffn: {FFN}
transformer-ffn-activation: relu
transformer-postprocess: dan
tied-embeddings-all: true
"""
Weights = dict[str, NDArray[Any]]


@pytest.fixture
def voita(monkeypatch):
    """scripts/reproduce_voita/student.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "reproduce_voita")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import student

    return student


def weights(seed):
    """A student's tensors as they are multiplied: matrices (out, in), in steps of 1/127 of m."""
    generator, found = np.random.default_rng(seed), Weights()

    def matrix(name, *shape):
        found[name] = generator.integers(-127, 128, shape).astype(np.int8)

    def vector(name, size):
        middle = 1.0 if name.endswith("scale") else 0.0
        found[name] = generator.normal(middle, 0.1, (1, size)).astype(np.float32)

    matrix("Wemb", len(WORDS), WIDTH)
    vector("decoder_ff_logit_out_b", len(WORDS))
    for layer in [*(f"encoder_l{n + 1}" for n in range(LAYERS)), "decoder_l1"]:
        attention = "self" if layer.startswith("encoder") else "context"
        for part in "qkvo":
            matrix(f"{layer}_{attention}_W{part}", WIDTH, WIDTH)
            vector(f"{layer}_{attention}_b{part}", WIDTH)
        matrix(f"{layer}_ffn_W1", FFN, WIDTH)
        matrix(f"{layer}_ffn_W2", WIDTH, FFN)
        vector(f"{layer}_ffn_b1", FFN)
        vector(f"{layer}_ffn_b2", WIDTH)
        norms = [f"{attention}_Wo", "ffn_ffn"]
        if attention == "context":
            norms.append("rnn_ffn")
            matrix(f"{layer}_rnn_W", WIDTH, WIDTH)
            matrix(f"{layer}_rnn_Wf", WIDTH, WIDTH)
            vector(f"{layer}_rnn_bf", WIDTH)
        for norm in norms:
            vector(f"{layer}_{norm}_ln_scale", WIDTH)
            vector(f"{layer}_{norm}_ln_bias", WIDTH)
    matrix("Wemb_QuantMultA", 1, 1)
    return found


SCALE = 200.0  # m: a weight is q / m


def write(path, tensors):
    """Writes a file as Marian does; the shape of a matrix is said the other way round."""
    rows = []
    for name, value in tensors.items():
        integers = value.dtype == np.int8
        blob = value.tobytes() + (struct.pack("<f", SCALE) if integers else b"")
        shape = value.shape if name == "Wemb" or not integers else value.shape[::-1]
        rows.append((name, 0x4101 if integers else 0x404, shape, blob + bytes(-len(blob) % 256)))
    settings = SETTINGS.encode() + b"\0"
    rows.append(("special:model.yml", 0x101, (len(settings),), settings))
    out = struct.pack("<2Q", 1, len(rows))
    for name, kind, shape, blob in rows:
        out += struct.pack("<4Q", len(name) + 1, kind, len(shape), len(blob))
    out += b"".join(name.encode() + b"\0" for name, *_ in rows)
    out += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in rows)
    out += struct.pack("<Q", 5) + bytes(5)
    path.write_bytes(out + b"".join(blob for *_, blob in rows))
    return path


def write_tokenizer(path):
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.save(str(path))
    return path


def sentences(count, seed):
    generator = np.random.default_rng(seed)
    words = [word.removeprefix("▁") for word in WORDS[2:]]
    return "".join(" ".join(generator.choice(words, 9)) + "\n" for _ in range(count))


def test_a_file_of_marian_is_read(voita, tmp_path):
    import marian_file

    tensors = weights(0)
    path = write(tmp_path / "model.bin", tensors)
    found, settings = marian_file.read(path)
    assert settings["dec-cell"] == "ssru"
    assert set(found) == set(tensors) - {"Wemb_QuantMultA"}
    for name, value in found.items():
        there = tensors[name]
        wanted = there / np.float32(SCALE) if there.dtype == np.int8 else there.ravel()
        assert np.array_equal(value.numpy(), wanted), name
    model = marian_file.model_of(path)
    placed = model.model.encoder.layers[1].fc1.weight
    assert torch.equal(placed, found["encoder_l2_ffn_W1"])
    assert not torch.equal(placed, found["encoder_l1_ffn_W1"])
    assert model.model.decoder.embed_tokens.weight is model.model.encoder.embed_tokens.weight
    assert model.final_logits_bias[0, -1] == marian_file.NEVER
    asked = {"input_ids": torch.tensor([[5, 9, 0]]), "labels": torch.tensor([[7, 3, 0]])}
    assert model(**asked).loss == model.train()(**asked).loss
    for spoilt, why in (
        (path.read_bytes()[:-300], "cut off"),
        (b"\2" + path.read_bytes()[1:], "version 2"),
        (path.read_bytes().replace(struct.pack("<Q", 0x4101), struct.pack("<Q", 0x4102)), "type"),
        (path.read_bytes().replace(b"_ffn_b1", b"_ffn_b9"), "ffn_b1"),
    ):
        path.write_bytes(spoilt)
        with pytest.raises((marian_file.MarianFileError, KeyError), match=why):
            marian_file.model_of(path)


def test_the_recurrence_is_a_plain_loop(voita, tmp_path):
    from marian_file import model_of
    from ssru import Ssru
    from transformers import DynamicCache

    torch.manual_seed(0)
    ssru, x = Ssru(6, 0), torch.randn(2, 5, 6)
    with torch.no_grad():
        output, _ = ssru(x)
        state = torch.zeros(2, 6)
        for step in range(5):
            f = torch.sigmoid(x[:, step] @ ssru.forget.weight.T + ssru.forget.bias)
            state = f * state + (1 - f) * (x[:, step] @ ssru.candidate.weight.T)
            torch.testing.assert_close(output[:, step], state.relu())
        cache = DynamicCache()
        parts = [ssru(part, cache)[0] for part in x.split(2, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), output)
        alone = torch.cat([ssru(part)[0] for part in x.split(2, 1)], 1)
        assert not torch.allclose(alone, output)

    model = model_of(write(tmp_path / "model.bin", weights(0)))
    ids = torch.tensor([[5, 9, 14, 0], [7, 7, 0, model.config.pad_token_id]])
    asked = {"input_ids": ids, "attention_mask": ids.ne(model.config.pad_token_id).long()}
    cached, whole = (
        model.generate(**asked, max_new_tokens=8, use_cache=use) for use in (True, False)
    )
    assert torch.equal(cached, whole)


def test_the_student_is_taken_and_cut_by_the_commands(voita, tmp_path, monkeypatch):
    for name, count in (("text", 60), ("test", 6), ("other", 6)):
        (tmp_path / f"{name}.en").write_text(sentences(count, count + len(name)))
    work, tokenizer = tmp_path / "work", write_tokenizer(tmp_path / "tokenizer.json")
    work.mkdir()
    voita.take(write(tmp_path / "model.bin", weights(0)), tokenizer, work / voita.MODEL)
    files = {name: str(tmp_path / f"{name}.en") for name in ("test", "other")}
    voita.main(work, [str(tmp_path / "text.en")], **files, pairs=50, count=5)
    held = {file.stem: file.read_text() for file in work.glob("*.jsonl")}
    assert {name: text.count("\n") for name, text in held.items()} == {
        "train-0": 50,
        "test": 5,
        "other": 5,
    }
    assert json.loads(held["test"].splitlines()[0])["en"] in (tmp_path / "test.en").read_text()
    with pytest.raises(SystemExit, match="2 seeds of 50 sentences .* the text has 60"):
        voita.main(work, [str(tmp_path / "text.en")], **files, seeds=2, pairs=50)

    def headprune(*words):
        monkeypatch.setattr("sys.argv", ["headprune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("headprune_with_ssru", run_name="__main__")
        assert not ended.value.code

    model, pairs = work / voita.MODEL, ["--text-column", "en,pt"]
    settings = ROOT / "configs" / "voita.yaml"
    smaller = ["steps=2", "batch_size=2", f"model={model}", f"data={work / 'train-0.jsonl'}"]
    smaller += [f"output={tmp_path / 'gates'}", "text_column=en,pt", "l0_penalty=0.2"]
    headprune("train-gates", "--config", settings, *(w for s in smaller for w in ("--config", s)))
    assert json.loads((tmp_path / "gates" / "gates.json").read_text())["judgement"] is None
    headprune("prune", model, tmp_path / "cut", "--gates", tmp_path / "gates")
    how = ["--data", work / "test.jsonl", *pairs, "--metric", "bleu", "--against", model]
    headprune("evaluate", tmp_path / "cut", tmp_path / "report.json", *how, "--no-speed")
    report = json.loads((tmp_path / "report.json").read_text())
    base = {one["name"]: one["value"] for one in report["against"]["metrics"]}
    assert base["bleu"] == pytest.approx(100)  # the references are its own
