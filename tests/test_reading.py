"""Text that reaches no model: no tokenizer, unknown words, special tokens, ids beyond the model."""

import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

import headprune
from headprune.data.read import Examples
from headprune.data.sequences import all_windows, tokenized_rows, translation_rows
from headprune.errors import CheckpointError, DataError
from headprune.model.loading import load_tokenizer
from tests import tiny
from tests.test_cli import refuses, run

LANGUAGE_MODELS = ("bert-mlm", "gpt2", "t5")
SIZE = 30_000  # tokens, as real models have


def bare(case, folder):
    """A model's folder as people copy it: config and weights, and nothing of a tokenizer."""
    config = tiny.config(case)
    config.vocab_size = SIZE
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_a_folder_without_a_vocabulary_has_no_tokenizer(case, tmp_path):
    with pytest.raises(CheckpointError, match="has no usable tokenizer.* Copy the tokenizer files"):
        load_tokenizer(bare(case, tmp_path / "model"))


def letters(folder, words="ACGTN"):
    """A tokenizer of a few letters."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)


def added(folder):
    """A tokenizer without a vocabulary, but for tokens that were added to it, one by one."""
    tokenizer = Qwen2Tokenizer()
    tokenizer.add_tokens([f"w{i}" for i in range(SIZE // 2)])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: ByT5Tokenizer().save_pretrained(folder),
        lambda folder: CanineTokenizer().save_pretrained(folder),
        lambda folder: tiny.tokenizer().save_pretrained(folder),
        letters,
        added,
    ],
    ids=["bytes", "characters", "words", "letters", "added"],
)
def test_a_small_or_odd_tokenizer_is_one(save, tmp_path):  # type: ignore[no-untyped-def]
    folder = bare("t5", tmp_path / "model")
    save(folder)
    assert len(load_tokenizer(folder)) > 5


def documents(*texts):
    return Examples(texts, None, rows_are_documents=True)


def rows(examples, kind, vocabulary=tiny.VOCAB):
    """Makes rows of text in one of the three ways."""
    tokenizer = tiny.tokenizer()
    if kind == "sequences":
        return all_windows(examples, tokenizer, 4, vocabulary=vocabulary)[0]
    if kind == "texts":
        return tokenized_rows(examples, tokenizer, 16, vocabulary=vocabulary)
    pairs = documents(*((text, text) for text, *_ in examples.texts))
    return translation_rows(pairs, tokenizer, 16, vocabulary)


@pytest.mark.parametrize("kind", ["sequences", "texts", "pairs"])
def test_text_that_a_model_cannot_read(kind):
    known = "w0 w1 w2 w3"
    for fine in (known, f"{known} quux", f"{known} one two three four", f"<s> {known} </s>"):
        assert rows(documents((fine,)), kind)
    with pytest.raises(DataError, match="60% of the text's tokens are unknown"):
        rows(documents((f"{known} quux quux quuz",), ("quux quux quuz",)), kind)
    with pytest.raises(DataError, match="only special tokens of the text"):
        rows(documents(("<s> <pad> </s> <pad> <s>",)), kind)
    with pytest.raises(DataError, match="'w5' has the id 10, .* 10 tokens, 0 to 9"):
        rows(documents((f"{known} w5",)), kind, 10)
    assert rows(documents((known,)), kind, 9)


def test_text_of_which_the_tokenizer_makes_nothing(llama_folder, tmp_path):
    """As one of a vocabulary of pieces does, without a token for what is unknown."""
    model = shutil.copytree(llama_folder, tmp_path / "m")
    letters = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
    assert len(all_windows(documents(("abba" * 4,)), tokenizer, 4)[0]) == 4
    with pytest.raises(DataError, match="makes no tokens of the text"):
        all_windows(documents((" \n",), ("\nслово за словом",)), tokenizer, 4)
    with pytest.raises(DataError, match="which makes 0 sequences"):
        all_windows(documents((" \n",)), tokenizer, 4)
    tokenizer.save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text("слово за словом " * 200, encoding="utf-8")
    with pytest.raises(DataError, match="makes no tokens of the text"):
        headprune.compress(model, tmp_path / "out", data=[text], keep=0.5, seq_len=16)


@pytest.mark.parametrize(
    "line",
    [
        "evaluate m --data t.txt --no-speed --config seq_len=16",
        "score m --data t.txt --criterion fisher --config seq_len=16 out",
    ],
)
def test_ids_that_a_model_does_not_embed(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny.model("llama-gqa")
    model.resize_token_embeddings(40)
    tiny.save(model, tmp_path / "m")
    (tmp_path / "t.txt").write_text(tiny.text(600))
    code, _, err = run(capsys, *line.split())
    assert (code, "40 tokens, 0 to 39" in " ".join(err.split())) == (2, True), err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A tiny Llama with the wrong text, and without its tokenizer."""
    root = tmp_path_factory.mktemp("strange")
    model = tiny.save(tiny.model("llama-gqa"), root / "model")
    shutil.copytree(model, root / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    (root / "text.txt").write_text("слова другого языка " * 400)
    (root / "good.txt").write_text(tiny.text(2_000))
    (root / "plan.json").write_text('{"model.layers.1.self_attn": [0, 1]}')
    return {name.stem: name for name in root.iterdir()}


COMMANDS = {
    "train-gates": "train-gates {model} --target-heads 0.5 --data {text}",
    "score": "score {model} --data {text}",
    "heal": "heal {model} --teacher {model} --steps 2 --data {text}",
    "evaluate": "evaluate {model} --data {text}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_text_refuses(command, strange, tmp_path, capsys):
    options = ["--config", "seq_len=16"]
    options += [] if command == "check" else [str(tmp_path / "out")]
    for changed, message in (
        ({}, "100% of the text's tokens are unknown"),
        ({"model": strange["bare"], "text": strange["good"]}, "has no usable tokenizer"),
    ):
        words = COMMANDS[command].split()
        line = [word.format(**{**strange, **changed}) for word in words]
        refuses(capsys, message, *line, *options)
