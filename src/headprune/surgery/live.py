"""A plan on a model in memory, without a folder, and back."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.runtime import MANIFEST
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import Plan, read_plan
from headprune.surgery.cut import cut_heads, resolve

_BEFORE = "headprune_before"
_ABSENT = object()  # a setting that was not there
_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Before:
    """Classes of modules, and what dictionaries of modules and of settings held."""

    classes: list[tuple[nn.Module, type[nn.Module]]]
    held: list[tuple[dict[str, Any], dict[str, Any]]]
    settings: list[tuple[dict[str, Any], dict[str, Any]]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Before:
        modules = [*model.modules()]
        places = [p for own in map(vars, modules) for p in (own, *(own[part] for part in _PARTS))]
        given = (vars(m).get(n) for m in modules for n in ("config", "generation_config"))
        configs = {id(each): each for each in given if each is not None}
        # one config may hold another, which modules share
        settings = [(vars(c), copy.deepcopy(vars(c), dict(configs))) for c in configs.values()]
        return cls([(m, type(m)) for m in modules], [(p, dict(p)) for p in places], settings)

    def changed(self) -> _Before:
        """Return the entries that differ by now: a model in use may change elsewhere."""
        return _Before(
            [(module, kind) for module, kind in self.classes if type(module) is not kind],
            [(now, _differing(now, former, operator.is_not)) for now, former in self.held],
            [(now, _differing(now, former, operator.ne)) for now, former in self.settings],
        )

    def restore(self) -> None:
        for module, kind in self.classes:
            module.__class__ = kind
        for place, former in (*self.held, *self.settings):
            for name, value in former.items():
                if value is _ABSENT:
                    place.pop(name, None)
                    continue
                if isinstance(value, Tensor) and isinstance(now := place.get(name), Tensor):
                    value.data = value.data.to(now.device, now.dtype)  # it may have been moved
                place[name] = value


def _differing(
    now: dict[str, Any], former: dict[str, Any], differ: Callable[[Any, Any], bool]
) -> dict[str, Any]:
    names = {**former, **now}
    old = {name: former.get(name, _ABSENT) for name in names}
    return {name: value for name, value in old.items() if differ(now.get(name, _ABSENT), value)}


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
    _refuse_hooks(model)
    cuts, before = resolve(plan, model, ragged=True), _Before.of(model)
    try:
        cut_heads(model, cuts)
    except BaseException:
        before.changed().restore()
        raise
    vars(model)[_BEFORE] = before.changed()


def _refuse_hooks(model: PreTrainedModel) -> None:
    """Raise PlanError if something calls a module's forward pass by its former class."""
    for attention in attention_of(model):
        if "forward" in vars(attention.module):
            raise PlanError(
                f"'{attention.path}' has a forward pass of its own, as accelerate gives it for "
                "device_map. Load the model on one device, without offloading."
            )


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
    before = vars(model).pop(_BEFORE, None)
    if before is None:
        raise PlanError("No plan was applied to this model: headprune.apply(model, plan) does it.")
    before.restore()
