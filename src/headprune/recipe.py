"""A recipe: the whole job as named steps, in order.

    model: HuggingFaceTB/SmolLM2-135M      a folder or a hub id
    output: smaller                        one folder per step, the recipe and the versions
    data:                                  named sources; steps refer to them
      train: text.txt
      test: {source: wikitext:wikitext-2-raw-v1, split: test}
    steps:
      train-gates: {target_heads: 0.75}    a step's name says which it is, and its settings are
      prune:                               those of the command of that name;
      again: {step: evaluate}              or ``step`` says which it is

A step works on the model that the step before it made, and takes the evidence that was made for
that model; ``model``, ``gates``, ``plan`` and so on name another step, ``original`` the recipe's
own model. A new kind of step is a class here, and a row of ``pipelines.steps``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError

from headprune.config import (
    ConvertConfig,
    DataConfig,
    Dtype,
    EvaluateConfig,
    HealConfig,
    ShapeOption,
    TrainGatesConfig,
)
from headprune.errors import RecipeError
from headprune.registry import Registry, did_you_mean

ORIGINAL = "original"

C = TypeVar("C", bound=BaseModel)


class Made(str, Enum):
    """What a step's output is to the steps after it."""

    MODEL = "model"
    GATES = "gates"
    PLAN = "plan"
    REPORT = "report"


class Slot(str, Enum):
    """What a field of a step names, where it names an input."""

    MODEL = "model"  # a step that makes a model, or the original
    GATES = "gates"  # a step that trains gates, or a folder of them
    PLAN = "plan"  # a step that makes a plan, or a file
    DATA = "data"  # one of the recipe's sources


OfModel = Annotated[str | None, Slot.MODEL]
OfData = Annotated[str, Slot.DATA]


class Step(BaseModel):
    """One step; its other fields are the settings of the command.

    Attributes:
        step: Which kind of step it is.
        model: The model it works on: an earlier step, or "original". By default the model that
            was made last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    makes: ClassVar[Made]

    step: str
    model: OfModel = None

    @classmethod
    def slots(cls) -> dict[str, Slot]:
        """The fields that name inputs."""
        return {
            name: kind
            for name, field in cls.model_fields.items()
            for kind in field.metadata
            if isinstance(kind, Slot)
        }

    def config(self, kind: type[C]) -> C:
        """The settings of this step that belong to a command's config."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


class TrainGatesStep(Step, TrainGatesConfig):
    """``headprune train-gates``."""

    makes = Made.GATES
    data: OfData = "train"


class PruneStep(Step):
    """``headprune prune``, with the gates or the plan that was made last.

    Attributes:
        gates: A step that trains gates, or a folder of them.
        plan: A step that makes a plan, or a plan file.
        keep: Keep another share or count of heads than the gates were trained for.
        shape: What the result may look like.
        dtype: Element type to load, and so to write.
    """

    makes = Made.MODEL
    gates: Annotated[str | None, Slot.GATES] = None
    plan: Annotated[str | None, Slot.PLAN] = None
    keep: float | int | None = None
    shape: ShapeOption = ShapeOption.AUTO
    dtype: Dtype = Dtype.AUTO


class ConvertStep(Step, ConvertConfig):
    """``headprune convert-gqa``.

    Attributes:
        calibrate: The recipe's source of calibration text; None for none.
        shape: What the result may look like.
    """

    makes = Made.MODEL
    calibrate: Annotated[str | None, Slot.DATA] = None
    shape: ShapeOption = ShapeOption.AUTO


class HealStep(Step, HealConfig):
    """``headprune heal``.

    Attributes:
        data: The recipe's source of text.
        teacher: The model to match: an earlier step, or "original".
    """

    makes = Made.MODEL
    data: OfData = "train"
    teacher: OfModel = ORIGINAL


class EvaluateStep(Step, EvaluateConfig):
    """``headprune evaluate``.

    Attributes:
        data: The recipe's source of examples.
        against: The model to compare with: an earlier step, "original", or None for none.
    """

    makes = Made.REPORT
    data: OfData = "test"
    against: OfModel = ORIGINAL


STEPS: Registry[type[Step]] = Registry("kind of step", RecipeError)
STEPS.add("train-gates", TrainGatesStep)
STEPS.add("prune", PruneStep)
STEPS.add("convert-gqa", ConvertStep)
STEPS.add("heal", HealStep)
STEPS.add("evaluate", EvaluateStep)
STEPS.freeze()


class Recipe(BaseModel):
    """The whole job.

    Attributes:
        name: What tells its output from that of another recipe; by default the file's name.
        model: The original: a folder or a hub id.
        output: Folder for everything that it makes.
        data: Named sources of examples.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the model's config has settings that are not in the table.
        steps: The steps by name, in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    output: Path
    data: dict[str, DataConfig] = {}
    trust_remote_code: bool = False
    assume_supported: bool = False
    steps: dict[str, SerializeAsAny[Step]]

    def as_yaml(self) -> str:
        """The recipe with all its settings; it runs like the one that was read."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


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


class _Loader(yaml.SafeLoader):
    """YAML in which a key that comes twice is an error rather than the last one's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise RecipeError(
                    f"line {key.start_mark.line + 1} has '{key.value}' for the second time; a "
                    "second step of a kind gets a name of its own, with 'step: "
                    f"{key.value}' in it."
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe at '{path}'; 'headprune init' writes one.") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())
        raise RecipeError(f"'{path}' is not readable as YAML ({first}).") from None
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


def _set(content: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not last or not all(sections):
        raise RecipeError(f"--set {override}: give key=value, such as steps.heal.steps=300.")
    place = content
    for depth, section in enumerate(sections):
        inside = place.get(section)
        if not isinstance(inside, dict) and not (inside is None and sections == ["data"]):
            above = ".".join(sections[:depth]) or "The recipe"
            known = [name for name, value in place.items() if isinstance(value, dict)]
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
    value = yaml.safe_load(text)
    place[last] = _source(value) if sections == ["data"] else value


def _recipe(content: dict[str, Any], name: str) -> Recipe:
    steps: dict[str, Step] = {}
    for step, settings in content["steps"].items():
        steps[step] = _step(step, settings)
    recipe: Recipe = _validated(Recipe, {"name": name, **content, "steps": steps}, "")
    if not recipe.steps:
        raise RecipeError(f"It has no steps. There are: {', '.join(STEPS)}.")
    return recipe.model_copy(update={"steps": _resolved(recipe)})


def _step(name: Any, settings: Any) -> Step:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(name)) or name == ORIGINAL:
        raise RecipeError(
            f"A step cannot be named '{name}': names are letters, digits, - and _, as they are the "
            f"names of folders, and '{ORIGINAL}' is the model that the recipe starts from."
        )
    if not isinstance(settings, dict):
        raise RecipeError(f"steps.{name}: settings are key: value, not {settings!r}.")
    kind = settings.get("step", name)
    if kind not in STEPS and "step" not in settings:
        known = list(STEPS)
        raise RecipeError(
            f"There is no step '{name}'.{did_you_mean(str(name), known)} There are "
            f"{', '.join(known)}; under another name, 'step' says which of them it is."
        )
    step: Step = _validated(STEPS[kind], {"step": kind, **settings}, f"steps.{name}")
    return step


def _validated(model: type[BaseModel], values: dict[str, Any], where: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, [*filter(None, [where]), *first["loc"]]))
        if first["type"] == "extra_forbidden":
            section, _, key = path.rpartition(".")
            known = list(DataConfig.model_fields if len(first["loc"]) > 1 else model.model_fields)
            place = f"'{section}' has" if section else "It has"
            raise RecipeError(f"{place} no setting '{key}'.{did_you_mean(key, known)}") from None
        if first["type"] == "missing":
            raise RecipeError(f"'{path}' is missing.") from None
        message = first["msg"].removeprefix("Value error, ")
        found = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
        raise RecipeError(f"{path or 'It'}: {message}{found}.") from None


def _resolved(recipe: Recipe) -> dict[str, Step]:
    """The steps, each with the names of all that it takes."""
    done: dict[str, Step] = {}
    for name, step in recipe.steps.items():
        for slot, kind in step.slots().items():
            if kind is Slot.DATA:
                _check_data(recipe, name, slot, getattr(step, slot))
            else:
                _check_reference(recipe, name, slot, kind, done)
        chosen: dict[str, Any] = {"model": step.model or _latest(done, Made.MODEL) or ORIGINAL}
        if isinstance(step, PruneStep):
            chosen |= _evidence(recipe, name, step, chosen["model"], done)
        if isinstance(step, HealStep) and (step.teacher or ORIGINAL) == chosen["model"]:
            raise RecipeError(
                f"Step '{name}' would train '{chosen['model']}' to match itself: put a step that "
                "changes the model before it, such as prune or convert-gqa."
            )
        if isinstance(step, EvaluateStep) and step.against == chosen["model"]:
            chosen["against"] = None
        done[name] = step.model_copy(update=chosen)
    return done


def _latest(done: dict[str, Step], *made: Made) -> str | None:
    return next((name for name in reversed(done) if done[name].makes in made), None)


def _check_data(recipe: Recipe, name: str, slot: str, asked: str | None) -> None:
    if asked is not None and asked not in recipe.data:
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
    if asked == name or (asked in recipe.steps and name in _ancestors(recipe, asked)):
        also = "itself" if asked == name else f"'{asked}', which takes that of '{name}'"
        raise RecipeError(f"Step '{name}' takes the output of {also}: that is circular.")
    if asked in done:
        if done[asked].makes.value != kind.value:
            raise RecipeError(
                f"Step '{name}' takes its {slot} from '{asked}', which makes a "
                f"{done[asked].makes.value}."
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
    recipe: Recipe, name: str, step: PruneStep, model: str, done: dict[str, Step]
) -> dict[str, str]:
    """What says which heads stay: what the step names, or what was made last."""
    given = {slot: getattr(step, slot) for slot in ("gates", "plan") if getattr(step, slot)}
    if len(given) > 1:
        raise RecipeError(f"Step '{name}' has both gates and a plan; one of them says what stays.")
    if not given:
        latest = _latest(done, Made.GATES, Made.PLAN)
        if latest is None:
            later = [n for n, s in recipe.steps.items() if s.makes in (Made.GATES, Made.PLAN)]
            what = f"'{later[0]}' comes after it: move it up" if later else "add train-gates"
            raise RecipeError(
                f"Step '{name}' needs gates or a plan to say which heads stay, and no step before "
                f"it makes them; {what}, or name a file (plan: heads.json)."
            )
        given = {done[latest].makes.value: latest}
    ((_, source),) = given.items()
    if source in done and done[source].model != model:
        raise RecipeError(
            f"Step '{name}' would cut '{model}' by what '{source}' found out about "
            f"'{done[source].model}', which is another model: put '{name}' right after '{source}', "
            f"or a step of that kind before '{name}'."
        )
    return given
