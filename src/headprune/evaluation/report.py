"""The report of ``evaluate``: metrics, sizes and speed, and how they were measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import computed_field, model_validator

from headprune.config import NonNegativeInt
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation.comparison import Interval
from headprune.evaluation.metrics import in_k, label, spec_of
from headprune.evaluation.speed import Speed
from headprune.io.folders import digest_of
from headprune.io.writing import write_whole
from headprune.model.cost import ModelCost
from headprune.schemas.values import Digest, Record


class Metric(Record):
    """One measured number, never rounded.

    Attributes:
        name: "perplexity", or "perplexity[brown]" on the further domain brown, or
            "lambada_openai:acc" of a task of lm-eval.
        value: The number.
        unit: Its unit.
        higher_is_better: Its direction.
        n: Windows or examples behind it.
        stderr: The standard error of lm-eval; None for all others.
    """

    name: str
    value: float
    unit: str
    higher_is_better: bool
    n: NonNegativeInt
    stderr: float | None = None

    @classmethod
    def of(cls, name: str, value: float, n: int) -> Metric:
        """Return a metric with its unit and direction.

        Raises:
            DataError: If the value is not finite: JSON has no such number.
        """
        if not math.isfinite(value):
            raise DataError(
                f"The {label(name)} is {value} on {n} examples: there are too few of them, "
                "its outputs are all the same, or it is damaged. Give more examples, or verify it."
            )
        spec = spec_of(name)
        return cls(
            name=name, value=value, unit=spec.unit, higher_is_better=spec.higher_is_better, n=n
        )


def finite(scores: Iterable[Metric]) -> list[Metric]:
    """Return the finite scores of a package, and warn of others: JSON has no such number."""
    kept = list[Metric]()
    for one in scores:
        if math.isfinite(one.value):
            kept.append(one)
        else:
            warnings.warn(
                f"The {label(one.name)} is {one.value} on {one.n} examples, and is left out of the "
                "report.",
                HeadpruneWarning,
                stacklevel=2,
            )
    return kept


class Provenance(Record):
    """Settings and data that repeat a measurement.

    Attributes:
        created: UTC time.
        versions: Of headprune, Python, torch, transformers, datasets, and lm-eval if it ran.
        platform: Operating system and processor.
        data: Source of the examples, and their split and columns.
        data_sha256: Digest of the texts and labels, in order.
        domains: Further data by name: source, split, columns and digest; None for none.
        settings: The resolved settings, seeds included.
    """

    created: str
    versions: dict[str, str]
    platform: str
    data: dict[str, Any]
    data_sha256: str
    domains: dict[str, dict[str, Any]] | None = None
    settings: dict[str, Any]


class Identified(Record):
    """A report with an id.

    Attributes:
        schema_version: Version of this schema.
        provenance: How it was measured.
    """

    schema_version: Literal[1] = 1
    provenance: Provenance

    @model_validator(mode="before")
    @classmethod
    def _without_id(cls, content: Any) -> Any:
        """Leave out the id in a file: an edited one has another."""
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name != "id"}

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def id(self) -> str:
        """SHA-256 of the content without times."""
        content = self.model_dump(
            mode="json",
            exclude={"id": True, "provenance": {"created"}, "evaluate_s": True, "judge_s": True},
            exclude_none=True,
        )
        return digest_of(content)


class Retrieval(Record):
    """Needles retrieved from contexts of one length, at one depth.

    Attributes:
        tokens: Length of the contexts.
        depth: Share of the text before the needle.
        accuracy: Share of retrieved needles.
        nats: Mean loss per token of the answers.
        n: Needles.
    """

    tokens: NonNegativeInt
    depth: float
    accuracy: float
    nats: float
    n: NonNegativeInt


class ModelReport(Record):
    """The numbers of one model.

    Attributes:
        id: Id of the model; None where its files are not at hand.
        name: Folder or hub id.
        architecture: Its class.
        task: causal-lm, masked-lm, seq2seq-lm, classification, multi-label, regression or features.
        dtype: Element type it ran in.
        metrics: Quality.
        cost: Size.
        speed: Throughput, if it was timed.
        speed_at: The same after longer prompts, with ``speed_contexts``.
        longest_context: With a given memory: tokens of KV cache that fit beside the weights, over
            all sequences, or with windows of one; activations are not counted.
        needle: Retrieval by context length and depth, with ``--needle``.
    """

    id: Digest | None = None
    name: str
    architecture: str
    task: str
    dtype: str
    metrics: tuple[Metric, ...]
    cost: ModelCost
    speed: Speed | None
    speed_at: tuple[Speed, ...] = ()
    longest_context: NonNegativeInt | None = None
    needle: tuple[Retrieval, ...] | None = None


class Difference(Record):
    """Difference of the model from the base on the same windows.

    Attributes:
        name: The metric.
        kind: "ratio" (model / base) or "difference" (model - base).
        interval: Estimate and paired bootstrap interval.
        higher_is_better: Direction of the metric.
    """

    name: str
    kind: Literal["ratio", "difference"]
    interval: Interval
    higher_is_better: bool

    @property
    def change(self) -> str:
        """``1.082 x``, or ``-0.175`` of a difference."""
        value = self.interval.estimate
        return f"{value:.3f} x" if self.kind == "ratio" else f"{value:+.3f}"

    @property
    def bounds(self) -> str:
        """``1.071 to 1.093``."""
        return f"{self.interval.low:.3f} to {self.interval.high:.3f}"

    def in_words(self) -> str:
        """``1.082 x (95 %: 1.071 to 1.093)``, or ``-0.175 (...)`` of a difference."""
        return f"{self.change} ({100 * self.interval.confidence:g} %: {self.bounds})"


class Report(Identified):
    """The result of ``headprune evaluate``.

    Attributes:
        schema_version: Version of this schema.
        id: SHA-256 of the content without times.
        provenance: How it was measured.
        model: The model.
        against: The base model, with ``--against``.
        differences: Model against base.
    """

    model: ModelReport
    against: ModelReport | None = None
    differences: tuple[Difference, ...] = ()

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return, per metric in tables, as text: name, value of the base, value, comparison."""
        base = {one.name: one.value for one in self.against.metrics} if self.against else {}
        compared = {one.name: one.in_words() for one in self.differences}
        return [
            (
                label(one.name),
                f"{base[one.name]:.4f}" if one.name in base else "-",
                f"{one.value:.4f}",
                compared.get(one.name, "-"),
            )
            for one in self.model.metrics
            if spec_of(one.name).in_tables
        ]

    def needle(self) -> tuple[list[str], list[list[str]]]:
        """Return retrieval by length and depth, beside the base's: columns, and rows as text."""
        cells = self.model.needle or ()
        base = (self.against.needle if self.against else None) or ()
        theirs = {(one.tokens, one.depth): one for one in base}
        depths = sorted({one.depth for one in cells})
        rows: dict[tuple[str, int], dict[float, str]] = {}
        for one, (name, value) in product(cells, (("found", "accuracy"), ("nats", "nats"))):
            beside = theirs.get((one.tokens, one.depth))
            of_base = f" ({getattr(beside, value):.2f})" if beside else ""
            cell = f"{getattr(one, value):.2f}{of_base}"
            rows.setdefault((name, one.tokens), {})[one.depth] = cell
        return ["context", *(f"at {depth:.0%}" for depth in depths)], [
            [f"{in_k(tokens)} {name}", *(row.get(depth, "-") for depth in depths)]
            for (name, tokens), row in sorted(rows.items())
        ]

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")
