"""Parsed sentences as an input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from warnings import warn

import numpy as np
import torch
from transformers import PreTrainedModel

from headprune.config import RolesConfig
from headprune.data.text import evenly
from headprune.data.trees import Tree, belonging, read_trees
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.batch import Batch, most_tokens
from headprune.role.collection import Tallies, Watched
from headprune.role.inputs import Input
from headprune.role.spec import Parsed
from headprune.role.syntactic import RELATIONS, offset_baseline, syntactic

MOST = 2000  # sentences
_AT_ONCE = 8  # times as many as of the text, which is so much longer
_LONGEST = 512  # tokens of a sentence, where the model takes any number

_Row = tuple[list[int], Tree, np.ndarray[Any, np.dtype[np.bool_]]]


def parsed_input(net: PreTrainedModel, tokenizer: Any, config: RolesConfig) -> Input | None:
    """The sentences of ``--trees`` one by one, with words and trees; None without any.

    Raises:
        DataError: If the file is none of trees, or no sentence fits into the model.
    """
    if config.trees is None:
        return None
    trees = read_trees(str(config.trees))
    if not tokenizer.is_fast:
        warn(
            f"{type(tokenizer).__name__} does not say where tokens stand in the text, so syntactic "
            "and rare-token heads are left out: --trees needs a fast tokenizer.",
            HeadpruneWarning,
            stacklevel=2,
        )
        return None
    most = min(most_tokens(net.config, tokenizer) or _LONGEST, _LONGEST)
    rows: list[_Row] = []
    for number in evenly(len(trees), min(MOST, len(trees))):
        read = tokenizer(trees[number].text, return_offsets_mapping=True, verbose=False)
        if 2 <= len(read["input_ids"]) <= most:
            offsets = [(int(a), int(b)) for a, b in read["offset_mapping"]]
            rows.append((read["input_ids"], trees[number], belonging(trees[number], offsets)))
    if len(rows) < 4:
        raise DataError(
            f"--trees {config.trees}: {len(rows)} of {len(trees)} sentences fit into the {most} "
            "tokens that the model takes, and an interval needs four. Leave --trees out."
        )
    words = Counter(name for _, tree, _ in rows for name in tree.relations if name in RELATIONS)
    if max(words.values(), default=0) < syntactic.fewest:
        warn(
            f"--trees {config.trees}: no relation has {syntactic.fewest} words, so syntactic heads "
            "are left out. Give more sentences.",
            HeadpruneWarning,
            stacklevel=2,
        )
    rows.sort(key=lambda row: len(row[0]))  # little padding
    ranks = _ranks(rows, set(tokenizer.all_special_ids))
    size = _AT_ONCE * config.batch_size
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    pad = tokenizer.pad_token_id or 0
    batches = [_batch(net, [ids for ids, _, _ in part], pad) for part in parts]
    return Input(batches, parsed=[_parsed(part, ranks) for part in parts])


def baselines(watched: Watched, given: Input) -> Tallies:
    """What the most frequent offsets find, as the control of every module."""
    by_kind = {c: offset_baseline(given.parsed, c) for c in {*watched.causal.values()}}
    return {
        (position, name): by_kind[watched.causal[position]]
        for position, name in watched.found
        if name == "syntactic"
    }


def _ranks(rows: Sequence[_Row], special: set[int]) -> dict[int, int]:
    """By token, how many kinds of tokens are more frequent; of two as frequent, lower ids are."""
    counts = Counter(number for ids, _, _ in rows for number in ids if number not in special)
    ordered = sorted(counts, key=lambda number: (-counts[number], number))
    return {number: rank for rank, number in enumerate(ordered)}


def _batch(net: PreTrainedModel, rows: Sequence[Sequence[int]], pad: int) -> Batch:
    """Padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    batch: Batch = {"input_ids": ids, "attention_mask": mask}
    if net.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
        batch["labels"] = ids.masked_fill(mask == 0, -100)  # which tells its padding
    return batch


def _parsed(part: Sequence[_Row], ranks: dict[int, int]) -> Parsed:
    longest = max(len(ids) for ids, _, _ in part)
    most = max(len(tree.spans) for _, tree, _ in part)
    belongs = torch.zeros(len(part), longest, most, dtype=torch.bool)
    heads, relations = (torch.full((len(part), most), -1) for _ in range(2))
    ranked = torch.full((len(part), longest), -1)
    for at, (ids, tree, tokens) in enumerate(part):
        words = len(tree.spans)
        belongs[at, : len(ids), :words] = torch.from_numpy(tokens)
        heads[at, :words] = torch.tensor(tree.heads)
        names = [RELATIONS.index(name) if name in RELATIONS else -1 for name in tree.relations]
        relations[at, :words] = torch.tensor(names)
        ranked[at, : len(ids)] = torch.tensor([ranks.get(number, -1) for number in ids])
    return Parsed(belongs, heads, relations, ranked)
