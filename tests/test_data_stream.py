"""Long text: tokens of the whole up to a limit, in parts beyond it, and files that are damaged."""

import json
import random
import tempfile
from functools import partial
from itertools import chain

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from headprune.config import CalibrationConfig, ConvertConfig, DataConfig, HealConfig, Objective
from headprune.data import sequences
from headprune.data.batches import batches, calibration, merge_calibration
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import all_windows, windows
from headprune.data.text import evenly, lengths
from headprune.data.tokens import WHOLE, slices, tokens_of
from headprune.errors import DataError
from tests import tiny

PROSE = tiny.text(900)


def whole(text, of):
    return of(text, add_special_tokens=False, verbose=False)["input_ids"]


def pieces(text, seed=0):
    draw = random.Random(seed)
    while text:
        size = draw.choice([1, 7, 50, 400])
        yield text[:size]
        text = text[size:]


def flat(parts):
    return list(chain.from_iterable(parts))


def test_a_text_within_the_limit_is_tokenized_as_a_whole():
    assert WHOLE == 4 * 1024**2
    of, text = tiny.tokenizer(), f"{PROSE}\n\n\n{PROSE}"
    ((ids,),) = tokens_of(pieces(text), of)
    assert ids.tolist() == whole(text, of)
    assert [len(list(tokens_of(pieces(text), of, most=len(text) - n))) for n in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("w1 w2\nw3\n\nw4\nw5 w6", ["w1 w2\nw3\n\n", "w4\nw5 w6"]),
        ("w1 w2 w\r\n\r\nw\nw5 w6", ["w1 w2 w\r\n\r\n", "w\nw5 w6"]),
        ("w1 w2\nw3 w4 w5 w6", ["w1 w2\nw3 w4 w5", " w6"]),  # too early
        ("w1 w2 w3 w4\nw5 w6", ["w1 w2 w3 w4\n", "w5 w6"]),
        ("w1 w2 w3 w4 w5 w6", ["w1 w2 w3 w4 w5", " w6"]),
        ("\n" * 30, ["\n" * 14, "\n" * 14, "\n" * 2]),
    ],
)
def test_a_longer_text_is_cut_at_blank_lines_or_lines(text, cut):
    assert list(slices(pieces(text), 14)) == cut == list(slices([text], 14))
    of = tiny.tokenizer()
    found = [ids.tolist() for (ids,) in tokens_of([text], of, most=14)]
    assert found == [whole(part, of) for part in cut]


def test_a_text_is_read_no_further_than_tokens_are_asked_for():
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield "w1 w2 w3 w4 w5 w6 w7 w8\n\n"

    (first,) = next(tokens_of(endless(), tiny.tokenizer(), most=240))
    assert first.tolist() == whole("w1 w2 w3 w4 w5 w6 w7 w8\n\n" * 9, tiny.tokenizer())
    assert read == 10


def files(folder, *texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return read_examples(DataConfig(source=str(folder)))


def test_windows_are_those_of_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "_AT_ONCE", 100)
    of, texts = tiny.tokenizer(), [PROSE, tiny.text(300), tiny.text(200)]
    stream = flat(whole(text, of) for text in texts)
    found = all_windows(files(tmp_path, *texts), of, 16)[0]
    rows = [stream[i * 16 : i * 16 + 16] for i in range(len(stream) // 16)]
    assert list(found["input_ids"]) == rows
    assert all(mask == [1] * 16 for mask in found["attention_mask"])
    assert lengths(found).tolist() == [16] * len(rows)
    starts = np.cumsum([0, *(len(whole(text, of)) for text in texts)])
    for most in (1, 7, 50):  # all over the text, each with the document that it begins in
        part, begins = windows(files(tmp_path, *texts), of, 16, most=most)
        numbers = evenly(len(rows), most)
        assert list(part["input_ids"]) == [rows[number] for number in numbers]
        assert begins.tolist() == [sum(16 * n >= starts) - 1 for n in numbers]
    assert set(begins.tolist()) == {0, 1, 2}
    documents = Examples([(text,) for text in texts], None, rows_are_documents=True)
    ended = flat([*whole(text, of), of.eos_token_id] for text in texts)
    found = all_windows(documents, of, 16)[0]
    assert flat(found["input_ids"]) == ended[: len(ended) // 16 * 16]


@pytest.mark.parametrize("kind", ["text", "documents", "rows", "chosen by tokens", "merge"])
def test_no_more_text_is_tokenized_than_a_short_run_needs(kind, tmp_path, monkeypatch):
    """Two steps on a long text, and on one that is four times as long."""
    monkeypatch.setattr(sequences, "_MIN_SCANNED_TOKENS", 2_000)
    monkeypatch.setattr("headprune.data.tokens.WHOLE", 2_000)
    monkeypatch.setattr(sequences, "tokens_of", partial(tokens_of, most=2_000))
    read = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text, *args, **options):
            read.append(sum(map(len, [text] if isinstance(text, str) else text)))
            return super().__call__(text, *args, **options)

    of, name = tiny.tokenizer(), "bert-base" if kind == "rows" else "llama-gqa"
    of.__class__ = Counting
    net, seen = tiny.model(name), []
    for size in (2, 8):
        lines = [tiny.text(12, seed) for seed in range(300)] * size
        file = tmp_path / f"{size}{'.txt' if kind == 'text' else '.jsonl'}"
        rows = lines if kind == "text" else [json.dumps({"text": line}) for line in lines]
        file.write_text("\n\n".join(rows) if kind == "text" else "\n".join(rows))
        data = DataConfig(source=str(file))
        read.clear()
        if kind == "chosen by tokens":
            few = CalibrationConfig(calibration_tokens=64, seq_len=16)
            assert calibration(net, of, data, few, "score").fit.tokens == 64
        elif kind == "merge":
            merge = ConvertConfig(kv_heads=1, merge="lowrank", calibration_tokens=64, seq_len=16)
            assert merge_calibration(net, of, data, merge).fit.tokens == 64
        else:
            heal = HealConfig(steps=2, batch_size=2, seq_len=16)
            assert len(batches(Objective.DISTILL, net, of, data, heal).rows) >= 2 * 2 + 2 * 16
        seen.append(sum(read))
        assert seen[-1] < 40_000
    assert seen[1] <= 1.2 * seen[0]


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n' * 9)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    examples = read_examples(DataConfig(source=str(tmp_path / "rows.jsonl")))
    found = all_windows(examples, tiny.tokenizer(), 4)[0]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(found) == 11 and len(list(examples.texts)) == 9  # and they are still there


def test_a_full_disk_is_said(monkeypatch):
    def full(path, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headprune.data.files.pa.OSFile", full)
    examples = Examples([("w1 w2",)], None, rows_are_documents=True)
    with pytest.raises(DataError, match="could not be kept in .*No space left.*TMPDIR"):
        all_windows(examples, tiny.tokenizer(), 2)
