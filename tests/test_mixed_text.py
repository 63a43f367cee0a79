"""The text of a compression: apart by position, mixed evenly, named with its source."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headprune.compression import texts
from headprune.compression.heldout import HeldOut
from headprune.config import DataConfig
from headprune.errors import DataError
from tests import tiny


def test_the_text_that_ships_is_named_with_its_source() -> None:
    files = [Path(data.source) for data in texts.shipped().values()]
    said = (files[0].parent / "SOURCE.md").read_text(encoding="utf-8")
    assert len(files) == 6
    for file in files:
        assert f"`{file.name}`" in said
        text = gzip.decompress(file.read_bytes()).decode()
        assert 80_000 < len(text) < 100_000 and "Gutenberg" not in text
    assert "PSF LICENSE AGREEMENT" in (files[0].parent / "LICENSE-PSF.txt").read_text()


def test_an_eighth_of_every_text_is_held_out_from_all_over_it(tmp_path: Path) -> None:
    lines = [f"line {i:04d} of a text\n" for i in range(1600)]
    (tmp_path / "plain.txt").write_text("".join(lines))
    rows = [json.dumps({"text": line}) for line in lines[:80]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = ("plain.txt", "rows.jsonl")
    sources = {Path(n).stem: DataConfig(source=str(tmp_path / n)) for n in files}
    parts = texts.read(sources)
    three = (parts.learning, parts.choosing, parts.reporting)
    plain = [[row[0] for row, _ in part[0].rows] for part in three]
    assert sorted("".join(map("".join, plain)).splitlines(True)) == lines  # nothing is in both
    held_out = [plain[1][0], plain[2][0], plain[1][1], plain[2][1]]  # in turns: 4 blocks
    assert all(block.startswith("line") and block.endswith("\n") for block in held_out)
    places = [int(block[5:9]) / 1600 for block in held_out]
    assert all(i / 4 <= at < (i + 1) / 4 for i, at in enumerate(places))
    rows = [[row[0] for row, _ in part[1].rows] for part in three]
    assert [len(part) for part in rows] == [70, 5, 5]
    assert [rows[1], rows[2]] == [lines[12:80:16], lines[4:80:16]]  # the second text's turns
    labelled = DataConfig(source=str(tmp_path / "labelled.jsonl"), label_column="label")
    Path(labelled.source).write_text(json.dumps({"text": "a", "label": "b"}))
    with pytest.raises(DataError, match="cannot be mixed"):
        texts.read({**sources, "labelled": labelled})


def test_few_documents_of_several_texts_give_both_held_out_parts_something(tmp_path: Path) -> None:
    for name, count in {"eight": 8, "nine": 9}.items():
        rows = (json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    parts = texts.read({f.stem: DataConfig(source=str(f)) for f in sorted(tmp_path.iterdir())})
    for part in (parts.choosing, parts.reporting):
        assert [len(text.rows) for text in part] == [1, 1]


@pytest.mark.parametrize("short", ["choose", "report"])
def test_each_held_out_part_needs_a_sequence(short: str) -> None:
    few, many = (
        (texts.Text("t", (((tiny.text(words),), None),), plain=False),) for words in (3, 100)
    )
    parts = texts.Parts((), *((few, many) if short == "choose" else (many, few)))
    net, tokenizer = tiny.model("llama-gqa"), tiny.tokenizer()
    with pytest.raises(DataError, match=f"3 tokens, is held out to {short} on"):
        HeldOut(net, tokenizer, parts, seq_len=16, tokens=64, batch_size=4)
    enough = texts.Parts((), many, many)
    assert HeldOut(net, tokenizer, enough, seq_len=16, tokens=64, batch_size=4).tokens == 64


def test_texts_are_mixed_in_equal_parts_as_far_as_they_reach(tmp_path: Path) -> None:
    sizes = {"long": 400_000, "longer": 900_000, "short": 3_000}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n" * (size // len(f"{name} text\n")))
    sources = {n: DataConfig(source=str(tmp_path / f"{n}.txt")) for n in sizes}
    trained = texts.read(sources).learning
    parts = dict(zip(sizes, texts.mixed(trained, 20_000), strict=True))
    assert parts["short"].size == trained[2].size
    assert abs(parts["long"].size - parts["longer"].size) < 10_000
    assert 110_000 < sum(part.size for part in parts.values()) < 140_000
    data = texts.write(list(parts.values()), tmp_path / "mixed")
    assert Path(data.source).read_text().count("short text") == trained[2].size // 11


def test_where_all_reach_far_samples_come_from_all_over_them(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        lines = (f"{name} text, line {i:05d}\n" for i in range(20_000))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    sources = {f.stem: DataConfig(source=str(f)) for f in tmp_path.iterdir()}
    trained = texts.read(sources).learning
    few, many = (texts.mixed(trained, tokens) for tokens in (100, 4_000))
    assert all(0 < part.size < 20_000 for part in few)
    for part, whole in zip(many, trained, strict=True):
        assert abs(part.size - 16 * 4_000 * texts.CHARACTERS // 3) < 20_000
        assert whole.rows.index(part.rows[-1]) > 0.8 * len(whole.rows)


def test_sentences_are_rows() -> None:
    text = texts.Text("t", ((("A first sentence of it. And a\nsecond one. No.",), None),), True)
    assert [row[0] for row, _ in text.by_sentence().rows] == ["A first sentence of it."]
    longer = texts.Text(
        "t", ((("One that is long enough!  Another that\nis, too? x",), None),), True
    )
    found = [row[0] for row, _ in longer.by_sentence().rows]
    assert found == ["One that is long enough!", "Another that is, too?"]
