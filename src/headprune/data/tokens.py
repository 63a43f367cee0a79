"""The tokens of a text of any length, from chunks of it: exactly those of the whole.

    chunk     |------------ left ------------|
    next                             |------------ right ------------|
    overlap                          |.. ????|
    agreed                             ======
    joint                                |

A chunk is tokenized wrongly where it was cut: at its end, because a word goes on, and at its
beginning, because one does not start there. Two chunks overlap, the fast tokenizers tell where in
the text each token stands, and the chunks are joined inside the longest stretch of the overlap in
which both have the same tokens at the same places. The result is that of the whole text:

* Between words. Pre-tokenizers find words from left to right, so where both chunks have the border
  of a word, the words after it are those of the right chunk, which was not cut near it, and the
  words before it those of the left one. A model encodes every word by itself. A joint stands at
  such a border wherever the stretch has one.
* Inside a word, as there is only one where the pre-tokenizer leaves a text whole (Llama 2, Gemma).
  For BPE alone: a border that no merge has crossed parts a word into two that are merged each for
  itself, so that tokens are those of the whole if any two neighbours are neighbours in an encoding
  of some part. They are: each pair stands in one of the chunks, as the joint's tokens are in both.
  (Unigram weighs whole words against each other, and ties between them are broken by rounding.)

If there is no such place, as in a run of spaces longer than the overlap, overlap and chunk grow
until there is one: to the whole text at most. Tokenizers that do not tell places (those written in
Python) or that draw tokens at random (dropout) get the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headprune.errors import DataError

Ids = NDArray[np.int32]
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Chunking:
    """How a text is cut up.

    Attributes:
        chunk: Characters that are tokenized at once; some 150 bytes of memory each.
        overlap: Characters that two chunks have in common.
        margin: Tokens on each side of a joint in which both chunks agree.
    """

    chunk: int = 1 << 18
    overlap: int = 1 << 12
    margin: int = 16


CHUNKING = Chunking()


class Around(NamedTuple):
    """Special tokens that a tokenizer puts around a text, such as BOS and EOS.

    Attributes:
        before: Ids in front of it.
        after: Ids behind it.
    """

    before: list[int]
    after: list[int]


def around(tokenizer: Any) -> Around:
    """Return the special tokens around every text of a tokenizer.

    Raises:
        DataError: If the tokenizer changes the text itself when it adds special tokens.
    """
    special = set(tokenizer.all_special_ids)
    tokens = (tokenizer.convert_tokens_to_string([token]) for token in tokenizer.get_vocab())
    for text in chain(("a", "1"), tokens):
        bare = _encoded(text, tokenizer)["input_ids"]
        if not bare or special.intersection(bare):
            continue
        whole = tokenizer(text, verbose=False)["input_ids"]
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return Around(whole[:start], whole[start + len(bare) :])
        raise DataError(
            f"The tokenizer reads {text!r} as {bare}, and with special tokens as {whole}, so its "
            "special tokens are unknown. Give the tokenizer that the model was trained with."
        )
    return Around([], [])  # of ordinary tokens it has none: what it reads is refused as unreadable


def token_ids(pieces: Iterable[str], tokenizer: Any, cut: Chunking = CHUNKING) -> Iterator[Ids]:
    """The tokens of a text, without special tokens around it, a part at a time.

    Args:
        pieces: The text, in pieces of any length; read as far as the tokens are asked for.
        tokenizer: The tokenizer.
        cut: How the text is cut up.

    Raises:
        DataError: If the tokenizer gives other tokens for the same text.
    """
    if not _tells_places(tokenizer):
        yield _numbers(_encoded("".join(pieces), tokenizer))
        return
    text = _Text(pieces)
    joiner = _Joiner(text, tokenizer, cut)
    left, begin = joiner.chunk(0, cut.chunk), 0
    while not left.is_last:
        right, joint = joiner.after(left, begin)
        if joint is not None:
            yield left.ids[begin : joint[0]]
            begin = joint[1]
        left = right
        text.forget(left.start)
    yield left.ids[begin:]


def head(pieces: Iterable[str], tokenizer: Any, count: int, cut: Chunking = CHUNKING) -> str:
    """The beginning of a text, long enough for its first ``count`` tokens to be the text's."""
    left = iter(pieces)
    taken: list[str] = []
    while sum(map(len, taken)) <= cut.chunk:
        if (piece := next(left, None)) is None:
            return "".join(taken)
        taken.append(piece)

    def told() -> Iterator[str]:
        yield from tuple(taken)
        for piece in left:
            taken.append(piece)
            yield piece

    found, parts = 0, token_ids(told(), tokenizer, cut)
    while found <= count and (part := next(parts, None)) is not None:
        found += len(part)
    return "".join(taken)


class _Text:
    """The part of a text that is still needed; places count from the beginning of the whole."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = iter(pieces)
        self._start, self._held = 0, ""
        self._ended = False

    def between(self, start: int, stop: int) -> tuple[str, bool]:
        """What stands there, as far as there is text; and whether the text ends with it."""
        parts, length = [self._held], len(self._held)
        while self._start + length <= stop and not self._ended:
            piece = next(self._pieces, None)
            self._ended = piece is None
            parts.append(piece or "")
            length += len(parts[-1])
        self._held = "".join(parts)
        is_last = self._ended and self._start + length <= stop
        return self._held[start - self._start : stop - self._start], is_last

    def forget(self, before: int) -> None:
        """Lets go of what stands before a place."""
        self._held = self._held[before - self._start :]
        self._start = before


def _numbers(encoded: Any) -> Ids:
    """The tokens of an encoding."""
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if ids.size and ids.max() > _LARGEST_ID:
        raise DataError(
            f"The tokenizer gives a token the number {ids.max():,}, which no vocabulary has: its "
            "files are damaged. Get them again."
        )
    return ids.astype(np.int32)


class _Chunk:
    """A part of a text, tokenized by itself.

    Args:
        start: Where it begins in the text.
        stop: Where it ends.
        is_last: Whether the text ends there.
        encoded: What the tokenizer made of it.
    """

    def __init__(self, start: int, stop: int, is_last: bool, encoded: Any) -> None:
        self.start, self.stop, self.is_last = start, stop, is_last
        self.ids = _numbers(encoded)
        self._encoded = encoded

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """First character of every token in the text, and that after its last."""
        return np.asarray(self._encoded[0].offsets, dtype=np.int64).reshape(-1, 2) + self.start

    @cached_property
    def words(self) -> NDArray[np.int64]:
        """Number of the word that every token belongs to."""
        return np.array([-1 if w is None else w for w in self._encoded[0].word_ids], np.int64)

    def starts_word(self, token: int) -> bool:
        """Whether a word begins with a token."""
        return token > 0 and bool(self.words[token] != self.words[token - 1])

    def is_one_word(self, token: int, count: int) -> bool:
        """Whether so many tokens from one on belong to the same word."""
        words = self.words[token : token + count]
        return bool((words == words[0]).all())

    def begins_as(self, other: _Chunk, count: int) -> bool:
        """Whether the first tokens of two chunks are the same."""
        return np.array_equal(self.ids[:count], other.ids[:count])


class _Joiner:
    """Cuts a text into chunks, and finds where one takes over from the other."""

    def __init__(self, text: _Text, tokenizer: Any, cut: Chunking) -> None:
        self.text, self.tokenizer, self.cut = text, tokenizer, cut

    def chunk(self, start: int, length: int) -> _Chunk:
        """Tokenizes a part of the text."""
        part, is_last = self.text.between(start, start + length)
        return _Chunk(start, start + len(part), is_last, _encoded(part, self.tokenizer))

    def after(self, left: _Chunk, begin: int) -> tuple[_Chunk, tuple[int, int] | None]:
        """The chunk after ``left``, and the tokens of both with which it takes over.

        Where nothing joins the two it is ``left`` itself with more text, and there is no joint.
        """
        behind = self.cut.overlap
        while (start := left.stop - behind) > left.start:
            right = self.chunk(start, max(self.cut.chunk, 2 * behind))
            joint = self._joint(left, begin, right)
            if joint is not None:
                return right, joint
            behind *= 4
        longer = self.chunk(left.start, 2 * (left.stop - left.start))
        if not left.begins_as(longer, begin):
            raise DataError(
                "The tokenizer gives other tokens for the same text when it reads it again, so "
                "the text cannot be read in parts. Give it in rows (JSONL, CSV or parquet)."
            )
        return longer, None

    def _joint(self, left: _Chunk, begin: int, right: _Chunk) -> tuple[int, int] | None:
        """The token with which ``right`` takes over: its number in ``left``, and in ``right``."""
        i, j, length = _agreed(left, right)
        first, last = max(self.cut.margin, begin - i), length - self.cut.margin
        inner = sorted(range(first, last + 1), key=lambda k: abs(2 * k - length))
        for k in inner:
            if left.starts_word(i + k) and right.starts_word(j + k):
                return i + k, j + k
        one_word = inner and left.is_one_word(i, length) and right.is_one_word(j, length)
        if not one_word or type(self.tokenizer.backend_tokenizer.model).__name__ != "BPE":
            return None
        # a word this long is no token by itself, which some models look up before they merge
        spans = int(left.places[i + length - 1, 1] - left.places[i, 0])
        return (i + inner[0], j + inner[0]) if spans > self._longest_token else None

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=0)


def _agreed(left: _Chunk, right: _Chunk) -> tuple[int, int, int]:
    """The longest stretch of the same tokens at the same places: both beginnings, and its length.

    Several tokens may stand at one place, the bytes of a character.
    """
    i = int(np.searchsorted(left.places[:, 0], right.start))
    stop = int(np.searchsorted(right.places[:, 0], left.stop))
    ours = list(zip(left.places[i:].tolist(), left.ids[i:].tolist(), strict=True))
    theirs = list(zip(right.places[:stop].tolist(), right.ids[:stop].tolist(), strict=True))
    best, run, a, b = (0, 0, 0), 0, 0, 0
    while a < len(ours) and b < len(theirs):
        place, other = ours[a][0], theirs[b][0]
        run = run + 1 if ours[a] == theirs[b] else 0
        if run > best[2]:
            best = (i + a + 1 - run, b + 1 - run, run)
        a, b = a + (place <= other), b + (other <= place)
    return best


def _tells_places(tokenizer: Any) -> bool:
    if not getattr(tokenizer, "is_fast", False):
        return False
    return not getattr(tokenizer.backend_tokenizer.model, "dropout", None)


def _encoded(text: str, tokenizer: Any) -> Any:
    return tokenizer(text, add_special_tokens=False, verbose=False)
