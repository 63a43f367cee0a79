"""From documents to fixed-length windows (language models) or padded rows (the others)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from headprune.data.sources import Examples
from headprune.errors import DataError


def packed_windows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    need: int = 1,
    specials: bool = False,
    vocabulary: int | None = None,
) -> Dataset:
    """Packs all documents into windows of exactly ``seq_len`` tokens; the rest is dropped.

    Documents of row formats are separated by the end-of-sequence token; a text file is one
    document and gets none.

    Args:
        examples: The documents.
        tokenizer: The model's tokenizer.
        seq_len: Tokens per window.
        need: Windows that are needed at least.
        specials: Whether each window is wrapped as the tokenizer wraps a text ([CLS] ... [SEP]),
            as encoders expect; language models that continue a text get it bare.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.

    Returns:
        Rows of ``input_ids`` and ``attention_mask``, both of length ``seq_len``.

    Raises:
        DataError: If there are fewer than ``need`` windows, or the text is not readable.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    end = end if examples.rows_are_documents else []
    around = tokenizer("")["input_ids"] if specials else []
    stream: list[int] = []
    found: Counter[int] = Counter()
    for text, *_ in examples.texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found.update(ids)
        stream += ids + end
    _refuse_unreadable(
        found, {*end, *around}, (t for t, *_ in examples.texts), tokenizer, vocabulary
    )
    before, after = around[:1], around[1:]
    inner = seq_len - len(around)
    count = len(stream) // inner
    if count < need:
        raise DataError(
            f"The data has {len(stream):,} tokens, which makes {count} windows of {seq_len}; "
            f"{need} are needed. Give more text or a smaller --seq-len."
        )
    windows = [before + stream[i * inner : (i + 1) * inner] + after for i in range(count)]
    return Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * seq_len] * count})


def tokenized_rows(
    examples: Examples,
    tokenizer: Any,
    seq_len: int,
    label_ids: dict[str, int] | None = None,
    vocabulary: int | None = None,
) -> Dataset:
    """Tokenizes every example on its own, cut off at ``seq_len``; padding is left to the batch.

    Args:
        examples: The examples; pairs are joined as the tokenizer joins pairs.
        tokenizer: The model's tokenizer.
        seq_len: Longest row.
        label_ids: The model's ``label2id``; adds an integer ``labels`` column.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.

    Raises:
        DataError: If a label is none of the model's, or the text is not readable.
    """
    parts = [list(column) for column in zip(*examples.texts, strict=True)]
    rows = dict(tokenizer(*parts, truncation=True, max_length=seq_len, verbose=False))
    _refuse_unreadable_rows(rows["input_ids"], (t for p in parts for t in p), tokenizer, vocabulary)
    if label_ids is not None and examples.labels is not None:
        rows["labels"] = [_label_id(label, label_ids) for label in examples.labels]
    return Dataset.from_dict(rows)


def translation_rows(
    examples: Examples, tokenizer: Any, seq_len: int, vocabulary: int | None = None
) -> Dataset:
    """Tokenizes pairs of source and target text, each cut off at ``seq_len``.

    Returns:
        Rows of ``input_ids``, ``attention_mask`` and ``labels``, of unequal length.

    Raises:
        DataError: If an example is not a pair, or the text is not readable.
    """
    if len(examples.texts[0]) != 2:
        raise DataError(
            "An encoder-decoder learns from pairs: name both columns, as in "
            "--text-column SOURCE,TARGET (CSV, TSV, JSONL or parquet)."
        )
    sources, targets = (list(column) for column in zip(*examples.texts, strict=True))
    options = {"truncation": True, "max_length": seq_len, "verbose": False}
    rows = dict(tokenizer(sources, text_target=targets, **options))
    for name, texts in (("input_ids", sources), ("labels", targets)):
        _refuse_unreadable_rows(rows[name], texts, tokenizer, vocabulary)
    return Dataset.from_dict(rows)


def _refuse_unreadable_rows(
    rows: list[list[int]], texts: Iterable[str], tokenizer: Any, vocabulary: int | None
) -> None:
    padded = len(set(map(len, rows))) > 1 and tokenizer.pad_token_id is not None
    also = {tokenizer.pad_token_id} if padded else set()
    found = Counter(token for row in rows for token in row)
    _refuse_unreadable(found, also, texts, tokenizer, vocabulary)


def _refuse_unreadable(
    found: Counter[int],
    also: set[int],
    texts: Iterable[str],
    tokenizer: Any,
    vocabulary: int | None,
) -> None:
    """Refuses text of which nothing reaches the model.

    Args:
        found: Token ids of the text, with how often each is there.
        also: Ids that stand between and around them.
        texts: The text.
        tokenizer: The tokenizer.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.

    Raises:
        DataError: If the text is mostly unknown tokens, or nothing but special ones, or has an id
            that the model has no embedding for.
    """
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
            "among them, so the model would read next to nothing of it. Give text in a language "
            "of the model, or the tokenizer that it was trained with."
        )
    if found and not known:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(found)[:3])))
        raise DataError(
            f"The tokenizer makes nothing but special tokens of the text ({names}), so the model "
            "would read none of it. Give other text, or the tokenizer that it was trained with."
        )
    beyond = max({*found, *also}, default=0)
    if vocabulary is not None and beyond >= vocabulary:
        raise DataError(
            f"The tokenizer gives the token {tokenizer.convert_ids_to_tokens(beyond)!r} the id "
            f"{beyond}, and the model has embeddings for {vocabulary} tokens, 0 to "
            f"{vocabulary - 1}. Give it the tokenizer that it was trained with, without tokens "
            "that were added later."
        )


def _unknown_words(texts: Iterable[str], tokenizer: Any, most: int = 3) -> list[str]:
    """The first words with an unknown token, cut off where a script has no spaces."""
    found: dict[str, None] = {}
    for word in (word for text in texts for word in text.split()):
        ids = tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.unk_token_id in ids:
            found[word[:20]] = None
        if len(found) == most:
            break
    return list(found)


def _label_id(label: str, label_ids: dict[str, int]) -> int:
    if label in label_ids:
        return label_ids[label]
    if label.isdigit() and int(label) in label_ids.values():
        return int(label)
    raise DataError(
        f"The label '{label}' is none of the model's labels ({', '.join(label_ids)}); "
        "use these names, or their numbers."
    )


def masked(
    input_ids: Tensor, tokenizer: Any, seed: int, share: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Masks tokens for masked-language modelling, reproducibly.

    Args:
        input_ids: Token ids, shape (batch, length).
        tokenizer: Must have a mask token.
        seed: With the ids themselves, decides which tokens are masked, so that a window is
            masked the same way in whichever batch it comes.
        share: Share of the tokens to mask.

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
        count = min(allowed, max(1, round(share * allowed)))
        chosen[row, draw.argsort()[:count]] = True
    labels = torch.where(chosen, input_ids, torch.full_like(input_ids, -100))
    return torch.where(chosen, tokenizer.mask_token_id, input_ids), labels
