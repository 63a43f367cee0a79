"""Files that are damaged, changed or hold no text, homes that cannot be written, odd numbers."""

import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value, load_dataset

import headprune
from headprune.config import ConvertConfig, DataConfig, EvaluateConfig, Objective, TrainGatesConfig
from headprune.config.data import data_config
from headprune.data.batches import batches, label_reader
from headprune.data.read import Examples, digest_of_data, read_examples
from headprune.data.sequences import tokenized_rows, translation_rows
from headprune.data.tokens import refuse_beyond
from headprune.errors import DataError, HeadpruneError, HeadpruneWarning
from headprune.evaluation import quality
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.evaluate import evaluate
from headprune.result.convert_gqa import convert_gqa
from tests import tiny
from tests.test_cli import refuses, succeeds

PACKED = gzip.compress(b"w1 w2 w3 " * 999)


def parquet(*texts):
    """A file whose strings may be no UTF-8."""
    array = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts).buffers())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": array}), sink)
    return sink.getvalue().to_pybytes()


def flipped(content):
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 0x55]) + content[half + 1 :]


DAMAGED = {
    "latin.txt": (b"caf\xe9 au lait", "not readable as UTF-8"),
    "cut.txt": ("fine é".encode()[:-1], "not readable as UTF-8 .*unexpected end"),
    "late.txt": (b"w1 " * 200_000 + b"\xff", "at byte 600,000"),
    "mark.txt": ("\ufeffé".encode() + b"\xff", "at byte 5"),
    "blank.txt": (b" \n\n ", "holds no text"),
    "cut.txt.gz": (PACKED[:-10], "not readable .Compressed file ended"),
    "flipped.jsonl.gz": (flipped(PACKED), "not readable .(Error -3|CRC check)"),
    "surrogate.jsonl": (b'{"text": "a\\ud800b"}\n', "surrogate"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": \n', "JSON parse error"),
    "empty.jsonl": (b"", "no rows"),
    "quote.csv": (b'text\n"a\nb\n', "quote.csv', line 2: .*unexpected end of data"),
    "wide.csv": (b"text,b\na,1\nb,2,3,4\n", "wide.csv', line 3: this row has 4 cells"),
    "long.csv": (b'text,b\n"a\nb",1\na,1,2\n', "long.csv', line 4: this row has 3 cells"),
    "short.tsv": (b"text\tb\na\t1\nb\n", "short.tsv', line 3: this row has 1 cells"),
    "spaced.csv": (b'text,b\na, "b, c"\n', "spaced.csv', line 2: this row has 3 cells"),
    "said.csv": (b'text\na\n"b" said c\n', "said.csv', line 3: the row .* no CSV"),
    "mac.csv": (b"text\ra\rb", r"mac.csv', line 1: a carriage return \(CR\) alone"),
    "mac.tsv": (b"text\tb\ra\tc\r", r"mac.tsv', line 1: a carriage return \(CR\) alone"),
    "late.csv": (b"text,b\na,1\nb,2\r3,4\n", r"late.csv', line 3: a carriage return \(CR\)"),
    "excel.csv": (b"sep=;\r\ntext;b\r\na;1\r\n", "excel.csv' begins with Excel's line sep="),
    "excel.tsv": (b"sep=\t\ntext\tb\na\t1\n", "excel.tsv' begins with .* remove that line"),
    "columns.json": (pd.DataFrame({"text": ["a"]}).to_json().encode(), "columns.*or JSONL"),
    "named.json": (b'{"text": ["a", "b"], "label": [0, 1]}', "holds columns.*a list of rows"),
    "rows.json": (b'[["a", "b"], ["c", "d"]]', "rows without names. Give a list of rows"),
    "null.json": (b'[null, {"text": "a"}]', "a list of rows"),
    "twice.csv": (b"text,text\na,b\n", "two columns called 'text'"),
    "names.csv": (b"text,label\n", "names.csv' has no rows"),
    "cut.parquet": (b"PAR1garbage", "magic bytes not found"),
    "bytes.parquet": (parquet(b"w1", b"a\xff\xed\xa0\x80"), "not readable as UTF-8"),
    "null.jsonl": (b" null\n\nnull\n", "a row that is null"),
    "later.jsonl": (b'{"text": "b"}\nnull\n', "a row that is null"),
    "numbers.jsonl": (b'{"text": 1}\n', "column 'text' .* holds no text"),
    "lists.jsonl": (b'{"text": [1], "b": "c"}\n', "holds no text. Columns of text: b;"),
    "nulls.jsonl": (b'{"text": null}\n', "column 'text' .* holds no text"),
    "chat.jsonl": (
        b'{"source": "a", "messages": [{"role": "user", "content": "w1"}]}\n',
        "holds chats, and the tokenizer has no chat template",
    ),
    "headless.csv": (b"it was a good film\nw1 w2\n", "no header row: .*'it was a good film'"),
    "two.csv": (b"a,b\nw1,w2\n", "--text-column SOURCE,TARGET"),
    "odd.xyz": (b"w1", "ending of .* names no format"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_in_a_sentence(name, tmp_path):
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_examples(DataConfig(source=str(tmp_path / name))).texts)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("semicolons.csv", '\ufefftext;label\n"w1, w2";a\nw3;b\n'),
        ("bars.csv", "text|label\nw1, w2|a\nw3|b\n"),
        ("tabs.csv", "text\tlabel\nw1, w2\ta\nw3\tb\n"),
        ("quoted.csv", '"text";"label, such as a"\nw1, w2;a\nw3;b\n'),
        ("commas.csv", 'text,label\n"w1, w2",a\nw3,b\n'),
        ("commas.tsv", "text\tlabel; of it\nw1, w2\ta\nw3\tb\n"),
        ("one.csv", 'text\n"w1, w2"\nw3\n'),
        ("packed.csv.gz", "text;label\nw1, w2;a\nw3;b\n"),
    ],
)
def test_columns_are_separated_as_their_first_row(name, content, tmp_path):
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert texts_in(tmp_path / name) == ["w1, w2", "w3"]


def texts_in(place, **options):
    return [text for (text,) in read_examples(DataConfig(source=str(place), **options)).texts]


CELLS = [
    *("NA", "N/A", "null", "None", "nan", "TRUE", "false", "1e5", "007", "1.0", "-0", "#N/A", "-"),
    *("12345678901234567890123", "0.1234567890123456789", "  a ", 'say "hi"', "2021-02-03", "é"),
]
QUOTED = [*CELLS, '"', '"a" said', "a,b;c\td", "two\nlines", "two\r\nlines"]


def written(name, cells):
    """A table whose columns are the cells, and the cells again, in turns."""
    rows, text = list(zip(cells, cells[::-1], [*cells[1:], cells[0]], strict=True)), io.StringIO()
    if ".jsonl" in name:
        lines = [json.dumps(dict(zip("abl", row, strict=True))) for row in rows]
        text.write("\n".join(lines))
    elif ".tsv" in name:
        text.write("\r\n".join("\t".join(row) for row in [("a", "b", "l"), *rows]))
    else:
        table = csv.writer(text, delimiter=";" if "semicolon" in name else ",")
        table.writerows([("a", "b", "l"), *rows])
    content = text.getvalue().encode("utf-8-sig" if "excel" in name else "utf-8")
    return gzip.compress(content) if name.endswith(".gz") else content


@pytest.mark.parametrize(
    "name", ["a.csv", "semicolon.csv", "excel.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "a.jsonl"]
)
def test_every_cell_is_read_as_it_is_written(name, tmp_path):
    file, cells = tmp_path / name, CELLS if ".tsv" in name else QUOTED
    file.write_bytes(written(name, cells))
    examples = read_examples(DataConfig(source=str(file), text_column="a,b", label_column="l"))
    assert list(examples.texts) == list(zip(cells, cells[::-1], strict=True))
    assert list(examples.labels or ()) == [*cells[1:], cells[0]]
    changed = [cells[0].lower(), *cells[1:]]
    file.write_bytes(written(name, changed))
    assert next(iter(read_examples(DataConfig(source=str(file), text_column="a,b")).texts)) == (
        "na",
        cells[-1],
    )


def test_tables_from_elsewhere_have_the_cells_of_plain_readers(tmp_path):
    """As GLUE writes SST-2, Excel a CSV, pandas an index, datasets dates and a missing label."""

    def read(name, content, column, label):
        (tmp_path / name).write_bytes(content)
        config = DataConfig(source=str(tmp_path / name), text_column=column, label_column=label)
        examples = read_examples(config)
        return [text for (text,) in examples.texts], list(examples.labels or ())

    lines = ["sentence\tlabel", 'it \'s a "charming" film\t1', '" unclosed\t0', 'and "\t1']
    found = read("sst.tsv", "\n".join(lines).encode(), "sentence", "label")
    assert list(zip(*found, strict=True)) == [tuple(line.split("\t")) for line in lines[1:]]

    text = 'text;label;;\r\n"a; b\r\nc";TRUE;;\r\n"say ""hi""";007;;\r\n\r\n'
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=";") if row][1:]
    found = read("excel.csv", text.encode("utf-8-sig"), "text", "label")
    assert found == ([row[0] for row in rows], [row[1] for row in rows])

    frame = pd.DataFrame({"text": ["NA", "x", None], "label": [0, 1, None]})
    frame["label"] = frame["label"].astype("Int64")
    for name, content in (
        ("index.csv", frame.to_csv()),  # an index, and an empty row
        ("lines.jsonl", frame.to_json(orient="records", lines=True)),
        ("list.json", frame.to_json(orient="records", indent=1)),
    ):
        with pytest.warns(HeadpruneWarning, match="1 of 3 rows have no text"):
            assert read(name, content.encode(), "text", "label") == (["NA", "x"], ["0", "1"])
    frame.astype({"label": float}).to_parquet(tmp_path / "floats.parquet")
    content = (tmp_path / "floats.parquet").read_bytes()
    with pytest.warns(HeadpruneWarning, match="1 of 3 rows have no text"):
        assert read("floats.parquet", content, "text", "label") == (["NA", "x"], ["0", "1"])

    mixed = b'{"text": "a", "label": 1}\n{"text": "b", "label": "1"}\n'
    assert read("mixed.jsonl", mixed, "text", "label") == (["a", "b"], ["1", "1"])


@pytest.mark.parametrize("score", ["0.5", "1", "True"])
def test_a_column_of_numbers_is_not_taken_for_the_text(score, tmp_path):
    (tmp_path / "a.csv").write_text(f",sentence,score\n0,w1 w2,{score}\n1,7,{score}\n")
    assert texts_in(tmp_path / "a.csv") == ["w1 w2", "7"]
    assert texts_in(tmp_path / "a.csv", text_column="score") == [score, score]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (json.dumps(["a", "b"], indent=1), ["a", "b"]),
        (json.dumps([{"text": "a"}, {"text": "b"}]), ["a", "b"]),
        (json.dumps({"text": "a", "of": {"b": 1}}, indent=1), ["a"]),
        (json.dumps({"id": 1, "text": ["a", "b"]}), ["a b"]),
        ('{"text": ["a", "b"]}\n{"text": ["c", null]}\n', ["a b", "c "]),
    ],
)
def test_json_is_a_list_of_rows_lines_or_one_row(content, texts, tmp_path):
    (tmp_path / "a.json").write_text(content)
    assert texts_in(tmp_path / "a.json") == texts


def in_format(folder, kind, columns, **types):
    """A table as the library of the format writes it."""
    file, table = folder / f"a.{kind}", Dataset.from_dict(columns)
    for name, feature in types.items():
        table = table.cast_column(name, feature)
    rows = list(zip(*columns.values(), strict=True))
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        to = csv.writer(text, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n")
        to.writerow(columns)
        to.writerows([c if isinstance(c, str) else json.dumps(c) for c in row] for row in rows)
        file.write_text(text.getvalue())
    elif kind in ("json", "jsonl"):
        rows_of = [dict(zip(columns, row, strict=True)) for row in rows]
        lines = map(json.dumps, rows_of)
        file.write_text(json.dumps(rows_of) if kind == "json" else "\n".join(lines))
    elif kind == "parquet":
        table.to_parquet(file)
    else:
        table.save_to_disk(folder / "saved")
        (saved,) = (folder / "saved").glob("*.arrow")
        saved.rename(file)
    return file


KINDS = ["csv", "tsv", "json", "jsonl", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_is_none_in_any_file(kind, tmp_path):
    columns = {"text": ["a", "", " b"], "more": ["", "x", "y"], "l": ["0", "1", "2"]}
    data = DataConfig(source=str(in_format(tmp_path, kind, columns)), label_column="l")
    with pytest.warns(HeadpruneWarning, match="1 of 3 rows have no text in text"):
        examples = read_examples(data)
    assert (list(examples.texts), [*(examples.labels or ())]) == ([("a",), (" b",)], ["0", "2"])
    with pytest.warns(HeadpruneWarning, match="2 of 3 rows have no text in text or more"):
        pairs = read_examples(data.model_copy(update={"text_column": "text,more"}))
    assert list(pairs.texts) == [(" b", "y")]
    labelled = data.model_copy(update={"text_column": "l", "label_column": "more"})
    with pytest.raises(DataError, match="--label-column more: 1 rows of .* no label"):
        read_examples(labelled)


LABELS = {
    "booleans": ([True, False], Value("bool")),
    "few bits": ([0.1, 2.5, 1e-7], Value("float32")),
    "many bits": ([0.1, 1 / 3, 123456.789], Value("float64")),
    "integers": ([2**53 + 1, -(2**62) - 1], Value("int64")),
    "digits": (["12345678901234567890123", "007"], Value("string")),
    "lists of booleans": ([[True, False], [False]], List(Value("bool"))),
    "lists of few bits": ([[0.1, 1.0], [2.5]], List(Value("float32"))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", LABELS)
def test_a_label_is_written_alike_in_any_file(case, kind, tmp_path):
    labels, feature = LABELS[case]

    def read(labels):
        columns = {"text": ["w1"] * len(labels), "l": labels}
        file = in_format(tmp_path, kind, columns, l=feature)
        data = DataConfig(source=str(file), text_column="text", label_column="l")
        return list(read_examples(data).labels or ())

    wanted = [x if isinstance(x, str) else json.dumps(x) for x in labels]
    assert read(labels) == wanted
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    assert read(labels[::-1]) == wanted[::-1] != wanted


@pytest.mark.parametrize("label", [12345678901234567890123, 2**53 + 1, -(2**53)])
def test_a_whole_number_that_was_rounded_is_refused(label, tmp_path):
    def read(*labels):
        lines = (json.dumps({"text": "a", "l": one}) for one in labels)
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        data = DataConfig(source=str(tmp_path / "a.jsonl"), label_column="l")
        return list(read_examples(data).labels or ())

    with pytest.raises(DataError, match="--label-column l: .* beyond 2.*Write .* as strings"):
        read(0.5, label)  # a column of fractions is one of float64
    assert read(0.5, 2**53 - 1) == ["0.5", str(2**53 - 1)]


@pytest.mark.parametrize("number", [-1, -100, 2])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_number_of_no_class_is_refused(kind, several, number, tmp_path):
    names = ClassLabel(names=["O", "B-PER"])
    feature = List(names) if several else names

    def read(value):
        labels = [[0, value], [1]] if several else [0, value]
        table = Dataset.from_dict({"text": ["a b", "c"], "l": labels})
        raw = List(Value("int64")) if several else Value("int64")
        schema = Features({"text": Value("string"), "l": feature}).arrow_schema
        cast = table.cast(Features({"text": Value("string"), "l": raw})).data.table
        told = cast.replace_schema_metadata(schema.metadata)
        file = tmp_path / f"a.{kind}"
        if kind == "parquet":
            pq.write_table(told, file)
        else:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, told.schema) as out:
                out.write_table(told)
        data = DataConfig(source=str(file), text_column="text", label_column="l")
        return list(read_examples(data).labels or ())

    wanted = [json.dumps(names.int2str(x)) for x in ([0, 1], [1])] if several else ["O", "B-PER"]
    assert read(1) == wanted
    with pytest.raises(DataError, match="none of the labels O, B-PER. Give labelled data"):
        read(number)


DATES = {
    "texts": ["2024-01-01", "2024-01-02T03:04"],
    "words": [["2024-01-01", "2024-01-02 03:04:05"], ["2024-01-03"]],
}


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize("case", DATES)
def test_a_text_of_dates_stays_as_it_is(case, kind, tmp_path):
    def read(cells):
        file = in_format(tmp_path, kind, {"text": cells, "l": cells})
        examples = read_examples(DataConfig(source=str(file), label_column="l"))
        assert [*(examples.labels or ())] == [
            x if isinstance(x, str) else json.dumps(x) for x in cells
        ]
        return [text for (text,) in examples.texts]

    def wanted(cells):
        return [cell if isinstance(cell, str) else " ".join(cell) for cell in cells]

    cells = DATES[case]
    assert read(cells) == wanted(cells)
    changed = json.loads(json.dumps(cells).replace("01-01", "01-01 00:00:00"))
    assert read(changed) == wanted(changed) != wanted(cells)


def test_rows_that_a_quote_may_have_swallowed_are_said(tmp_path):
    file = tmp_path / "a.csv"
    rows = [("text", "label"), ("said he,1\nb,2\nc", "3"), ("d", "4"), ('e, "f",5\ng', "6")]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    file.write_text(text.getvalue())
    with pytest.warns(HeadpruneWarning, match=r"a.csv', line 2: .* \(of 2 such rows the first"):
        assert texts_in(file, text_column="text") == [row[0] for row in rows[1:]]
    file.write_text('text,label\n"Dear all,\nthanks\nfor\nit",1\n"b\nc",2\n')
    with warnings.catch_warnings():
        assert texts_in(file, text_column="text") == ["Dear all,\nthanks\nfor\nit", "b\nc"]
    file.write_text('text\n"a, b\nc, d"\n')  # a column alone has no separators
    with warnings.catch_warnings():
        assert texts_in(file) == ["a, b\nc, d"]


def test_tables_of_a_folder_have_the_same_columns(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nw1,a\n")
    (tmp_path / "b.csv").write_text("label,text\nb,w2\n")
    assert texts_in(tmp_path) == ["w1", "w2"]
    (tmp_path / "b.csv").write_text("label,words\nb,w2\n")
    with pytest.raises(DataError, match="b.csv' has the columns label, words, and a file before"):
        texts_in(tmp_path)


HIDDEN = (".ipynb_checkpoints/a-checkpoint", "._a", "sub/.hidden/a", "__MACOSX/._a", "~$a")


@pytest.mark.parametrize("ending", [".txt", ".csv", ".tsv", ".jsonl", ".parquet"])
def test_hidden_files_are_no_data(ending, tmp_path):
    table, folder = Dataset.from_dict({"text": ["w1 w2", "w3"]}), tmp_path / ".home" / "data"
    (folder / "sub").mkdir(parents=True)
    for file in (folder / f"a{ending}", folder / "sub" / f"b{ending}"):
        if ending in (".csv", ".tsv"):
            table.to_csv(file, sep="," if ending == ".csv" else "\t")
        elif ending == ".txt":
            file.write_text("w1 w2\nw3\n")
        else:
            table.to_json(file) if ending == ".jsonl" else table.to_parquet(file)
    data = DataConfig(source=str(folder))
    texts, digest = texts_in(folder), digest_of_data(data)
    assert len(texts) == (2 if ending == ".txt" else 4)
    for name in HIDDEN:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / f"a{ending}", folder / f"{name}{ending}")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert (texts_in(folder), digest_of_data(data)) == (texts, digest)
    seen = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert seen.num_rows == 4 + 2  # datasets reads ~$a, the lock of an editor
    shutil.copy(folder / f"a{ending}", folder / f"c{ending}")
    assert digest_of_data(data) != digest and len(texts_in(folder)) > len(texts)
    assert texts_in(folder / f"._a{ending}") == texts_in(folder / f"a{ending}")  # asked for


TEMPLATE = """{% for m in messages %}{% if m.role not in ("user", "assistant", "system") %}{{
raise_exception("no role " + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}
{% endfor %}"""


@pytest.mark.parametrize(
    "rows",
    [
        {
            "messages": [
                {"role": "user", "content": "w1 w2"},
                {"role": "assistant", "content": "w3"},
            ]
        },
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]},
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_become_texts_by_the_template(kind, rows, tmp_path):
    tokenizer, file = tiny.tokenizer(), tmp_path / f"chats.{kind}"
    tokenizer.chat_template = TEMPLATE
    (column,) = rows
    table = Dataset.from_list([{"source": "a", **rows}, {"source": "b", column: rows[column][:1]}])
    table.to_json(file) if kind == "jsonl" else table.to_parquet(file)
    data = DataConfig(source=str(file))
    both = ["<user>w1 w2\n<assistant>w3\n", "<user>w1 w2\n"]
    assert list(read_examples(data, tokenizer).texts) == [(text,) for text in both]
    named = data.model_copy(update={"text_column": column})
    assert next(iter(read_examples(named, tokenizer).texts)) == (both[0],)
    digest = read_examples(data, tokenizer).sha256
    tokenizer.chat_template = TEMPLATE.replace("<{{", "[{{")
    assert read_examples(data, tokenizer).sha256 != digest
    tokenizer.chat_template = TEMPLATE.replace('"user", ', "")
    with pytest.raises(DataError, match="chat template takes no such messages: no role user"):
        read_examples(data, tokenizer)


def test_a_folder_is_read_file_by_file(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"w1, w2",x\n')
    (tmp_path / "b.tsv").write_text("text\tlabel\nw3, w4\tx\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.csv").write_text("text;label\nw5;x\n")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA card.")
    (tmp_path / "dataset_infos.json").write_text("{}")
    data = DataConfig(source=str(tmp_path), label_column="label")
    assert texts_in(tmp_path) == ["w1, w2", "w3, w4", "w5"]
    assert list(read_examples(data).labels or ()) == ["x"] * 3
    (tmp_path / "d.parquet").write_bytes(parquet(b"w6"))
    with pytest.raises(DataError, match="mixes csv and parquet files"):
        read_examples(data)
    notes = tmp_path / "notes"
    notes.mkdir()
    with pytest.raises(DataError, match="no file with one of the endings"):
        texts_in(notes)
    for name in ("README.md", "more.md"):  # where all is Markdown, this is text as well
        (notes / name).write_text(name)
    assert texts_in(notes) == ["README.md", "more.md"]


def test_what_datasets_saved_is_read(tmp_path):
    label = ClassLabel(names=["bad", "good"])
    features = Features({"text": Value("string"), "label": label})
    parts = {
        split: Dataset.from_dict({"text": texts, "label": [1] * len(texts)}, features)
        for split, texts in (("train", ["w1", "w2"]), ("test", ["w3"]))
    }
    parts["train"].save_to_disk(tmp_path / "one", num_shards=2)
    DatasetDict(parts).save_to_disk(tmp_path / "both")
    (saved, *_) = (tmp_path / "one").glob("*.arrow")
    shutil.copyfile(saved, tmp_path / "one" / "cache-1a2b.arrow")  # as map() leaves it
    one = DataConfig(source=str(tmp_path / "one"), label_column="label")
    both = one.model_copy(update={"source": str(tmp_path / "both")})
    test = both.model_copy(update={"split": "test"})
    for data, texts in ((one, ["w1", "w2"]), (both, ["w1", "w2"]), (test, ["w3"])):
        examples = read_examples(data)
        assert list(examples.texts) == [(text,) for text in texts]
        assert list(examples.labels or ()) == ["good"] * len(texts)
    assert digest_of_data(both) != digest_of_data(test)
    with pytest.raises(DataError, match="no split tset.*Did you mean 'test'"):
        read_examples(both.model_copy(update={"split": "tset"}))


def rows_file(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(path))


def test_rows_without_a_text_are_left_out_and_counted(tmp_path):
    data = rows_file(tmp_path, {"text": "w1 w2"}, {"text": None}, {"text": "w3"}, {"text": None})
    with pytest.warns(HeadpruneWarning, match="2 of 4 rows have no text in text .*; 2 are used"):
        examples = read_examples(data)
    assert list(examples.texts) == [("w1 w2",), ("w3",)]
    pairs = rows_file(tmp_path, {"a": "x", "b": None, "l": 1}, {"a": "x", "b": "y", "l": 2})
    pairs = pairs.model_copy(update={"text_column": "a,b", "label_column": "l"})
    with pytest.warns(HeadpruneWarning, match="1 of 2 rows have no text in a or b"):
        examples = read_examples(pairs)
    assert (list(examples.texts), list(examples.labels or ())) == ([("x", "y")], ["2"])
    data = rows_file(tmp_path, {"text": "a", "l": "x"}, {"text": "b", "l": None})
    with pytest.raises(DataError, match="--label-column l: 1 rows of .* no label"):
        read_examples(data.model_copy(update={"label_column": "l"}))


def test_digests_are_of_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("w1 w2\n", encoding="utf-8-sig")  # whose mark is no text
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"w1 w2\n"))
    wanted = hashlib.sha256(b"w1 w2\n\0").hexdigest()
    for name in ("text.txt", "packed.txt.gz"):
        assert read_examples(DataConfig(source=str(tmp_path / name))).sha256 == wanted
    data = rows_file(tmp_path, {"text": "a", "l": 1}, {"text": "b", "l": 2})
    labelled = read_examples(data.model_copy(update={"label_column": "l"}))
    assert labelled.sha256 == hashlib.sha256(b"a\0b\0" + b"1\0" + b"2\0").hexdigest()


def test_a_file_that_changed_is_read_again(tmp_path):
    """Under the name and the time that it had, as cp -p and rsync -t leave it."""
    data = rows_file(tmp_path, {"text": "w1 w2"}, name="a[1].jsonl")  # which is no pattern
    rows_file(tmp_path, {"text": "other"}, name="a1.jsonl")
    before, then = read_examples(data), Path(data.source).stat()
    rows_file(tmp_path, {"text": "w3 w4"}, name="a[1].jsonl")
    os.utime(data.source, ns=(then.st_atime_ns, then.st_mtime_ns))
    after = read_examples(data)
    assert list(after.texts) == [("w3 w4",)]
    assert after.sha256 != before.sha256


@pytest.mark.parametrize("label", ["²", "9" * 5000, "١x", ""])
def test_a_label_that_is_no_number_after_all(label):
    examples = Examples([("w1 w2",)], [label], rows_are_documents=True)
    with pytest.raises(DataError, match="is none of the model's labels"):
        label_reader(tiny.model("bert-classifier"), examples.labels or ())


def test_texts_without_tokens_and_windows_without_room():
    of = tiny.tokenizer()
    for texts in ([("w1", "w2"), ("", "w1")], [("w1", "w2"), ("w1", "")]):
        with pytest.raises(DataError, match="Row 1 .*no tokens"):
            translation_rows(Examples(texts, None, rows_are_documents=True), of, 8)
    with pytest.raises(DataError, match="Row 0 .*no tokens"):
        tokenized_rows(Examples([("",), ("w1",)], None, rows_are_documents=True), of, 8)


def test_targets_and_masks_beyond_the_vocabulary():
    of, pairs = tiny.tokenizer(), Examples([("w1 w2", "w5 w6")], None, rows_are_documents=True)
    with pytest.raises(DataError, match="'w6' has the id 11, .* 11 tokens, 0 to 10"):
        translation_rows(pairs, of, 8, 11)
    of.add_special_tokens({"mask_token": "<later>"})
    with pytest.raises(DataError, match="'<later>' has the id 65"):
        refuse_beyond([of.mask_token_id], of, tiny.VOCAB)


def test_nothing_to_mask_and_nothing_to_predict(text_file):
    of = tiny.tokenizer()
    special = Dataset.from_dict({"input_ids": [[0, 1, 2, 0]] * 2})
    with pytest.raises(DataError, match="no token to score in 2 windows"):
        quality.masked_losses(quality.Pass(tiny.model("bert-mlm"), special, of, 2, seed=0))
    one = Dataset.from_dict({"input_ids": [[9]] * 3})
    with pytest.raises(DataError, match="no token to score in 3 windows"):
        quality.causal_losses(quality.Pass(tiny.model("llama-gqa"), one, of, 2))
    config = TrainGatesConfig(target_heads=0.5, seq_len=8, batch_size=2, steps=1)
    data = DataConfig(source=str(text_file))
    read = batches(Objective.MLM, tiny.model("bert-mlm"), of, data, config)
    with pytest.raises(DataError, match="no token to mask in a whole batch"):
        read.collate([dict(row, attention_mask=[1] * 4) for row in special])
    short = config.model_copy(update={"seq_len": 1})
    with pytest.raises(DataError, match="--seq-len 1: there is nothing to predict"):
        batches(Objective.LM, tiny.model("llama-gqa"), of, data, short)


def test_a_difference_without_a_finite_interval_is_said(text_file, tmp_path, monkeypatch):
    with warnings.catch_warnings(record=True) as told:
        undefined = bootstrap(lambda i: np.full(i.shape[:-1], np.nan), 3, 50, 0.95, seed=0)
    assert not undefined.is_finite and not told
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    monkeypatch.setattr("headprune.evaluation.metrics.bootstrap", lambda *args: undefined)
    config = EvaluateConfig(seq_len=16, speed=False, max_windows=3)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", HeadpruneWarning)
        report = evaluate(model, DataConfig(source=str(text_file)), config, against=model)
    said = "The perplexity against the base has no finite interval on 3"
    assert any(said in str(one.message) for one in given)
    assert report.differences == ()


def test_a_merge_without_finite_weights_is_said_at_once(llama_folder, tmp_path, monkeypatch):
    def overflowing(heads, groups, context):
        return replace(heads, v=heads.v * 1e38 * 1e38)

    monkeypatch.setattr("headprune.surgery.merges.merger.MERGES", {"mean": overflowing})
    with pytest.raises(DataError, match="--merge mean makes no finite weights of .model.layers.0"):
        convert_gqa(llama_folder, tmp_path / "out", ConvertConfig(kv_heads=1, merge="mean"))
    assert not (tmp_path / "out").exists()


def test_one_window_is_enough_to_measure(tmp_path, capsys):
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(20))
    line = ("evaluate", model, "--data", tmp_path / "text.txt", "--config", "seq_len=16")
    succeeds(capsys, *line, "--no-speed")
    (tmp_path / "text.txt").write_text("w1")
    refuses(capsys, "The data has 1 tokens, which makes 0 sequences of 16", *line)


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00001", "test-00000-of-00001"],
        ["data/train-00000-of-00001", "data/test-00000-of-00001", "data/validation"],
        ["train", "test", "dev"],
        ["train/0000", "test/0000"],
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet", "txt"])
def test_files_of_splits_are_read_as_datasets_reads_them(names, ending, tmp_path):
    for name in names:
        file = tmp_path / f"{name}.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"text": [name]}
        file.write_text(name) if ending == "txt" else pd.DataFrame(row).to_parquet(
            file
        ) if ending == "parquet" else pd.DataFrame(row).to_csv(file, index=False)
    wanted = load_dataset(str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    assert {*wanted} >= {"train", "test"}
    for split, rows in wanted.items():
        got = read_examples(data_config(f"{tmp_path}@{split}", None, None))
        assert [*got.strings()] == rows["text"]
        assert [*read_examples(data_config(tmp_path, None, None, split=split)).strings()] == rows[
            "text"
        ]
    with pytest.raises(DataError, match="has files of the splits .*, and none of other"):
        read_examples(data_config(f"{tmp_path}@other", None, None))


def test_names_that_only_begin_like_a_split_are_files_of_one_text(tmp_path):
    for name in ("training", "testament", "developers", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert len([*read_examples(data_config(tmp_path, None, None)).texts]) == 4


def test_a_data_set_of_splits_in_memory_is_refused(llama_folder):
    rows = Dataset.from_dict({"text": ["w1 w2"]})
    with pytest.raises(
        HeadpruneError, match=r"splits train, test: give one of them.*data\['test'\]"
    ):
        headprune.evaluate(llama_folder, data=DatasetDict(train=rows, test=rows))


def test_views_of_strings_are_text(tmp_path):
    pq.write_table(
        pa.table({"text": pa.array(["a", "b"], pa.string_view())}), tmp_path / "a.parquet"
    )
    assert [*read_examples(data_config(tmp_path / "a.parquet", None, None)).texts] == [
        ("a",),
        ("b",),
    ]


@pytest.mark.parametrize("name", ["train.csv", "folder"])
def test_a_local_place_has_no_split(name, tmp_path):
    (tmp_path / "folder").mkdir()
    for file in ("train.csv", "folder/train.csv", "folder/train-2.csv"):
        (tmp_path / file).write_text("text\nhello\n")
    with pytest.raises(DataError, match="is a local .* without splits, so @test names none"):
        data_config(f"{tmp_path / name}@test", None, None)
    for file in ("test-notes.md", "test.png", ".git/test/a"):  # nothing that is read
        (tmp_path / "folder" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / file).touch()
    with pytest.raises(DataError, match="without splits"):
        data_config(f"{tmp_path / name}@test", None, None)
    assert data_config(tmp_path / name, None, None, split="test").split == "test"
    DatasetDict(test=Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "saved")
    assert [*read_examples(data_config(f"{tmp_path / 'saved'}@test", None, None)).texts] == [("a",)]


def test_columns_that_a_model_would_not_read_are_refused(llama_folder, tmp_path, capsys):
    rows = [{"q": tiny.text(9, n), "a": tiny.text(5, n + 99), "b": "w1"} for n in range(40)]
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, report = ("--data", file, "--text-column", "q,a"), tmp_path / "r.json"
    short = ("--config", "seq_len=32")
    for command in (("evaluate", llama_folder, report), ("score", llama_folder, tmp_path / "s")):
        refuses(
            capsys, "names pairs, and a language model reads single texts", *command, *short, *pairs
        )
    with pytest.raises(DataError, match="an example has two texts at most"):
        read_examples(DataConfig(source=str(file), text_column="q,a,b"))
    named = ("--data", file, "--config", "text_column=q,a", "--keep", "0.5")
    compressed = ("compress", llama_folder, tmp_path / "c", *named)
    refuses(capsys, "names pairs, and a language model reads single texts", *compressed)
    one = [llama_folder, report, *short, "--max-windows", 4, "--data", file, "--text-column"]
    succeeds(capsys, "evaluate", *one, "q")
    written = ("--metric", "exact_match", "--config", "max_new_tokens=4")
    succeeds(capsys, "evaluate", *one, "q,a", *written)


@pytest.mark.parametrize("cell", ['"He said ""w1"""', 'He said "w1"', '"w1" w2'])
def test_a_table_with_tabs_that_looks_quoted(cell, tmp_path):
    file = tmp_path / "t.tsv"
    file.write_text(f"text\tl\n{cell}\t1\n")
    quoted = '""' in cell
    with pytest.warns(HeadpruneWarning, match="name the file .csv") if quoted else nullcontext():
        read = read_examples(DataConfig(source=str(file), text_column="text"))
    assert list(read.texts) == [(cell,)]
    as_csv = file.rename(tmp_path / "t.csv")
    if quoted:
        read = read_examples(DataConfig(source=str(as_csv), text_column="text"))
        assert list(read.texts) == [('He said "w1"',)]
