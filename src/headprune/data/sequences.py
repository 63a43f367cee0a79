"""From documents to sequences of one length (language models) or padded rows (the others)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from headprune.data.files import stored
from headprune.data.read import Examples
from headprune.data.text import evenly
from headprune.data.tokens import Ids, Seen, around, token_ids
from headprune.errors import DataError

Label = int | float | list[float] | list[int]
_ROWS_AT_ONCE = 1000  # to tokenize
_CHARACTERS_AT_ONCE = 1 << 18  # of these rows
_AT_ONCE = 1 << 18  # tokens to hold before sequences are written
_FAR = 1 << 21  # tokens of a text that a few sequences are spread over, at least
_WIDE = 8  # or this multiple of their own


def packed_sequences(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
) -> Dataset:
    """Return the rows of ``all_windows``, without document numbers."""
    return all_windows(examples, tokenizer, seq_len, need, closed, vocabulary)[0]


def windows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[Dataset, NDArray[np.int64]]:
    """Return ``most`` of all windows, evenly; None for all."""
    rows, begins = all_windows(examples, tokenizer, seq_len, need, closed, vocabulary, most)
    if most is None or most >= len(rows):
        return rows, begins
    numbers = evenly(len(rows), most)
    return rows.select(numbers), begins[numbers]


def all_windows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[Dataset, NDArray[np.int64]]:
    """Pack all documents into sequences of exactly ``seq_len`` tokens; drop the rest.

    Every sequence begins as the tokenizer begins a text, such as with BOS. A document ends as the
    tokenizer ends it; a row of a table may end with the end-of-sequence token instead.

    Args:
        examples: The documents.
        tokenizer: The model's tokenizer.
        seq_len: Tokens per sequence.
        need: Least number of sequences.
        closed: End each sequence as the tokenizer ends a text, for encoders.
        vocabulary: Tokens that the model has embeddings for; None without a model.
        most: Sequences that will be used. Text after eight times as many, and after two million
            tokens, is not read.

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

    def stream() -> Iterator[Ids]:
        for document in examples.documents():
            first.append(packer.tokens)
            for ids in token_ids(document, tokenizer):
                seen.add(ids)
                yield ids
            yield np.array(end, dtype=np.int32)

    rows = stored(packer.sequences(stream(), most and max(_FAR // inner, _WIDE * most)))
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

    def sequences(self, stream: Iterable[Ids], most: int | None) -> Iterator[dict[str, Any]]:
        """Yield columns of shape (sequences, length), of at most ``most`` sequences in all."""
        waiting: list[Ids] = []
        held = done = 0
        for ids in stream:
            self.tokens += len(ids)
            waiting.append(ids)
            held += len(ids)
            count = held // self.inner if most is None else min(held // self.inner, most - done)
            if count and (held >= _AT_ONCE or done + count == most):
                joined = np.concatenate(waiting)
                yield self._wrapped(joined[: count * self.inner])
                waiting = [joined[count * self.inner :]]
                held, done = len(waiting[0]), done + count
            if done == most:
                return
        if held >= self.inner:
            yield self._wrapped(np.concatenate(waiting)[: held // self.inner * self.inner])

    def _wrapped(self, ids: Ids) -> dict[str, Any]:
        rows = ids.reshape(-1, self.inner)
        before, after = (np.tile(side, (len(rows), 1)) for side in (self.before, self.after))
        whole = np.concatenate([before, rows, after], axis=1)
        return {"input_ids": whole, "attention_mask": np.ones(whole.shape, np.int8)}


def tokenized_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    read_label: Callable[[str], Label] | None = None,
    vocabulary: int | None = None,
    apart: bool = False,
) -> Dataset:
    """Tokenize every example on its own, cut off at ``seq_len`` and without padding.

    ``read_label`` (see ``label_reader``) adds a column ``labels``. The tokenizer joins pairs;
    ``apart`` makes two rows of each.

    Raises:
        DataError: If the model has no such label, or the text is not readable.
    """
    seen = Seen(tokenizer, vocabulary)
    labels = iter(examples.labels or ())

    def parts() -> Iterator[dict[str, Any]]:
        done = 0
        singles = ((part,) for text in examples.texts for part in text)
        for texts in _batched(singles if apart else examples.texts):
            columns = [list(column) for column in zip(*texts, strict=True)]
            rows = dict(tokenizer(*columns, truncation=True, max_length=seq_len, verbose=False))
            _refuse_empty(rows["input_ids"], done)
            seen.add_rows(rows["input_ids"])
            if examples.labels is not None and read_label is not None:
                rows["labels"] = [read_label(next(labels)) for _ in texts]
            done += len(texts)
            yield rows

    rows = stored(parts())
    seen.refuse(examples.strings())
    return rows


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
    examples: Examples, tokenizer: Any, seq_len: int, vocabulary: int | None = None
) -> Dataset:
    """Tokenize chats, each cut off at ``seq_len``.

    ``labels`` has the tokens of answers, with the one that ends each, and -100 elsewhere. Chats
    whose answers are all cut off are left out.

    Raises:
        DataError: If the examples are no chats, or the tokenizer does not say where tokens stand.
    """
    _refuse_slow(tokenizer, "Answers")
    if examples.labels is None:
        raise DataError("--loss answers is of chats: give rows of messages with role and content.")
    seen, places = Seen(tokenizer, vocabulary), iter(examples.labels)

    def parts() -> Iterator[dict[str, Any]]:
        for batch in _batched(examples.texts):
            options = {"truncation": True, "max_length": seq_len, "verbose": False}
            rows = tokenizer(
                [text for (text,) in batch],
                return_offsets_mapping=True,
                add_special_tokens=False,  # the template has them
                **options,
            )
            offsets = rows.pop("offset_mapping")
            seen.add_rows(rows["input_ids"])
            labels = [
                _of_answers(ids, at, json.loads(next(places)))
                for ids, at in zip(rows["input_ids"], offsets, strict=True)
            ]
            kept = [n for n, row in enumerate(labels) if any(label != -100 for label in row)]
            columns = {**rows, "labels": labels}
            if kept:
                yield {name: [column[n] for n in kept] for name, column in columns.items()}

    rows = stored(parts())
    seen.refuse(examples.strings())
    return rows


def _of_answers(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], places: Sequence[Sequence[int]]
) -> list[int]:
    """Return the tokens in some places of a text and the next one after each, else -100."""
    inside = [any(a < end and start < b for a, b in places) for start, end in offsets]
    counts = [here or before for here, before in zip(inside, [False, *inside], strict=False)]
    return [token if counted else -100 for token, counted in zip(ids, counts, strict=True)]


def _refuse_slow(tokenizer: Any, what: str) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            f"{what} are found by places in the text, and a {type(tokenizer).__name__} does not "
            "say where tokens stand. Give the fast tokenizer (tokenizer.json)."
        )


def translation_rows(
    examples: Examples, tokenizer: Any, seq_len: int, vocabulary: int | None = None
) -> Dataset:
    """Tokenize pairs of source and target text, each cut off at ``seq_len``.

    Returns:
        Rows of ``input_ids``, ``attention_mask`` and ``labels``, of unequal length.

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
            options = {"truncation": True, "max_length": seq_len, "verbose": False}
            rows = dict(tokenizer(sources, text_target=targets, **options))
            for name, of_column in seen.items():
                _refuse_empty(rows[name], done)
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


def _refuse_empty(rows: list[list[int]], before: int) -> None:
    if [] in rows:
        raise DataError(
            f"Row {before + rows.index([])} (counted from 0; a sentence pair may be two rows) has "
            "no tokens. Leave empty texts out."
        )
