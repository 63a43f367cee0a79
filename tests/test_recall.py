"""What a model recalls from earlier in its context: counts and losses on known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headprune.evaluation.metrics import Samples
from headprune.evaluation.recall import RecalledWords, WordMarks
from tests import tiny

TOKENS = ["<s>", "Ġthe", "Ġcat", "Ġsat", "s", ".", "-", "Ġ7", "Ġdog", "ma", "Ċ", "7"]


class Marked:
    """A tokenizer whose tokens say where words begin."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return len(TOKENS)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [i for i, token in enumerate(TOKENS) if token == f"Ġ{text.strip()}"]}

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("Ġ", " ").replace("Ċ", "\n")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [TOKENS[i] for i in ids]

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(TOKENS)}


def ids(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([TOKENS.index(token) for token in text.split()])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ġthe Ġcat Ġsat", [(0, 1), (1, 2)]),  # the last one may go on
        ("Ġcat s Ġsat Ġthe", [(0, 2), (2, 3)]),
        ("Ġcat . Ġsat Ġthe", [(0, 1), (2, 3)]),
        ("Ġcat Ċ Ġsat Ċ", [(0, 1), (2, 3)]),  # a letter in bytes, but no letter
        ("Ġcat 7 Ġthe Ġdog", [(2, 3)]),
        ("Ġcat - ma Ġthe Ġdog", [(3, 4)]),
        ("Ġ7 s Ġthe Ġdog", [(2, 3)]),
        ("s Ġcat ma Ġdog", [(1, 3)]),  # the first token may be the end of a word
        ("<s> . -", []),
    ],
)
def test_words_are_told_by_their_tokens(text: str, words: list[tuple[int, int]]) -> None:
    assert WordMarks(Marked()).words(ids(text)) == words


def test_tokenizers_without_marks_know_no_words() -> None:
    assert WordMarks(Marked()).any
    assert not WordMarks(tiny.tokenizer()).any


def test_words_count_in_the_second_half_and_apart_where_they_were_seen() -> None:
    #                 first half          | second half; the last word is cut off
    labels = torch.from_numpy(ids("Ġcat s Ġthe Ġdog Ġsat Ġcat s Ġdog ma Ġthe Ġcat Ġsat"))[None]
    right = torch.nn.functional.one_hot(labels, len(TOKENS)).float()
    wrong = right.clone()
    wrong[0, 6] = 0
    wrong[0, 6, 1] = 1  # the second token of a word is missed
    found = {}
    for name, logits in (("right", right), ("wrong", wrong)):
        counted = RecalledWords(WordMarks(Marked()))
        counted.add(logits, labels)
        found[name] = Samples(counted.columns())
    # Ġcat s begins in the first half; Ġdog ma is new, Ġthe was seen, Ġcat alone was not
    assert found["right"].columns["words"].tolist() == [3]
    assert found["right"].columns["seen_words"].tolist() == [1]
    assert found["right"].value("word_accuracy") == 1
    assert found["wrong"].value("word_accuracy") == 1
    wrong[0, 8] = right[0, 0]
    counted = RecalledWords(WordMarks(Marked()))
    counted.add(wrong, labels)
    assert Samples(counted.columns()).value("word_accuracy") == pytest.approx(2 / 3)
    assert Samples(counted.columns()).value("seen_word_accuracy") == 1
    none = RecalledWords(WordMarks(tiny.tokenizer()))
    none.add(torch.zeros(1, 4, tiny.VOCAB), torch.ones(1, 4, dtype=torch.long))
    assert none.columns() == {}
