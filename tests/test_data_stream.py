"""Text in parts: the same tokens as of the whole, in bounded memory, and files that are damaged."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from headprune.config import DataConfig
from headprune.data import sequences, tokens
from headprune.data.rows import evenly, lengths
from headprune.data.sequences import packed_sequences, tokenized_rows, windows
from headprune.data.sources import Examples, read_examples
from headprune.data.tokens import Chunking, head, token_ids
from headprune.errors import DataError
from tests import tiny

SMALL = Chunking(chunk=240, overlap=80, margin=3)
WORDS = "the quick brown foxes jumped over lazily sleeping dogs' internationalization 中文 naïve"
DIGITS = r"\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+|\p{L}+"


def prose(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    words = [*WORDS.split(), "123", "4567890", "don't", "😀", "e\u0301", "\n", "\n\n", "  ", "-"]
    return " ".join(draw.choice(words) + draw.choice(["", "", ",", "."]) for _ in range(count))


TEXTS = {
    "prose": prose(1200),
    "runs of spaces": "".join(f"{word}{' ' * n}" for n, word in enumerate(prose(60).split())),
    "one run of spaces": f"a{' ' * 3000}b {prose(40)}",
    "newlines": "\n" * 1500 + prose(50) + "\r\n" * 400 + "\t \n" * 300,
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈 𐐐𐐐" * 200,
    "no spaces": prose(600).replace(" ", "").replace("\n", ""),
    "one letter": "a" * 2500 + " b",
    "digits": f"{prose(30)} {'31415926535' * 150} {prose(30)}",
    "marks": "e\u0301\u0323" * 600 + "ﬁ½Å" * 200,
    "special tokens": "<s> one<mask>two </s>" * 90 + prose(60),
    "short": "a few words",
    "empty": "",
}


def trained(model: Any, trainer: Any, pre: Any = None, normalizer: Any = None) -> Any:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre if pre is not None else backend.pre_tokenizer
    backend.normalizer = normalizer if normalizer is not None else backend.normalizer
    backend.train_from_iterator([prose(3000, seed=7)], trainer)
    return backend


SPECIAL = ["<unk>", "<s>", "</s>", "<mask>"]


def byte_level(pre: Any) -> Any:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return trained(models.BPE(), trainer, pre)


def bpe_words() -> Any:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def bpe_digits() -> Any:
    split = pre_tokenizers.Split(Regex(DIGITS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([split, level]))


def bpe_whole() -> Any:
    """As Llama 2: the pre-tokenizer leaves the text whole; bytes stand for what is unknown."""
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    learnt = trained(models.BPE(), trainer, pre_tokenizers.Metaspace())
    vocabulary = learnt.get_vocab()
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.add_special_tokens(SPECIAL)
    return backend


def wordpiece() -> Any:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return trained(
        models.WordPiece(unk_token="<unk>"),
        trainer,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    )


def unigram(split: bool = True) -> Any:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    learnt = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    return learnt


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": bpe_words,
    "byte-level BPE, digits by three": bpe_digits,
    "BPE without words": bpe_whole,
    "WordPiece": wordpiece,
    "Unigram": unigram,
    "Unigram without words": lambda: unigram(split=False),
}


@cache
def tokenizer(name: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZERS[name](),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
    )


def whole(text: str, of: Any) -> list[int]:
    ids: list[int] = of(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def pieces(text: str, seed: int = 0) -> Iterator[str]:
    draw = random.Random(seed)
    while text:
        size = draw.choice([1, 7, 50, 400])
        yield text[:size]
        text = text[size:]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def joined(text: str, of: Any, cut: Chunking = SMALL) -> list[list[int]]:
    return [part.tolist() for part in token_ids(pieces(text), of, cut)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_in_parts_are_those_of_the_whole(name: str, text: str) -> None:
    of = tokenizer(name)
    parts = joined(TEXTS[text], of)
    assert flat(parts) == whole(TEXTS[text], of)
    if text == "prose" and name != "Unigram without words":
        assert len(parts) > 20  # or it would show nothing


@pytest.mark.parametrize("name", TOKENIZERS)
def test_chunks_that_are_not_joined_where_they_agree_give_other_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, text = tokenizer(name), TEXTS["prose"]

    def at_the_cut(self: Any, left: Any, begin: int, right: Any) -> tuple[int, int]:
        return len(left.ids), int(np.searchsorted(right.places[:, 0], left.stop))

    monkeypatch.setattr(tokens._Joiner, "_joint", at_the_cut)
    assert flat(joined(text, of)) != whole(text, of)


def test_ties_and_digits_are_not_joined_by_luck() -> None:
    """Repeats agree wherever they are cut, though not by how many there are."""
    odd = f"{TEXTS['prose'][:300]}{'é' * 40}{chr(10) * 901}{TEXTS['prose'][:300]}"
    for name in ("Unigram", "Unigram without words", "byte-level BPE, digits by three"):
        of = tokenizer(name)
        for text in (odd, f"{TEXTS['prose'][:99]}{'1' * 1000} 12{TEXTS['prose'][:400]}"):
            for margin in (2, 3, 6):
                cut = Chunking(chunk=150, overlap=40, margin=margin)
                assert flat(joined(text, of, cut)) == whole(text, of)


def test_a_text_is_read_no_further_than_tokens_are_asked_for() -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "w1 w2 w3 w4 w5 w6 w7 w8 w9 "

    of = tiny.tokenizer()
    first = next(token_ids(endless(), of, SMALL))
    assert first.tolist() == whole("w1 w2 w3 w4 w5 w6 w7 w8 w9 " * 30, of)[: len(first)]
    assert read < 30
    assert len(of(head(endless(), of, 500, SMALL))["input_ids"]) > 500
    assert head(iter(["w1 ", "w2"]), of, 500, SMALL) == "w1 w2"


def test_tokenizers_that_tell_no_places_get_the_whole() -> None:
    slow = ByT5Tokenizer()
    assert joined("several words " * 99, slow) == [whole("several words " * 99, slow)]
    random_merges = bpe_words()
    random_merges.model.dropout = 0.5
    of = PreTrainedTokenizerFast(tokenizer_object=random_merges)
    assert len(joined(TEXTS["prose"], of)) == 1


def test_a_tokenizer_that_changes_its_mind_is_refused() -> None:
    """It tells its places, and other tokens every time."""
    inner, calls = tokenizer("byte-level BPE"), iter(range(1000))

    class Moody:
        is_fast, backend_tokenizer = True, inner.backend_tokenizer

        def __call__(self, text: str, **options: Any) -> Any:
            return inner(f"{next(calls)}" * 9 + text[::-1], **options)

        def get_vocab(self) -> Any:
            return inner.get_vocab()

    with pytest.raises(DataError, match="other tokens for the same text when it reads it again"):
        list(token_ids(["abc def " * 500], Moody(), SMALL))


def files(folder: Path, *texts: str) -> Examples:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return read_examples(DataConfig(source=str(folder)))


def test_windows_are_those_of_whole_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "token_ids", partial(token_ids, cut=SMALL))
    monkeypatch.setattr(sequences, "_AT_ONCE", 100)
    of, texts = tokenizer("byte-level BPE"), [TEXTS["prose"], TEXTS["newlines"], TEXTS["digits"]]
    stream = flat(whole(text, of) for text in texts)
    found = packed_sequences(files(tmp_path, *texts), of, 16)
    rows = [stream[i * 16 : i * 16 + 16] for i in range(len(stream) // 16)]
    assert list(found["input_ids"]) == rows
    assert all(mask == [1] * 16 for mask in found["attention_mask"])
    assert lengths(found).tolist() == [16] * len(rows)
    starts = np.cumsum([0, *(len(whole(text, of)) for text in texts)])
    for most in (1, 7, 50):  # all over the text, each with the document that it begins in
        part, begins = windows(files(tmp_path, *texts), of, 16, most=most)
        numbers = evenly(len(rows), most)
        assert list(part["input_ids"]) == [rows[number] for number in numbers]
        assert begins.tolist() == [sum(16 * n >= starts) - 1 for n in numbers]
    assert set(begins.tolist()) == {0, 1, 2}
    documents = Examples([(text,) for text in texts], None, rows_are_documents=True)
    ended = flat([*whole(text, of), of.eos_token_id] for text in texts)
    found = packed_sequences(documents, of, 16)
    assert flat(found["input_ids"]) == ended[: len(ended) // 16 * 16]


def test_rows_of_long_texts_are_cut_off_as_if_they_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = tokenizer("WordPiece")
    examples = files(tmp_path, TEXTS["prose"], TEXTS["short"])
    wanted = of([TEXTS["prose"], TEXTS["short"]], truncation=True, max_length=40)["input_ids"]
    monkeypatch.setattr(sequences, "head", partial(head, cut=SMALL))
    assert list(tokenized_rows(examples, of, 40)["input_ids"]) == wanted


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n' * 9)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    examples = read_examples(DataConfig(source=str(tmp_path / "rows.jsonl")))
    found = packed_sequences(examples, tiny.tokenizer(), 4)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(found) == 11 and len(list(examples.texts)) == 9  # and they are still there


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, mode: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headprune.data.rows.pa.OSFile", full)
    examples = Examples([("w1 w2",)], None, rows_are_documents=True)
    with pytest.raises(DataError, match="could not be kept in .*No space left.*TMPDIR"):
        packed_sequences(examples, tiny.tokenizer(), 2)


def test_a_token_number_that_no_vocabulary_has_is_refused() -> None:
    class Damaged:
        """As a tokenizer whose file has another number for a word."""

        is_fast = False

        def __call__(self, texts: list[str], **settings: object) -> dict[str, object]:
            return {"input_ids": [[3, 2**31]] if isinstance(texts, list) else [3, 2**31]}

    with pytest.raises(DataError, match=r"the number 2,147,483,648, which no vocabulary has"):
        list(token_ids("a b", Damaged()))
