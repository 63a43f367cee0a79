"""Metrics against formulas written out here, independence of batch size, and the report."""

import functools
import json
import math
import re
import shutil
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch.nn import functional as F
from transformers import GPT2Config, GPT2ForSequenceClassification

from headprune.config import DataConfig, EvaluateConfig
from headprune.data.batches import masked
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import windows
from headprune.errors import DataError, HeadpruneError
from headprune.evaluation import quality
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.evaluate import evaluate, run
from headprune.evaluation.loaded import load
from headprune.evaluation.metrics import Samples, rank_correlation, similarity_correlation
from headprune.evaluation.quality import Pass
from headprune.evaluation.report import Metric, Report
from headprune.evaluation.speed import measure
from headprune.model.attention import attention_of
from headprune.render.blocks import Table
from headprune.render.models import evaluated, evaluation
from tests import tiny

FAST = {"seq_len": 16, "resamples": 200, "speed": False}


def sequences_of(path, seq_len=16, count=7):
    examples = read_examples(DataConfig(source=str(path)))
    rows, _ = windows(examples, tiny.tokenizer(), seq_len, measured=True)
    return rows.select(range(count))


def test_causal_losses_are_those_of_the_model(text_file):
    model, rows = tiny.model("llama-gqa"), sequences_of(text_file)
    losses = quality.causal_losses(Pass(model, rows, tiny.tokenizer(), batch_size=3))
    ids = torch.tensor(rows["input_ids"])
    with torch.no_grad():
        wanted = [float(model(row[None], labels=row[None]).loss) * 15 for row in ids]
        shifted = [float(model(row[None], labels=row[None].roll(1)).loss) * 15 for row in ids]
    np.testing.assert_allclose(losses.nll_nats, wanted, rtol=1e-5)
    assert np.abs(losses.nll_nats - shifted).min() > 1e-2  # the comparison can fail
    assert losses.tokens.tolist() == [15] * 7
    words = tiny.tokenizer().convert_ids_to_tokens(ids[0, 1:].tolist())
    assert losses.utf8_bytes[0] == sum(len(f" {word}") for word in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_by_position_are_those_of_the_model(dtype, tmp_path):
    (tmp_path / "long.txt").write_text(tiny.text(3_400))
    model = tiny.model("llama-gqa", dtype, max_position_embeddings=2_048)
    rows = sequences_of(tmp_path / "long.txt", 1_100, 3)
    run = Pass(model, rows, tiny.tokenizer(), 2)
    losses = quality.causal_losses(run)
    ranges = {"256-512": (256, 512), "512-1k": (512, 1_024), "1k-1100": (1_024, 1_100)}
    assert [*losses.by_position] == [f"{n}@{r}" for r in ranges for n in ("nll_nats", "tokens")]
    ids = torch.tensor(rows["input_ids"])
    with torch.no_grad():
        logits = torch.cat([model(row[None, :-1]).logits for row in ids]).float()
    of_each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double()
    for name, (start, stop) in ranges.items():
        wanted, shifted = (of_each[:, start - d : stop - d].sum(1) for d in (1, 2))
        found = losses.by_position[f"nll_nats@{name}"]
        np.testing.assert_allclose(found, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-3)
        assert np.abs(found - shifted.numpy()).min() > 1e-2  # the comparison can fail
        assert losses.by_position[f"tokens@{name}"].tolist() == [stop - start] * 3
    assert not quality.position_ranges(sequences_of(tmp_path / "long.txt", 512, 3))


def test_ranges_of_positions_are_metrics_with_ratios(tmp_path):
    (tmp_path / "long.txt").write_text(tiny.text(14_000))
    folders = [
        tiny.save(tiny.model(case, max_position_embeddings=1_024), tmp_path / case)
        for case in ("llama-gqa", "llama-mha")
    ]
    data = {"": DataConfig(source=str(tmp_path / "long.txt"))}
    data["other"] = data[""]
    config = EvaluateConfig(**FAST | {"seq_len": 600})
    report = evaluate(folders[0], data, config, against=folders[1])
    names = [f"perplexity@{r}{d}" for d in ("", "[other]") for r in ("256-512", "512-600")]
    values = {one.name: one for one in report.model.metrics}
    assert [name for name in values if name.startswith("perplexity@")] == names
    kinds = {one.name: one.kind for one in report.differences}
    assert {kinds[name] for name in names} == {"ratio"}
    assert values[names[0]].value == values[names[2]].value != values[names[1]].value
    shown = [row[0] for row in report.rows()]
    assert "perplexity at 256-512" in shown and "perplexity at 512-600 [other]" in shown
    short = evaluate(folders[0], data, config.model_copy(update={"seq_len": 512}))
    assert not any("@" in one.name for one in short.model.metrics)


def test_bytes_are_those_of_the_text_and_not_of_names_of_special_tokens(tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", tiny.tokenizer()
    path.write_text("".join(json.dumps({"text": tiny.text(4, s)}) + "\n" for s in range(40)))
    rows = sequences_of(path)
    assert tokenizer.eos_token_id in rows[0]["input_ids"][1:]
    losses = quality.causal_losses(Pass(tiny.model("llama-gqa"), rows, tokenizer, batch_size=3))
    for row, size in zip(rows["input_ids"], losses.utf8_bytes, strict=True):
        words = [word for word in pairwise(tokenizer.decode(row).split()) if word[1] != "</s>"]
        # no space stands before a document
        assert size == sum(len(word) + (before != "</s>") for before, word in words)
    path = tmp_path / "text.txt"
    path.write_text("w1 unheard words öf " + tiny.text(40))
    rows = sequences_of(path, count=1)
    losses = quality.causal_losses(Pass(tiny.model("llama-gqa"), rows, tokenizer, batch_size=1))
    assert tokenizer.unk_token_id in rows[0]["input_ids"][1:]  # it stands for text
    words = path.read_text().split()[1:16]
    assert losses.utf8_bytes[0] == sum(len(f" {word}".encode()) for word in words)


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_losses_do_not_depend_on_batch_size(case, text_file):
    model, rows, tokenizer = tiny.model(case), sequences_of(text_file), tiny.tokenizer()

    def nll(size, seed=0):
        if case == "llama-gqa":
            return quality.causal_losses(Pass(model, rows, tokenizer, size)).nll_nats
        return quality.masked_losses(Pass(model, rows, tokenizer, size, seed=seed)).nll_nats

    np.testing.assert_allclose(nll(1), nll(7), rtol=1e-5)
    np.testing.assert_allclose(nll(2), nll(3), rtol=1e-5)
    if case == "bert-mlm":
        assert np.abs(nll(7) - nll(7, seed=1)).max() > 1e-3


def test_masks_are_reproducible_and_leave_special_tokens_alone():
    ids = torch.randint(0, tiny.VOCAB, (4, 40))
    hidden, labels = masked(ids, tiny.tokenizer(), seed=0)
    again, _ = masked(ids.flip(0), tiny.tokenizer(), seed=0)
    assert torch.equal(hidden, again.flip(0))  # whatever the batch
    other, _ = masked(ids, tiny.tokenizer(), seed=1)
    assert not torch.equal(hidden, other)
    chosen = labels != -100
    assert torch.equal(labels[chosen], ids[chosen])
    assert (hidden[chosen] == 4).all()
    assert (ids[chosen] >= len(tiny.SPECIAL)).all()
    share = chosen.sum(1) / (ids >= len(tiny.SPECIAL)).sum(1)
    assert ((share - 0.15).abs() < 0.02).all()


def test_embeddings_ignore_padding():
    model, tokenizer = tiny.model("bert-base"), tiny.tokenizer()
    texts = [tiny.text(n, seed=n) for n in (3, 12, 7)]
    rows = Dataset.from_dict(dict(tokenizer(texts)))
    together = quality.embeddings(Pass(model, rows, tokenizer, batch_size=3))
    alone = quality.embeddings(Pass(model, rows, tokenizer, batch_size=1))
    np.testing.assert_allclose(together, alone, atol=1e-5)
    with torch.no_grad():
        states = model(**tokenizer(texts[0], return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(together[0], (states / states.norm()).numpy(), atol=1e-5)
    seen = rows.map(lambda row: {"attention_mask": [1] * 12, "input_ids": pad(row["input_ids"])})
    padded = quality.embeddings(Pass(model, seen, tokenizer, batch_size=3))
    assert np.abs(padded[0] - alone[0]).max() > 1e-3  # had the padding counted, it would show


def pad(ids):
    return ids + [1] * (12 - len(ids))


@pytest.mark.parametrize("pad_id", [None, -1, 1])
def test_decoders_without_a_padding_token_are_padded_too(pad_id):
    sizes = {"n_embd": 60, "n_layer": 2, "n_head": 6, "n_positions": 32, "num_labels": 5}
    config = GPT2Config(**sizes, vocab_size=tiny.VOCAB, initializer_range=1.0, bos_token_id=2)
    config.pad_token_id = pad_id
    model, tokenizer = GPT2ForSequenceClassification(config).eval(), tiny.tokenizer()
    tokenizer.pad_token = None
    texts = [tiny.text(n, seed=n) for n in (3, 12, 7, 1, 9)]
    rows = Dataset.from_dict(dict(tokenizer(texts)))
    with torch.no_grad():
        wanted = [int(model(torch.tensor([ids])).logits.argmax()) for ids in rows["input_ids"]]
    assert len(set(wanted)) > 1
    assert quality.logits(Pass(model, rows, tokenizer, batch_size=5)).argmax(1).tolist() == wanted
    alone, together = (
        quality.embeddings(Pass(model.transformer, rows, tokenizer, batch_size=n)) for n in (1, 5)
    )
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_damaged_rows_and_empty_texts_are_named():
    tokenizer = tiny.tokenizer()
    rows = Dataset.from_dict(dict(tokenizer(["w1 w2", "w7"])))
    classifier, encoder = tiny.model("bert-classifier"), tiny.model("bert-base")
    for model in (classifier.bert, encoder):
        with torch.no_grad():
            model.embeddings.word_embeddings.weight[tokenizer("w7")["input_ids"][0]] = math.nan
    broken = tiny.model("llama-gqa")
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    windows = Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    with pytest.raises(DataError, match="loss of window 0 is not finite"):
        quality.causal_losses(Pass(broken, windows, tokenizer, 4))
    with pytest.raises(DataError, match="output for row 1 is not finite"):
        quality.logits(Pass(classifier, rows, tokenizer, 2))
    with pytest.raises(DataError, match="embedding of row 1 is not finite"):
        quality.embeddings(Pass(encoder, rows, tokenizer, 2))
    rows = Dataset.from_dict(dict(tokenizer(["w1 w2", "w3", ""])))
    with pytest.raises(DataError, match="Row 2 .* has no tokens"):
        quality.embeddings(Pass(tiny.model("bert-base"), rows, tokenizer, 2))
    with pytest.raises(DataError, match="mean cosine is nan on 4 examples"):
        Metric.of("mean_cosine", math.nan, 4)


def test_metrics_on_known_answers():
    def value(name, **columns):
        return Samples({key: np.array(each, float) for key, each in columns.items()}).value(name)

    losses = {"nll_nats": [math.log(8), math.log(2)], "tokens": [2, 2], "utf8_bytes": [4, 4]}
    assert value("perplexity", **losses) == pytest.approx(2.0)  # exp(log 16 / 4)
    assert value("bits_per_byte", **losses) == pytest.approx(0.5)  # 4 bits in 8 bytes
    assert value("accuracy", hits=[1, 0, 1]) == 2 / 3
    # ranks 1 2.5 2.5 4 against 1 2 3 4
    ties = value("spearman", similarities=[0.1, 0.5, 0.5, 0.9], scores=[1, 2, 3, 4])
    assert ties == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert value("spearman", similarities=[3, 2, 1], scores=[1, 2, 3]) == pytest.approx(-1)
    assert math.isinf(value("bits_per_byte", nll_nats=[1.0], utf8_bytes=[0]))


def test_fidelity_is_one_for_the_same_embeddings_only():
    vectors = np.random.default_rng(0).normal(size=(6, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert similarity_correlation(vectors, vectors) == pytest.approx(1)
    assert similarity_correlation(vectors[::-1], vectors) < 0.99
    other = np.random.default_rng(1).normal(size=(6, 4)) * 0.3 + vectors
    pairs = np.triu_indices(6, k=1)
    direct = np.corrcoef((vectors @ vectors.T)[pairs], (other @ other.T)[pairs])[0, 1]
    assert similarity_correlation(vectors, other) == pytest.approx(direct, abs=1e-12)
    assert math.isnan(similarity_correlation(vectors, np.tile(vectors[:1], (6, 1))))
    # a common rotation keeps similarities
    assert similarity_correlation(vectors @ np.eye(4)[::-1], vectors) == pytest.approx(1)


def test_rank_correlation_counts_ties_and_refuses_constants():
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 5, (2, 30)).astype(float)
    ranks = [[(v < x).sum() + ((v == x).sum() + 1) / 2 for x in v] for v in (a, b)]
    assert rank_correlation(a, b) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    broken = [np.argsort(np.argsort(v)) for v in (a, b)]  # ties in order of appearance
    assert abs(rank_correlation(a, b) - np.corrcoef(*broken)[0, 1]) > 1e-3
    assert math.isnan(rank_correlation(a, np.ones(30)))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        sample = generator.normal(0.3, 1, 60)
        found = bootstrap(lambda i, s=sample: s[i].mean(-1), 60, 300, 0.9, seed)
        hits += found.low <= 0.3 <= found.high
    assert 167 <= hits <= 193  # 180 expected, binomial sd 4.2


def test_few_windows_are_not_overconfident():
    """Ten draws, 95 %: plain percentiles miss the truth about twice as often as they say."""
    generator, hits, plain = np.random.default_rng(0), 0, 0
    for seed in range(600):
        sample = generator.normal(0.3, 1, 10)
        found = bootstrap(lambda i, s=sample: s[i].mean(-1), 10, 1000, 0.95, seed)
        draws = sample[np.random.default_rng(seed).integers(0, 10, (1000, 10))].mean(-1)
        low, high = np.quantile(draws, [0.025, 0.975])
        hits, plain = hits + (found.low <= 0.3 <= found.high), plain + (low <= 0.3 <= high)
    assert 554 <= hits <= 586  # 570 expected, binomial sd 5.3
    assert plain < 554


@pytest.mark.parametrize(
    ("tied", "n"),
    [
        *((count, n) for count, n in ((15, 60), (2, 40), (4, 40), (9, 180))),
        *((0.4, n) for n in (30, 100)),
        (0.6, 40),
    ],
)
def test_windows_of_one_text_are_not_drawn_as_if_they_were_independent(tied, n):
    """95 % intervals of the mean of windows of some documents, or that resemble their neighbours.

    Args:
        tied: How many documents, or how alike neighbours are.
        n: Windows.
    """
    generator = np.random.default_rng(n)
    if tied > 1:
        documents = np.arange(n) * int(tied) // n
        if n // int(tied) == 4:  # in the mean
            documents = np.sort(generator.integers(0, int(tied), n))
        draws = generator.normal(size=(400, n)) + generator.normal(size=(400, n))[:, documents]
    else:
        documents, draws = np.zeros(n, np.int64), generator.normal(size=(400, n))
        for window in range(1, n):
            draws[:, window] *= (1 - tied**2) ** 0.5
            draws[:, window] += tied * draws[:, window - 1]
    covered = {"alone": 0, "together": 0}
    for seed, sample in enumerate(draws):
        for name, runs in (("alone", None), ("together", documents)):
            found = bootstrap(lambda i, s=sample: s[i].mean(-1), n, 200, 0.95, seed, runs)
            covered[name] += found.low <= 0 <= found.high
    assert 0.90 * 400 <= covered["together"] <= 0.98 * 400
    assert covered["alone"] < 0.90 * 400


def test_windows_are_drawn_with_those_of_their_document(llama_folder, text_file, tmp_path):
    config = EvaluateConfig(seq_len=16, max_windows=12, speed=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": tiny.text(40, i)}) for i in range(20)))
    for source, distinct in ((text_file, 1), (rows, 12)):
        found = run(load(llama_folder, DataConfig(source=str(source)), config), config).samples[0]
        documents = found.documents_of("perplexity")
        assert documents is not None and len(documents) == found.count("perplexity") == 12
        assert len(set(documents.tolist())) == distinct


def test_the_examples_that_are_measured_come_from_all_over_a_table(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["text,label", *(f"text{i},{i}" for i in range(10))]))
    examples = read_examples(DataConfig(source=str(path), label_column="label"))
    held = Examples(list(examples.texts), list(examples.labels or ()), rows_are_documents=True)
    for found in (examples, held):
        some = found.spread(3)
        assert [text for (text,) in some.texts] == ["text0", "text3", "text6"]
        assert some.labels is not None and list(some.labels) == ["0", "3", "6"]
        assert found.spread(None) is found.spread(99) is found


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_a_model_against_itself_and_against_a_worse_one(case, text_file, tmp_path):
    model = tiny.model(case)
    folder = tiny.save(model, tmp_path / "model")
    with torch.no_grad():
        for attention in attention_of(model):
            attention.output_projection.get_parameter("weight").mul_(1.3)
    other = tiny.save(model, tmp_path / "other")
    data, config = DataConfig(source=str(text_file)), EvaluateConfig(**FAST)
    same = evaluate(folder, data, config, against=folder).differences[0].interval
    assert (same.estimate, same.low, same.high) == (1, 1, 1)
    report = evaluate(other, data, config, against=folder)
    ratio = report.differences[0].interval
    assert report.against is not None
    values = [m.metrics[0].value for m in (report.model, report.against)]
    assert ratio.estimate == pytest.approx(values[0] / values[1])
    assert ratio.low < ratio.estimate < ratio.high


def test_a_report_round_trips_and_is_strict(text_file, tmp_path):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    config = EvaluateConfig(**FAST | {"speed": True})
    report = evaluate(folder, DataConfig(source=str(text_file)), config)
    report.write(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert Report.model_validate(content) == report
    with pytest.raises(ValueError, match="extra"):
        Report.model_validate(content | {"surprise": 1})
    assert report.model.speed.decode_tokens_per_s is not None
    assert set(report.provenance.versions) > {"torch", "transformers", "headprune"}
    assert all(f in Report.__doc__ for f in Report.model_fields)  # documented, field by field


def test_speeds_beside_the_original_have_their_range(text_file, tmp_path):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    config = EvaluateConfig(**FAST | {"speed": True, "decode_batches": (1, 2)})
    report = evaluate(folder, DataConfig(source=str(text_file)), config, against=folder)
    (table,) = evaluated(report)
    assert isinstance(table, Table)
    cells = {row[0]: row[-1] for row in table.rows}
    for name in ("prefill tokens/s", "decoded tokens/s, batch 1", "decoded tokens/s, batch 2"):
        (bounds,) = re.findall(r"^\d+\.\d{3} x \[(.+), (.+)\]$", str(cells[name]))
        assert 0 < float(bounds[0]) < float(bounds[1])
    assert "[" not in str(cells["query heads"])


def test_speed_is_timed_after_prompts_of_stated_lengths(text_file, tmp_path):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    given = {"speed": True, "decode_batches": (2,), "speed_contexts": (24, 128)}
    config, data = EvaluateConfig(**FAST | given), DataConfig(source=str(text_file))
    report = evaluate(folder, data, config, against=folder)
    # a prompt of all positions leaves room for what is decoded
    assert [one.prompt_tokens for one in report.model.speed_at] == [24, 112]
    _, table = evaluated(report)
    assert table.columns[1:] == [
        "prefill tokens/s",
        *(f"decoded tokens/s, batch {n}" for n in (1, 2)),
    ]
    assert [row[0] for row in table.rows] == ["24 tokens", "112 tokens"]
    assert all(
        re.fullmatch(r"[\d,.]+ \(\d+\.\d\d x\)", cell) for row in table.rows for cell in row[1:]
    )
    assert Report.model_validate_json(report.model_dump_json()) == report
    too_long = config.model_copy(update={"speed_contexts": (24, 129)})
    with pytest.raises(
        HeadpruneError, match="after 129 tokens, and a LlamaForCausalLM here has 128 positions"
    ):
        evaluate(folder, data, too_long)


def test_models_of_other_dtypes_are_told_apart(text_file, tmp_path):
    """Half of the cache's bytes is no gain then."""
    full = tiny.save(tiny.model("llama-gqa"), tmp_path / "full")
    half = tiny.save(tiny.model("llama-gqa", torch.bfloat16), tmp_path / "half")
    config = EvaluateConfig(seq_len=16, max_windows=12, speed=False)

    def shown(*names):
        console = Console(record=True, width=120, file=StringIO())
        data = DataConfig(source=str(text_file))
        evaluation(console, evaluate(str(names[0]), data, config, against=str(names[1])))
        return " ".join(console.export_text().split())

    assert "computed in bfloat16 float32" in shown(half, full)
    assert "computed in" not in shown(full, full)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Tiny models by case, each saved once."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda case: tiny.save(tiny.model(case), root / case))


def table(path, labels, columns=1):
    """A text or a pair per label."""
    names = ["a", "b"][:columns]
    rows = [
        {**{name: tiny.text(5 + k, s + 99 * k) for k, name in enumerate(names)}, "label": label}
        for s, label in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(path), text_column=",".join(names), label_column="label")


def test_a_classifier_is_scored_on_its_labels(saved, tmp_path):
    folder, path = saved("bert-classifier"), tmp_path / "rows.jsonl"
    labelled = table(path, [s % 2 for s in range(12)])
    report = evaluate(folder, labelled, EvaluateConfig(**FAST), against=folder)
    model, words, hits = tiny.model("bert-classifier"), tiny.tokenizer(), []
    for s in range(12):
        with torch.no_grad():
            logits = model(**words(tiny.text(5, s), return_tensors="pt")).logits
        hits.append(int(logits.argmax()) == s % 2)
    assert report.model.metrics[0].value == pytest.approx(sum(hits) / 12)
    assert report.differences[0].interval.estimate == 0


@pytest.mark.parametrize(
    ("case", "base", "data", "message"),
    [
        ("bert-classifier", None, {"labels": [0, 1], "label_column": None}, "name the --label-"),
        ("bert-classifier", None, {"labels": ["sad"]}, "'sad' is none of the model's labels"),
        ("bert-base", None, {"labels": [1, 2], "label_column": None}, "--against BASE"),
        ("bert-base", None, {"labels": [3] * 4, "columns": 2}, "4 scores .* not all the same"),
        ("bert-base", None, {"labels": ["x"] * 4, "columns": 2}, "must be numbers"),
        ("bert-base", "bert-base", {"labels": [1, 2]}, "3 texts at least; the data has 2"),
        ("llama-gqa", "bert-mlm", {"labels": [1, 2]}, "cannot be compared"),
    ],
)
def test_what_cannot_be_measured_is_refused(case, base, data, message, saved, tmp_path):
    given = table(tmp_path / "rows.jsonl", data["labels"], data.get("columns", 1))
    if "label_column" in data:
        given = DataConfig(source=given.source, text_column="a")
    with pytest.raises(HeadpruneError, match=message):
        evaluate(saved(case), given, EvaluateConfig(**FAST), base and saved(base))


def test_a_base_with_another_vocabulary_is_refused(saved, text_file, tmp_path):
    other = Path(shutil.copytree(saved("llama-gqa"), tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["w0"], ids["w1"] = ids["w1"], ids["w0"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    data = DataConfig(source=str(text_file))
    with pytest.raises(HeadpruneError, match=r"disagree on 2 tokens \('w0' among them\)"):
        evaluate(saved("llama-gqa"), data, EvaluateConfig(**FAST), against=other)


def test_sentence_pairs_give_spearman_and_fidelity(saved, tmp_path):
    folder = saved("bert-base")
    pairs = table(tmp_path / "pairs.jsonl", [s % 5 for s in range(12)], columns=2)
    report = evaluate(folder, pairs, EvaluateConfig(**FAST), against=folder)
    values = {m.name: m.value for m in report.model.metrics}
    assert -1 <= values["spearman"] <= 1
    assert values["mean_cosine"] == pytest.approx(1)
    assert report.differences[0].interval.estimate == 0


def test_classifiers_are_compared_by_the_names_of_their_classes(tmp_path):
    model = tiny.model("bert-classifier")

    def named(name, *classes):
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {label: number for number, label in enumerate(classes)}
        return tiny.save(model, tmp_path / name)

    ours, strange = named("ours", "neg", "pos"), named("strange", "neg", "other")
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter.flip(0))
    turned, fast = named("turned", "pos", "neg"), EvaluateConfig(**FAST)
    words = table(tmp_path / "words.jsonl", ["neg", "pos"] * 6)
    numbers = table(tmp_path / "numbers.jsonl", [0, 1] * 6)
    report = evaluate(ours, words, fast, against=turned)
    assert report.model.metrics == report.against.metrics
    assert evaluate(ours, numbers, fast, against=ours).model.metrics == report.model.metrics
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps({**config, "label2id": None}))
    assert evaluate(ours, words, fast).model.metrics == report.model.metrics
    with pytest.raises(HeadpruneError, match="has the class 'other'"):
        evaluate(ours, words, fast, against=strange)
    with pytest.raises(DataError, match=r"number their classes differently.*\(neg, pos\)"):
        evaluate(ours, numbers, fast, against=turned)


def test_timing_fits_into_the_positions():
    model = tiny.model("llama-gqa")
    (whole,) = measure([model], prompt_tokens=20, decoded=4, repeats=1)
    assert (whole.prompt_tokens, whole.decoded_tokens) == (20, 4)
    model.config.max_position_embeddings = 12
    first, second = measure([model, tiny.model("llama-mha")], repeats=1)
    assert (first.prompt_tokens, first.decoded_tokens) == (6, 6)
    assert (second.prompt_tokens, second.decoded_tokens) == (6, 6)  # both read the same
    (encoder,) = measure([tiny.model("bert-base")], repeats=1)
    assert encoder.decode_tokens_per_s is None


def test_data_formats_give_the_same_documents(tmp_path):
    import gzip

    texts = [tiny.text(9, s) for s in range(4)]
    frame = Dataset.from_dict({"text": texts})
    frame.to_json(tmp_path / "d.jsonl")
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "d.jsonl").read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    for half, part in enumerate((texts[:2], texts[2:])):
        Dataset.from_dict({"text": part}).to_json(folder / f"{half}.jsonl")
    for source in ("d.jsonl", "d.csv", "d.parquet", "d.jsonl.gz", "folder"):
        read = read_examples(DataConfig(source=str(tmp_path / source)))
        assert [text for (text,) in read.texts] == texts, source
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    (whole,) = read_examples(DataConfig(source=str(tmp_path / "d.txt.gz"))).texts
    assert whole == ("\n".join(texts),)  # a text file is one document
