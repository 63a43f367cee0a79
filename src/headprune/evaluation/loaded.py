"""Models and data that fit together, before any work is done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import DataConfig, EvaluateConfig
from headprune.context import Allowed
from headprune.data.batches import label_reader
from headprune.data.read import Examples, read_examples
from headprune.data.sentences import by_sentence
from headprune.data.sequences import tokenized_rows, translation_rows, windows
from headprune.data.tokens import around, refuse_beyond
from headprune.evaluation.last_words import LAST_WORDS, Passage, fitting, passages, rows_of
from headprune.evaluation.metrics import within
from headprune.evaluation.needle import NEEDLE, Needle, needles
from headprune.evaluation.quality import TokenLosses
from headprune.evaluation.recall import COPYING, REPEATED, WORDS, WordMarks
from headprune.evaluation.refusals import (
    refuse_exported,
    refuse_other_tokenizer,
    refuse_unfit,
)
from headprune.evaluation.samples import Samples
from headprune.evaluation.tasks import refuse_tasks
from headprune.model.batch import most_tokens, usable_length
from headprune.model.loading import (
    CLASSIFIERS,
    load_config,
    load_tokenizer,
    parse_dtype,
    task_of,
    vocabulary_of,
)
from headprune.model.open import as_it_fits
from headprune.model.placement import alone_on_device
from headprune.model.precision import refuse_missing_dtype, refuse_not_finite
from headprune.model.refusals import refuse_without_text
from headprune.model.stored import id_of_model
from headprune.tensors.dtypes import dtype_name

LANGUAGE_MODELS = ("causal-lm", "masked-lm", "seq2seq-lm")
_CORRELATIONS = ["spearman", "pearson"]
_OF_CLASSIFIERS = {
    "classification": ["accuracy"],
    "multi-label": ["accuracy", "micro_f1"],
    "regression": _CORRELATIONS,
}
_PACKED = ("causal-lm", "masked-lm")  # their text is cut into sequences of one length


@dataclass(frozen=True)
class LoadedDomain:
    """Data to measure on.

    Attributes:
        name: What its metrics carry in brackets; "" for the main one.
        data: Where it comes from.
        examples: The documents.
        rows: What the models read.
        documents: The number of the document that each row of a text begins in; None where every
            row is a document.
        passages: Those whose last words are to be predicted.
        needles: Contexts with a fact that is to be found.
    """

    name: str
    data: DataConfig
    examples: Examples
    rows: Dataset
    documents: NDArray[np.int64] | None = None
    passages: tuple[Passage, ...] = ()
    needles: tuple[Needle, ...] = ()

    @property
    def steps(self) -> int:
        """What a causal language model reads, for its progress."""
        return len(self.rows) + len(self.passages) + len(self.needles)

    @property
    def pairs(self) -> bool:
        """Whether the examples are scored pairs."""
        return self.examples.labels is not None and self.examples.width == 2


@dataclass(frozen=True)
class Loaded:
    """Models and examples that fit together; the base comes second, if there is one.

    Attributes:
        ids: Ids of the models, where their files are at hand.
        names: Folders or hub ids.
        nets: The models.
        tokenizer: That of the first.
        domains: What they are measured on, the main one first.
    """

    ids: tuple[str | None, ...]
    names: tuple[str, ...]
    nets: tuple[PreTrainedModel, ...]
    tokenizer: Any
    domains: tuple[LoadedDomain, ...]

    def metrics(self) -> tuple[str, ...]:
        """The metrics of which every window or example has its part."""
        return tuple(name for domain in self.domains for name in self._metrics(domain))

    def _metrics(self, domain: LoadedDomain) -> list[str]:
        task = task_of(self.nets[0])
        if task in LANGUAGE_MODELS:
            columns = [*TokenLosses.COLUMNS]
            if task == "causal-lm":
                columns += [*REPEATED, *LAST_WORDS, *(() if domain.name else (*COPYING, *NEEDLE))]
                columns += WORDS if WordMarks(self.tokenizer).any else ()
            names = [*Samples(dict.fromkeys(columns, np.zeros(1))).metrics()]
        elif task in CLASSIFIERS:
            names = _OF_CLASSIFIERS[task]
        else:
            paired = ["mean_cosine"] if len(self.nets) == 2 else []
            names = [*(_CORRELATIONS if domain.pairs else []), *paired]
        return [within(name, domain.name) for name in names]

    def settings(self, config: EvaluateConfig) -> dict[str, Any]:
        """The settings of a run; the length of packed sequences is the one that they have."""
        used: dict[str, Any] = {}
        if task_of(self.nets[0]) in _PACKED:
            used = {"seq_len": len(self.domains[0].rows[0]["input_ids"])}
        if task_of(self.nets[0]) == "causal-lm" and (before := around(self.tokenizer).before):
            used["prefix_ids"] = before
        settings = config.model_dump(mode="json")
        for optional in ("copying", "last_words", "tasks"):
            if not settings[optional]:  # it was not measured
                del settings[optional]
        if not settings["needle"]:
            settings = {n: value for n, value in settings.items() if not n.startswith("needle")}
        return {**settings, **used}

    def data_sha256(self) -> str:
        """Digest of the texts and labels of the main domain, in order."""
        return self.domains[0].examples.sha256

    def further(self) -> dict[str, dict[str, Any]] | None:
        """The other domains: where they come from, and the digests of their texts and labels."""
        found = {
            one.name: {**one.data.model_dump(mode="json"), "sha256": one.examples.sha256}
            for one in self.domains[1:]
        }
        return found or None

    def inputs_sha256(self) -> str:
        """Digest of the token ids that the models read, which tokenizer and settings decide."""
        digest, rows = hashlib.sha256(), self.domains[0].rows
        for name in sorted(rows.column_names):
            for row in rows[name]:
                digest.update(f"{name} {row}\0".encode())
        return digest.hexdigest()


def load(
    model: str | Path,
    data: DataConfig | Mapping[str, DataConfig],
    config: EvaluateConfig,
    against: str | Path | None = None,
    allowed: Allowed = Allowed(),
) -> Loaded:
    """The first half of ``evaluate``, which finds what does not fit before any work is done."""
    trust = {"trust_remote_code": allowed.trust_remote_code}
    several = {"": data} if isinstance(data, DataConfig) else data
    refuse_tasks(config.tasks)
    found = [read_examples(one) for one in several.values()]
    names = [str(name) for name in (model, against) if name is not None]
    for name in names:
        load_config(name, **trust)
    nets: list[PreTrainedModel] = []
    for name in names:
        refuse_exported(name)
        net = as_it_fits(
            name,
            parse_dtype(config.dtype.value),
            **trust,
            drop_unexpected=allowed.drop_unexpected,
        )
        refuse_missing_dtype(net.dtype, devices.chosen())
        refuse_without_text(net, "evaluate")
        if devices.emulates(dtype := dtype_name(net.dtype)):
            devices.remark(
                f"'{name}' is measured in {dtype}, which this CPU only emulates: "
                "--config dtype=float32 is several times as fast."
            )
        with alone_on_device(net):
            refuse_not_finite(net, name)
        nets.append(net)
    tokenizer = load_tokenizer(names[0], **trust)
    for examples in found:
        refuse_unfit(nets, names, examples, config)
    seq_len = usable_length(nets[0].config, tokenizer, config.seq_len)
    if against is not None:
        base = load_tokenizer(names[1], **trust)
        refuse_other_tokenizer(tokenizer, base, names)
    domains = tuple(
        LoadedDomain(
            name if number else "",
            one,
            examples,
            *_rows(nets[0], tokenizer, examples, seq_len, config.max_windows),
            _passages(nets, tokenizer, examples, config),
            () if number else _needles(nets[0], tokenizer, examples, config),
        )
        for number, ((name, one), examples) in enumerate(zip(several.items(), found, strict=True))
    )
    ids = tuple(id_of_model(name) for name in names)
    return Loaded(ids, tuple(names), tuple(nets), tokenizer, domains)


def _passages(
    nets: list[PreTrainedModel], tokenizer: Any, examples: Examples, config: EvaluateConfig
) -> tuple[Passage, ...]:
    asked = config.last_words if task_of(nets[0]) == "causal-lm" else 0
    return fitting(passages(rows_of(examples), asked), tokenizer, nets) if asked else ()


def _needles(
    net: PreTrainedModel, tokenizer: Any, examples: Examples, config: EvaluateConfig
) -> tuple[Needle, ...]:
    if not config.needle:
        return ()
    most, known = most_tokens(net.config, tokenizer), vocabulary_of(net)
    return needles(examples, tokenizer, most, config, config.seed, known)


def _rows(
    net: PreTrainedModel, tokenizer: Any, examples: Examples, seq_len: int, most: int | None
) -> tuple[Dataset, NDArray[np.int64] | None]:
    """Return windows for language models, for the others a row per text or sentence, two per pair.

    With the documents that they begin in, if they are of some.
    """
    task, known = task_of(net), vocabulary_of(net)
    if task == "masked-lm":
        refuse_beyond([tokenizer.mask_token_id], tokenizer, known)
    if task in _PACKED:
        return windows(
            examples,
            tokenizer,
            seq_len,
            closed=task == "masked-lm",
            vocabulary=known,
            most=most,
        )
    if task == "seq2seq-lm":
        return translation_rows(examples.spread(most), tokenizer, seq_len, known), None
    some = by_sentence(examples).spread(most)
    if task in CLASSIFIERS:
        read_label = label_reader(net, examples.labels or ())
        return tokenized_rows(some, tokenizer, seq_len, read_label, known), None
    rows = tokenized_rows(some, tokenizer, seq_len, vocabulary=known, apart=True)
    return rows, None if examples.rows_are_documents else np.zeros(len(rows), np.int64)
