"""Needles: a model finds those that it can see, and no others; where they lie; what has no room."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from headprune.config import DataConfig, EvaluateConfig, NeedleConfig
from headprune.data.read import read_examples
from headprune.errors import DataError
from headprune.evaluation.evaluate import evaluate, retrieved
from headprune.evaluation.probes import needles
from headprune.model.answers import answered
from tests import tiny

SAID = "The secret number of the is . bridge castle engine forest garden island kitchen river"
NEARBY = 3  # tokens that say what comes next, where they stood before


def words():
    """The words of needles and of the tiny text, and every digit for itself."""
    known = [*tiny.SPECIAL, *SAID.split(), "village", "w", *"0123456789"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(known))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.Split("w", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


class Finder(PreTrainedModel):
    """Goes on as the text did after the last copy of three tokens, no more than so far back."""

    def __init__(self, reach):
        super().__init__(LlamaConfig(vocab_size=64))
        self.reach = reach
        self.weight = nn.Parameter(torch.zeros(1))

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, **_):
        told = torch.zeros_like(input_ids)
        for row, ids in enumerate(input_ids.tolist()):
            after = {}
            for place in range(NEARBY - 1, len(ids)):
                seen = tuple(ids[place - NEARBY + 1 : place + 1])
                there = after.get(seen, -1)
                if there >= 0 and place - there < self.reach:
                    told[row, place] = ids[there]
                after[seen] = place + 1
        return SimpleNamespace(logits=nn.functional.one_hot(told, 64).float())


@pytest.fixture
def examples(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(400))
    return read_examples(DataConfig(source=str(tmp_path / "text.txt")))


def hidden(examples, lengths, **settings):
    config = NeedleConfig(needle_lengths=lengths, needle_trials=2)
    return needles(examples, words(), **{"most": None, "config": config, "seed": 0} | settings)


def found(reach, given):
    hits = answered(Finder(reach), [needle.row for needle in given], 3)
    return {(f.tokens, f.depth): f.accuracy for f in retrieved(given, hits)}


def test_needles_are_found_as_far_back_as_a_model_sees(examples):
    given = hidden(examples, (64, 200))
    assert {len(needle.row.ids) for needle in given} == {64, 200}  # to the token
    assert set(found(200, given).values()) == {1.0}
    cut = found(70, given)
    assert [cut[64, depth] for depth in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0] * 5
    assert [cut[200, depth] for depth in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0, 0, 0, 1.0, 1.0]
    assert set(found(8, given).values()) == {0.0}


def test_numbers_are_drawn_by_the_seed_and_lie_at_their_depth(examples):
    given, again = hidden(examples, (100,)), hidden(examples, (100,))
    assert given == again != hidden(examples, (100,), seed=1)
    tokenizer = words()
    for needle in given:
        text = tokenizer.decode(needle.row.ids)
        number = tokenizer.decode(needle.row.ids[needle.row.start :])
        assert len(number.split()) == 5 and text.count(number) == 2 and text.endswith(number)
        room = 100 - 2 * len(tokenizer.tokenize("The secret number of the river is 12345"))
        before = text[: text.index("The")].split()
        assert len(before) == pytest.approx(needle.depth * room, abs=1)


@pytest.mark.parametrize(
    ("lengths", "most", "told"),
    [
        ((20,), None, "takes 25, and 16 of text are needed besides. Give needle_lengths of 41"),
        ((), 40, "takes 25"),  # the model has no room for it
        ((64, 300), 256, "A needle in 300 tokens: model and tokenizer take 256 at most"),
        ((5000,), None, "A needle in 5,000 tokens: the text has fewer"),
    ],
)
def test_without_room_there_is_no_needle(lengths, most, told, examples):
    with pytest.raises(DataError, match=told):
        hidden(examples, lengths, most=most)


def test_an_evaluation_shows_retrieval_beside_the_base(llama_folder, text_file):
    data = DataConfig(source=str(text_file))
    fast = {"seq_len": 16, "speed": False, "resamples": 100}
    config = EvaluateConfig(**fast, last_words=0, needle=True, needle_trials=2)
    report = evaluate(llama_folder, data, config, llama_folder)
    (metric,) = (m for m in report.model.metrics if m.name == "needle_accuracy")
    assert (metric.n, metric.higher_is_better) == (10, True)  # of the 128 tokens that it takes
    assert report.model.needle is not None
    assert [cell.tokens for cell in report.model.needle] == [128] * 5
    columns, rows = report.needle()
    assert columns == ["context", "at 0%", "at 25%", "at 50%", "at 75%", "at 100%"]
    assert rows[0][0] == "128 tokens" and rows[0][1].count("(") == 1
    assert report.provenance.settings["needle_trials"] == 2
    plain = evaluate(llama_folder, data, config.model_copy(update={"needle": False}))
    assert plain.model.needle is None
    assert not any(name.startswith("needle") for name in plain.provenance.settings)
