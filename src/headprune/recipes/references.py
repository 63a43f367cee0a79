"""What the steps of a recipe take from each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headprune.declaration import (
    Made,
    Slot,
)
from headprune.errors import RecipeError
from headprune.recipes.recipe import Recipe
from headprune.recipes.steps import EVIDENCE, ORIGINAL, Step
from headprune.registry import did_you_mean


def resolved(recipe: Recipe) -> dict[str, Step]:
    """The steps, each with the names of all that it takes."""
    done: dict[str, Step] = {}
    for name, step in recipe.steps.items():
        for slot, kind in step.slots().items():
            if kind is Slot.DATA:
                for source in step.sources(slot):
                    _check_data(recipe, name, slot, source)
            else:
                _check_reference(recipe, name, slot, kind, done)
        chosen: dict[str, Any] = {}
        if "model" in step.slots():
            chosen["model"] = getattr(step, "model", None) or _latest(done, Made.MODEL) or ORIGINAL
        if step.kind().by_evidence:
            chosen |= _evidence(name, step, recipe, chosen["model"], done)
        for slot in _others(step):
            chosen |= _other_model(name, step, slot, chosen["model"])
        if step.kind().about_all is not None and not done:
            raise RecipeError(f"Step '{name}' is about the steps before it, and there are none.")
        done[name] = step.model_copy(update=chosen)
    return done


def _others(step: Step) -> list[str]:
    """The slots of models beside the one that the step works on."""
    return [slot for slot, kind in step.slots().items() if kind is Slot.MODEL and slot != "model"]


def _other_model(name: str, step: Step, slot: str, model: str) -> dict[str, Any]:
    """A second model, which has to be another than the first."""
    needed = step.command.options.model_fields[slot].is_required()
    other = getattr(step, slot) or (ORIGINAL if needed else None)
    if other != model:
        return {slot: other}
    if not needed:
        return {slot: None}
    raise RecipeError(
        f"Step '{name}' would train '{model}' to match itself: put a step that changes the model "
        "before it, such as prune or convert-gqa."
    )


def _latest(done: dict[str, Step], *made: Made) -> str | None:
    return next((name for name in reversed(done) if done[name].kind().makes in made), None)


def _check_data(recipe: Recipe, name: str, slot: str, asked: str) -> None:
    if asked not in recipe.data:
        has = ", ".join(recipe.data) or "nothing"
        raise RecipeError(
            f"Step '{name}' takes the data '{asked}' (its '{slot}'), and the section 'data' has "
            f"{has}.{did_you_mean(asked, list(recipe.data))}"
        )


def _check_reference(
    recipe: Recipe, name: str, slot: str, kind: Slot, done: dict[str, Step]
) -> None:
    """Refuses a reference to what is not there, comes later, or makes something else."""
    asked = getattr(recipe.steps[name], slot)
    if asked is None or (kind is Slot.MODEL and asked == ORIGINAL):
        return
    if kind is Slot.FILE:
        if not Path(asked).is_file():
            raise RecipeError(f"Step '{name}' takes its {slot} from '{asked}', which is no file.")
        return
    if asked == name or (asked in recipe.steps and name in _ancestors(recipe, asked)):
        also = "itself" if asked == name else f"'{asked}', which takes that of '{name}'"
        raise RecipeError(f"Step '{name}' takes the output of {also}: that is circular.")
    if asked in done:
        if done[asked].kind().makes.value != kind.value:
            raise RecipeError(
                f"Step '{name}' takes its {slot} from '{asked}', which makes a "
                f"{done[asked].kind().makes.value}."
            )
    elif asked in recipe.steps:
        raise RecipeError(
            f"Step '{name}' takes the output of '{asked}', which comes after it: move '{asked}' up."
        )
    elif kind is Slot.MODEL or not Path(asked).exists():
        known = [*recipe.steps, *([ORIGINAL] if kind is Slot.MODEL else [])]
        raise RecipeError(
            f"Step '{name}' takes its {slot} from '{asked}', and there is no such step"
            f"{'' if kind is Slot.MODEL else ' or file'}.{did_you_mean(asked, known)}"
        )


def _ancestors(recipe: Recipe, name: str) -> Iterator[str]:
    """All steps that a step names as its inputs, and those that these name."""
    seen, todo = {name}, [name]
    while todo:
        step = recipe.steps[todo.pop()]
        named = {getattr(step, slot) for slot in step.slots()} & set(recipe.steps)
        yield from named
        todo += named - seen
        seen |= named


def _evidence(
    name: str, step: Step, recipe: Recipe, model: str, done: dict[str, Step]
) -> dict[str, str]:
    """What says which heads stay: what the step names, or what was made last."""
    evidence = [made.value for made in EVIDENCE]
    slots = [slot for slot, kind in step.slots().items() if kind.value in evidence]
    given = {slot: getattr(step, slot) for slot in slots if getattr(step, slot)}
    wanted = " or ".join(slots)
    if len(given) > 1:
        raise RecipeError(
            f"Step '{name}' has both {' and '.join(given)}; one of them says what stays."
        )
    if not given:
        makes = [made for made in EVIDENCE if made.value in slots]
        latest = _latest(done, *makes)
        if latest is None:
            later = [
                n for n, s in recipe.steps.items() if s.kind().makes in makes and n not in done
            ]
            what = (
                f"'{later[0]}' comes after it: move it up" if later else "add score or train-gates"
            )
            raise RecipeError(
                f"Step '{name}' needs {wanted} to say which heads stay, and no step before it "
                f"makes them; {what}, or name a place ({slots[-1]}: PATH)."
            )
        given = {done[latest].kind().makes.value: latest}
    (source,) = given.values()
    studied = getattr(done.get(source), "model", model)
    if studied != model:
        raise RecipeError(
            f"Step '{name}' would cut '{model}' by what '{source}' found out about "
            f"'{studied}', which is another model: put '{name}' right after '{source}', or a "
            f"step of that kind before '{name}'."
        )
    return given
