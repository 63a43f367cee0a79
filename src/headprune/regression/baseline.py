"""The baseline: the record of a run that later ones are compared with, window by window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from headprune.config import NonNegativeInt
from headprune.errors import CheckpointError, DataError
from headprune.evaluation.loaded import Loaded
from headprune.evaluation.metrics import Samples, spec_of
from headprune.io.parsing import read_as
from headprune.io.writing import write_whole
from headprune.model.loading import task_of
from headprune.render.blocks import at_context
from headprune.schemas.values import Digest, Finite, Record
from headprune.surgery.layer_windows import classes_of

# settings that decide a number; the others, such as the batch size, may change
DECISIVE = ("prefix_ids", "seq_len", "max_windows", "seed")


class Subject(BaseModel):
    """Facts of a model that stay when its heads are cut, shared or trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_type: str
    task: str
    hidden_size: NonNegativeInt | None
    layers: NonNegativeInt | None
    vocab_size: NonNegativeInt | None

    @classmethod
    def of(cls, net: PreTrainedModel) -> Subject:
        """Return the subject of a model."""
        text = net.config.get_text_config()
        return cls(
            model_type=net.config.model_type,
            task=task_of(net),
            hidden_size=getattr(text, "hidden_size", None),
            layers=getattr(text, "num_hidden_layers", None),
            vocab_size=getattr(text, "vocab_size", None),
        )


class Baseline(Record):
    """An earlier run.

    Attributes:
        schema_version: Version of this schema.
        created: UTC time.
        versions: Of headprune, Python, torch, transformers and datasets.
        platform: Operating system and processor.
        model: Folder or hub id of the model.
        subject: Which model it was.
        dtype: Element type it ran in.
        data: Source of the examples, and their split and columns.
        data_sha256: Digest of texts and labels.
        domains: Further data by name, each with its digest; None for none.
        inputs_sha256: Digest of the token ids made from them.
        against: Id of the original that embeddings were compared with; None without one.
        settings: The settings of the evaluation, seeds included.
        limits: The limits that were in force.
        metrics: Quality.
        structure: Heads, parameters and KV bytes.
        kv_cache_tokens: Context of the KV bytes without one in their name.
        load_route: "native" or "runtime".
        samples: Per window or example, the columns of the metrics.
    """

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    platform: str
    model: str
    subject: Subject
    dtype: str
    data: dict[str, str | int | None]
    data_sha256: str
    domains: dict[str, dict[str, str | int | None]] | None = None
    inputs_sha256: str
    against: Digest | None = None
    settings: dict[str, Any]
    limits: tuple[str, ...]
    metrics: dict[str, float]
    structure: dict[str, NonNegativeInt]
    kv_cache_tokens: NonNegativeInt
    load_route: str
    samples: dict[str, tuple[Finite, ...] | tuple[tuple[Finite, ...], ...]]

    def as_samples(self) -> Samples:
        """Return the columns of its metrics."""
        return Samples({name: np.array(values) for name, values in self.samples.items()})

    def write(self, path: Path) -> None:
        """Write it as JSON with one line per column of samples, whole or not at all."""
        head = self.model_dump_json(indent=2, exclude={"samples"})
        columns = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in self.samples.items()]
        body = ",\n".join(columns)
        write_whole(path, f'{head[:-2]},\n  "samples": {{\n{body}\n  }}\n}}\n')

    def refuse_other(self, path: Path, loaded: Loaded, settings: dict[str, Any]) -> None:
        """Refuse a run that cannot be compared with this one window by window.

        Raises:
            DataError: Naming what differs.
        """
        why = self._other(loaded, settings)
        if why is not None:
            raise DataError(
                f"The baseline '{path}' was made {why}. Give the same settings, or write a new "
                "one with --update-baseline."
            )

    def _other(self, loaded: Loaded, settings: dict[str, Any]) -> str | None:
        subject, further = Subject.of(loaded.nets[0]), loaded.further() or {}
        for name in Subject.model_fields:
            then, now = getattr(self.subject, name), getattr(subject, name)
            same = then == now
            if name == "model_type":  # windows of layers come with a class that holds them
                same = now in classes_of(then) or then in classes_of(now)
            if not same:
                return f"for another model: its {name} was {then} and is {now}"
        digests = [(self.data.get("source"), self.data_sha256, loaded.data_sha256())]
        digests += [
            (name, str(recorded.get("sha256")), further[name]["sha256"])
            for name, recorded in (self.domains or {}).items()
            if name in further
        ]
        for source, before, after in digests:
            if before != after:
                return (
                    f"on other data: the texts of '{source}' had the digest {before[:12]}, and "
                    f"these have {after[:12]}"
                )
        for name in DECISIVE:
            if (then := self.settings.get(name)) != (now := settings.get(name)):
                return f"with other settings: {name} was {then} and is {now}"
        if self.inputs_sha256 != loaded.inputs_sha256():
            return "with another tokenizer: it made other token ids of the same texts"
        return None

    def refuse_cache(self, path: Path, metric: str, tokens: int, dtype: str) -> None:
        """Refuse KV bytes of another element type, or of another context where none is named.

        Raises:
            DataError: Naming the difference.
        """
        if self.dtype != dtype:
            raise DataError(
                f"The {metric} of the baseline '{path}' is in {self.dtype}, and here in {dtype}: "
                "give the same --dtype, or write a new one with --update-baseline."
            )
        if metric == "kv_cache_bytes" and self.kv_cache_tokens != tokens:
            raise DataError(
                f"The {metric} of the baseline '{path}' is {at_context(self.kv_cache_tokens)}, and "
                f"here {at_context(tokens)}, since one has windows. Limit kv_cache_bytes@2k or "
                "@8k, or write a new one with --update-baseline."
            )

    def refuse_metric(
        self, path: Path, metric: str, settings: dict[str, Any], against: str | None
    ) -> None:
        """Refuse an unrecorded metric, or one measured otherwise.

        Args:
            path: The file of this baseline.
            metric: The limited metric.
            settings: The settings of this run.
            against: Id of the original of this run.

        Raises:
            DataError: Naming the difference.
        """
        known, spec = self.as_samples().metrics(), spec_of(metric)
        if metric not in known:
            raise DataError(
                f"The baseline '{path}' has no {metric}, only {', '.join(known)}. Write a new one "
                "with --update-baseline, and with --against where embeddings are compared."
            )
        both = {name: (self.settings.get(name), settings.get(name)) for name in spec.settings}
        if spec.of_two and None not in (self.against, against):
            both["the original"] = (str(self.against)[:12], str(against)[:12])
        for name, (then, now) in both.items():
            if then != now:
                raise DataError(
                    f"The {metric} of the baseline '{path}' was measured otherwise: {name} was "
                    f"{then} and is {now}. Give the old value, or write a new one with "
                    "--update-baseline."
                )


def read_baseline(path: Path) -> Baseline:
    """Return a baseline.

    Raises:
        CheckpointError: If it is missing, damaged or of a later schema.
    """
    if not path.exists():
        raise CheckpointError(
            f"There is no baseline at '{path}'; headprune check --update-baseline writes it."
        )
    return read_as(Baseline, path)
