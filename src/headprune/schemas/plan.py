"""The plan: the heads of every attention module that stay. It joins evidence and surgery.

A plan is a small JSON file, keyed by module path, holding ids of heads and never weights:

    {"schema_version": 1, "unit": "kv-group", "model": {...},
     "attentions": {"model.layers.0.self_attn":
                    {"query_heads": 9, "kv_heads": 3, "keep": [0, 1, 2, 6, 7, 8],
                     "scale": [1, 1, 1, 0.93, 0.93, 0.93]}, ...}}

The short form maps module paths to the heads that are **removed**, as for ``prune_heads`` of
transformers 4. Other modules keep all their heads.

    {"model.layers.0.self_attn": [0, 3]}

``"groups": [[0, 2], [1]]`` shares KV heads: the queries of KV heads 0 and 2 get one K and V. A
merge computes these.

``"window": [1]`` lets KV head 1 and its queries see a window only. The plan describes that once:
``"window": {"size": 1024, "sinks": 4}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headprune.errors import PlanError
from headprune.io.parsing import read_json, validated
from headprune.io.writing import write_whole
from headprune.registry import did_you_mean
from headprune.schemas.records import Window
from headprune.schemas.values import Record
from headprune.tensors.units import Unit

Number = Annotated[int, Field(ge=0, strict=True)]
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Shape(str, Enum):
    """Storage of a result."""

    NATIVE = "native"  # a plain config: loads anywhere
    RUNTIME = "runtime"  # uneven heads: modeling_headprune.py travels with the weights


class ModelIdentity(Record):
    """The model of evidence or a plan.

    Attributes:
        name: The folder name or hub id it was read from.
        model_type: Its family.
        architecture: Its class.
        fingerprint: Digest of its geometry and of samples of its output projections.
    """

    name: str
    model_type: str
    architecture: str
    fingerprint: str

    def refuse_other(self, model: ModelIdentity, evidence: str, instead: str) -> None:
        """Refuse evidence of this model for another one.

        Raises:
            PlanError: With both models, and what to do ``instead``.
        """
        if model.fingerprint != self.fingerprint:
            raise PlanError(
                f"{evidence} are of '{self.name}' ({self.architecture}, fingerprint "
                f"{self.fingerprint}), not of '{model.name}' ({model.architecture}, fingerprint "
                f"{model.fingerprint}). {instead}"
            )


class AttentionPlan(Record):
    """The heads of one attention module that stay.

    Attributes:
        query_heads: Query heads it has before the cut.
        kv_heads: KV heads it has before the cut.
        keep: Ids of the query heads that stay, ascending.
        scale: Gate value per kept head, folded into the output projection; None for all 1.
        groups: Per KV head of the result, ids of the KV heads that become it; None without a
            merge.
        window: Ids of the KV heads that see a window only; None to leave the forms as they are.
    """

    query_heads: Number
    kv_heads: Number
    keep: tuple[Number, ...]
    scale: tuple[Factor, ...] | None = None
    groups: tuple[tuple[Number, ...], ...] | None = None
    window: tuple[Number, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> AttentionPlan:
        if list(self.keep) != sorted(set(self.keep)):
            raise ValueError(f"kept heads must be ascending and distinct, not {list(self.keep)}")
        if self.scale is not None and len(self.scale) != len(self.keep):
            raise ValueError(f"{len(self.scale)} gate values for {len(self.keep)} kept heads")
        shared = [head for group in self.groups or () for head in group]
        if self.groups is not None and (
            len(set(shared)) != len(shared) or len(shared) != self.kv_heads or not all(self.groups)
        ):
            raise ValueError(f"groups must hold each of {self.kv_heads} KV heads once")
        return self


class Plan(Record):
    """The heads of a model that stay.

    Attributes:
        unit: Unit of removal.
        model: The model it was made for; None if it was written by hand.
        merge: Name of the merge of KV heads; None without one.
        window: The window of window heads; None without any.
        attentions: Per module path, the heads that stay.
    """

    schema_version: Literal[1] = 1
    unit: Unit
    model: ModelIdentity | None = None
    merge: str | None = None
    window: Window | None = None
    attentions: dict[str, AttentionPlan]

    @model_validator(mode="after")
    def _window(self) -> Plan:
        if self.window is None and any(a.window for a in self.attentions.values()):
            raise ValueError("it names window heads, but no window: size and sinks")
        return self

    @property
    def query_heads(self) -> int:
        """Query heads before the cut."""
        return sum(a.query_heads for a in self.attentions.values())

    @property
    def kept_heads(self) -> int:
        """Query heads after the cut."""
        return sum(len(a.keep) for a in self.attentions.values())

    @property
    def merged(self) -> list[str]:
        """The modules with merged KV heads."""
        parts = self.attentions.items()
        return [path for path, part in parts if any(len(g) > 1 for g in part.groups or ())]

    def write(self, path: Path) -> None:
        """Write the plan as indented JSON, with one line per module for readable diffs."""
        unused = {name for name in ("merge", "window") if getattr(self, name) is None}
        head = self.model_dump(mode="json", exclude={"attentions", *unused})
        rows = [
            f"    {json.dumps(name)}: {a.model_dump_json(exclude_none=True)}"
            for name, a in self.attentions.items()
        ]
        body = json.dumps(head, indent=2)[:-2] + ',\n  "attentions": {\n' + ",\n".join(rows)
        write_whole(path, body + "\n  }\n}\n")


def read_plan(path: Path, present: Mapping[str, tuple[Sequence[int], int]]) -> Plan:
    """Read a plan file, in its full or its short form.

    Args:
        path: The JSON file.
        present: The model's attention modules: path to (ids of its query heads, number of KV
            heads). The short form needs it; the full form is checked by ``surgery.cut``.

    Raises:
        PlanError: If the file is missing, is no plan, or names modules or heads that are not there.
    """
    content = plan_content(path)
    if isinstance(content, dict) and "attentions" in content:
        return validated(Plan, content, path, PlanError)
    return _from_removed(content, present, path)


def plan_content(path: Path) -> object:
    """Return the content of a plan file, which may be no plan.

    Raises:
        PlanError: If the file is missing or not readable.
    """
    try:
        content: object = read_json(path, PlanError, distinct=True)
    except FileNotFoundError:
        raise PlanError(f"There is no plan file at '{path}'.") from None
    return content


def _from_removed(
    content: object, present: Mapping[str, tuple[Sequence[int], int]], path: Path
) -> Plan:
    valid = isinstance(content, dict) and all(
        isinstance(heads, list) and all(type(h) is int for h in heads) for heads in content.values()
    )
    if not isinstance(content, dict) or not valid:
        raise PlanError(
            f"'{path}' is no plan: it has no 'attentions', and is no map from module path to "
            'removed heads, such as {"model.layers.0.self_attn": [0, 3]}.'
        )
    removed = {name: set(heads) for name, heads in content.items()}
    for name, heads in removed.items():
        check_module(name, present)
        check_heads(name, heads, present[name][0])
    return Plan(
        unit=Unit.HEAD,
        attentions={
            name: AttentionPlan(
                query_heads=len(ids),
                kv_heads=kv_heads,
                keep=tuple(h for h in sorted(ids) if h not in removed.get(name, set())),
            )
            for name, (ids, kv_heads) in present.items()
        },
    )


def check_module(name: str, present: Mapping[str, object]) -> None:
    """Refuse a module path that the model does not have."""
    if name not in present:
        known = list(present)
        raise PlanError(
            f"The plan names the module '{name}', which this model does not have."
            f"{did_you_mean(name, known)} Its {len(known)} attention modules run from '{known[0]}' "
            f"to '{known[-1]}'."
        )


def check_heads(name: str, heads: set[int], ids: Sequence[int]) -> None:
    """Refuse head ids that a module does not have."""
    unknown = sorted(heads - set(ids))
    if unknown:
        raise PlanError(
            f"The plan names head {unknown[0]} of '{name}', which has the {len(ids)} heads "
            f"{_ranges(ids)}."
        )


def _ranges(ids: Sequence[int]) -> str:
    if list(ids) == list(range(len(ids))):
        return f"0 to {len(ids) - 1}" if ids else "(none)"
    return ", ".join(map(str, ids))
