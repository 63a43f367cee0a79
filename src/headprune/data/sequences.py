"""From documents to sequences of one length (language models) or padded rows (the others)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from headprune.data.rows import evenly, stored
from headprune.data.sources import Examples
from headprune.data.tokens import Ids, around, slices, token_ids
from headprune.data.unreadable import Seen
from headprune.errors import DataError
from headprune.model.loading import class_ids, task_of

Label = int | float | list[float]
_ROWS_AT_ONCE = 1000  # that are tokenized
_CHARACTERS_AT_ONCE = 1 << 18  # of these rows
_AT_ONCE = 1 << 18  # tokens that are held before sequences are written
_FAR = 1 << 21  # tokens of a text that a few sequences are spread over, at least
_WIDE = 8  # or so many times their own
_MASKED = 0.15  # share of the tokens, as BERT was trained


def packed_sequences(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
) -> Dataset:
    """``windows`` without the documents that they begin in."""
    return windows(examples, tokenizer, seq_len, need, closed, vocabulary)[0]


def windows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    closed: bool = False,
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[Dataset, NDArray[np.int64]]:
    """Packs all documents into sequences of exactly ``seq_len`` tokens; the rest is dropped.

    Every sequence begins as the tokenizer begins a text, with BOS for example. A document ends as
    the tokenizer ends it; where it adds nothing, one of a row format ends with the
    end-of-sequence token. No more text is held than is tokenized together.

    Args:
        examples: The documents.
        tokenizer: The model's tokenizer.
        seq_len: Tokens per sequence.
        need: Windows that are needed at least.
        closed: Whether each sequence also ends as the tokenizer ends a text ([CLS] ... [SEP]), as
            encoders expect; a text that a language model continues is open.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.
        most: How many sequences are wanted, spread evenly over the text, or over the first two
            million tokens of a longer one; None for all.

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
            f"--seq-len {seq_len}: the tokenizer puts {seq_len - inner} special tokens around "
            "every sequence, which leaves no room for text."
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

    read = None if most is None else max(_FAR // inner, _WIDE * most)
    rows = stored(packer.sequences(stream(), read))
    seen.refuse(examples.strings(), also={*before, *end, *after})
    if len(rows) < need:
        raise DataError(
            f"The data has {packer.tokens:,} tokens, which makes {len(rows)} sequences of "
            f"{seq_len}; at least {need} must be there. Give more text or a smaller --seq-len."
        )
    numbers = np.arange(len(rows))
    if most is not None and most < len(rows):
        numbers = np.array(evenly(len(rows), most))
        rows = rows.select(numbers)
    return rows, np.searchsorted(first, numbers * inner, side="right") - 1


class _Packer:
    """Cuts a stream of tokens into sequences, with the same tokens before and after each."""

    def __init__(self, before: list[int], after: list[int], inner: int) -> None:
        self.before, self.after = np.array(before, np.int32), np.array(after, np.int32)
        self.inner = inner
        self.tokens = 0

    def sequences(self, stream: Iterable[Ids], most: int | None) -> Iterator[dict[str, Any]]:
        """Some at a time, at most so many in all; as arrays of shape (sequences, length)."""
        waiting: list[Ids] = []
        held = made = 0
        for ids in stream:
            self.tokens += len(ids)
            waiting.append(ids)
            held += len(ids)
            count = held // self.inner if most is None else min(held // self.inner, most - made)
            if count and (held >= _AT_ONCE or made + count == most):
                joined = np.concatenate(waiting)
                yield self._wrapped(joined[: count * self.inner])
                waiting = [joined[count * self.inner :]]
                held, made = len(waiting[0]), made + count
            if made == most:
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
    """Tokenizes every example on its own, cut off at ``seq_len``; padding is left to the batch.

    Args:
        examples: The examples; pairs are joined as the tokenizer joins pairs.
        tokenizer: The model's tokenizer.
        seq_len: Longest row.
        read_label: Reads a label as the model's loss takes it (see ``label_reader``); adds a
            ``labels`` column.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.
        apart: Whether the two texts of a pair are rows of their own, one after the other.

    Raises:
        DataError: If a label is none of the model's, or the text is not readable.
    """
    seen, done = Seen(tokenizer, vocabulary), 0
    labels = None if read_label is None or examples.labels is None else iter(examples.labels)

    def parts() -> Iterator[dict[str, Any]]:
        nonlocal done
        for some in _batched(_beginnings(examples, tokenizer, apart)):
            columns = [list(column) for column in zip(*some, strict=True)]
            rows = dict(tokenizer(*columns, truncation=True, max_length=seq_len, verbose=False))
            _refuse_empty(rows["input_ids"], done)
            seen.add_rows(rows["input_ids"])
            if labels is not None and read_label is not None:
                rows["labels"] = [read_label(next(labels)) for _ in some]
            done += len(some)
            yield rows

    rows = stored(parts())
    seen.refuse(examples.strings())
    return rows


def translation_rows(
    examples: Examples, tokenizer: Any, seq_len: int, vocabulary: int | None = None
) -> Dataset:
    """Tokenizes pairs of source and target text, each cut off at ``seq_len``.

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
    seen = {"input_ids": Seen(tokenizer, vocabulary), "labels": Seen(tokenizer, vocabulary)}
    options = {"truncation": True, "max_length": seq_len, "verbose": False}
    done = 0

    def parts() -> Iterator[dict[str, Any]]:
        nonlocal done
        for some in _batched(iter(examples.texts)):
            sources, targets = (list(column) for column in zip(*some, strict=True))
            rows = dict(tokenizer(sources, text_target=targets, **options))
            for name, of_column in seen.items():
                _refuse_empty(rows[name], done)
                of_column.add_rows(rows[name])
            done += len(some)
            yield rows

    rows = stored(parts())
    for of_column in seen.values():
        of_column.refuse(examples.strings())
    return rows


def _beginnings(examples: Examples, tokenizer: Any, apart: bool) -> Iterator[tuple[str, ...]]:
    """The texts; of a file longer than is tokenized together, the beginning."""
    if examples.width > 1 or tokenizer.truncation_side != "right":
        for text in examples.texts:
            yield from ((part,) for part in text) if apart else (text,)
        return
    for document in examples.documents():
        yield (next(slices(document, _CHARACTERS_AT_ONCE), ""),)


def _batched(texts: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Some texts at a time, fewer where they are long."""
    some: list[tuple[str, ...]] = []
    size = 0
    for text in texts:
        some.append(text)
        size += sum(map(len, text))
        if len(some) == _ROWS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _refuse_empty(rows: list[list[int]], before: int) -> None:
    lengths = list(map(len, rows))
    if 0 in lengths:
        raise DataError(
            f"Row {before + lengths.index(0)} (counted from 0; a sentence pair may be two rows) "
            "has no tokens. Leave empty texts out."
        )


def label_reader(net: PreTrainedModel, column: Iterable[str] = ()) -> Callable[[str], Label]:
    """Return what reads a label as the loss of a head for sequences takes it.

    That is the number of a class; a number, for a regression; or, where labels do not exclude each
    other, 0 or 1 for each. These are written as a list, or with commas between them: the names or
    numbers of those that hold, or as many 0 and 1 as there are. Of two labels "0,1" may be either;
    rows of the column that can mean one alone decide.

    Args:
        net: The model.
        column: The labels of all rows.

    Raises:
        DataError: If the model gives several numbers, and a column holds one.
    """
    task, ids = task_of(net), class_ids(net.config)
    if task == "multi-label":
        forms = {_is_flags(label, ids) for label in (column if len(ids) == 2 else ())} - {None}
        return partial(_yes_or_no, label_ids=ids, flags=forms.pop() if len(forms) == 1 else None)
    if task != "regression":
        return partial(_label_id, label_ids=ids)
    if net.config.num_labels != 1:
        raise DataError(
            f"This {type(net).__name__} gives {net.config.num_labels} numbers for a text, and a "
            "label column holds one. Leave out --label-column; healing needs none."
        )
    return _number


def _number(label: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(label)):
            return number
    raise DataError(f"The label '{label}' is not a number, and the model predicts a number.")


def _parts(label: str, label_ids: dict[str, int]) -> list[str]:
    several = [label] if label in label_ids else label.split(",")
    if label.startswith("["):
        with suppress(ValueError):
            several = json.loads(label)
    return [str(part).strip() for part in several]


def _is_flags(label: str, label_ids: dict[str, int]) -> bool | None:
    """Whether a label is as many 0 and 1 as there are; None if it may name those that hold."""
    parts = _parts(label, label_ids)
    if len(parts) != len(label_ids) or not {*parts} <= {"0", "1", "0.0", "1.0"}:
        return False
    holding = {str(number) for number in label_ids.values()} | {*label_ids}
    either = len(parts) == 2 and len({*parts}) == 2 and {*parts} <= holding
    return None if either else True


def _yes_or_no(label: str, label_ids: dict[str, int], flags: bool | None) -> list[float]:
    parts = [part.removesuffix(".0") for part in _parts(label, label_ids)]
    this = _is_flags(label, label_ids)
    if this is None and flags is None:
        raise DataError(
            f"The label '{label}' may be one 0 or 1 per label, or the numbers of those that hold. "
            f"Write the names ({', '.join(label_ids)}), or 0.0 and 1.0."
        )
    if flags if this is None else this:
        return [float(part) for part in parts]
    holding = {_label_id(part, label_ids) for part in parts if part}
    return [float(number in holding) for number in range(len(label_ids))]


def _label_id(label: str, label_ids: dict[str, int]) -> int:
    if label in label_ids:
        return label_ids[label]
    if label.isdecimal() and len(label) < 10 and int(label) in label_ids.values():
        return int(label)
    raise DataError(
        f"The label '{label}' is none of the model's labels ({', '.join(label_ids)}); "
        "use these names, or their numbers."
    )


def masked(input_ids: Tensor, tokenizer: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Masks 15 % of the tokens for masked-language modelling, reproducibly.

    Args:
        input_ids: Token ids, shape (batch, length).
        tokenizer: Must have a mask token.
        seed: With the ids themselves, decides which tokens are masked, so that a sequence is
            masked the same way in whichever batch it comes.

    Returns:
        The masked ids, and labels: the original id where masked, -100 elsewhere.

    Raises:
        DataError: If the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise DataError("The tokenizer has no mask token, so its model is no masked LM.")
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
    chosen = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, ids in enumerate(input_ids):
        digest = hashlib.sha256(str(seed).encode() + ids.cpu().numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        draw = torch.rand(ids.shape[0], generator=generator)
        draw[torch.isin(ids.cpu(), special)] = 2.0
        allowed = int((draw < 2.0).sum())
        count = min(allowed, max(1, round(_MASKED * allowed)))
        chosen[row, draw.argsort()[:count]] = True
    labels = torch.where(chosen, input_ids, torch.full_like(input_ids, -100))
    return torch.where(chosen, tokenizer.mask_token_id, input_ids), labels
