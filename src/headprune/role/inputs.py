"""Inputs that roles are measured on: text, random tokens twice, parsed sentences, needles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.config import (
    NEEDLE_DEPTHS,
    CalibrationConfig,
    DataConfig,
    NeedleConfig,
    Objective,
    RolesConfig,
)
from headprune.data.batches import batches
from headprune.data.needles import Needle, needles
from headprune.data.read import read_examples
from headprune.data.text import Sequences, Text, evenly
from headprune.data.tokens import around
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.answers import answered
from headprune.model.batch import Batch, most_tokens
from headprune.model.loading import task_of, vocabulary_of
from headprune.role.attended import Facts
from headprune.role.table import RELATIONS, ROLES
from headprune.role.trees import Tree, read_trees

RUN, SHORTEST_RUN = 50, 8  # tokens; in shorter runs a head that looks anywhere is often right
SHORTEST_TEXT = 16  # tokens of a sequence: with fewer, most roles come down to a handful of keys
SENTENCES, LONGEST_SENTENCE = 2000, 512
FEWEST_NEEDLES = 10  # contexts; with fewer, luck decides

_Parsed = tuple[list[int], Tree, Tensor]  # ids of tokens, and which belong to which words


@dataclass(frozen=True)
class Reading:
    """Batches and the facts of each."""

    batches: Sequence[Batch]
    start: int = 0  # place of the first run of random tokens
    period: int = 0  # tokens of a run; 0 on other inputs
    facts: Sequence[Facts] = ()


def text_input(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> tuple[Reading, int]:
    """Return evenly spread running text and its number of tokens."""
    tokens = config.sequences * config.seq_len
    # with this objective no task hides tokens
    sample = _sample(Objective.DISTILL, net, tokenizer, data, config, tokens, running=True)
    if sample.tokens < 4 * SHORTEST_TEXT or len(sample.rows) < 4:
        raise DataError(
            f"The text makes {len(sample.rows)} sequences with {sample.tokens} tokens; an interval "
            f"needs four of {SHORTEST_TEXT} tokens. Give more text or a smaller --seq-len."
        )
    return Reading(sample.batches()), sample.tokens


def loss_batches(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> list[Batch]:
    """Return sequences with labels of a language model's loss."""
    task = task_of(net)
    if task not in ("causal-lm", "masked-lm", "seq2seq-lm"):
        raise DataError(
            f"--ablation-tokens needs the loss of a language model, and this is a "
            f"{type(net).__name__}. Leave it out; roles need no loss."
        )
    objective = Objective.MLM if task == "masked-lm" else Objective.LM
    sample = _sample(objective, net, tokenizer, data, config, max(2, config.ablation_tokens))
    if len(sample.rows) < 2:
        raise DataError(
            f"--ablation-tokens {config.ablation_tokens} makes {len(sample.rows)} sequences of "
            f"--seq-len {config.seq_len}; an interval needs two."
        )
    return sample.batches()


def _sample(
    objective: Objective,
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: RolesConfig,
    tokens: int,
    **more: bool,
) -> Sequences:
    shared = {name: getattr(config, name) for name in ("seq_len", "batch_size", "seed")}
    taken = CalibrationConfig(calibration_tokens=tokens, **shared)
    read = batches(objective, net, tokenizer, data, taken, **more)
    return Text.calibration(read.rows, read.collate, tokens, batch_size=config.batch_size).fit


def repeated_inputs(
    net: PreTrainedModel, tokenizer: Any, config: RolesConfig
) -> tuple[Reading, Reading]:
    """Return runs of random tokens twice, and the control with another second run.

    Special tokens and the rarest, last in a vocabulary, are left out.
    """
    size = net.config.get_text_config().vocab_size
    usual = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    ids = np.array(sorted(number for number in usual if number < size))
    ids = ids[: max(2 * RUN, len(ids) * 9 // 10)]
    before, after = around(tokenizer)
    after = [] if task_of(net) == "causal-lm" else after
    special = len(before) + len(after)
    most = most_tokens(net, tokenizer) or 2 * RUN + special
    period = min(RUN, (most - special) // 2, len(ids) // 2)
    if period < SHORTEST_RUN:
        raise DataError(
            f"Induction and duplicate tokens need two runs of {SHORTEST_RUN} random tokens; the "
            f"model takes {most} tokens and its vocabulary has {len(ids)} to draw from."
        )
    generator = np.random.default_rng(config.seed)
    # no token twice in a run, nor in the other run of the control
    drawn = [generator.choice(ids, 2 * period, replace=False) for _ in range(config.sequences)]
    runs = [(ids[:period].tolist(), ids[period:].tolist()) for ids in drawn]

    def reading(rows: Sequence[list[int]]) -> Reading:
        whole = [[*before, *row, *after] for row in rows]
        parts = _parts(whole, config.batch_size)
        return Reading([_batch(net, part) for part in parts], len(before), period)

    return reading([run + run for run, _ in runs]), reading([run + new for run, new in runs])


def _parts(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _batch(net: PreTrainedModel, rows: Sequence[Sequence[int]], pad: int = 0) -> Batch:
    ids = _padded(rows, pad)
    mask = _padded([[1] * len(row) for row in rows], 0)
    batch: Batch = {"input_ids": ids, "attention_mask": mask}
    if net.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
        batch["labels"] = ids.masked_fill(mask == 0, -100)  # they say where its padding is
    return batch


def _padded(rows: Sequence[Sequence[int]], value: int = -1) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def token_classes(tokenizer: Any) -> Mapping[str, Tensor]:
    """Return ids of the tokens of ``delimiter``, by kind."""
    begin = {tokenizer.bos_token_id, tokenizer.cls_token_id}
    end = {tokenizer.eos_token_id, tokenizer.sep_token_id} - begin  # where one token is both
    classes = {"beginning": begin - {None}, "end": end - {None}}
    vocabulary = tokenizer.get_vocab().items()
    for sign in (".", ","):
        classes[sign] = {number for token, number in vocabulary if token.lstrip("Ġ▁") == sign}
    return {kind: torch.tensor(sorted(ids), dtype=torch.long) for kind, ids in classes.items()}


def trees_input(net: PreTrainedModel, tokenizer: Any, config: RolesConfig) -> Reading | None:
    """Return the sentences of ``--trees`` with their facts; None without any."""
    if config.trees is None:
        return None
    trees = read_trees(str(config.trees))
    if not tokenizer.is_fast:
        _left_out(
            f"{type(tokenizer).__name__} does not say where tokens stand in the text, so syntactic "
            "and rare-token heads are left out: --trees needs a fast tokenizer."
        )
        return None
    most = min(most_tokens(net, tokenizer) or LONGEST_SENTENCE, LONGEST_SENTENCE)
    rows: list[_Parsed] = []
    for number in evenly(len(trees), min(SENTENCES, len(trees))):
        read = tokenizer(trees[number].text, return_offsets_mapping=True, verbose=False)
        if 2 <= len(read["input_ids"]) <= most:
            belongs = trees[number].belonging(read["offset_mapping"])
            rows.append((read["input_ids"], trees[number], belongs))
    if len(rows) < 4:
        raise DataError(
            f"--trees {config.trees}: {len(rows)} of {len(trees)} sentences fit into the {most} "
            "tokens that the model takes, and an interval needs four. Leave --trees out."
        )
    words = Counter(name for _, tree, _ in rows for name in tree.relations if name in RELATIONS)
    if max(words.values(), default=0) < (fewest := ROLES["syntactic"].fewest):
        _left_out(
            f"--trees {config.trees}: no relation has {fewest} words, so syntactic heads are left "
            "out. Give more sentences."
        )
    rows.sort(key=lambda row: len(row[0]))  # little padding
    special = set(tokenizer.all_special_ids)
    counts = Counter(number for ids, _, _ in rows for number in ids if number not in special)
    ordered = sorted(counts, key=lambda number: (-counts[number], number))
    ranks = {number: rank for rank, number in enumerate(ordered)}
    parts = _parts(rows, 8 * config.batch_size)  # sentences are short
    pad = tokenizer.pad_token_id or 0
    return Reading(
        [_batch(net, [ids for ids, _, _ in part], pad) for part in parts],
        facts=[_tree_facts(part, ranks) for part in parts],
    )


def _tree_facts(part: Sequence[_Parsed], ranks: Mapping[int, int]) -> Facts:
    names = {name: number for number, name in enumerate(RELATIONS)}
    heads = _padded([tree.heads for _, tree, _ in part])
    ranked = _padded([[ranks.get(number, -1) for number in ids] for ids, _, _ in part])
    tokens, words = ranked.shape[1], heads.shape[1]
    return {
        "heads": heads,
        "relations": _padded([[names.get(r, -1) for r in t.relations] for _, t, _ in part]),
        "ranks": ranked,
        "belongs": torch.stack(
            [F.pad(b, (0, words - b.shape[1], 0, tokens - b.shape[0])) for _, _, b in part]
        ),
    }


def needles_input(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> Reading | None:
    """Return contexts from which the model copies a number; None where there are too few."""
    if not config.needle_lengths:
        return None
    if task_of(net) != "causal-lm":
        raise DataError(
            f"needle_lengths: retrieval heads need a model that continues a text, and this one "
            f"is a {type(net).__name__}. Leave it out."
        )
    trials = max(1, config.sequences // len(NEEDLE_DEPTHS))
    settings = NeedleConfig(
        needle_lengths=config.needle_lengths, needle_trials=trials, needle_keys=1, seed=config.seed
    )
    most, vocabulary = most_tokens(net, tokenizer), vocabulary_of(net)
    examples = read_examples(data, tokenizer)
    contexts = needles(examples, tokenizer, settings, most, vocabulary)
    hits = answered(net, [needle.row for needle in contexts], 1).hits
    copied = [needle for needle, hit in zip(contexts, hits, strict=True) if hit]
    places = [(needle, _elsewhere(needle, copied)) for needle in copied]
    rows = [(needle, place) for needle, place in places if place is not None]
    if len(rows) < FEWEST_NEEDLES:
        _left_out(
            f"The model finds {len(copied)} of {len(contexts)} needles, {len(rows)} of them where "
            f"it also finds one at another depth, and {FEWEST_NEEDLES} are needed: retrieval heads "
            "are left out. Give shorter needle_lengths, or more --sequences."
        )
        return None
    return Reading(
        [_batch(net, [needle.row.ids]) for needle, _ in rows],
        facts=[_needle_facts(needle, place) for needle, place in rows],
    )


def _elsewhere(needle: Needle, copied: Sequence[Needle]) -> int | None:
    """Return the place of a copied needle of that length at the next depth."""
    same = (one for one in copied if len(one.row.ids) == len(needle.row.ids))
    begins = {one.depth: one.fact.start for one in same}
    depths = sorted(begins)
    following = depths[(depths.index(needle.depth) + 1) % len(depths)]
    return begins[following] if following != needle.depth else None


def _needle_facts(needle: Needle, elsewhere: int) -> Facts:
    ids = torch.tensor([needle.row.ids])
    copied = torch.zeros_like(ids, dtype=torch.bool)
    copied[:, needle.row.start - 1 : -1] = True  # each predicts the token after it
    fact = ids[:, needle.fact.start : needle.fact.stop]
    facts: dict[str, Tensor] = {"copied": copied}
    for name, place in (("needle", needle.fact.start), ("elsewhere", elsewhere)):
        facts[name] = torch.full_like(ids, -1)
        facts[name][:, place : place + fact.shape[1]] = fact
    return facts


def _left_out(sentence: str) -> None:
    warn(sentence, HeadpruneWarning, stacklevel=3)
