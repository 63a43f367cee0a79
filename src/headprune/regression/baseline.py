"""The baseline: the record of a run that later ones are compared with, window by window."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator

from headprune.config import Amount
from headprune.errors import CheckpointError, DataError
from headprune.evaluation.metrics import METRICS, parted, spec_of, within
from headprune.evaluation.samples import Samples
from headprune.io.parsing import read_as
from headprune.io.writing import write_whole
from headprune.schemas.values import Digest

# settings that decide what is measured; the others, such as the batch size, may change
DECISIVE = ("prefix_ids", "seq_len", "max_windows", "seed")
_DECISIVE_OF = {"needle_accuracy": ("needle_lengths", "needle_trials")}  # for one metric alone
_COUNTS = {"tokens", "utf8_bytes"}  # what sums of losses are divided by


class Subject(BaseModel):
    """What stays the same of a model when its heads are cut, shared or trained.

    Attributes:
        model_type: Its family.
        architecture: Its class.
        hidden_size: Width of its hidden states.
        layers: Its hidden layers.
        vocab_size: Its vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_type: str
    architecture: str
    hidden_size: Amount | None
    layers: Amount | None
    vocab_size: Amount | None


class Baseline(BaseModel):
    """An earlier run.

    Attributes:
        created: UTC time.
        commit: The git commit from which it was made; None outside a repository.
        dirty: Whether tracked files were changed since.
        versions: Of headprune, Python, torch, transformers, evaluate and datasets.
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
        load_route: "native" or "runtime".
        samples: Per window or example, what the metrics are made of.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    commit: str | None
    dirty: bool
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
    structure: dict[str, Amount]
    load_route: str
    samples: dict[str, tuple[float, ...]]

    @field_validator("samples")
    @classmethod
    def _even(cls, samples: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        for domain in {parted(name)[1] for name in samples}:
            for spec in METRICS.values():
                needed = [within(name, domain) for name in spec.columns]
                if len({len(samples[name]) for name in needed if name in samples}) > 1:
                    raise ValueError(f"{' and '.join(needed)} must be equally long")
        if not all(math.isfinite(value) for values in samples.values() for value in values):
            raise ValueError("its numbers must be finite")
        for name in (name for name in samples if parted(name)[0] in _COUNTS):
            if min(samples[name], default=0) < 0 or not sum(samples[name]):
                raise ValueError(f"{name} must be counts, and not all 0")
        return samples

    @field_validator("data")
    @classmethod
    def _named(cls, data: dict[str, str | int | None]) -> dict[str, str | int | None]:
        if not isinstance(data.get("source"), str):
            raise ValueError("it must name a source")
        return data

    def refuse_metric(
        self, path: Path, metric: str, settings: dict[str, Any], against: str | None
    ) -> None:
        """Refuses a limit relative to what was not recorded, or was measured otherwise.

        Args:
            path: Where this baseline lies.
            metric: What is limited.
            settings: The settings of this run.
            against: Id of the original of this run.

        Raises:
            DataError: If the metric is not among what the samples give, or not comparable.
        """
        known = self.as_samples().metrics()
        if metric not in known:
            raise DataError(
                f"The baseline '{path}' has no {metric}, only {', '.join(known)}. Write a new one "
                "with --update-baseline, and with --against where embeddings are compared."
            )
        both = {
            name: (self.settings.get(name), settings.get(name))
            for name in _DECISIVE_OF.get(metric, ())
        }
        if spec_of(metric).of_two and None not in (self.against, against):
            both["the original"] = (str(self.against)[:12], str(against)[:12])
        for name, (then, now) in both.items():
            if then != now:
                raise DataError(
                    f"The {metric} of the baseline '{path}' was measured otherwise: {name} was "
                    f"{then} and is {now}. Give what it was made with, or write a new one with "
                    "--update-baseline."
                )

    def as_samples(self) -> Samples:
        """What its metrics are made of."""
        return Samples({name: np.array(values) for name, values in self.samples.items()})

    def write(self, path: Path) -> None:
        """Writes it as JSON with one line per column of samples, whole or not at all."""
        head = self.model_dump_json(indent=2, exclude={"samples"})
        columns = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in self.samples.items()]
        body = ",\n".join(columns)
        write_whole(path, f'{head[:-2]},\n  "samples": {{\n{body}\n  }}\n}}\n')

    def refuse_other(
        self,
        path: Path,
        subject: Subject,
        data_sha256: str,
        domains: dict[str, dict[str, Any]],
        inputs_sha256: str,
        settings: dict[str, Any],
    ) -> None:
        """Refuses a run that cannot be compared with this one window by window.

        Raises:
            DataError: Naming what differs.
        """
        why = self._other_domain(domains) or self._other(
            subject, data_sha256, inputs_sha256, settings
        )
        if why is not None:
            raise DataError(
                f"The baseline '{path}' was made {why}. Give what it was made with, or write a new "
                "one with --update-baseline allow_other."
            )

    def _other_domain(self, domains: dict[str, dict[str, Any]]) -> str | None:
        """Of the further data that both have, whether it is the same."""
        for name, recorded in (self.domains or {}).items():
            then, now = recorded.get("sha256"), domains.get(name, recorded).get("sha256")
            if then != now:
                return (
                    f"on other data: the texts of {name} had the digest {str(then)[:12]}, and "
                    f"these have {str(now)[:12]}"
                )
        return None

    def _other(
        self, subject: Subject, data_sha256: str, inputs_sha256: str, settings: dict[str, Any]
    ) -> str | None:
        for name in Subject.model_fields:
            then, now = getattr(self.subject, name), getattr(subject, name)
            if then != now:
                return f"for another model: its {name} was {then} and is {now}"
        if self.data_sha256 != data_sha256:
            return (
                f"on other data: the texts of '{self.data.get('source')}' had the digest "
                f"{self.data_sha256[:12]}, and these have {data_sha256[:12]}"
            )
        for name in DECISIVE:
            then, now = self.settings.get(name), settings.get(name)
            if then != now:
                return f"with other settings: {name} was {then} and is {now}"
        if self.inputs_sha256 != inputs_sha256:
            return "with another tokenizer: it made other token ids of the same texts"
        return None


def read_baseline(path: Path) -> Baseline:
    """Reads a baseline.

    Raises:
        CheckpointError: If it is missing, damaged or of a later schema.
    """
    if not path.exists():
        raise CheckpointError(
            f"There is no baseline at '{path}'; headprune check --update-baseline writes it."
        )
    return read_as(Baseline, path)
