"""A plan on a model in memory, without a folder, and back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.runtime import MANIFEST
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import Plan, read_plan
from headprune.surgery.cut import cut_heads, resolve

_BEFORE = "headprune_before"
_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Before:
    """A model before a plan: the class and attributes of its modules, and their settings."""

    modules: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]]
    configs: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Before:
        modules = [(each, type(each), dict(vars(each))) for each in model.modules()]
        for _, _, attributes in modules:
            attributes |= {part: dict(attributes[part]) for part in _PARTS}
        settings = (own.get(n) for _, _, own in modules for n in ("config", "generation_config"))
        configs = {id(each): each for each in settings if each is not None}
        return cls(modules, [(each, copy.deepcopy(vars(each))) for each in configs.values()])

    def restore(self) -> None:
        for module, kind, attributes in self.modules:
            for name, now in module._parameters.items():
                former = attributes["_parameters"].get(name)
                if now is not None and former is not None:  # the model may have been moved
                    former.data = former.data.to(now.device, now.dtype)
            module.__class__, module.__dict__ = kind, attributes
        for config, attributes in self.configs:
            config.__dict__ = attributes


def apply(model: PreTrainedModel, plan: Plan | str | Path) -> None:
    """Give a model in memory the heads of a plan: removed ones go, others get windows.

    The former weights of attention stay in memory for ``undo``. An optimiser made before knows
    nothing of the new ones.

    Args:
        model: The model; it is changed in place.
        plan: A plan, or the plan.json of a result whose weights are slices of the model's.

    Raises:
        PlanError: If the plan is of another model, its result has other weights, or a plan is
            applied already.
    """
    if _BEFORE in vars(model):
        raise PlanError("The model has a plan already: headprune.undo(model) takes it back.")
    if not isinstance(plan, Plan):
        _refuse_other_weights(Path(plan).parent)
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


def _refuse_other_weights(folder: Path) -> None:
    """Raise PlanError if a result has weights that are no slices of its original's."""
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    if manifest is not None and (manifest.refit or manifest.changed_weights):
        raise PlanError(f"The weights of '{folder}' were fitted or trained: load the folder.")


def undo(model: PreTrainedModel) -> None:
    """Take back the plan of ``apply``: the model has its former heads, classes and settings.

    A training in between stays in the weights that both share.

    Raises:
        PlanError: If no plan was applied.
    """
    before = vars(model).get(_BEFORE)
    if before is None:
        raise PlanError("No plan was applied to this model: headprune.apply(model, plan) does it.")
    before.restore()
