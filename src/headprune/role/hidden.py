"""Needles as an input: contexts out of which a model copies a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from warnings import warn

import torch
from transformers import PreTrainedModel

from headprune.config import NEEDLE_DEPTHS, DataConfig, NeedleConfig, RolesConfig
from headprune.data.read import read_examples
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation.endings import endings_predicted
from headprune.evaluation.needle import Needle, needles
from headprune.model.batch import most_tokens
from headprune.model.loading import task_of, vocabulary_of
from headprune.role.inputs import Input
from headprune.role.spec import Hidden

FEWEST = 10  # contexts that tell more of a head than luck does


def hidden_input(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> Input | None:
    """Contexts out of which the model copies the number, one by one as they are long.

    None without ``--needle-lengths``, and where the model finds too few.

    Raises:
        DataError: If the model does not go on with a text, or has no room for a needle.
    """
    if not config.needle_lengths:
        return None
    if task_of(net) != "causal-lm":
        raise DataError(
            f"--needle-lengths: retrieval heads are told of a model that goes on with a text, and "
            f"this one is a {type(net).__name__}. Leave it out."
        )
    trials = max(1, config.sequences // len(NEEDLE_DEPTHS))
    asked = NeedleConfig(needle_lengths=config.needle_lengths, needle_trials=trials)
    most, known = most_tokens(net.config, tokenizer), vocabulary_of(net)
    given = needles(read_examples(data), tokenizer, most, asked, config.seed, known)
    hits = endings_predicted(net, [needle.row for needle in given], 1)
    found = [needle for needle, hit in zip(given, hits, strict=True) if hit]
    places = [(needle, _elsewhere(needle, found)) for needle in found]
    rows = [(needle, place) for needle, place in places if place is not None]
    if len(rows) < FEWEST:
        warn(
            f"The model finds {len(found)} of {len(given)} needles, {len(rows)} of them where it "
            f"also finds one at another depth, and {FEWEST} are needed: retrieval heads are left "
            "out. Give shorter --needle-lengths, or more --sequences.",
            HeadpruneWarning,
            stacklevel=2,
        )
        return None
    ids = [torch.tensor([needle.row.ids]) for needle, _ in rows]
    return Input(
        [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids],
        hidden=[_hidden(needle, place) for needle, place in rows],
    )


def _elsewhere(needle: Needle, found: Sequence[Needle]) -> int | None:
    """Where the needle begins at the next depth at which one of that length was found."""
    same = (other for other in found if len(other.row.ids) == len(needle.row.ids))
    begins = {other.depth: other.fact.start for other in same}
    depths = sorted(begins)
    following = depths[(depths.index(needle.depth) + 1) % len(depths)]
    return begins[following] if following != needle.depth else None


def _hidden(needle: Needle, elsewhere: int) -> Hidden:
    ids = torch.tensor(needle.row.ids)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[needle.row.start - 1 : -1] = True  # each writes the token after it
    fact = ids[needle.fact.start : needle.fact.stop]

    def at(place: int) -> torch.Tensor:
        told = torch.full_like(ids, -1)
        told[place : place + len(fact)] = fact
        return told[None]

    return Hidden(asked[None], at(needle.fact.start), at(elsewhere))
