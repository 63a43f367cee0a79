"""From documents to sequences of one length (language models) or padded rows (the others)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from headprune.data.files import stored
from headprune.data.read import Examples
from headprune.data.text import evenly
from headprune.data.tokens import BYTES, Seen, TextBytes, around, tokens_of
from headprune.errors import DataError, HeadpruneWarning

Label = int | float | list[float] | list[int]
_ROWS_AT_ONCE = 1000  # to tokenize
_CHARACTERS_AT_ONCE = 1 << 18  # of these rows
_AT_ONCE = 1 << 18  # tokens to hold before sequences are written
_MIN_SCANNED_TOKENS = 1 << 21  # tokens of a text that a few sequences are spread over, at least
_SCAN_FACTOR = 8  # or this multiple of their own


def windows(
    examples: Examples, tokenizer: Any, seq_len: int, most: int | None = None, **how: Any
) -> tuple[Dataset, NDArray[np.int64]]:
    """Return ``most`` of all windows, evenly; None for all. ``how``: as for ``all_windows``."""
    rows, begins = all_windows(examples, tokenizer, seq_len, most=most, **how)
    if most is None or most >= len(rows):
        return rows, begins
    numbers = evenly(len(rows), most)
    return rows.select(numbers), begins[numbers]


def all_windows(  # noqa: PLR0913  # text, amounts, and what to count
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
    most: int | None = None,
    measured: bool = False,
) -> tuple[Dataset, NDArray[np.int64]]:
    """Pack all documents into sequences of exactly ``seq_len`` tokens; drop the rest.

    Every sequence begins as the tokenizer begins a text, such as with BOS; a document that begins
    so, such as a chat, loses that. A document ends as the tokenizer ends it; a row of a table may
    end with the end-of-sequence token instead, unless it has one there.

    Args:
        examples: The documents.
        tokenizer: The model's tokenizer.
        seq_len: Tokens per sequence.
        need: Least number of sequences.
        closed: End each sequence as the tokenizer ends a text, for encoders.
        vocabulary: Tokens that the model has embeddings for; None without a model.
        most: Sequences that will be used. Text after eight times as many, and after two million
            tokens, is not read.
        measured: Add the bytes of text of every token (``data.tokens.TextBytes``).

    Returns:
        Rows of ``input_ids`` and ``attention_mask``, both of length ``seq_len``, and the number of
        the document that each begins in.

    Raises:
        DataError: If there are fewer than ``need`` sequences, or the text is not readable.
    """
    before, after = around(tokenizer)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end = eos if examples.rows_are_documents else []
    if not closed:
        end, after = after or end, []
    inner = seq_len - len(before) - len(after)
    if inner < 1:
        raise DataError(
            f"--seq-len {seq_len} leaves no room for text: the tokenizer puts {seq_len - inner} "
            "special tokens around every sequence."
        )
    seen, packer = Seen(tokenizer, vocabulary), _Packer(before, after, inner)
    first = list[int]()  # token of every document

    def stream() -> Iterator[NDArray[Any]]:
        for document in examples.documents():
            first.append(packer.tokens)
            last = np.empty(0)
            for tokens in tokens_of(document, tokenizer, before, measured):
                seen.add(tokens[0])
                yield tokens
                last = tokens[0, -2:]  # a template may write a line break after the end
            if not np.isin(end, last).any():
                yield np.array([end, [0] * len(end)][: 1 + measured])

    rows = stored(
        packer.sequences(stream(), most and max(_MIN_SCANNED_TOKENS // inner, _SCAN_FACTOR * most))
    )
    seen.refuse(examples.strings(), also={*before, *end, *after})
    if len(rows) < need:
        raise DataError(
            f"The data has {packer.tokens:,} tokens, which makes {len(rows)} sequences of "
            f"{seq_len}; at least {need} are needed. Give more text or a smaller --seq-len."
        )
    return rows, np.searchsorted(first, np.arange(len(rows)) * inner, side="right") - 1


class _Packer:
    """Cuts a stream of tokens into sequences, with the same tokens before and after each."""

    def __init__(self, before: list[int], after: list[int], inner: int) -> None:
        self.before, self.after = np.array(before, np.int32), np.array(after, np.int32)
        self.inner = inner
        self.tokens = 0

    def sequences(
        self, stream: Iterable[NDArray[Any]], most: int | None
    ) -> Iterator[dict[str, Any]]:
        """Yield columns of shape (sequences, length), of at most ``most`` sequences in all.

        The stream has ids, shape (1, tokens), or ids and bytes, shape (2, tokens).
        """
        waiting: list[NDArray[Any]] = []
        held = done = 0
        for tokens in stream:
            self.tokens += tokens.shape[1]
            waiting.append(tokens)
            held += tokens.shape[1]
            count = held // self.inner if most is None else min(held // self.inner, most - done)
            if count and (held >= _AT_ONCE or done + count == most):
                joined = np.concatenate(waiting, axis=1)
                yield self._wrapped(joined[:, : count * self.inner])
                waiting = [joined[:, count * self.inner :]]
                held, done = waiting[0].shape[1], done + count
            if done == most:
                return
        if held >= self.inner:
            joined = np.concatenate(waiting, axis=1)
            yield self._wrapped(joined[:, : held // self.inner * self.inner])

    def _wrapped(self, tokens: NDArray[Any]) -> dict[str, Any]:
        ids, *sizes = tokens.reshape(len(tokens), -1, self.inner)
        before, after = (np.tile(side, (len(ids), 1)) for side in (self.before, self.after))
        whole = np.concatenate([before, ids.astype(np.int32), after], axis=1)
        columns = {"input_ids": whole, "attention_mask": np.ones(whole.shape, np.int8)}
        for of_text in sizes:
            around = (np.zeros_like(before), of_text, np.zeros_like(after))
            columns[BYTES] = np.concatenate(around, axis=1).astype(np.float32)
        return columns


def tokenized_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    read_label: Callable[[str], Label] | None = None,
    vocabulary: int | None = None,
    apart: bool = False,
    prompt: str = "",
) -> Dataset:
    """Tokenize every example on its own, cut off at ``seq_len`` and without padding.

    A text that begins as the tokenizer begins texts, such as a chat with BOS, begins so once.

    ``read_label`` (see ``label_reader``) adds a column ``labels``. The tokenizer joins pairs;
    ``apart`` makes two rows of each. ``prompt`` stands before every text.

    Raises:
        DataError: If the model has no such label, or the text is not readable.
    """
    seen = Seen(tokenizer, vocabulary)
    labels = iter(examples.labels or ())

    def parts() -> Iterator[dict[str, Any]]:
        done = 0
        singles = ((part,) for text in examples.texts for part in text)
        for texts in _batched(singles if apart else examples.texts):
            columns = [[prompt + text for text in column] for column in zip(*texts, strict=True)]
            rows = dict(tokenizer(*columns, truncation=True, max_length=seq_len, verbose=False))
            begin_once(rows, tokenizer)
            refuse_empty(map(len, rows["input_ids"]), done)
            seen.add_rows(rows["input_ids"])
            if examples.labels is not None and read_label is not None:
                rows["labels"] = [read_label(next(labels)) for _ in texts]
            done += len(texts)
            yield rows

    rows = stored(parts())
    seen.refuse(examples.strings())
    return rows


def begin_once(rows: dict[str, Any], tokenizer: Any) -> None:
    """Leave out the special token before a text that has it itself."""
    begins = ([tokenizer.bos_token_id] * 2, [tokenizer.cls_token_id] * 2)
    for number, ids in enumerate(rows["input_ids"]):
        if ids[:2] in begins:
            for column in rows.values():
                column[number] = column[number][1:]


def tagged_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    read_tags: Callable[[str], list[int]],
    vocabulary: int | None = None,
) -> Dataset:
    """Tokenize sentences of tagged words, each cut off at ``seq_len``.

    ``labels`` has the tag of a word at its first token, and -100 elsewhere.

    Raises:
        DataError: If a sentence has more or fewer tags than words, or the tokenizer does not say
            where tokens stand.
    """
    _refuse_slow(tokenizer, "Tags")
    seen, tags = Seen(tokenizer, vocabulary), iter(examples.labels or ())

    def parts() -> Iterator[dict[str, Any]]:
        done = 0
        for batch in _batched(examples.texts):
            texts = [text for (text,) in batch]
            options = {"truncation": True, "max_length": seq_len, "verbose": False}
            rows = tokenizer(texts, return_offsets_mapping=True, **options)
            places = rows.pop("offset_mapping")
            seen.add_rows(rows["input_ids"])
            labels = []
            for number, (text, at) in enumerate(zip(texts, places, strict=True), done):
                of_words = read_tags(next(tags))
                count = len(text.split(" "))
                if len(of_words) != count:
                    raise DataError(
                        f"Row {number} (counted from 0) has {count} words and other than {count} "
                        "tags: name columns of lists, of words without spaces and of their tags."
                    )
                labels.append(_at_first_tokens(text, at, of_words))
            done += len(texts)
            yield {**rows, "labels": labels}

    rows = stored(parts())
    seen.refuse(examples.strings())
    return rows


def _at_first_tokens(
    text: str, places: Sequence[tuple[int, int]], of_words: Sequence[int]
) -> list[int]:
    """Return the number of each word at its first token; tokens stand at ``places``."""
    labels, before = [], -1
    for start, end in places:
        word = text.count(" ", 0, end - 1) if end > start else -1  # -1: a special token
        labels.append(-100 if word in (-1, before) else of_words[word])
        before = max(before, word)
    return labels


def answer_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    vocabulary: int | None = None,
    measured: bool = False,
) -> Dataset:
    """Tokenize chats, each cut off at ``seq_len``.

    ``labels`` has the tokens of answers, with the one that ends each, and -100 elsewhere. Chats
    whose answers are all cut off are left out, with a warning. ``measured`` is as for ``windows``.

    Raises:
        DataError: If the examples are no chats, all answers are cut off, or the tokenizer does not
            say where tokens stand.
    """
    _refuse_slow(tokenizer, "Answers")
    if examples.labels is None:
        raise DataError("loss=answers is of chats: give rows of messages with role and content.")
    seen, places = Seen(tokenizer, vocabulary), iter(examples.labels)
    sizes, lost = TextBytes(tokenizer), 0

    def parts() -> Iterator[dict[str, Any]]:
        nonlocal lost
        for batch in _batched(examples.texts):
            options = {"truncation": True, "max_length": seq_len, "verbose": False}
            texts = [text for (text,) in batch]
            rows = tokenizer(
                texts,
                return_offsets_mapping=True,
                add_special_tokens=False,  # the template has them
                **options,
            )
            offsets = rows.pop("offset_mapping")
            seen.add_rows(rows["input_ids"])
            rows["labels"] = [
                _of_answers(ids, at, json.loads(next(places)))
                for ids, at in zip(rows["input_ids"], offsets, strict=True)
            ]
            if measured:
                counted = map(sizes.of, texts, rows["input_ids"], offsets)
                rows[BYTES] = [row.tolist() for row in counted]
            # nothing stands before the first token that could predict it
            kept = [n for n, row in enumerate(rows["labels"]) if {*row[1:]} - {-100}]
            lost += len(batch) - len(kept)
            if kept:
                yield {name: [column[n] for n in kept] for name, column in rows.items()}

    rows = stored(parts())
    seen.refuse(examples.strings())
    if lost and not len(rows):
        raise DataError(
            f"No answer of {lost:,} chats begins within {seq_len:,} tokens. Give a larger "
            "--seq-len, or shorter chats."
        )
    if lost:
        warnings.warn(
            f"The answers of {lost:,} of {lost + len(rows):,} chats are cut off at {seq_len:,} "
            "tokens; these chats are left out. A larger --seq-len keeps them.",
            HeadpruneWarning,
            stacklevel=2,
        )
    return rows


def _of_answers(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    places: Sequence[Sequence[int]],
) -> list[int]:
    """Return the tokens in some places of a text, and the tokens that end them, else -100."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    counts = np.zeros(len(ids), bool)
    for start, end, closes in places:
        counts |= (starts < end) & (ends > start)
        after = int(np.searchsorted(starts, end))
        if closes and after < len(ids) and (after or starts[0] == end):
            counts[after] = True
    return [token if counted else -100 for token, counted in zip(ids, counts, strict=True)]


def _refuse_slow(tokenizer: Any, what: str) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            f"{what} are found by places in the text, and a {type(tokenizer).__name__} does not "
            "say where tokens stand. Give the fast tokenizer (tokenizer.json)."
        )


def translation_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    vocabulary: int | None = None,
    of_decoder: int | None = None,
    measured: bool = False,
) -> Dataset:
    """Tokenize pairs of source and target text, each cut off at ``seq_len``.

    A target also ends after ``of_decoder`` tokens, where the decoder takes fewer.

    Returns:
        Rows of ``input_ids``, ``attention_mask`` and ``labels``, of unequal length; ``measured``
        adds the bytes of the labels.

    Raises:
        DataError: If an example is not a pair, or the text is not readable.
    """
    if examples.width != 2:
        raise DataError(
            "An encoder-decoder learns from pairs: name both columns, as in "
            "--text-column SOURCE,TARGET (CSV, TSV, JSONL or parquet)."
        )
    seen = {name: Seen(tokenizer, vocabulary) for name in ("input_ids", "labels")}

    def parts() -> Iterator[dict[str, Any]]:
        done = 0
        for texts in _batched(examples.texts):
            sources, targets = (list(column) for column in zip(*texts, strict=True))
            options: dict[str, Any] = {"truncation": True, "verbose": False}
            rows = dict(tokenizer(sources, max_length=seq_len, **options))
            options["max_length"] = min(seq_len, of_decoder or seq_len)
            rows["labels"] = tokenizer(text_target=targets, **options)["input_ids"]
            if measured:
                how = {"text_target": targets, **options}
                rows[BYTES] = TextBytes(tokenizer).of_rows(targets, rows["labels"], **how)
            for name, of_column in seen.items():
                refuse_empty(map(len, rows[name]), done)
                of_column.add_rows(rows[name])
            done += len(texts)
            yield rows

    rows = stored(parts())
    for of_column in seen.values():
        of_column.refuse(examples.strings())
    return rows


def _batched(texts: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    batch: list[tuple[str, ...]] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += sum(map(len, text))
        if len(batch) == _ROWS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def refuse_empty(counts: Iterable[int], before: int = 0) -> None:
    """Raise a DataError if a row has no tokens; ``before`` counts the rows before these."""
    for number, count in enumerate(counts, before):
        if not count:
            raise DataError(
                f"Row {number} (counted from 0; a sentence pair may be two rows) has no tokens. "
                "Leave empty texts out."
            )
