"""Metrics of written text: translations, summaries, transcripts, answers.

Packages count something of every example, such as matching n-grams. The number is a function of the
sums of these counts, so that the bootstrap resamples counts and reads no text again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.context import Allowed, Progress
from headprune.data.audio import Recordings, features_of, recordings_per_pass
from headprune.data.read import Examples
from headprune.data.sequences import begin_once, refuse_empty
from headprune.data.tokens import around
from headprune.errors import DataError, HeadpruneError, HeadpruneWarning
from headprune.evaluation.metrics import METRICS, Floats
from headprune.evaluation.report import Metric, finite
from headprune.model.batch import SpeechProcessor, most_tokens, padded, padding_id
from headprune.model.generation import generated, minds_padding, search_of, until_end
from headprune.model.placement import on_device
from headprune.packages import refuse_missing
from headprune.registry import did_you_mean

Counts = Callable[[Sequence[str], Sequence[str]], Sequence[Any]]


@dataclass(frozen=True)
class Counted:
    """Counts of written texts.

    Attributes:
        package: The module that counts; "" for none.
        counts: From written texts and references to the numbers of each example.
    """

    package: str
    counts: Counts


def _sacrebleu(name: str) -> Counted:
    def counts(written: Sequence[str], references: Sequence[str]) -> Sequence[Any]:
        from sacrebleu import metrics

        rows: Sequence[Any] = getattr(metrics, name)()._extract_corpus_statistics(
            written, [references]
        )
        return rows

    return Counted("sacrebleu", counts)


def _rouge(name: str) -> Counted:
    def counts(written: Sequence[str], references: Sequence[str]) -> Sequence[Any]:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([name])
        pairs = zip(references, written, strict=True)
        return [scorer.score(*pair)[name].fmeasure for pair in pairs]

    return Counted("rouge_score", counts)


def _errors(unit: str) -> Counted:
    def counts(written: Sequence[str], references: Sequence[str]) -> Sequence[Any]:
        import jiwer

        process: Any = getattr(jiwer, f"process_{unit}")
        found = [process(*pair) for pair in zip(references, written, strict=True)]
        return [
            (
                one.substitutions + one.deletions + one.insertions,
                one.substitutions + one.deletions + one.hits,
            )
            for one in found
        ]

    return Counted("jiwer", counts)


def _same(written: Sequence[str], references: Sequence[str]) -> Sequence[Any]:
    pairs = zip(written, references, strict=True)
    return [float(ours.strip() == theirs.strip()) for ours, theirs in pairs]


COUNTED = {
    "bleu": _sacrebleu("BLEU"),
    "chrf": _sacrebleu("CHRF"),
    "ter": _sacrebleu("TER"),
    "rouge1": _rouge("rouge1"),
    "rouge2": _rouge("rouge2"),
    "rouge_l": _rouge("rougeL"),
    "wer": _errors("words"),
    "cer": _errors("characters"),
    "exact_match": Counted("", _same),
}


def refuse_metrics(names: Sequence[str], allowed: Allowed) -> None:
    """Refuse metrics that cannot be computed, before anything is loaded.

    Raises:
        HeadpruneError: If one is not known, its package is missing, or it is code that may not run.
    """
    for name in names:
        package = COUNTED[name].package if name in COUNTED else "evaluate"
        if name not in COUNTED and "/" not in name and not Path(name).exists():
            raise HeadpruneError(
                f"--metric {name}: known are {', '.join(COUNTED)}, a file or folder with a module "
                f"of evaluate, and OWNER/NAME on the hub.{did_you_mean(name, [*COUNTED])}"
            )
        if name not in COUNTED and not allowed.trust_remote_code:
            raise HeadpruneError(
                f"--metric {name} runs code that comes with it: read it, and give "
                "--trust-remote-code."
            )
        refuse_missing(f"--metric {name}", *[package] * bool(package))


def references_of(examples: Examples) -> list[str]:
    """Return the second text of every pair.

    Raises:
        DataError: If the examples are no pairs.
    """
    if examples.width != 2:
        raise DataError(
            "--metric compares written text with references: name both columns, as in "
            "--text-column SOURCE,REFERENCE (CSV, TSV, JSONL or parquet)."
        )
    return [reference for _, reference in examples.texts]


def scores(
    names: Sequence[str], written: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, Floats], list[Metric]]:
    """Return columns of counts, and the numbers of modules that give no counts.

    Raises:
        DataError: If every text is empty.
        HeadpruneError: If a module fails; quotes it.
    """
    if not any(text.strip() for text in written):
        raise DataError(
            f"The model wrote nothing after {len(written)} prompts, so there is nothing to compare "
            "with the references. Look at its generation_config.json, or verify it."
        )
    columns, numbers = {}, []
    for name in names:
        if name in COUNTED:
            (column,) = METRICS[name].columns
            columns[column] = np.array(COUNTED[name].counts(written, references), np.float64)
        else:
            numbers += _of_module(name, written, references)
    return columns, numbers


def _of_module(name: str, written: Sequence[str], references: Sequence[str]) -> list[Metric]:
    import evaluate

    try:
        results = evaluate.load(name).compute(predictions=written, references=references)
    except Exception as error:  # the code of others fails in its own way
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise HeadpruneError(f"--metric {name} could not be computed: {first}") from error
    stem = Path(name).stem
    return finite(
        Metric(name=f"{stem}:{key}", value=value, unit="1", higher_is_better=True, n=len(written))
        for key, value in (results or {}).items()
        if isinstance(value, int | float)
    )


def write(
    model: PreTrainedModel,
    prompts: Sequence[str],
    tokenizer: Any,
    batch_size: int,
    most: int,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Return a model's text after each prompt; see ``model.generation``.

    Prompts longer than the model takes are cut off: of a decoder, on the left. There prompt and
    answer share the positions.

    Args:
        model: A model that generates.
        prompts: Sources or prompts.
        tokenizer: Its tokenizer.
        batch_size: Prompts per pass.
        most: Tokens to write, at most.
        progress: Called with prompts done and prompts in all.

    Raises:
        DataError: If a prompt has no tokens, or the model too few positions.
        CheckpointError: If its stored settings ask for another search.
    """
    continues, search = not model.config.is_encoder_decoder, search_of(model)
    # without an end token, a row continues behind its stop string until the whole batch stops
    alone = minds_padding(search, continues) or bool(search.stop_strings)
    if alone or (continues and tokenizer.pad_token_id is None):
        batch_size = 1

    after = around(tokenizer).after if continues else []  # nothing is said behind an end token

    def tokens(**cut: Any) -> list[list[int]]:
        rows: dict[str, list[list[int]]] = {"input_ids": tokenizer([*prompts], **cut)["input_ids"]}
        begin_once(rows, tokenizer)
        ended = len(after)
        return [r[:-ended] if after and r[-ended:] == after else r for r in rows["input_ids"]]

    ids = tokens(verbose=False)
    refuse_empty(map(len, ids))
    reads, most = _room(model, tokenizer, max(map(len, ids)), most)
    before = tokenizer.truncation_side
    tokenizer.truncation_side = "left" if continues else before
    try:
        ids = tokens(truncation=True, max_length=reads + len(after))
    finally:
        tokenizer.truncation_side = before
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    padding, side = padding_id(model.config, tokenizer), "left" if continues else "right"
    texts: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        batch = padded([{"input_ids": ids[number]} for number in some], padding, side)
        written = generated(model, on_device(model, batch), search, most, tokenizer)
        rows = until_end(written, search, continues)
        texts |= zip(some, tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True)
        progress(len(texts), len(prompts))
    return [texts[number] for number in range(len(prompts))]


def _room(model: PreTrainedModel, tokenizer: Any, longest: int, most: int) -> tuple[int, int]:
    """Return the tokens to read of a prompt, and those to write.

    Where a decoder has fewer positions, at least half of them are for the answer.
    """
    positions = most_tokens(model, sides=["decoder"]) or longest + most
    reads = min(longest, most_tokens(model, tokenizer, ["encoder"]) or longest)
    writes = min(most, positions)
    if not model.config.is_encoder_decoder:
        writes = min(most, max(positions // 2, positions - reads))
        reads = min(reads, positions - writes)
    if writes < 1 or reads <= sum(map(len, around(tokenizer))):
        raise DataError(
            f"This {type(model).__name__} has {positions} positions, too few for a prompt and an "
            "answer. Leave --metric out."
        )
    if (reads, writes) != (longest, most):
        warnings.warn(
            f"Up to {writes} tokens are written after the last {reads} of a prompt: {most} after "
            f"{longest} were asked for, and model and tokenizer take no more (max_new_tokens).",
            HeadpruneWarning,
            stacklevel=3,
        )
    return reads, writes


@torch.no_grad()
def transcribe(
    model: PreTrainedModel,
    recordings: Recordings,
    processor: SpeechProcessor,
    batch_size: int,
    most: int,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Return the transcripts that a model writes of recordings; arguments as for ``write``."""
    texts, writes = list[str](), model.can_generate()
    if writes:
        search = search_of(model)
        most = min(most, most_tokens(model, sides=["decoder"]) or most)
    total, batch_size = len(recordings.table), recordings_per_pass(model, batch_size)
    for start in range(0, total, batch_size):
        numbers = range(start, min(start + batch_size, total))
        inputs = on_device(model, features_of(recordings, model, processor, numbers))
        if writes:
            ids = generated(model, inputs, search, most, processor.tokenizer)
            rows = until_end(ids, search, continues=False)
        else:
            rows = _by_frames(model, inputs).tolist()
        texts += processor.tokenizer.batch_decode(rows, skip_special_tokens=True)
        progress(len(texts), total)
    return texts


def _by_frames(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the likeliest token of every frame, blanks at padding (CTC)."""
    ids: Tensor = model(**inputs).logits.argmax(-1)
    if "attention_mask" in inputs:
        lengths = model._get_feat_extract_output_lengths(inputs["attention_mask"].sum(1))
        beyond = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
        ids = ids.masked_fill(beyond, model.config.pad_token_id)
    return ids
