"""The tokens of a text of any length, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headprune.errors import DataError

BYTES = "utf8_bytes"  # column of the text behind every token
WHOLE = 1 << 22  # characters to tokenize together
_CUTS = ("\n\n", "\n\r\n", "\n")  # blank lines, else the end of a line
_FITTING = "Give text in a language of the model, or the tokenizer that it was trained with."


class Around(NamedTuple):
    """Ids of the special tokens before and after a text, such as BOS and EOS."""

    before: list[int]
    after: list[int]


def around(tokenizer: Any) -> Around:
    """Return the special tokens that a tokenizer puts around every text.

    Raises:
        DataError: If the tokenizer changes the text itself when it adds special tokens.
    """
    special = set(tokenizer.all_special_ids)
    tokens = (tokenizer.convert_tokens_to_string([token]) for token in tokenizer.get_vocab())
    for text in chain(("a", "1"), tokens):
        bare = _encoded(text, tokenizer)
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
    return Around([], [])  # no ordinary token: `Seen` refuses whatever text comes


def tokens_of(
    text: Iterable[str],
    tokenizer: Any,
    before: Sequence[int] = (),
    measured: bool = False,
    most: int = WHOLE,
) -> Iterator[NDArray[Any]]:
    """Yield the tokens of a text, shape (1, tokens), without special tokens around it.

    The text is read only as far as needed.

    Args:
        text: A text in pieces.
        tokenizer: The model's tokenizer.
        before: Special tokens to leave out where the text itself begins so, as a chat may.
        measured: Add a row of the bytes of every token, shape (2, tokens).
        most: Characters to tokenize together.
    """
    sizes = TextBytes(tokenizer)
    for number, part in enumerate(slices(text, most)):
        how = {"add_special_tokens": False, "verbose": False}
        rows = tokenizer(part, return_offsets_mapping=measured and tokenizer.is_fast, **how)
        columns = [ids := rows["input_ids"]]
        if measured:
            columns.append(sizes.of(part, ids, rows.get("offset_mapping")))
        begins = number == 0 and ids[: len(before)] == [*before]
        yield np.array(columns)[:, len(before) * begins :]


def slices(text: Iterable[str], most: int = WHOLE) -> Iterator[str]:
    """Yield a text as a whole, or one longer than ``most`` in parts of about that size.

    A part ends after the last blank line of its second half, else after a line, else anywhere.
    """
    held: list[str] = []
    size = 0
    for piece in text:
        held.append(piece)
        size += len(piece)
        if size <= most:
            continue
        joined, start = "".join(held), 0
        while len(joined) - start > most:
            end = _end(joined, start, most)
            yield joined[start:end]
            start = end
        held = [joined[start:]]
        size = len(held[0])
    if size:
        yield "".join(held)


def _end(text: str, start: int, most: int) -> int:
    stop = start + most
    for mark in _CUTS:
        at = text.rfind(mark, start + most // 2, stop)
        if at >= 0:
            return at + len(mark)
    return stop


def _encoded(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


class TextBytes:
    """Counts the bytes of a text, in UTF-8, that each of its tokens stands for.

    A token stands for the text from the end of the token before it. Tokens within one character
    share it, as long as they are. Special tokens stand for none, but an unknown one for its text. A
    slow tokenizer does not say where its tokens stand: these share the whole text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        named = {tokenizer.bos_token_id, tokenizer.eos_token_id}
        self._names = list({*tokenizer.all_special_ids} - ({tokenizer.unk_token_id} - named))

    def of(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
    ) -> NDArray[np.float64]:
        """Return the bytes of every token."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + sum((codes > last).astype(np.int64) for last in (0x7F, 0x7FF, 0xFFFF))
        before = np.concatenate([[0], np.cumsum(sizes)])  # of every character
        told = (~np.isin(ids, self._names)).astype(np.float64)
        if offsets is None:
            return told * float(before[-1] / max(told.sum(), 1))
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        through = np.maximum.accumulate(ends)
        first = starts[:1] if text[: max(starts[:1], default=0)].strip() else [0]  # cut on the left
        after = np.concatenate([first, through])[: len(ids)].astype(np.int64)
        run = np.cumsum(~((starts < after) & (ends > starts)))  # tokens that share a character
        lengths = np.array([len(t) for t in self._tokenizer.convert_ids_to_tokens(list(ids))])
        own = np.bincount(run, before[through] - before[after])
        share: NDArray[np.float64] = (own / np.maximum(np.bincount(run, lengths), 1))[run]
        share *= told * lengths
        return share

    def of_rows(
        self, texts: Sequence[str], rows: Sequence[Sequence[int]], **tokenized: Any
    ) -> list[list[float]]:
        """Return the bytes of every token of texts that were ``tokenized`` with such arguments."""
        offsets: Any = [None] * len(rows)
        if self._tokenizer.is_fast:
            how = {"return_offsets_mapping": True, "verbose": False, **tokenized}
            offsets = self._tokenizer(**how)["offset_mapping"]
        return [self.of(*row).tolist() for row in zip(texts, rows, offsets, strict=True)]


class Seen:
    """The tokens of a text, to refuse text that does not reach the model.

    ``vocabulary`` counts the model's embeddings; None without a model.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.counts: Counter[int] = Counter()
        self._lengths: set[int] = set()

    def add(self, ids: ArrayLike) -> None:
        """Count tokens."""
        tokens, counts = np.unique(np.asarray(ids, dtype=np.int64), return_counts=True)
        self.counts.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))

    def add_rows(self, rows: list[list[int]]) -> None:
        """Count tokens of rows that batches pad."""
        self._lengths.update(map(len, rows))
        self.add(list(chain.from_iterable(rows)))

    def refuse(self, texts: Iterable[str], also: Iterable[int] = ()) -> None:
        """Refuse text whose tokens the model does not know; ``also`` adds ids of special tokens.

        Raises:
            DataError: If most tokens are unknown, all are special, there are none, or an id has no
                embedding.
        """
        tokenizer, counts = self.tokenizer, self.counts
        special = set(tokenizer.all_special_ids)
        known = sum(count for token, count in counts.items() if token not in special)
        unknown = tokenizer.unk_token_id
        if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            unknown = None  # a vocabulary of bytes knows every text
        share = counts[unknown] / max(known + counts[unknown], 1)
        if share > 0.5:
            raise DataError(f"{share:.0%} of the text's tokens are unknown. {_FITTING}")
        if counts and not known:
            raise DataError(f"The tokenizer makes only special tokens of the text. {_FITTING}")
        if not counts and any(map(str.strip, texts)):
            raise DataError(
                f"The tokenizer, a {type(tokenizer).__name__}, makes no tokens of the text. "
                f"{_FITTING}"
            )
        padded = [tokenizer.pad_token_id] if len(self._lengths) > 1 else []
        refuse_beyond((*counts, *also, *padded), tokenizer, self.vocabulary)


def refuse_beyond(ids: Iterable[int | None], tokenizer: Any, vocabulary: int | None) -> None:
    """Raise a DataError if an id has no embedding, naming the highest."""
    highest = max((token for token in ids if token is not None), default=0)
    if vocabulary is not None and highest >= vocabulary:
        raise DataError(
            f"The token {tokenizer.convert_ids_to_tokens(highest)!r} has the id {highest}, and the "
            f"model has embeddings for {vocabulary} tokens, 0 to {vocabulary - 1}. Give it the "
            "tokenizer that it was trained with, without tokens added later."
        )
