"""From a YAML file to a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    ValidationError,
)

from headprune.config import DataConfig
from headprune.declaration import (
    Door,
    Options,
    location,
    warn_of_old_names,
)
from headprune.errors import HeadpruneError, RecipeError
from headprune.io.parsing import Loader, parse_yaml, read_yaml, shown
from headprune.recipes.recipe import Recipe, options_of
from headprune.recipes.references import resolved
from headprune.recipes.steps import ORIGINAL, Step, kinds
from headprune.registry import did_you_mean


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and resolves what its steps take from each other.

    Args:
        path: The YAML file.
        overrides: Settings that win over the file's, as ``steps.heal.steps=300``.

    Raises:
        RecipeError: If it is no recipe, misspells a setting, or its steps cannot run in their
            order.
    """
    content = _read(path)
    for override in overrides:
        _set(content, override)
    try:
        return _recipe(content, path.stem)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


class _Loader(Loader):
    """YAML in which a key that comes twice is an error rather than the last one's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1} has {shown(key.value)} for the second time; a "
                    "second step of a kind gets a name of its own, with 'step: KIND' in it"
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise RecipeError(f"'{path}' is a folder; give the recipe, such as {path / 'recipe.yaml'}.")
    try:
        content = read_yaml(path, RecipeError, _Loader)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe at '{path}'; 'headprune init' writes one.") from None
    if not isinstance(content, dict) or not isinstance(content.get("steps"), dict):
        raise RecipeError(
            f"'{path}' is no recipe: it has no section 'steps' with a step in it. "
            "'headprune init' writes one."
        )
    # short forms: a step without settings, and a source without columns
    content["steps"] = {name: {} if v is None else v for name, v in content["steps"].items()}
    if isinstance(content.get("data"), dict):
        content["data"] = {name: _source(v) for name, v in content["data"].items()}
    return content


def _source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


_QUOTED = ("'", '"', "|", ">", "!", "&")  # how YAML begins a string that is not plain


def _set(content: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not last or not all(sections):
        raise RecipeError(f"--set {override}: give key=value, such as steps.heal.steps=300.")
    place = content
    for depth, section in enumerate(sections):
        inside = place.get(section)
        # a first source, or a section of a step's settings, may be new
        new = inside is None and (sections == ["data"] or (sections[0] == "steps" and depth > 1))
        if not isinstance(inside, dict) and not new:
            above = ".".join(sections[:depth]) or "The recipe"
            known = [str(name) for name, value in place.items() if isinstance(value, dict)]
            raise RecipeError(
                f"--set {override}: {above} has no '{section}'.{did_you_mean(section, known)} "
                f"It has {', '.join(known)}."
            )
        place = place.setdefault(section, {})
    if sections == ["steps"]:
        raise RecipeError(
            f"--set {override}: a step has settings, such as {dotted}.KEY=VALUE; steps are added "
            "in the file."
        )
    try:
        value = parse_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise RecipeError(f"--set {override}: the value is not readable as YAML.") from None
    if isinstance(value, str) and not text.lstrip().startswith(_QUOTED):
        value = text.strip()  # YAML would fold line breaks, and take " #" for a comment
    place[last] = _source(value) if sections == ["data"] else value


def _recipe(content: dict[str, Any], name: str) -> Recipe:
    steps: dict[str, Step] = {}
    for step, settings in content["steps"].items():
        steps[step] = _step(step, settings)
    recipe: Recipe = _validated(Recipe, {"name": name, **content, "steps": steps}, "")
    if not recipe.steps:
        raise RecipeError(f"It has no steps. There are: {', '.join(kinds())}.")
    recipe = recipe.model_copy(update={"steps": resolved(recipe)})
    for step in recipe.steps:
        _refuse(recipe, step)
    return recipe


def _refuse(recipe: Recipe, name: str) -> None:
    """Refuses settings that do not go together, or ask for what there is not."""
    kind = recipe.steps[name].kind()
    try:
        kind.refuse(options_of(recipe, name, recipe.output / name))
    except HeadpruneError as error:
        options = recipe.steps[name].command.options
        told = Door.KEY.translate(str(error), options)
        raise RecipeError(f"Step '{name}': {told}") from None


def _step(name: Any, settings: Any) -> Step:
    named = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name)
    if not named or name == ORIGINAL:
        raise RecipeError(
            f"A step cannot be named {shown(name)}: names are up to 100 letters, digits, - and _, "
            f"as they are the names of folders, and '{ORIGINAL}' is the model that the recipe "
            "starts from."
        )
    if not isinstance(settings, dict):
        raise RecipeError(f"steps.{name}: settings are key: value, not {shown(settings)}.")
    kind = settings.get("step", name)
    if not isinstance(kind, str):
        raise RecipeError(f"steps.{name}: 'step' is the name of a kind, not {shown(kind)}.")
    known = list(kinds())
    if kind not in known:
        shared = f"{did_you_mean(kind, known)} There are {', '.join(known)}"
        if "step" in settings:
            raise RecipeError(f"steps.{name}: No kind of step named '{kind}'.{shared}.")
        raise RecipeError(
            f"There is no step '{name}'.{shared}; under another name, 'step' says which of them it "
            "is."
        )
    chosen = kinds()[kind]
    warn_of_old_names(chosen, settings, Door.KEY)
    step: Step = _validated(chosen, {"step": kind, **settings}, f"steps.{name}")
    return step


def _validated(model: type[Options], values: dict[str, Any], where: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = location(first["loc"], values)
        if first["type"] == "missing":  # so that it is not in what was given
            place = (*place[: len(first["loc"]) - 1], first["loc"][-1])
        path = ".".join(map(str, [*filter(None, [where]), *place]))
        if first["type"] == "extra_forbidden":
            section, _, key = path.rpartition(".")
            near = _at(model, place).near(key)
            asked = f"'{section}' has" if section else "It has"
            raise RecipeError(f"{asked} no setting '{key}'.{near}") from None
        if first["type"] == "missing":
            raise RecipeError(f"'{path}' is missing.") from None
        message = Door.KEY.translate(first["msg"].removeprefix("Value error, "), model)
        found = "" if first["type"] == "value_error" else f" (got {shown(first['input'])})"
        raise RecipeError(f"{path or 'It'}: {message}{found}.") from None


def _at(model: type[Options], loc: tuple[int | str, ...]) -> type[Options]:
    """The model that a misspelt setting is in."""
    if len(loc) == 1:
        return model
    inner = model.model_fields[str(loc[0])].annotation
    return inner if isinstance(inner, type) and issubclass(inner, Options) else DataConfig
