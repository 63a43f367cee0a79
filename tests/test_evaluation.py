"""Metrics against formulas written out here, independence of batch size, and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from headprune.config import DataConfig, EvaluateConfig
from headprune.data.sources import read_examples
from headprune.data.windows import masked, packed_windows
from headprune.errors import DataError, HeadpruneError
from headprune.evaluation import metrics, quality
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.report import Report
from headprune.models.attention import attention_of
from headprune.models.cost import model_cost
from headprune.pipelines.evaluate import evaluate
from headprune.pipelines.inspect import inspect
from tests import tiny

FAST = {"seq_len": 16, "resamples": 200, "speed": False}


def windows_of(path: Path, seq_len: int = 16, count: int = 7) -> Dataset:
    examples = read_examples(DataConfig(source=str(path)))
    return packed_windows(examples, tiny.tokenizer(), seq_len).select(range(count))


def test_causal_losses_are_those_of_the_model(text_file: Path) -> None:
    model, windows = tiny.model("llama-gqa"), windows_of(text_file)
    losses = quality.causal_losses(model, windows, tiny.tokenizer(), batch_size=3)
    ids = torch.tensor(windows["input_ids"])
    with torch.no_grad():
        wanted = [float(model(row[None], labels=row[None]).loss) * 15 for row in ids]
    np.testing.assert_allclose(losses.nll_nats, wanted, rtol=1e-5)
    assert losses.tokens.tolist() == [15] * 7
    decoded = tiny.tokenizer().decode(ids[0, 1:])
    assert losses.utf8_bytes[0] == len(decoded.encode())


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_losses_do_not_depend_on_batch_size(case: str, text_file: Path) -> None:
    model, windows, tokenizer = tiny.model(case), windows_of(text_file), tiny.tokenizer()

    def nll(size: int, seed: int = 0) -> Any:
        if case == "llama-gqa":
            return quality.causal_losses(model, windows, tokenizer, size).nll_nats
        return quality.masked_losses(model, windows, tokenizer, size, seed).nll_nats

    np.testing.assert_allclose(nll(1), nll(7), rtol=1e-5)
    np.testing.assert_allclose(nll(2), nll(3), rtol=1e-5)
    if case == "bert-mlm":
        assert np.abs(nll(7) - nll(7, seed=1)).max() > 1e-3


def test_masks_are_reproducible_and_leave_special_tokens_alone() -> None:
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


def test_embeddings_ignore_padding() -> None:
    model, tokenizer = tiny.model("bert-base"), tiny.tokenizer()
    texts = [tiny.text(n, seed=n) for n in (3, 12, 7)]
    rows = Dataset.from_dict(dict(tokenizer(texts)))
    together = quality.embeddings(model, rows, tokenizer, batch_size=3)
    alone = quality.embeddings(model, rows, tokenizer, batch_size=1)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    with torch.no_grad():
        states = model(**tokenizer(texts[0], return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(together[0], (states / states.norm()).numpy(), atol=1e-5)


def test_a_damaged_model_is_named_by_window(text_file: Path) -> None:
    model = tiny.model("llama-gqa")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(DataError, match="loss of window 0 is not finite"):
        quality.causal_losses(model, windows_of(text_file), tiny.tokenizer(), 4)


def test_metrics_on_known_answers() -> None:
    computed = metrics.load("token_nll").compute(
        nll_nats=[math.log(8), math.log(2)], tokens=[2, 2], utf8_bytes=[4, 4]
    )
    assert computed["perplexity"] == pytest.approx(2.0)  # exp(log 16 / 4)
    assert computed["bits_per_byte"] == pytest.approx(0.5)  # 4 bits in 8 bytes
    accuracy = metrics.load("label_accuracy")
    assert accuracy.compute(predictions=[1, 0, 1], references=[1, 1, 1])["accuracy"] == 2 / 3
    spearman = metrics.load("similarity_spearman")
    # ranks 1 2.5 2.5 4 against 1 2 3 4
    ties = spearman.compute(similarities=[0.1, 0.5, 0.5, 0.9], scores=[1, 2, 3, 4])
    assert ties["spearman"] == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    reverse = spearman.compute(similarities=[3, 2, 1], scores=[1, 2, 3])
    assert reverse["spearman"] == pytest.approx(-1)


def test_fidelity_is_one_for_the_same_embeddings_only() -> None:
    vectors = np.random.default_rng(0).normal(size=(6, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    fidelity = metrics.load("embedding_fidelity")
    same = fidelity.compute(predictions=vectors, references=vectors)
    assert same["mean_cosine"] == pytest.approx(1)
    assert same["similarity_correlation"] == pytest.approx(1)
    shuffled = fidelity.compute(predictions=vectors[::-1], references=vectors)
    assert shuffled["similarity_correlation"] < 0.99
    # a common rotation keeps similarities, and only those
    rotated = fidelity.compute(predictions=vectors @ np.eye(4)[::-1], references=vectors)
    assert rotated["similarity_correlation"] == pytest.approx(1)
    assert rotated["mean_cosine"] < 0.99


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        sample = generator.normal(0.3, 1, 60)
        found = bootstrap(lambda i, s=sample: float(s[i].mean()), 60, 300, 0.9, seed)
        hits += found.low <= 0.3 <= found.high
    assert 165 <= hits <= 193  # 180 expected, binomial sd 4.2; percentile intervals run short


def test_the_same_seed_gives_the_same_interval() -> None:
    sample = np.random.default_rng(0).normal(size=30)

    def statistic(i: Any) -> float:
        return float(sample[i].mean())

    first = bootstrap(statistic, 30, 200, 0.95, seed=5)
    assert first == bootstrap(statistic, 30, 200, 0.95, seed=5)
    assert first != bootstrap(statistic, 30, 200, 0.95, seed=6)


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_a_model_against_itself_and_against_a_worse_one(
    case: str, text_file: Path, tmp_path: Path
) -> None:
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


def test_a_report_round_trips_and_is_strict(text_file: Path, tmp_path: Path) -> None:
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    config = EvaluateConfig(**FAST | {"speed": True})
    report = evaluate(folder, DataConfig(source=str(text_file)), config)
    report.write(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert Report.model_validate(content) == report
    with pytest.raises(ValueError, match="extra"):
        Report.model_validate(content | {"surprise": 1})
    assert report.model.speed is not None
    assert report.model.speed.decode_tokens_per_s is not None
    assert set(report.provenance.versions) > {"torch", "transformers", "headprune"}
    assert all(f in Report.__doc__ for f in Report.model_fields)  # documented, field by field


def test_a_classifier_is_scored_on_its_labels(tmp_path: Path) -> None:
    model = tiny.model("bert-classifier")
    folder = tiny.save(model, tmp_path / "model")
    rows = [{"text": tiny.text(6, seed=s), "label": s % 2} for s in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = DataConfig(source=str(path), text_column="text", label_column="label")
    report = evaluate(folder, labelled, EvaluateConfig(**FAST), against=folder)
    with torch.no_grad():
        hits = [
            int(model(**tiny.tokenizer()(r["text"], return_tensors="pt")).logits.argmax())
            == r["label"]
            for r in rows
        ]
    assert report.model.metrics[0].value == pytest.approx(sum(hits) / 12)
    assert report.differences[0].interval.estimate == 0
    with pytest.raises(DataError, match="name the --label-column"):
        evaluate(folder, DataConfig(source=str(path), text_column="text"), EvaluateConfig(**FAST))
    path.write_text(json.dumps({"text": "w1", "label": "sad"}) + "\n")
    with pytest.raises(DataError, match="label 'sad' is none of the model's labels"):
        evaluate(folder, labelled, EvaluateConfig(**FAST))


def test_sentence_pairs_give_spearman_and_fidelity(tmp_path: Path) -> None:
    folder = tiny.save(tiny.model("bert-base"), tmp_path / "model")
    rows = "".join(f"{tiny.text(5, s)},{tiny.text(6, s + 99)},{s % 5}\n" for s in range(9))
    (tmp_path / "pairs.csv").write_text("a,b,score\n" + rows)
    pairs = DataConfig(source=str(tmp_path / "pairs.csv"), text_column="a,b", label_column="score")
    report = evaluate(folder, pairs, EvaluateConfig(**FAST), against=folder)
    values = {m.name: m.value for m in report.model.metrics}
    assert -1 <= values["spearman"] <= 1
    assert values["mean_cosine"] == pytest.approx(1)
    assert report.differences[0].interval.estimate == 0
    plain = DataConfig(source=str(tmp_path / "pairs.csv"), text_column="a")
    with pytest.raises(DataError, match="--against BASE"):
        evaluate(folder, plain, EvaluateConfig(**FAST))


def test_models_that_do_not_compare_are_refused(text_file: Path, tmp_path: Path) -> None:
    llama = tiny.save(tiny.model("llama-gqa"), tmp_path / "llama")
    bert = tiny.save(tiny.model("bert-mlm"), tmp_path / "bert")
    data = DataConfig(source=str(text_file))
    with pytest.raises(HeadpruneError, match="cannot be compared token by token"):
        evaluate(llama, data, EvaluateConfig(**FAST), against=bert)
    with pytest.raises(DataError, match="the model has 128 positions"):
        evaluate(llama, data, EvaluateConfig(**FAST | {"seq_len": 129}))


def test_data_formats_give_the_same_documents(tmp_path: Path) -> None:
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


def test_cost_counts_what_is_there() -> None:
    cost = model_cost(tiny.model("llama-gqa", torch.bfloat16))
    assert cost.query_heads == 6 * tiny.LAYERS
    assert cost.kv_cache_bytes_per_token == 2 * 3 * 10 * tiny.LAYERS * 2  # K and V, bfloat16
    per_layer = 48 * 60 + 60 + 2 * (48 * 30 + 30) + 60 * 48 + 48
    assert cost.attention_parameters == per_layer * tiny.LAYERS
    assert model_cost(tiny.model("bert-mlm")).kv_cache_bytes_per_token == 0


def test_inspect_says_what_the_cache_measures(tmp_path: Path) -> None:
    model = tiny.model("llama-gqa")
    report = inspect(tiny.save(model, tmp_path / "model"))
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    live = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 3
    assert report.kv_cache_bytes_per_token["float32"] == live
    assert "head_dim 10 is under the usual 64 and 128" in report.notes[0]
    assert report.attention_parameters == sum(a.parameters for a in report.attentions)
