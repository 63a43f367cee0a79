"""Text of which nothing reaches a model: unknown words, special tokens, ids beyond the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headprune.errors import DataError


class Seen:
    """The tokens that were made of a text.

    Args:
        tokenizer: What makes them.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.found: Counter[int] = Counter()
        self._lengths: set[int] = set()

    def add(self, ids: ArrayLike) -> None:
        """Counts tokens."""
        tokens, counts = np.unique(np.asarray(ids, dtype=np.int64), return_counts=True)
        self.found.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))

    def add_rows(self, rows: list[list[int]]) -> None:
        """Counts tokens of rows that are going to be padded to the same length."""
        self._lengths.update(map(len, rows))
        self.add([token for row in rows for token in row])

    def refuse(self, texts: Iterable[str], also: Iterable[int] = ()) -> None:
        """Refuses text of which nothing reaches the model.

        Args:
            texts: The text.
            also: Ids that the model is given besides.

        Raises:
            DataError: If the text is mostly unknown tokens, nothing but special ones or none at
                all, or has an id that the model has no embedding for.
        """
        tokenizer, found = self.tokenizer, self.found
        special = set(tokenizer.all_special_ids)
        known = sum(count for token, count in found.items() if token not in special)
        unknown = tokenizer.unk_token_id
        if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            unknown = None  # vocabularies of bytes know everything, and name one token for all
        share = found[unknown] / max(known + found[unknown], 1)
        if share > 0.5:
            words = ", ".join(map(repr, _unknown_words(texts, tokenizer)))
            raise DataError(
                f"{share:.0%} of the text's tokens are unknown to the tokenizer, those of {words} "
                "among them, so the model would read next to nothing of it. Give text in a "
                "language of the model, or the tokenizer that it was trained with."
            )
        if found and not known:
            names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(found)[:3])))
            raise DataError(
                f"The tokenizer makes nothing but special tokens of the text ({names}), so the "
                "model would read none of it. Give other text, or the tokenizer that it was "
                "trained with."
            )
        begins = "" if found else next(filter(str.strip, texts), "").strip()[:20]
        if begins:
            raise DataError(
                f"The tokenizer makes no tokens of the text, which begins {begins!r}, so the model "
                f"would read none of it. It was loaded as a {type(tokenizer).__name__}; give text "
                "in a language that it knows, or the tokenizer that the model was trained with."
            )
        padded = [tokenizer.pad_token_id] if len(self._lengths) > 1 else []
        refuse_beyond((*found, *also, *padded), tokenizer, self.vocabulary)


def refuse_beyond(ids: Iterable[int | None], tokenizer: Any, vocabulary: int | None) -> None:
    """Refuses ids of tokens that the model has no embedding for; arguments as for ``Seen``.

    Raises:
        DataError: Naming the last of them.
    """
    beyond = max((token for token in ids if token is not None), default=0)
    if vocabulary is not None and beyond >= vocabulary:
        raise DataError(
            f"The tokenizer gives the token {tokenizer.convert_ids_to_tokens(beyond)!r} the id "
            f"{beyond}, and the model has embeddings for {vocabulary} tokens, 0 to "
            f"{vocabulary - 1}. Give it the tokenizer that it was trained with, without tokens "
            "that were added later."
        )


def _unknown_words(texts: Iterable[str], tokenizer: Any) -> list[str]:
    """The first three words with an unknown token, cut off where a script has no spaces."""
    found: dict[str, None] = {}
    for word in (word for text in texts for word in text.split()):
        ids = tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.unk_token_id in ids:
            found[word[:20]] = None
        if len(found) == 3:
            break
    return list(found)
