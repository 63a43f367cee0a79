"""The last words of passages: how they are cut from text, and which of them are predicted."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headprune.config import DataConfig, EvaluateConfig
from headprune.data.passages import Passage, last_words, lines_of, passage_words, passages
from headprune.data.read import read_examples
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation import evaluate as evaluation
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.metrics import Samples
from headprune.evidence.recall import passage_dependent_words
from headprune.model.answers import answered
from headprune.model.batch import most_tokens
from headprune.model.passes import logits_at
from tests import tiny

LETTERS = [f"{a}{b}{c}d" for a in "bcdf" for b in "aeio" for c in "lmnr"][: tiny.WORDS]


def sentence(seed, words=20):
    """A sentence of words of four letters."""
    drawn = np.random.default_rng(seed).choice(LETTERS, words)
    return f"The {' '.join(drawn)}."


def tokenizer():
    """A word-level tokenizer that knows the words of ``sentence``."""
    known = [*tiny.SPECIAL[:5], *LETTERS]
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")


def columns(model, words, given, size=4):
    """What a model makes of passages."""
    prompts = last_words(given, words, most_tokens(model, words))
    return {"last_word_hits": answered(model, prompts, size).hits}


def test_passages_are_whole_sentences_without_their_last_word():
    text = [sentence(number) for number in range(6)]
    first, second = passages(text, 10)
    assert first.context + f" {first.word}." == " ".join(text[:3])  # 63 words: 42 are too few
    assert second.context + f" {second.word}." == " ".join(text[3:])
    joined = passages([" ".join(text[:2]), " ".join(text[2:])], 10)
    assert joined == (first, second)  # rows do not matter


def test_passages_may_end_inside_their_last_sentence():
    text = [sentence(number) for number in range(3)]
    inside = passages(text, 100, inside=True)
    last = text[2].rstrip(".").split()
    assert [one.word for one in inside] == last[7:]  # 42 words come before it
    before = " ".join(text[:2])
    for number, one in enumerate(inside, 7):
        assert one.context == f"{before} {' '.join(last[:number])}"
        assert one.sentence == " ".join(last[:number])
    assert inside[-1:] == passages(text, 100)
    paragraphs = [text[0], "", text[1], "# Title", text[2]]
    assert passages(paragraphs, 100, inside=True) == inside  # they cross paragraphs
    more = passages([*text, sentence(3)], 100, inside=True)[len(inside) :]
    last = sentence(3).rstrip(".").split()  # and overlap: 63 words come before it
    assert [(one.context, one.word) for one in more] == [
        (" ".join([*text, *last[:number]]), word) for number, word in enumerate(last) if number
    ]


@pytest.mark.parametrize("line", ["", "  ", "# Title", "= Title ="])
def test_blank_lines_and_headings_separate(line):
    text = [sentence(number) for number in range(3)]
    assert len(passages(text, 10)) == 1
    assert passages([*text[:2], line, text[2]], 10) == ()
    assert passages(["\n".join([*text[:2], line, text[2]])], 10) == ()


@pytest.mark.parametrize(
    ("end", "word"),
    [
        ("by the river.", "river"),
        ('he said "to the river."', "river"),
        ("by the river . ", "river"),
        ("by the sea.", None),  # three letters
        ("in May 1961.", None),
        ("by the river-side.", None),
        ("by the river", None),  # no end
    ],
)
def test_words_that_count(end, word):
    found = passages([f"{sentence(0, 60)[:-1]} {end}"], 10)
    assert [one.word for one in found] == ([] if word is None else [word])


def test_sentences_that_are_too_long_are_left_out():
    assert len(passages([sentence(0, 148)], 10)) == 1
    assert passages([sentence(0, 150)], 10) == ()
    after = passages([sentence(0, 200), sentence(1, 60)], 10)
    assert [f"{one.context} {one.word}." for one in after] == [sentence(1, 60)]


def test_words_that_were_seen_are_told():
    end = "and so it went to the River."
    assert not passages([f"{sentence(0, 60)[:-1]} {end}"], 1)[0].seen
    assert passages([f"the river was {sentence(0, 60)[:-1]} {end}"], 1)[0].seen
    assert not passages([f"the rivers were {sentence(0, 60)[:-1]} {end}"], 1)[0].seen


def test_some_of_many_are_spread_evenly():
    text = [sentence(number, 60) for number in range(100)]
    all_of_them = passages(text, 1000)
    assert len(all_of_them) == 100
    assert passages(text, 4) == tuple(all_of_them[place] for place in (0, 33, 66, 99))


def test_text_files_are_read_across_pieces(tmp_path):
    text = [sentence(number, 60) for number in range(5_000)]
    (tmp_path / "a.txt").write_text("\n".join(text))
    examples = read_examples(DataConfig(source=str(tmp_path / "a.txt")))
    assert passages(lines_of(examples), 10**6) == passages(text, 10**6)
    assert len(passages(text, 10**6)) == 5_000


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bloom", "opt", "gemma2", "cohere", "mpt"])
def test_logits_at_some_tokens_are_those_of_all(case):
    model = tiny.model(case)
    ids = torch.randint(5, tiny.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[1, 4], [7, 0], [3, 3]])
    with torch.no_grad():
        found = logits_at(model, ids, torch.ones_like(ids), places)
        whole = model(input_ids=ids).logits
    wanted = torch.stack([row[at] for row, at in zip(whole, places, strict=True)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert (found - wanted.flip(0)).abs().max() > 1e-2
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, whole)  # nothing is left behind


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_hits_do_not_depend_on_batch_size_or_padding(case):
    model, words = tiny.model(case), tokenizer()
    given, wanted = [], []
    for number in range(11):
        context = sentence(number, 5 + 3 * number)[:-1]
        hit = number % 3 == 0
        given.append(Passage(context, likeliest(model, words, context, 0 if hit else 1), hit))
        wanted.append(float(hit))
    for size in (1, 3, 11):
        assert columns(model, words, given, size)["last_word_hits"].tolist() == wanted
    assert columns(model, words, given[::-1])["last_word_hits"].tolist() == wanted[::-1]
    found = Samples(columns(model, words, given))
    assert found.value("last_word_accuracy") == pytest.approx(4 / 11)


def likeliest(model, words, context, rank):
    """The word of a rank that a model puts after a context."""
    with torch.no_grad():
        logits = model(**words(context, return_tensors="pt")).logits[0, -1]
    return str(words.convert_ids_to_tokens(int(logits.argsort(descending=True)[rank])))


def test_every_token_of_a_word_must_be_the_likeliest():
    model, words = tiny.model("llama-gqa"), split()
    context = sentence(0, 30)[:-1]
    first = likeliest(model, words, context, 0)
    second = likeliest(model, words, f"{context} {first}", 0)
    wrong = likeliest(model, words, f"{context} {first}", 1)
    given = [Passage(context, f"{first}/{last}", False) for last in (second, wrong)]
    given.append(Passage(context, f"{wrong}/{second}", False))
    found = columns(model, words, given)
    assert found["last_word_hits"].tolist() == [1, 0, 0]


def split():
    """A tokenizer that makes several tokens of a word with slashes."""
    words = tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Replace("/", " ")
    return words


def test_what_is_longer_than_the_model_takes_is_left_out():
    model, words = tiny.model("llama-gqa"), tokenizer()
    long = Passage(sentence(0, 128)[:-1], LETTERS[0], False)  # of 128 positions
    short = Passage(sentence(0, 60)[:-1], LETTERS[0], False)
    assert len(columns(model, words, [long, short])["last_word_hits"]) == 1
    assert last_words([long], words, most_tokens(model, words)) == ()


def test_an_evaluation_says_which_last_words_are_predicted(tmp_path):
    model = tiny.model("llama-gqa")
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    text = [sentence(number, 60) for number in range(30)]
    (tmp_path / "text.txt").write_text("\n".join(text))
    data, fast = DataConfig(source=str(tmp_path / "text.txt")), {"seq_len": 16, "speed": False}
    config = EvaluateConfig(**fast, resamples=200, last_words=20)
    report = evaluate(tmp_path / "model", data, config, tmp_path / "model")
    found = {one.name: one for one in report.model.metrics}
    assert "nll_nats_per_token" in found
    shown = [name for name, *_ in report.rows()]
    assert shown == ["perplexity", "bits per byte", "last word accuracy"]
    hits = columns(model, tokenizer(), passages(text, 20))["last_word_hits"]
    assert found["last_word_accuracy"].n == 20
    assert found["last_word_accuracy"].value == hits.mean()
    same = {one.name: one.interval.estimate for one in report.differences}
    assert same["last_word_accuracy"] == 0
    assert report.provenance.settings["last_words"] == 20
    none = evaluate(tmp_path / "model", data, EvaluateConfig(**fast, last_words=0))
    assert "last_word_accuracy" not in {m.name for m in none.model.metrics}
    assert "last_words" not in none.provenance.settings


def test_both_models_read_the_passages_that_the_shorter_one_takes(tmp_path):
    model = tiny.model("llama-gqa")
    for name, most in (("long", 128), ("short", 80)):
        model.config.max_position_embeddings = most
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    text = [sentence(number, (60, 100)[number % 2]) for number in range(30)]
    (tmp_path / "text.txt").write_text("\n".join(text))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    config = EvaluateConfig(seq_len=16, speed=False, resamples=200)
    for one, other in (("short", "long"), ("long", "short")):
        report = evaluate(tmp_path / one, data, config, tmp_path / other)
        gap = {difference.name: difference.interval for difference in report.differences}
        assert gap["last_word_accuracy"].n == 15
        assert gap["last_word_accuracy"].estimate == 0  # their weights are the same


def test_unequal_numbers_of_windows_are_not_paired(tmp_path, monkeypatch):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    tokenizer().save_pretrained(folder)
    text = [sentence(number, 60) for number in range(5)]
    (tmp_path / "text.txt").write_text("\n".join(text))
    counts = iter([3, 4])
    monkeypatch.setattr(evaluation, "answered", lambda *_: np.ones((2, next(counts))))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    fast = {"seq_len": 16, "speed": False, "resamples": 200, "passage_words": 0}
    config = EvaluateConfig(**fast)
    with pytest.raises(DataError, match="has 3 windows or examples of the model and 4 of the base"):
        evaluate(folder, data, config, folder)


def test_passage_words_stand_earlier_but_not_in_their_own_sentence():
    filler = sentence(0, 45)
    told = f"the river was {filler} And so it went to the River."
    assert (
        passages([told], 1, lambda one: one.answer_in_context)[0].sentence
        == "And so it went to the"
    )
    for other in (f"{filler} And so it went to the River.", f"{filler} The river is the river."):
        assert passages([other], 1)
        assert not passages([other], 1, lambda one: one.answer_in_context)


def passage_text(model, words, count):
    """Passages whose last word the model predicts after them, and which stands in them before."""
    found = []
    for seed in range(2000):
        first, last = sentence(2 * seed, 45), sentence(2 * seed + 1, 4)[:-1]
        word = likeliest(model, words, f"{first} {last}", 0)
        if word in LETTERS and word in first and word not in last:
            found.append(f"{first} {last} {word}.")
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} passages")


def test_an_evaluation_says_which_words_of_the_passage_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "FEWEST_WORDS", 5)
    model, words = tiny.model("llama-gqa"), tokenizer()
    text = passage_text(model, words, 24)
    for name in ("model", "cut"):
        model.save_pretrained(tmp_path / name)
        words.save_pretrained(tmp_path / name)
        model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    (tmp_path / "text.txt").write_text("\n".join(text))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    config = EvaluateConfig(seq_len=16, speed=False, resamples=200, last_words=0)
    given = passage_words(read_examples(data), 100, words, None)
    assert len(given) == 24
    rows = passage_dependent_words(tiny.model("llama-gqa"), given, 4)
    alone = answered(tiny.model("llama-gqa"), [one.alone for one in given], 4).hits
    assert 5 <= len(rows) == 24 - alone.sum() < 24  # some sentences tell the word by themselves
    same = evaluate(tmp_path / "model", data, config, tmp_path / "model")
    cut = evaluate(tmp_path / "cut", data, config, tmp_path / "model")
    for report, wanted in ((same, 1.0), (cut, answered(model, rows, 4).hits.mean())):
        for side, value in ((report.model, wanted), (report.against, 1.0)):
            (one,) = (each for each in side.metrics if each.name == "passage_words")
            assert (one.value, one.n) == (value, len(rows))
    assert answered(model, rows, 4).hits.mean() < 1
    alone_measured = evaluate(tmp_path / "cut", data, config)
    assert "passage_words" not in {one.name for one in alone_measured.model.metrics}


@pytest.mark.parametrize(("fewest", "count"), [(50, "at most 12"), (12, r"\d+")])
def test_too_few_words_of_the_passage_are_said_and_left_out(fewest, count, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "FEWEST_WORDS", fewest)
    model, words = tiny.model("llama-gqa"), tokenizer()
    (tmp_path / "text.txt").write_text("\n".join(passage_text(model, words, 12)))
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    data = DataConfig(source=str(tmp_path / "text.txt"))
    config = EvaluateConfig(seq_len=16, speed=False, resamples=200, last_words=0)
    why = f"tells the original {count} words of .* needs {fewest}, and is left out"
    with pytest.warns(HeadpruneWarning, match=why):
        report = evaluate(tmp_path / "model", data, config, tmp_path / "model")
    assert "passage_words" not in {one.name for one in report.model.metrics}
