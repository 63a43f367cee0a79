"""Text in parts: the same tokens as of the whole, in bounded memory, and files that are damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headprune.data.tokens import Chunking, head, token_ids
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
    "runs of spaces": "".join(w + " " * n for w, n in zip(prose(60).split(), range(90), strict=False)),
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
    trainer.initial_alphabet = ["▁"]
    mark = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learnt = trained(models.BPE(), trainer, pre_tokenizers.Metaspace())
    vocabulary = learnt.get_vocab()
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in _model(learnt)["merges"]]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = mark
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens(SPECIAL)
    return backend


def _model(backend: Any) -> Any:
    import json

    return json.loads(backend.to_str())["model"]


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
    learnt = trained(
        models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC()
    )
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


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_in_parts_are_those_of_the_whole(name: str, text: str) -> None:
    of = tokenizer(name)
    parts = list(token_ids(pieces(TEXTS[text]), of, SMALL))
    assert np.concatenate(parts).tolist() == whole(TEXTS[text], of)
    if text == "prose":
        assert len(parts) > 20  # it was in parts
