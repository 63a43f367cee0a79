"""Classifiers of words: tags, entities, gates, compression."""

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from seqeval.metrics import accuracy_score, f1_score
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    RobertaTokenizerFast,
)

import headprune
from headprune.data.sequences import _at_first_tokens
from headprune.errors import DataError, HeadpruneError, HeadpruneWarning
from headprune.evaluation import tagged
from tests import tiny

TAGS = ("O", "B-PER", "I-PER", "B-LOC")


def tag(words):
    """The first of two equal words in a row begins a person; w7 is a place."""
    tags = []
    for number, word in enumerate(words):
        if tags and words[number - 1] == word:
            tags[-1], here = "B-PER", "I-PER"
        else:
            here = "B-LOC" if word == "w7" else "O"
        tags.append(here)
    return tags


@pytest.fixture
def sentences():
    generator = torch.Generator().manual_seed(0)
    rows = [
        [f"w{n}" for n in torch.randint(0, 9, (6 + row % 7,), generator=generator).tolist()]
        for row in range(60)
    ]
    return Dataset.from_dict({"tokens": rows, "tags": [tag(words) for words in rows]})


@pytest.fixture
def model(tmp_path, sentences):
    """A model that learned some of it."""
    torch.manual_seed(0)
    names = dict(enumerate(TAGS))
    net = BertForTokenClassification(
        BertConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            id2label=names,
            label2id={name: number for number, name in names.items()},
        )
    ).eval()
    optimizer, tokenizer = torch.optim.AdamW(net.parameters(), 5e-3), tiny.tokenizer()
    for _ in range(2):
        for row in sentences:
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(row["tokens"])])
            labels = torch.tensor([[TAGS.index(name) for name in row["tags"]]])
            optimizer.zero_grad()
            net(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
    return tiny.save(net, tmp_path / "model")


def numbers(report):
    return {metric.name: metric.value for metric in report.model.metrics}


HOW = {"text_column": "tokens", "label_column": "tags"}


def test_tags_and_entities_are_those_of_seqeval(model, sentences):
    got = numbers(headprune.evaluate(model, data=sentences, **HOW))
    net, tokenizer = headprune.from_pretrained(model), tiny.tokenizer()
    said = []
    for row in sentences:
        batch = tokenizer(" ".join(row["tokens"]), return_tensors="pt")
        special = set(tokenizer.all_special_ids)
        real = [n for n, i in enumerate(batch["input_ids"][0].tolist()) if i not in special]
        with torch.no_grad():
            best = net(**batch).logits[0].argmax(-1)
        said.append([TAGS[int(best[n])] for n in real])
    assert 0.1 < got["entity_f1"] < 1
    assert got["entity_f1"] == pytest.approx(f1_score(sentences["tags"], said))
    assert got["tag_accuracy"] == pytest.approx(accuracy_score(sentences["tags"], said))
    wrong = sentences.map(lambda row: {"tags": ["B-LOC", *row["tags"][1:]]})
    assert numbers(headprune.evaluate(model, data=wrong, **HOW)) != got
    features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=[*TAGS]))})
    numbered = [[TAGS.index(name) for name in row] for row in sentences["tags"]]
    classes = Dataset.from_dict({"tokens": sentences["tokens"], "tags": numbered}, features)
    assert numbers(headprune.evaluate(model, data=classes, **HOW)) == got


def test_entities_of_bilou_are_those_of_bioes():
    bilou = ["U-PER", "U-PER", "O", "B-LOC", "I-LOC", "L-LOC", "L-UNIT"]
    bioes = ["S-PER", "S-PER", "O", "B-LOC", "I-LOC", "E-LOC", "E-UNIT"]
    assert tagged._entities(bilou, bioes) == (4, 4, 4)
    assert tagged._entities(bilou, ["S-PER", "O", *bioes[2:]]) == (3, 4, 3)


def test_a_sentence_without_words_is_left_out(model, sentences):
    empty = Dataset.from_dict({"tokens": [[]], "tags": [[]]}, sentences.features)
    with pytest.warns(HeadpruneWarning, match="1 of 61 rows have no text"):
        report = headprune.evaluate(model, data=concatenate_datasets([empty, sentences]), **HOW)
    assert numbers(report) == numbers(headprune.evaluate(model, data=sentences, **HOW))


def test_models_may_number_tags_differently(model, sentences, tmp_path):
    net = headprune.from_pretrained(model)
    order = [1, 2, 3, 0]  # its inverse is another
    net.classifier.weight.data = net.classifier.weight.data[order]
    net.classifier.bias.data = net.classifier.bias.data[order]
    net.config.id2label = {n: TAGS[old] for n, old in enumerate(order)}
    net.config.label2id = {name: n for n, name in net.config.id2label.items()}
    other = tiny.save(net, tmp_path / "other")
    report = headprune.evaluate(other, data=sentences, against=model, **HOW)
    gaps = {one.name: one.interval.estimate - (one.kind == "ratio") for one in report.differences}
    assert gaps and not any(gaps.values()), gaps
    numbered = [[TAGS.index(name) for name in row] for row in sentences["tags"]]
    data = Dataset.from_dict({"tokens": sentences["tokens"], "tags": numbered})
    with pytest.raises(DataError, match="so the label '0' is ambiguous"):
        headprune.evaluate(other, data=data, against=model, **HOW)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_trained_cut_compressed_and_compared(dtype, model, sentences, tmp_path):
    gates = {"target_heads": 4, "steps": 4, "batch_size": 8, "dtype": dtype}
    run = headprune.train_gates(model, tmp_path / "gates", data=sentences, **HOW, **gates)
    assert run.metadata.kept_heads == 4
    out = tmp_path / "out"
    headprune.prune(model, out, gates=tmp_path / "gates", layout="ragged")
    report = headprune.evaluate(out, data=sentences, against=model, **HOW)
    assert {one.name for one in report.differences} == {"tag_accuracy", "entity_f1"}
    few = {"calibration_tokens": 200, "seq_len": 32, "text_column": "tokens"}
    many = concatenate_datasets([sentences] * 3)
    small = headprune.compress(model, tmp_path / "small", keep=0.5, data=many, **few)
    assert small.choice.measure == "same tags" and 0 < small.choice.contenders[0].held_out <= 1


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_a_word_has_its_tag_at_its_first_token(kind):
    if kind == "pieces":
        pieces = {"[UNK]": 0, "pa": 1, "##ris": 2, "is": 3, "##!": 4}
        raw = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
        raw.pre_tokenizer, raw.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")
    else:
        letters = {letter: n for n, letter in enumerate(["<s>", "</s>", *"Ġparis"])}
        tokenizer = RobertaTokenizerFast(vocab=letters, merges=[], add_prefix_space=False)
    text = "paris is paris"
    rows = tokenizer(text, return_offsets_mapping=True)
    labels = _at_first_tokens(text, rows["offset_mapping"], [5, 6, 7])
    tokens = tokenizer.convert_ids_to_tokens(rows["input_ids"])
    first = [(token, n) for token, n in zip(tokens, labels, strict=True) if n != -100]
    starts = ("pa", "is", "pa") if kind == "pieces" else ("p", "i", "p")
    assert first == [*zip(starts, (5, 6, 7), strict=True)]


def test_what_does_not_fit_is_refused(model, sentences, monkeypatch):
    def refused(error, match, data, **how):
        with pytest.raises(error, match=match):
            headprune.evaluate(model, data=data, **how)

    refused(DataError, "name the --label-column", sentences, text_column="tokens")
    short = sentences.map(lambda row: {"tags": row["tags"][1:]})
    refused(DataError, "Row 0 .* has 6 words and other than 6 tags", short, **HOW)
    spaced = sentences.map(lambda row: {"tokens": ["a b", *row["tokens"][1:]]})
    refused(DataError, "words without spaces", spaced, **HOW)
    other = sentences.map(lambda row: {"tags": ["B-ORG", *row["tags"][1:]]})
    refused(DataError, "The label 'B-ORG' is none of the model's labels", other, **HOW)

    def absent(what, *modules):
        raise HeadpruneError(f"{what} needs {modules[0]}.")

    monkeypatch.setattr(tagged, "refuse_missing", absent)
    refused(HeadpruneError, "F1 of entities needs seqeval", sentences, **HOW)
