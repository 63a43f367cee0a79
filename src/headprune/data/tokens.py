"""The tokens of a text of any length, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headprune.errors import DataError

Ids = NDArray[np.int32]
WHOLE = 1 << 22  # characters that are tokenized together
_LARGEST_ID = np.iinfo(np.int32).max
_CUTS = ("\n\n", "\n\r\n", "\n")  # blank lines, else the end of a line


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


def token_ids(text: Iterable[str], tokenizer: Any, most: int = WHOLE) -> Iterator[Ids]:
    """Yield the tokens of a text, without special tokens around it.

    Args:
        text: The text, in strings of any length; read as far as tokens are asked for.
        tokenizer: The tokenizer.
        most: Characters that are tokenized together; see ``slices``.

    Raises:
        DataError: If a token has a number that no vocabulary has.
    """
    for part in slices(text, most):
        yield _numbers(_encoded(part, tokenizer))


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
    """Return where a part ends that begins at ``start``."""
    stop = start + most
    for mark in _CUTS:
        at = text.rfind(mark, start + most // 2, stop)
        if at >= 0:
            return at + len(mark)
    return stop


def _numbers(encoded: Any) -> Ids:
    """The tokens of an encoding."""
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if ids.size and ids.max() > _LARGEST_ID:
        raise DataError(
            f"The tokenizer gives a token the number {ids.max():,}, which no vocabulary has: its "
            "files are damaged. Get them again."
        )
    return ids.astype(np.int32)


def _encoded(text: str, tokenizer: Any) -> Any:
    return tokenizer(text, add_special_tokens=False, verbose=False)
