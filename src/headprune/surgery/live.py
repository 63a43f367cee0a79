"""A plan on a model in memory, without a folder, and back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.schemas.plan import Plan, read_plan
from headprune.surgery.cut import cut_heads, resolve

_BEFORE = "headprune_before"
_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Before:
    """A model before a plan: the class and attributes of its modules, and its configs."""

    modules: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]]
    configs: list[tuple[PreTrainedConfig, dict[str, Any]]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Before:
        modules = [(each, type(each), dict(vars(each))) for each in model.modules()]
        for _, _, attributes in modules:
            attributes |= {part: dict(attributes[part]) for part in _PARTS}
        configs = {id(c): c for _, _, own in modules if (c := own.get("config")) is not None}
        return cls(modules, [(each, copy.deepcopy(vars(each))) for each in configs.values()])

    def restore(self) -> None:
        for module, kind, attributes in self.modules:
            module.__class__, module.__dict__ = kind, attributes
        for config, attributes in self.configs:
            config.__dict__ = attributes


def apply(model: PreTrainedModel, plan: Plan | str | Path) -> None:
    """Give a model in memory the heads of a plan: removed ones go, others get windows.

    The former weights of attention stay in memory for ``undo``. An optimiser made before knows
    nothing of the new ones.

    Args:
        model: The model; it is changed in place.
        plan: A plan, or the plan.json of a result. Merges change weights, and have none here.

    Raises:
        PlanError: If the plan is of another model or merges heads, or a plan is applied already.
    """
    if _BEFORE in vars(model):
        raise PlanError("The model has a plan already: headprune.undo(model) takes it back.")
    if not isinstance(plan, Plan):
        present = {a.path: (a.query_ids, a.kv_heads) for a in attention_of(model)}
        plan = read_plan(Path(plan), present)
    if plan.merged:
        raise PlanError(
            f"The plan merges KV heads of '{plan.merged[0]}', which changes weights: load the "
            "folder of that result."
        )
    cuts, before = resolve(plan, model, ragged=True), _Before.of(model)
    try:
        cut_heads(model, cuts)
    except BaseException:
        before.restore()
        raise
    vars(model)[_BEFORE] = before


def undo(model: PreTrainedModel) -> None:
    """Take back the plan of ``apply``: the model has its former weights, classes and settings.

    Raises:
        PlanError: If no plan was applied.
    """
    before = vars(model).get(_BEFORE)
    if before is None:
        raise PlanError("No plan was applied to this model: headprune.apply(model, plan) does it.")
    before.restore()
