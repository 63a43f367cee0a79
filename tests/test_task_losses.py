"""What a head is for decides on losses, divergences and metrics."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import headprune
from headprune.config import DataConfig, EvaluateConfig
from headprune.data.batches import label_reader, tag_reader
from headprune.data.read import read_examples
from headprune.data.text import Sequences
from headprune.errors import DataError, HeadpruneError, HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.task_table import TASKS
from headprune.evidence.losses import example_losses, mean_loss
from headprune.model.batch import task_of
from headprune.model.embedding import head_of
from headprune.model.losses import divergence
from tests import classes, tiny

IDS = torch.arange(5, 29).reshape(3, 8)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
BATCH["attention_mask"][1, 5:] = 0
MULTI = "multi_label_classification"


def classifier(**settings):
    return tiny.model("bert-classifier", **settings)


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"num_labels": 3}, "classification"),
        ({"num_labels": 2, "problem_type": "single_label_classification"}, "classification"),
        ({"num_labels": 3, "problem_type": MULTI}, "multi-label"),
        ({"num_labels": 1, "problem_type": MULTI}, "multi-label"),
        ({"num_labels": 1}, "regression"),
        ({"num_labels": 2, "problem_type": "regression"}, "regression"),
    ],
)
def test_the_config_says_what_a_head_for_sequences_is_for(settings, task):
    assert task_of(classifier(**settings)) == task


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 3}, torch.tensor([2, 0, 1])),
        ({"num_labels": 1}, torch.tensor([0.5, -2.0, 3.0])),
        ({"num_labels": 3, "problem_type": MULTI}, torch.eye(3)[[1, 1, 0]]),
        ({"num_labels": 1, "problem_type": MULTI}, torch.tensor([[0.0], [1.0], [1.0]])),
    ],
)
def test_the_loss_of_an_example_is_the_loss_of_its_model(settings, labels):
    model = classifier(**settings)
    with torch.no_grad():
        losses = example_losses(model, task_of(model), {**BATCH, "labels": labels})
        for row in range(3):
            one = {name: value[row : row + 1] for name, value in BATCH.items()}
            own = model(**one, labels=labels[row : row + 1]).loss
            torch.testing.assert_close(losses[row], own)
        others = {**BATCH, "labels": labels.roll(1, 0)}
        assert not torch.allclose(losses, example_losses(model, task_of(model), others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("labelled", [False, True])
def test_a_mean_loss_is_that_of_all_tokens_in_batches_of_any_size(labelled, dtype):
    model, draw = tiny.model("llama-gqa").to(dtype), torch.Generator().manual_seed(0)
    sizes = (9, 3, 14, 2, 8, 5, 11)
    rows = [torch.randint(5, tiny.VOCAB, (size,), generator=draw).tolist() for size in sizes]
    some = [[-100 if labelled and n % 3 == 1 else i for n, i in enumerate(row)] for row in rows]
    some[3] = rows[3]  # a short one has a token to score

    def collate(features):
        columns = {"input_ids": 1, "attention_mask": 0, **({"labels": -100} if labelled else {})}
        padded = {
            name: pad_sequence([torch.tensor(one[name]) for one in features], True, value)
            for name, value in columns.items()
        }
        return {**padded, "use_cache": False}

    columns = {"input_ids": rows, "attention_mask": [[1] * size for size in sizes], "labels": some}
    text = Sequences(Dataset.from_dict(columns), collate)
    total, count, means = 0.0, 0, list[float]()
    for ids, labels in zip(rows, some, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
        loss = float(F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        scored = sum(label != -100 for label in labels[1:])
        total, count, means = total + loss, count + scored, [*means, loss / scored]
    exact = 1e-5 if dtype is torch.float32 else 2e-3  # bfloat16 rounds by the shape of a batch
    for size in (1, 2, 3, 7):
        assert mean_loss(model, replace(text, batch_size=size)) == pytest.approx(
            total / count, rel=exact
        )
    of_rows = sum(means) / len(means)
    assert of_rows != pytest.approx(total / count, rel=3 * exact)


def pair(name, **settings):
    """A model, what it gives, and what it gives after a change."""
    family = "electra" if name.startswith("Electra") else "bert"
    model = classes.build(family, name, **settings)
    with torch.no_grad():
        wanted = model(**BATCH)
        model.base_model.encoder.layer[0].output.dense.weight[:3].mul_(-2)
        return model, model(**BATCH), wanted


def binary_kl(p, q):
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kl(got, wanted):
    p, q = wanted.softmax(-1), got.softmax(-1)
    return (p * (p / q).log()).sum(-1)


def real(values):
    return values[BATCH["attention_mask"].bool()].mean()


def over_places(got, wanted):
    lengths = BATCH["attention_mask"].sum(1).tolist()
    rows = [kl(g[:n], w[:n]) for g, w, n in zip(got, wanted, lengths, strict=True)]
    return torch.stack(rows).mean()


HEADS = {
    "BertForSequenceClassification": lambda g, w: kl(g.logits, w.logits).mean(),
    "BertForNextSentencePrediction": lambda g, w: kl(g.logits, w.logits).mean(),
    "BertForTokenClassification": lambda g, w: real(kl(g.logits, w.logits)),
    "BertForMaskedLM": lambda g, w: real(kl(g.logits, w.logits)),
    "ElectraForPreTraining": lambda g, w: real(binary_kl(w.logits.sigmoid(), g.logits.sigmoid())),
    "BertForQuestionAnswering": lambda g, w: (
        over_places(g.start_logits, w.start_logits) + over_places(g.end_logits, w.end_logits)
    ),
    "BertForPreTraining": lambda g, w: (
        real(kl(g.prediction_logits, w.prediction_logits))
        + kl(g.seq_relationship_logits, w.seq_relationship_logits).mean()
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_divergence_fits_the_head(name):
    model, got, wanted = pair(name)
    assert divergence(wanted, wanted, BATCH, head_of(model)).abs() < 1e-6
    torch.testing.assert_close(
        divergence(got, wanted, BATCH, head_of(model)), HEADS[name](got, wanted)
    )
    assert HEADS[name](got, wanted) > 1e-4


def test_numbers_and_several_labels_diverge_by_themselves():
    name = "BertForSequenceClassification"
    model, got, wanted = pair(name, num_labels=1)
    found = divergence(got, wanted, BATCH, head_of(model))
    torch.testing.assert_close(found, (got.logits - wanted.logits).square().mean())
    assert found > 1e-4  # and the KL of one class is 0
    model, got, wanted = pair(name, num_labels=3, problem_type=MULTI)
    found = divergence(got, wanted, BATCH, head_of(model))
    exact = binary_kl(wanted.logits.sigmoid(), got.logits.sigmoid()).sum(-1).mean()
    torch.testing.assert_close(found, exact)
    assert not torch.allclose(found, kl(got.logits, wanted.logits).mean())


def table(path, labels, header="label"):
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", header])
        rows.writerows([tiny.text(6 + n % 4, seed=n), label] for n, label in enumerate(labels))
    return DataConfig(source=str(path), label_column=header)


def measured(folder, data):
    config = EvaluateConfig(speed=False, resamples=20, seq_len=16)
    return {m.name: m.value for m in evaluate(folder, data, config).model.metrics}


def test_numbers_are_evaluated_by_their_correlations(tmp_path):
    model, labels = classifier(num_labels=1), [0.5, -1, 2, 3.5, 1, 0]
    folder = tiny.save(model, tmp_path / "model")
    data = table(tmp_path / "data.csv", list(map(str, labels)))
    tokenizer = tiny.tokenizer()
    with torch.no_grad():
        said = [
            model(**tokenizer(tiny.text(6 + n % 4, seed=n), return_tensors="pt")).logits.item()
            for n in range(6)
        ]
    found = measured(folder, data)
    assert set(found) == {"spearman", "pearson"}
    assert found["pearson"] == pytest.approx(np.corrcoef(said, labels)[0, 1], abs=1e-5)
    ranks = [np.argsort(np.argsort(each)) for each in (said, labels)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["pearson"] != pytest.approx(np.corrcoef(said, labels[::-1])[0, 1], abs=1e-3)
    with pytest.raises(DataError, match="'high' is not a number"):
        measured(folder, table(tmp_path / "words.csv", ["high"] * 6))


def test_several_labels_are_evaluated_each(tmp_path):
    names = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = classifier(problem_type=MULTI, **names)
    model.classifier.weight.data.normal_()
    folder, labels = tiny.save(model, tmp_path / "model"), ["a,c", "b", "[]", "a", "c", "b,c"]
    tokenizer = tiny.tokenizer()
    with torch.no_grad():
        said = torch.cat(
            [
                model(**tokenizer(tiny.text(6 + n % 4, seed=n), return_tensors="pt")).logits > 0
                for n in range(6)
            ]
        )
    true = torch.tensor([[name in label for name in "abc"] for label in labels])
    found = measured(folder, table(tmp_path / "data.csv", labels))
    assert set(found) == {"accuracy", "micro_f1"}
    assert found["accuracy"] == pytest.approx((said == true).all(1).float().mean().item())
    hits = (said & true).sum().item()
    assert found["micro_f1"] == pytest.approx(2 * hits / (said.sum() + true.sum()).item())
    assert 0 < found["micro_f1"] < 1


STARS = [str(n + 1) for n in range(5)]
FRUIT = ["apple", "NA", "2", "0", "fig"]


@pytest.mark.parametrize("kind", ["classes", "tags", "several"])
@pytest.mark.parametrize(
    ("names", "column", "numbers"),
    [
        (STARS, ["1", "5", "3"], [0, 4, 2]),  # names: 5 is no number
        (STARS, ["0", "4", "2"], [0, 4, 2]),  # numbers: 0 is no name
        (FRUIT, ["apple", "2", "0"], [0, 2, 3]),
        (FRUIT, ["1", "2", "0"], [1, 2, 0]),
        (["0", "1", "2"], ["0", "2"], [0, 2]),
        (["NEGATIVE", "POSITIVE", "-1"], ["POSITIVE", "-1"], [1, 2]),
        (FRUIT, ["apple", "1"], None),  # neither
        (STARS, ["0", "5"], None),
        (STARS, ["1", "1.0"], None),
        (["a", "b"], ["0", "01"], None),
        (["a", "b"], ["a", "a "], None),
    ],
)
def test_labels_are_names_or_numbers_by_the_whole_column(kind, names, column, numbers):
    net = classifier(num_labels=len(names), problem_type=MULTI if kind == "several" else None)
    net.config.id2label = dict(enumerate(names))
    net.config.label2id = {name: number for number, name in enumerate(names)}
    make = tag_reader if kind == "tags" else label_reader
    several = [json.dumps([label]) for label in column]
    rows = column if kind == "classes" else several
    if numbers is None and (kind == "classes" or "a " not in column):
        with pytest.raises(DataError, match="none of the model's labels"):
            make(net, rows)
    elif numbers is not None:
        read = make(net, rows)
        found = [read(row) for row in rows]
        one_hot = np.eye(len(names))[numbers].tolist()
        assert (
            found == {"classes": numbers, "tags": [[n] for n in numbers], "several": one_hot}[kind]
        )
        assert [read(row) for row in rows[::-1]] == found[::-1] != found


def test_labels_that_may_be_names_or_numbers_are_names_with_a_word():
    net = classifier(id2label=dict(enumerate(STARS)), label2id={s: n for n, s in enumerate(STARS)})
    with pytest.warns(
        HeadpruneWarning, match="The labels 1, 2 are names .*, and numbers of others"
    ):
        assert label_reader(net, ["1", "2"])("2") == 1


def test_a_part_of_a_column_is_read_as_the_whole(tmp_path):
    """The windows that are measured have no 0, and so might be names."""
    settings = {"id2label": dict(enumerate(STARS))}
    settings["label2id"] = {name: number for number, name in enumerate(STARS)}
    folder = tiny.save(classifier(**settings), tmp_path / "model")
    config = EvaluateConfig(speed=False, resamples=20, seq_len=16, max_windows=4)
    data = table(tmp_path / "data.csv", ["1", "0"] * 4)
    found = evaluate(folder, data, config).model.metrics
    with pytest.warns(HeadpruneWarning, match="read as names"):
        named = evaluate(folder, table(tmp_path / "b.csv", ["2", "1"] * 4), config).model.metrics
    assert [(m.name, m.value) for m in found] == [(m.name, m.value) for m in named]


def test_several_labels_are_written_in_several_ways(tmp_path):
    def read(*column):
        reader = label_reader(classifier(num_labels=3, problem_type=MULTI), column)
        return [reader(label) for label in column]

    for written in ("LABEL_0,LABEL_2", "0, 2", '["LABEL_0", "LABEL_2"]', "[1.0, 0.0, 1.0]"):
        assert read(written, "", "[]") == [[1.0, 0.0, 1.0], [0.0] * 3, [0.0] * 3]
    with pytest.raises(DataError, match="'LABEL_7' is none of the model's labels"):
        read("1", "0,LABEL_7")
    with pytest.raises(DataError, match="gives 2 numbers"):
        label_reader(classifier(num_labels=2, problem_type="regression"), ["1"])
    rows = [{"text": "w1 w2", "labels": [0, 2]}, {"text": "w3 w4", "labels": []}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(
        source=str(tmp_path / "data.jsonl"), text_column="text", label_column="labels"
    )
    assert read(*(read_examples(config).labels or ())) == [[1, 0, 1], [0, 0, 0]]


def test_scores_gates_and_healing_take_the_loss_of_the_head(tmp_path):
    settings = {"num_labels": 3, "problem_type": MULTI}
    folder = tiny.save(classifier(**settings), tmp_path / "model")
    data = table(tmp_path / "data.csv", [f"[{n % 3}]" for n in range(24)])
    where = {"data": data.source, "label_column": "label"}
    headprune.score(folder, output=tmp_path / "scores", criterion="fisher", seq_len=16, **where)
    brief = {"steps": 2, "batch_size": 4, "seq_len": 16}
    headprune.train_gates(folder, output=tmp_path / "gates", target_heads=0.5, **where, **brief)
    headprune.prune(folder, tmp_path / "cut", scores=tmp_path / "scores", keep=0.5)
    healed = headprune.heal(
        tmp_path / "cut", output=tmp_path / "healed", teacher=folder, data=data.source, **brief
    )
    assert healed.before > 1e-6


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "BertForPreTraining"])
def test_heads_without_a_loss_of_their_own_learn_from_a_teacher(name, tmp_path, text_file):
    folder = tiny.save(classes.build("bert", name), tmp_path / "model")
    brief = {"steps": 2, "batch_size": 4, "seq_len": 16}
    gates = headprune.train_gates(
        folder, output=tmp_path / "gates", data=str(text_file), target_heads=0.5, **brief
    )
    assert gates.metadata.final_loss > 0
    with pytest.raises(HeadpruneError, match=f"no metric for the head of a {name}"):
        evaluate(folder, DataConfig(source=str(text_file)), EvaluateConfig(speed=False))


def test_several_texts_at_once_are_refused(tmp_path, text_file):
    folder = tiny.save(classes.build("bert", "BertForMultipleChoice"), tmp_path / "model")
    with pytest.raises(HeadpruneError, match="reads several texts at once, and score gives it one"):
        headprune.score(folder, output=tmp_path / "scores", data=str(text_file))


@pytest.mark.parametrize(
    ("settings", "label", "measure"),
    [
        ({"num_labels": 1}, "{}.5", "explained variance"),
        ({"num_labels": 3, "problem_type": MULTI}, "[{}]", "same labels"),
    ],
)
def test_compress_chooses_by_what_the_head_is_for(settings, label, measure, tmp_path):
    model = classifier(**settings)
    folder = tiny.save(model, tmp_path / "model")
    data = table(tmp_path / "data.csv", [label.format(n % 3) for n in range(80)])
    small = {"seq_len": 16, "calibration_tokens": 256, "held_out_tokens": 128}
    headprune.compress(
        folder, tmp_path / "out", data=data.source, keep=0.75, label_column="label", **small
    )
    how = TASKS[task_of(model)].measure
    assert how.name == measure
    original = np.random.default_rng(0).integers(0, 2, (7, model.config.num_labels)) * 1.0
    assert how.number(how.rows(original, original)) == 1
    assert how.number(how.rows(1 - original, original)) < 0.1


def test_flags_of_two_labels_are_told_from_their_numbers():
    net = classifier(num_labels=2, problem_type=MULTI)
    assert label_reader(net, ["0.0,1.0"])("0.0,1.0") == [0.0, 1.0]
    assert label_reader(net, ["1"])("1") == [0.0, 1.0]
    with pytest.raises(DataError, match="'0,1' may be one 0 or 1 per label"):
        label_reader(net, ["0,1", "1"])
