"""Models and data that fit together, before any work is done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import DataConfig, EvaluateConfig
from headprune.config.data import Loss
from headprune.context import Allowed
from headprune.data.audio import Recordings, read_recordings, recording_rows
from headprune.data.batches import label_reader
from headprune.data.images import Images, image_rows, read_images
from headprune.data.needles import Needle, needles, window_of
from headprune.data.passages import (
    PassageWord,
    last_words,
    lines_of,
    passage_words,
    passages,
)
from headprune.data.read import Examples, read_examples
from headprune.data.tokens import BYTES, around
from headprune.evaluation.comparison import Numbers
from headprune.evaluation.metrics import METRICS, NEEDLES, Samples, spec_of, within
from headprune.evaluation.refusals import refuse_exported, refuse_other_tokenizer, refuse_unfit
from headprune.evaluation.task_table import TASKS, RowSettings, Truth
from headprune.evaluation.tasks import refuse_tasks
from headprune.evaluation.written import references_of, refuse_metrics
from headprune.model.answers import Prompt
from headprune.model.batch import modality_of, most_tokens, usable_length
from headprune.model.loading import (
    CLASSIFIERS,
    class_ids,
    parse_dtype,
    refuse_no_model,
    task_of,
    vocabulary_of,
)
from headprune.model.open import Model, read_model
from headprune.model.placement import alone_on_device
from headprune.model.precision import refuse_missing_dtype, refuse_not_finite
from headprune.model.refusals import refuse_without_padding, refuse_without_text
from headprune.model.stored import id_of_model
from headprune.tensors.dtypes import dtype_name


@dataclass(frozen=True)
class LoadedDomain:
    """Data to measure on.

    Attributes:
        name: What its metrics carry in brackets; "" for the main one.
        data: Source, split and columns.
        examples: The documents.
        rows: Input of the models.
        documents: The number of the document that each row of a text begins in; None where every
            row is a document.
        last_words: Passages whose last words are to be predicted.
        passage_words: Passages whose last words stand earlier in them.
        needles: Contexts with a fact to retrieve.
        references: The text wanted after each example, with ``--metric``.
    """

    name: str
    data: DataConfig
    examples: Examples | Images | Recordings
    rows: Dataset
    documents: Numbers | None = None
    last_words: tuple[Prompt, ...] = ()
    passage_words: tuple[PassageWord, ...] = ()
    needles: tuple[Needle, ...] = ()
    references: tuple[str, ...] = ()

    @property
    def sources(self) -> list[str]:
        """The texts that a model writes after."""
        if not (isinstance(self.examples, Examples) and self.references):
            return []
        return [source for source, _ in self.examples.spread(len(self.references)).texts]

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of last words, then of needles."""
        return [*self.last_words, *(needle.row for needle in self.needles)]


@dataclass(frozen=True)
class Loaded:
    """Models and examples that fit together; the base comes second, if there is one.

    Attributes:
        ids: Ids of the models, where their files are at hand.
        names: Folders or hub ids.
        nets: The models.
        tokenizer: That of the first.
        domains: Their data, the main one first.
        metrics_written: Metrics of written text.
    """

    ids: tuple[str | None, ...]
    names: tuple[str, ...]
    nets: tuple[PreTrainedModel, ...]
    tokenizer: Any
    domains: tuple[LoadedDomain, ...]
    metrics_written: tuple[str, ...] = ()

    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that a run can give example by example."""
        columns = [within(c, one.name) for one in self.domains for c in self._columns(one)]
        names = Samples(dict.fromkeys(columns, np.zeros(1))).metrics()
        return tuple(name for name in names if len(self.nets) == 2 or not spec_of(name).of_two)

    def truth(self, domain: LoadedDomain) -> Truth:
        """Return what outputs on a domain are held against."""
        return Truth(domain.rows, domain.examples, self.nets[0].config)

    def order(self, index: int) -> list[int] | None:
        """Return the places of the first model's classes in the outputs of one of the models."""
        first, ids = (class_ids(self.nets[each].config) for each in (0, index))
        if ids == first or ids.keys() != first.keys():
            return None
        order = [*range(self.nets[index].config.num_labels)]
        for name, number in first.items():
            order[number] = ids[name]
        return order

    def _columns(self, domain: LoadedDomain) -> tuple[str, ...]:
        written = (METRICS[name].columns for name in self.metrics_written if name in METRICS)
        names = (*TASKS[task_of(self.nets[0])].names(self.truth(domain)), *chain(*written))
        elsewhere = NEEDLES if domain.name else ()  # they are hidden in the main text
        return tuple(name for name in names if name not in elsewhere)

    def settings(self, config: EvaluateConfig) -> dict[str, Any]:
        """Return the settings of a run; packed sequences have their real length."""
        used: dict[str, Any] = {}
        packed = TASKS[task_of(self.nets[0])].closed is not None
        if packed and self.domains[0].data.loss is Loss.ALL:
            used = {"seq_len": len(self.domains[0].rows[0]["input_ids"])}
        if task_of(self.nets[0]) == "causal-lm" and (before := around(self.tokenizer).before):
            used["prefix_ids"] = before
        settings = config.model_dump(mode="json")
        for optional in ("last_words", "passage_words", "tasks", "metrics"):
            if not settings[optional]:  # it was not measured
                del settings[optional]
        if not config.metrics:
            del settings["max_new_tokens"]
        if contexts := self.domains[0].needles:
            used["needle_lengths"] = sorted({len(one.row.ids) for one in contexts})
            used["needle_window"] = (window := window_of(*self.nets)) and window.model_dump()
        else:
            settings = {n: value for n, value in settings.items() if not n.startswith("needle")}
        return {**settings, **used}

    def data_sha256(self) -> str:
        """Return the digest of the texts and labels of the main domain, in order."""
        return self.domains[0].examples.sha256

    def further(self) -> dict[str, dict[str, Any]] | None:
        """Return source and digest of the other domains, by name; None without any."""
        others = {
            one.name: {**one.data.model_dump(mode="json"), "sha256": one.examples.sha256}
            for one in self.domains[1:]
        }
        return others or None

    def inputs_sha256(self) -> str:
        """Return the digest of the token ids that the models read."""
        digest, rows = hashlib.sha256(), self.domains[0].rows
        for name in sorted({*rows.column_names} - {BYTES}):
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
    """Open models and data, and refuse what does not fit before any work is done."""
    several = {"": data} if isinstance(data, DataConfig) else data
    refuse_tasks(config.tasks)
    refuse_metrics(config.metrics, allowed)
    names = [str(name) for name in (model, against) if name is not None]
    for name in names:
        refuse_exported(name)
        refuse_no_model(name)
    models = [read_model(name, parse_dtype(config.dtype.value), allowed) for name in names]
    for each in models:
        refuse_without_text(each.skeleton, "evaluate")
        if modality_of(each.skeleton) == "text":
            refuse_without_padding(each.skeleton, task_of(each.skeleton))
    tokenizers = [model.tokenizer for model in models]
    reads_text = modality_of(models[0].skeleton) == "text"
    examples = [_read(one, models[0]) for one in several.values()]
    nets = [_loaded(model) for model in models]
    for one, place in zip(examples, several.values(), strict=True):
        refuse_unfit(nets, names, one, place, config)
    asked = (nets[0], tokenizers[0], config.seq_len, ["encoder"])
    seq_len = usable_length(*asked) if reads_text else 0
    if against is not None and reads_text:
        refuse_other_tokenizer(tokenizers[0], tokenizers[1], names)
    domains = (
        _domain(name if number else "", source, one, nets, tokenizers[0], seq_len, config)
        for number, ((name, source), one) in enumerate(zip(several.items(), examples, strict=True))
    )
    ids = tuple(id_of_model(name) for name in names)
    return Loaded(ids, tuple(names), tuple(nets), tokenizers[0], tuple(domains), config.metrics)


def _read(data: DataConfig, model: Model) -> Examples | Images | Recordings:
    modality = modality_of(model.skeleton)
    if modality == "images":
        return read_images(data)
    if modality == "sound":
        return read_recordings(data, task_of(model.skeleton) in CLASSIFIERS)
    return read_examples(data, model.tokenizer)


def _loaded(model: Model) -> PreTrainedModel:
    """Return a model with its weights, off the device: one model at a time is measured there."""
    net = model.weighted()
    refuse_missing_dtype(net.dtype, devices.chosen())
    if devices.emulates(dtype := dtype_name(net.dtype)):
        devices.remark(
            f"'{model.source}' is measured in {dtype}, which this CPU only emulates: "
            "--config dtype=float32 is several times as fast."
        )
    with alone_on_device(net):
        refuse_not_finite(net, model.source)
    return net


def _domain(
    name: str,
    data: DataConfig,
    examples: Examples | Images | Recordings,
    nets: list[PreTrainedModel],
    tokenizer: Any,
    seq_len: int,
    config: EvaluateConfig,
) -> LoadedDomain:
    if isinstance(examples, Images):
        some = examples.spread(config.max_windows)
        labelled = task_of(nets[0]) in CLASSIFIERS
        read_label = label_reader(nets[0], examples.labels or ()) if labelled else None
        pixels = image_rows(some, nets[0], read_label)
        return LoadedDomain(name, data, some, pixels)
    if isinstance(examples, Recordings):
        heard = examples.spread(config.max_windows)
        labels = examples.labels
        read_label = None if labels is None else label_reader(nets[0], labels)
        sound = recording_rows(heard, nets[0], tokenizer, read_label)
        said = tuple(heard.transcripts) if config.metrics else ()
        return LoadedDomain(name, data, heard, sound, references=said)
    answers = data.loss is Loss.ANSWERS
    how = RowSettings(nets[0], tokenizer, seq_len, config.max_windows, answers)
    rows, documents = TASKS[task_of(nets[0])].rows(how, examples)
    words: tuple[Prompt, ...] = ()
    of_passage: tuple[PassageWord, ...] = ()
    hidden: tuple[Needle, ...] = ()
    if task_of(nets[0]) == "causal-lm":
        limits = [most_tokens(net, tokenizer) for net in nets]  # all read the same passages
        most = min((limit for limit in limits if limit is not None), default=None)
        if config.needle and not name:
            limits_of = (most, vocabulary_of(nets[0]), window_of(*nets))
            hidden = needles(examples, tokenizer, config, *limits_of)
        if config.last_words:
            given = passages(lines_of(examples), config.last_words)
            words = last_words(given, tokenizer, most)
        if config.passage_words and len(nets) == 2:
            of_passage = passage_words(examples, config.passage_words, tokenizer, most)
    references = tuple(references_of(examples.spread(config.max_windows)) if config.metrics else ())
    return LoadedDomain(
        name, data, examples, rows, documents, words, of_passage, hidden, references
    )
