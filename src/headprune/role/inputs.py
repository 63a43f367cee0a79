"""What heads are watched on: sequences of the text, and random tokens that come twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Objective, RolesConfig
from headprune.data.batches import batches
from headprune.data.text import Text
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.model.batch import Batch, most_tokens
from headprune.model.loading import task_of
from headprune.role.spec import Hidden, Parsed

RUN = 50  # tokens of a run, where model and vocabulary have as many
FEWEST = 8  # with fewer, a head that looks anywhere is often right
TEXT_TOKENS = 16  # of a sequence: with fewer, most roles come down to a handful of keys


@dataclass(frozen=True)
class Input:
    """Batches, and how they are laid out.

    Attributes:
        batches: What the model is given.
        start: Place of the first token of the first run.
        period: Tokens of a run; 0 for text.
        parsed: Words and trees of every batch; empty where they are not known.
        hidden: The fact in every batch; empty without any.
    """

    batches: Sequence[Batch]
    start: int = 0
    period: int = 0
    parsed: Sequence[Parsed] = ()
    hidden: Sequence[Hidden] = ()


def text_input(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> tuple[Input, int]:
    """Sequences of the text as it is, spread evenly, and how many tokens they have.

    Raises:
        DataError: If there is too little of it.
    """
    tokens = config.sequences * config.seq_len
    taken = CalibrationConfig(
        calibration_tokens=tokens, seq_len=config.seq_len, batch_size=config.batch_size
    )
    # with this objective no task hides tokens
    rows, collate, _ = batches(Objective.DISTILL, net, tokenizer, data, taken, running=True)
    sample = Text.calibration(rows, collate, tokens, batch_size=config.batch_size).fit
    if sample.tokens < 4 * TEXT_TOKENS or len(sample.rows) < 4:
        raise DataError(
            f"The text makes {len(sample.rows)} sequences with {sample.tokens} tokens; an interval "
            f"needs four, of {TEXT_TOKENS} tokens or more. Give more text or a smaller --seq-len."
        )
    return Input(sample.batches()), sample.tokens


def loss_batches(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig
) -> list[Batch]:
    """Sequences of the text with what a language model's loss is of.

    Raises:
        DataError: If the model has no such loss, or the text makes fewer than two sequences.
    """
    task = task_of(net)
    objective = Objective.MLM if task == "masked-lm" else Objective.LM
    if task not in ("causal-lm", "masked-lm", "seq2seq-lm"):
        raise DataError(
            f"--ablation-tokens needs the loss of a language model, and this is a "
            f"{type(net).__name__}. Leave it out; roles need no loss."
        )
    taken = CalibrationConfig(
        calibration_tokens=max(2, config.ablation_tokens),
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    rows, collate, _ = batches(objective, net, tokenizer, data, taken)
    sample = Text.calibration(
        rows, collate, taken.calibration_tokens, batch_size=config.batch_size
    ).fit
    if len(sample.rows) < 2:
        raise DataError(
            f"--ablation-tokens {config.ablation_tokens} makes {len(sample.rows)} sequences of "
            f"--seq-len {config.seq_len}; an interval needs two."
        )
    return sample.batches()


def repeated_inputs(
    net: PreTrainedModel, tokenizer: Any, config: RolesConfig
) -> tuple[Input, Input]:
    """Runs of random tokens that come twice, and the same with another second run.

    Special tokens and the rarest, which come last in a vocabulary, are left out.

    Raises:
        DataError: If model or vocabulary have no room for two runs.
    """
    size = net.config.get_text_config().vocab_size
    usual = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    ids = np.array(sorted(number for number in usual if number < size))
    ids = ids[: max(2 * RUN, len(ids) * 9 // 10)]
    before, after = around(tokenizer)
    sides = (before, [] if task_of(net) == "causal-lm" else after)
    special = sum(map(len, sides))
    most = most_tokens(net.config, tokenizer) or 2 * RUN + special
    period = min(RUN, (most - special) // 2, len(ids) // 2)
    if period < FEWEST:
        raise DataError(
            f"Induction and duplicate tokens are told from two runs of {FEWEST} random tokens; the "
            f"model takes {most} tokens and its vocabulary has {len(ids)} to draw from."
        )
    generator = np.random.default_rng(config.seed)
    # no token twice in a run, nor in the other run of the control
    drawn = np.stack(
        [generator.choice(ids, 2 * period, replace=False) for _ in range(config.sequences)]
    )
    first, other = drawn[:, :period], drawn[:, period:]

    def laid_out(second: Any) -> Input:
        both = torch.from_numpy(np.concatenate([first, second], 1))
        left, right = (torch.tensor(side, dtype=both.dtype).expand(len(both), -1) for side in sides)
        rows = torch.cat([left, both, right], 1)
        parts = [_batch(net, part) for part in rows.split(config.batch_size)]
        return Input(parts, len(before), period)

    return laid_out(first), laid_out(other)


def _batch(net: PreTrainedModel, ids: Tensor) -> Batch:
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if net.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    return batch


def token_classes(tokenizer: Any) -> Mapping[str, Tensor]:
    """Ids of the tokens that ``delimiter`` is told from, by kind."""
    named = {
        "beginning": (tokenizer.bos_token_id, tokenizer.cls_token_id),
        "end": (tokenizer.eos_token_id, tokenizer.sep_token_id),
    }
    found = {kind: {i for i in ids if i is not None} for kind, ids in named.items()}
    found["end"] -= found["beginning"]  # where one token is both
    vocabulary = tokenizer.get_vocab().items()
    for sign in (".", ","):
        found[sign] = {number for token, number in vocabulary if token.lstrip("Ġ▁") == sign}
    return {kind: torch.tensor(sorted(ids), dtype=torch.long) for kind, ids in found.items()}
