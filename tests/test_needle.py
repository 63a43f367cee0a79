"""Needles: a model finds those that it can see, and no others; where they lie; what has no room."""

import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from headprune.config import DataConfig, EvaluateConfig, NeedleConfig
from headprune.data.needles import needles, window_of
from headprune.data.read import read_examples
from headprune.errors import DataError
from headprune.evaluation.evaluate import evaluate, retrieved
from headprune.model.answers import Prompt, answered
from headprune.schemas.records import Window
from tests import tiny

SAID = "The secret number of the is . bridge castle engine forest garden island kitchen river"
NEARBY = 3  # tokens that say what comes next, where they stood before
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def words():
    """The words of needles and of the tiny text, and every digit for itself."""
    known = [*tiny.SPECIAL, *SAID.split(), "village", "w", *"0123456789"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(known))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.Split("w", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


class Finder(PreTrainedModel):
    """Goes on as the text did after the last copy of some tokens, no more than so far back."""

    def __init__(self, reach, nearby=NEARBY):
        super().__init__(LlamaConfig(vocab_size=64))
        self.reach, self.nearby, self.shapes = reach, nearby, []
        self.weight = nn.Parameter(torch.zeros(1))

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, **_):
        told, nearby = torch.zeros_like(input_ids), self.nearby
        self.shapes.append(tuple(input_ids.shape))
        for row, ids in enumerate(input_ids.tolist()):
            after = {}
            for place in range(nearby - 1, len(ids)):
                seen = tuple(ids[place - nearby + 1 : place + 1])
                there = after.get(seen, -1)
                if there >= 0 and place - there < self.reach:
                    told[row, place] = ids[there]
                after[seen] = place + 1
        return SimpleNamespace(logits=nn.functional.one_hot(told, 64).float())


@pytest.fixture
def examples(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(400))
    return read_examples(DataConfig(source=str(tmp_path / "text.txt")))


def hidden(examples, lengths, keys=1, trials=2, seed=0, most=None, window=None):
    config = NeedleConfig(needle_lengths=lengths, needle_trials=trials, needle_keys=keys, seed=seed)
    return needles(examples, words(), config, most, window=window)


def found(reach, given, nearby=NEARBY):
    answers = answered(Finder(reach, nearby), [needle.row for needle in given], 3)
    return {(f.tokens, f.depth): f.accuracy for f in retrieved(given, *answers)}


@pytest.mark.parametrize("keys", [1, 4])
def test_needles_are_found_as_far_back_as_a_model_sees(examples, keys):
    given = hidden(examples, (100, 200), keys)
    assert {len(needle.row.ids) for needle in given} == {100, 200}  # to the token
    assert set(found(200, given).values()) == {1.0}
    cut = found(70, given)
    assert [cut[200, depth] for depth in DEPTHS][::4] == [0, 1.0]
    assert set(found(8, given).values()) == {0.0}


def test_one_of_several_numbers_is_asked_for(examples):
    given = hidden(examples, (200,), keys=4)
    tokenizer = words()
    for needle in given:
        text = tokenizer.decode(needle.row.ids)
        keys = [part.split()[0] for part in text.split("number of the")[1:]]
        assert len(keys) == 5 and len({*keys}) == 4 and keys.count(keys[-1]) == 2
        fact = tokenizer.decode([needle.row.ids[place] for place in needle.fact])
        assert f"number of the {keys[-1]} is" in fact
        asked = tokenizer.decode(needle.row.ids[needle.question :])
        assert asked.startswith("The secret number") and asked.split()[-5:] == fact.split()[-6:-1]
    # a model that goes by the last word alone copies the last number, unless a digit comes twice
    last = found(200, given, nearby=1)
    assert [last[200, depth] > 0 for depth in DEPTHS] == [False] * 4 + [True]


def test_the_loss_of_answers_is_that_of_the_model(examples):
    given = hidden(examples, (100,))
    for reach, likelihood in ((200, math.e / (math.e + 63)), (1, 1 / (math.e + 63))):
        hits, nats = answered(Finder(reach), [needle.row for needle in given], 4)
        assert nats == pytest.approx([-math.log(likelihood)] * 10)
        assert set(hits) == {float(reach == 200)}


def test_long_prompts_run_alone(examples):
    model = Finder(1)
    given = [*hidden(examples, (64, 300), trials=1), *hidden(examples, (390,), trials=1)] * 3
    answered(model, [Prompt(n.row.ids * 4, 4) for n in given], 8)
    assert max(rows * tokens for rows, tokens in model.shapes) <= 2048
    assert model.shapes[0] == (1, 4 * 390) and max(model.shapes)[0] == 8


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
    ("lengths", "keys", "most", "told"),
    [
        ((20,), 1, None, "takes 25, and 16 of text are needed besides. Give needle_lengths of 41 "),
        ((64,), 4, None, "Give needle_lengths of 80 or more, or fewer needle_keys."),
        ((), 1, 40, "takes 25"),  # the model has no room for it
        ((64, 300), 1, 256, "A needle in 300 tokens: model and tokenizer take 256 at most"),
        ((5000,), 1, None, "A needle in 5,000 tokens: the text has fewer"),
    ],
)
def test_without_room_there_is_no_needle(lengths, keys, most, told, examples):
    with pytest.raises(DataError, match=told):
        hidden(examples, lengths, keys, most=most)


@pytest.mark.parametrize("keys", [1, 3])
def test_no_token_of_the_question_sees_the_fact_through_a_window(examples, keys):
    window, of_all = Window(size=60, sinks=4), hidden(examples, (100, 200), keys)
    given = hidden(examples, (100, 200), keys, window=window)
    places = [(n.fact.stop - 1, n.question) for n in given]
    assert all(question - last >= window.size for last, question in places)
    assert not all(n.question - n.fact.stop + 1 >= window.size for n in of_all)
    assert all(n.fact.start >= window.sinks for n in given)
    assert not all(n.fact.start >= window.sinks for n in of_all)
    assert {n.depth for n in given if len(n.row.ids) == 200} == {0.0, 0.25, 0.5}
    # those that stay are the same as without a window, but for the place of the sinks
    answers = {tuple(n.row.ids[n.row.start :]) for n in of_all}
    assert {tuple(n.row.ids[n.row.start :]) for n in given} < answers


def test_lengths_without_a_fact_beyond_the_window_are_left_out_or_refused(examples):
    window = Window(size=150, sinks=0)
    with pytest.raises(
        DataError, match=r"in 100 tokens: windows of 150 .* Give .* (\d+) or more"
    ) as told:
        hidden(examples, (100, 300), window=window)
    least = int(str(told.value).split()[-3])
    assert {n.depth for n in hidden(examples, (least,), window=window)} == {0.0}
    with pytest.raises(DataError, match=f"Give needle_lengths of {least} or more"):
        hidden(examples, (least - 1,), window=window)
    with pytest.MonkeyPatch.context() as patch:  # default lengths
        patch.setattr("headprune.data.needles.NEEDLE_LENGTHS", (100, 300))
        assert {len(n.row.ids) for n in hidden(examples, (), window=window)} == {300}
        with pytest.raises(DataError, match="in 300 tokens: windows of 350"):
            hidden(examples, (), window=Window(size=350, sinks=0))


def test_a_window_is_that_of_layers_and_of_heads():
    mistral, llama = tiny.model("mistral"), tiny.model("llama-gqa")
    assert window_of(llama) is None and window_of(mistral) == window_of(llama, mistral) == Window(
        size=8, sinks=0
    )
    llama.config.headprune = {"window": {"size": 12, "sinks": 4}}
    assert window_of(llama) == window_of(mistral, llama) == Window(size=12, sinks=4)
    llama.config.headprune["window"]["size"] = tiny.SIZES["n_positions"]
    assert window_of(llama) is None  # it hides nothing


@pytest.mark.parametrize("case", ["llama-gqa", "mistral"])
def test_an_evaluation_shows_retrieval_beside_the_base(case, tmp_path, text_file):
    dtype = torch.bfloat16 if case == "mistral" else torch.float32
    folder, data = (
        tiny.save(tiny.model(case, dtype), tmp_path / "m"),
        DataConfig(source=str(text_file)),
    )
    fast = {"seq_len": 16, "speed": False, "resamples": 100}
    config = EvaluateConfig(**fast, last_words=0, needle=True, needle_trials=3)
    report = evaluate(folder, data, config, folder)
    depths = DEPTHS if case == "llama-gqa" else DEPTHS[:-1]
    accuracy, nats = (m for m in report.model.metrics if m.name.startswith("needle"))
    assert (accuracy.n, accuracy.higher_is_better) == (3 * len(depths), True)
    assert (nats.n, nats.higher_is_better, nats.unit) == (3 * len(depths), False, "nats/token")
    compared = {one.name: one for one in report.differences}["needle_nats"]
    assert (compared.kind, compared.interval.estimate) == ("difference", 0)
    assert report.model.needle is not None
    assert [(cell.tokens, cell.depth) for cell in report.model.needle] == [(128, d) for d in depths]
    mean = sum(cell.nats * cell.n for cell in report.model.needle) / nats.n
    assert mean == pytest.approx(nats.value) and nats.value > 1
    columns, rows = report.needle()
    assert columns == ["context", *(f"at {d:.0%}" for d in depths)]
    assert [row[0] for row in rows] == ["128 found", "128 nats"] and rows[1][1].count("(") == 1
    settings = report.provenance.settings
    assert [settings[f"needle_{n}"] for n in ("trials", "keys", "lengths")] == [3, 4, [128]]
    window = None if case == "llama-gqa" else {"size": 8, "sinks": 0}
    assert settings["needle_window"] == window
    plain = evaluate(folder, data, config.model_copy(update={"needle": False}))
    assert plain.model.needle is None
    assert not any(name.startswith("needle") for name in plain.provenance.settings)
