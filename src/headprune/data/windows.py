"""From documents to fixed-length windows (language models) or padded rows (the others)."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from headprune.data.sources import Examples
from headprune.errors import DataError


def packed_windows(
    examples: Examples, tokenizer: Any, seq_len: int, need: int = 1, specials: bool = False
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

    Returns:
        Rows of ``input_ids`` and ``attention_mask``, both of length ``seq_len``.

    Raises:
        DataError: If there are fewer than ``need`` windows.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    stream: list[int] = []
    for text, *_ in examples.texts:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        stream += end if examples.rows_are_documents else []
    around = tokenizer("")["input_ids"] if specials else []
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
    examples: Examples, tokenizer: Any, seq_len: int, label_ids: dict[str, int] | None = None
) -> Dataset:
    """Tokenizes every example on its own, cut off at ``seq_len``; padding is left to the batch.

    Args:
        examples: The examples; pairs are joined as the tokenizer joins pairs.
        tokenizer: The model's tokenizer.
        seq_len: Longest row.
        label_ids: The model's ``label2id``; adds an integer ``labels`` column.

    Raises:
        DataError: If a label is none of the model's.
    """
    parts = [list(column) for column in zip(*examples.texts, strict=True)]
    rows = dict(tokenizer(*parts, truncation=True, max_length=seq_len, verbose=False))
    if label_ids is not None and examples.labels is not None:
        rows["labels"] = [_label_id(label, label_ids) for label in examples.labels]
    return Dataset.from_dict(rows)


def translation_rows(examples: Examples, tokenizer: Any, seq_len: int) -> Dataset:
    """Tokenizes pairs of source and target text, each cut off at ``seq_len``.

    Returns:
        Rows of ``input_ids``, ``attention_mask`` and ``labels``, of unequal length.

    Raises:
        DataError: If an example is not a pair.
    """
    if len(examples.texts[0]) != 2:
        raise DataError(
            "An encoder-decoder learns from pairs: name both columns, as in "
            "--text-column SOURCE,TARGET (CSV, TSV, JSONL or parquet)."
        )
    sources, targets = (list(column) for column in zip(*examples.texts, strict=True))
    options = {"truncation": True, "max_length": seq_len, "verbose": False}
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets, **options)))


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
