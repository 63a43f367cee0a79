"""Padding decides no number, on whatever side a tokenizer puts it."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForTokenClassification, Wav2Vec2FeatureExtractor

from headprune.config import CalibrationConfig, DataConfig, Objective, TrainGatesConfig
from headprune.config.data import Loss
from headprune.data import batches as of_data
from headprune.data.batches import batches
from headprune.evaluation import quality
from headprune.model.batch import padded
from tests import tiny

TEXTS = [tiny.text(words, seed=words) for words in (3, 17, 8, 11)]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
DECODERS = ("gpt2", "opt", "llama", "bloom", "gpt_neox", "falcon", "mpt", "gpt_bigcode")
ENCODERS = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "deberta-v2")
PAIRS = ("t5", "bart", "marian", "pegasus", "m2m_100", "blenderbot")
CASES = [
    *(("classes", f"{name}-classifier") for name in (*DECODERS, *ENCODERS)),
    *(("embeddings", f"{name}-base") for name in ENCODERS),
    *(("tags", name) for name in ("bert", "roberta", "gpt2")),
    *(("answers", name) for name in ("gpt2", "opt", "llama", "bloom")),
    *(("pairs", name) for name in PAIRS),
]


def net_of(kind, name):
    """A tiny model of a kind of data."""
    if kind != "tags":
        return tiny.model(name)
    torch.manual_seed(0)
    config = tiny.config(name, num_labels=2)
    tagger = AutoModelForTokenClassification.from_config(config)
    return tagger.eval()


def data_of(kind, folder):
    """A file of texts of unequal length."""
    file = folder / "rows.jsonl"
    rows = [{"text": text, "label": "1"} for text in TEXTS]
    columns = {"text_column": "text", "label_column": "label"}
    if kind == "tags":
        rows = [{"text": text.split(), "label": [1] * len(text.split())} for text in TEXTS]
    elif kind == "answers":
        roles = ("user", "assistant")
        turns = zip(TEXTS, reversed(TEXTS), strict=True)
        rows = [
            {"messages": [{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)]}
            for turn in turns
        ]
        columns = {"loss": Loss.ANSWERS}
    elif kind == "pairs":
        rows = [{"a": a, "b": b} for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
        columns = {"text_column": "a,b"}
    elif kind == "embeddings":
        columns = {"text_column": "text"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(file), **columns)


def outputs(net, batch):
    """The outputs of each row, without those at its padding."""
    with torch.no_grad():
        given = {name: value for name, value in batch.items() if name != "labels"}
        result = net(**given)
    values = result.logits if "logits" in result else result.last_hidden_state
    mask = batch["labels"] != -100 if "decoder_input_ids" in batch else batch["attention_mask"] != 0
    rows = zip(values, mask, strict=True)
    return [row[real] if values.dim() == 3 else row for row, real in rows]


def alone(net, row):
    """What transformers gives for one text, which needs no padding."""
    ids = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels") if name in row}
    if not net.config.is_encoder_decoder:
        ids.pop("labels", None)
    with torch.no_grad():
        result = net(**ids)
    values = result.logits if "logits" in result else result.last_hidden_state
    return values[0]


def gathered(kind, name, side, folder):
    """The outputs of a batch, and those of its texts one by one."""
    net, tokenizer, data = net_of(kind, name), tiny.tokenizer(), data_of(kind, folder)
    tokenizer.padding_side, tokenizer.chat_template = side, TEMPLATE
    labelled = kind in ("classes", "tags")
    objective = Objective.TASK if labelled else Objective.DISTILL
    rows, collate, *_ = batches(
        objective, net, tokenizer, data, CalibrationConfig(seq_len=64, batch_size=4)
    )
    some = [rows[number] for number in range(len(rows))]
    return outputs(net, collate(some)), [alone(net, row) for row in some]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_batch_gives_what_its_texts_give_alone(kind, name, side, tmp_path):
    for got, wanted in zip(*gathered(kind, name, side, tmp_path), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("classes", "gpt2-classifier"),
        ("embeddings", "bert-base"),
        ("answers", "gpt2"),
        ("pairs", "bart"),
    ],
)
def test_padding_on_the_left_would_show(kind, name, tmp_path, monkeypatch):
    monkeypatch.setattr(of_data, "padded", partial(padded, side="left"))
    found = zip(*gathered(kind, name, "left", tmp_path), strict=True)
    assert max(float((got - wanted).abs().max()) for got, wanted in found) > 1e-2


@pytest.mark.parametrize("name", ["gpt2-classifier", "llama-classifier"])
def test_a_decoder_finds_the_end_of_a_text_by_the_padding_of_its_config(name):
    net, tokenizer = tiny.model(name), tiny.tokenizer()
    tokenizer.pad_token = "<mask>"  # the config says <pad>
    rows = of_data.Dataset.from_dict(dict(tokenizer(TEXTS)))
    wanted = [alone(net, row).argmax(-1) for row in rows]
    found = quality.logits(quality.Pass(net, rows, tokenizer, 4)).argmax(1)
    assert found.tolist() == [int(x) for x in wanted]


def test_a_tokenizer_may_make_no_mask():
    net, tokenizer = tiny.model("bert-base"), tiny.tokenizer()
    tokenizer.model_input_names = ["input_ids"]
    rows = of_data.Dataset.from_dict({"input_ids": tokenizer(TEXTS)["input_ids"]})
    got = quality.embeddings(quality.Pass(net, rows, tokenizer, 4))
    wanted = [alone(net, row).mean(0) for row in rows]
    unit = torch.stack([each / each.norm() for each in wanted])
    torch.testing.assert_close(torch.tensor(got).float(), unit)


def test_recordings_are_padded_at_their_end():
    from headprune.data.audio import features_of

    class Sounds:
        def sound(self, number, rate):
            return torch.arange(1, 400 * (number + 1)).float().numpy()

    extractor = Wav2Vec2FeatureExtractor(padding_side="left", do_normalize=False)
    processor = of_data.SpeechProcessor(extractor)
    made = features_of
    features = made.__wrapped__(Sounds(), tiny.model("wav2vec2"), processor, [0, 1])
    assert features["input_values"][0, 0] == 1 and features["input_values"][0, -1] == 0


def test_a_loss_is_that_of_single_texts(tmp_path):
    net, data = tiny.model("gpt2-classifier"), data_of("classes", tmp_path)
    losses = {}
    for side in ("right", "left"):
        tokenizer = tiny.tokenizer()
        tokenizer.padding_side = side
        config = TrainGatesConfig(target_heads=0.5, steps=1, batch_size=4, seq_len=64)
        rows, collate, *_ = batches(Objective.TASK, net, tokenizer, data, config)
        with torch.no_grad():
            losses[side] = net(**collate([rows[number] for number in range(4)])).loss
    with torch.no_grad():
        each = [net(torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    wanted = torch.nn.functional.cross_entropy(torch.stack(each), torch.ones(4).long())
    for loss in losses.values():
        torch.testing.assert_close(loss, wanted)
