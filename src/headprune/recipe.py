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
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
)

from headprune.config import (
    BudgetConfig,
    CalibrationConfig,
    ConvertConfig,
    DataConfig,
    Dtype,
    EvaluateConfig,
    HealConfig,
    Place,
    ShapeOption,
    TrainGatesConfig,
    possible_place,
)
from headprune.errors import RecipeError
from headprune.parsing import Loader, parse_yaml, read_yaml, shown
from headprune.registry import Registry, did_you_mean
from headprune.tensors.units import Unit

ORIGINAL = "original"

C = TypeVar("C", bound=BaseModel)


class Made(str, Enum):
    """What a step's output is to the steps after it."""

    MODEL = "model"
    GATES = "gates"
    SCORES = "scores"
    PLAN = "plan"
    REPORT = "report"


class Slot(str, Enum):
    """What a field of a step names, where it names an input."""

    MODEL = "model"  # a step that makes a model, or the original
    GATES = "gates"  # a step that trains gates, or a folder of them
    SCORES = "scores"  # a step that scores heads, or a folder of scores
    PLAN = "plan"  # a step that makes a plan, or a file
    FILE = "file"  # a file
    DATA = "data"  # one of the recipe's sources


OfModel = Annotated[Place | None, Slot.MODEL]
OfGates = Annotated[Place | None, Slot.GATES]
OfScores = Annotated[Place | None, Slot.SCORES]
OfPlan = Annotated[Place | None, Slot.PLAN]
OfData = Annotated[str, Slot.DATA]
EVIDENCE = (Made.GATES, Made.SCORES, Made.PLAN)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _possible(path: Path) -> Path:
    possible_place(str(path))
    return path


# one, or several
Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]


class Step(BaseModel):
    """One step; its other fields are the settings of the command.

    Attributes:
        makes: What its output is to later steps.
        file: The file of its output that they read; None for the folder.
        takes_all: Whether it takes the outputs of all steps before it.
        step: Which kind of step it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    makes: ClassVar[Made]
    file: ClassVar[str | None] = None
    takes_all: ClassVar[bool] = False

    step: str

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


class ModelStep(Step):
    """A step that works on a model.

    Attributes:
        model: An earlier step, or "original"; by default the model that was made last.
    """

    model: OfModel = None


class ScoreStep(ModelStep, CalibrationConfig):
    """``headprune score``.

    Attributes:
        criterion: One criterion, or several in one pass.
        data: The recipe's source of examples; None for criteria that need none.
        unit: What one score stands for.
        attention: Kinds of attention to score.
        gates: With the criterion "gates": a step that trains them, or a folder.
    """

    makes = Made.SCORES
    criterion: Names
    data: Annotated[str | None, Slot.DATA] = "train"
    unit: Unit | None = None
    attention: tuple[str, ...] = ()
    gates: OfGates = None


class PlanStep(ModelStep, BudgetConfig):
    """``headprune plan``.

    Attributes:
        scores: A step that scores heads, or a folder of scores; by default the last one.
        criterion: Which of the scores, where there are several.
        rounds: How often heads are scored.
    """

    makes = Made.PLAN
    file = "plan.json"
    scores: OfScores = None
    criterion: str | None = None
    rounds: Annotated[int, Field(ge=1)] = 1


class TrainGatesStep(ModelStep, TrainGatesConfig):
    """``headprune train-gates``."""

    makes = Made.GATES
    data: OfData = "train"


class PruneStep(ModelStep):
    """``headprune prune``, with the gates, scores or plan that were made last.

    Attributes:
        gates: A step that trains gates, or a folder of them.
        scores: A step that scores heads, or a folder of scores; needs ``keep``.
        criterion: With scores: which of them.
        plan: A step that makes a plan, or a plan file.
        keep: A share or count of heads to keep; with gates, another than they were trained for.
        refit: The recipe's source of text on which W_O makes up for the heads that go.
        calibration: How much of that text is used.
        shape: What the result may look like.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
    """

    makes = Made.MODEL
    gates: OfGates = None
    scores: OfScores = None
    criterion: str | None = None
    plan: OfPlan = None
    keep: float | int | None = None
    refit: Annotated[str | None, Slot.DATA] = None
    calibration: CalibrationConfig = CalibrationConfig()
    shape: ShapeOption = ShapeOption.AUTO
    dtype: Dtype = Dtype.AUTO
    out_dtype: Dtype = Dtype.AUTO


class ConvertStep(ModelStep, ConvertConfig):
    """``headprune convert-gqa``.

    Attributes:
        calibrate: The recipe's source of calibration text; None for none.
        shape: What the result may look like.
    """

    makes = Made.MODEL
    calibrate: Annotated[str | None, Slot.DATA] = None
    shape: ShapeOption = ShapeOption.AUTO


class HealStep(ModelStep, HealConfig):
    """``headprune heal``.

    Attributes:
        data: The recipe's source of text.
        teacher: The model to match: an earlier step, or "original".
    """

    makes = Made.MODEL
    data: OfData = "train"
    teacher: OfModel = ORIGINAL


class EvaluateStep(ModelStep, EvaluateConfig):
    """``headprune evaluate``.

    Attributes:
        data: The recipe's source of examples.
        against: The model to compare with: an earlier step, "original", or None for none.
    """

    makes = Made.REPORT
    file = "report.json"
    data: OfData = "test"
    against: OfModel = ORIGINAL


class CheckStep(ModelStep):
    """``headprune check``; a broken limit lets the run end with exit code 1.

    Attributes:
        limits: What must hold, a line each.
        data: The recipe's source of examples.
        against: The model that ``>= 98 %`` refers to: an earlier step, or "original".
        baseline: File that ``<= +2 %`` refers to.
        confidence: Level of the intervals that decide.
        resamples: Bootstrap resamples behind them.
        strict: Whether a limit that is too close to call counts as broken.
        seq_len: As for evaluate; so are the settings after it.
    """

    makes = Made.REPORT
    file = "check.json"
    limits: Names
    data: OfData = "test"
    against: OfModel = ORIGINAL
    baseline: Annotated[Place | None, Slot.FILE] = None
    confidence: float = 0.99
    resamples: int = 10_000
    strict: bool = False
    seq_len: int = 512
    batch_size: int = 4
    max_windows: int | None = None
    dtype: Dtype = Dtype.AUTO
    seed: int = 0


class ReportStep(Step):
    """``headprune report`` on all steps before it, as a page and as Markdown."""

    makes = Made.REPORT
    file = "report.html"
    takes_all = True


STEPS: Registry[type[Step]] = Registry("kind of step", RecipeError)
STEPS.add("score", ScoreStep)
STEPS.add("train-gates", TrainGatesStep)
STEPS.add("plan", PlanStep)
STEPS.add("prune", PruneStep)
STEPS.add("convert-gqa", ConvertStep)
STEPS.add("heal", HealStep)
STEPS.add("evaluate", EvaluateStep)
STEPS.add("check", CheckStep)
STEPS.add("report", ReportStep)
STEPS.freeze()


class Recipe(BaseModel):
    """The whole job.

    Attributes:
        name: What tells its output from that of another recipe; by default the file's name.
        model: The original: a folder or a hub id.
        output: Folder for everything that it makes.
        data: Named sources of examples.
        trust_remote_code: The model needs code that comes with it. That allows none: whoever runs
            the recipe does, with --trust-remote-code.
        assume_supported: Go on where the model's config has settings that are not in the table.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        steps: The steps by name, in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[Place, Field(min_length=1)]
    output: Annotated[Path, AfterValidator(_possible)]
    data: dict[str, DataConfig] = {}
    trust_remote_code: bool = False
    assume_supported: bool = False
    drop_unexpected: bool = False
    steps: dict[str, SerializeAsAny[Step]]

    def trusted(self, trust_remote_code: bool) -> Recipe:
        """The recipe as it is run by one who allows code that comes with the model, or does not.

        Raises:
            RecipeError: If the model needs it, and it is not allowed.
        """
        if self.trust_remote_code and not trust_remote_code:
            raise RecipeError(
                "The recipe asks to run code that comes with its model (trust_remote_code: true), "
                "which a file cannot allow. If you trust that code, give --trust-remote-code "
                "(in Python: run(recipe, trust_remote_code=True))."
            )
        return self.model_copy(update={"trust_remote_code": trust_remote_code})

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
        raise RecipeError(f"It has no steps. There are: {', '.join(STEPS)}.")
    return recipe.model_copy(update={"steps": _resolved(recipe)})


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
            known = list(_at(model, first["loc"]).model_fields)
            place = f"'{section}' has" if section else "It has"
            raise RecipeError(f"{place} no setting '{key}'.{did_you_mean(key, known)}") from None
        if first["type"] == "missing":
            raise RecipeError(f"'{path}' is missing.") from None
        message = first["msg"].removeprefix("Value error, ")
        found = "" if first["type"] == "value_error" else f" (got {shown(first['input'])})"
        raise RecipeError(f"{path or 'It'}: {message}{found}.") from None


def _at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that a misspelt setting is in."""
    if len(loc) == 1:
        return model
    inner = model.model_fields[str(loc[0])].annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else DataConfig


def _resolved(recipe: Recipe) -> dict[str, Step]:
    """The steps, each with the names of all that it takes."""
    done: dict[str, Step] = {}
    for name, step in recipe.steps.items():
        for slot, kind in step.slots().items():
            if kind is Slot.DATA:
                _check_data(recipe, name, slot, getattr(step, slot))
            else:
                _check_reference(recipe, name, slot, kind, done)
        chosen: dict[str, Any] = {}
        if isinstance(step, ModelStep):
            chosen["model"] = step.model or _latest(done, Made.MODEL) or ORIGINAL
        if isinstance(step, PruneStep | PlanStep):
            chosen |= _evidence(recipe, name, step, chosen["model"], done)
        if isinstance(step, HealStep):
            chosen["teacher"] = step.teacher or ORIGINAL
        if isinstance(step, HealStep) and (step.teacher or ORIGINAL) == chosen["model"]:
            raise RecipeError(
                f"Step '{name}' would train '{chosen['model']}' to match itself: put a step that "
                "changes the model before it, such as prune or convert-gqa."
            )
        if isinstance(step, EvaluateStep | CheckStep) and step.against == chosen["model"]:
            chosen["against"] = None
        if step.takes_all and not done:
            raise RecipeError(f"Step '{name}' is about the steps before it, and there are none.")
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
    if kind is Slot.FILE:
        if not Path(asked).is_file():
            raise RecipeError(f"Step '{name}' takes its {slot} from '{asked}', which is no file.")
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
    recipe: Recipe, name: str, step: PruneStep | PlanStep, model: str, done: dict[str, Step]
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
            later = [n for n, s in recipe.steps.items() if s.makes in makes and n not in done]
            what = (
                f"'{later[0]}' comes after it: move it up" if later else "add score or train-gates"
            )
            raise RecipeError(
                f"Step '{name}' needs {wanted} to say which heads stay, and no step before it "
                f"makes them; {what}, or name a place ({slots[-1]}: PATH)."
            )
        given = {done[latest].makes.value: latest}
    ((slot, source),) = given.items()
    if isinstance(step, PruneStep) and slot == "scores" and step.keep is None:
        raise RecipeError(f"Step '{name}' cuts by scores: say how many heads to 'keep'.")
    if isinstance(step, PruneStep) and slot == "plan" and step.keep is not None:
        raise RecipeError(f"Step '{name}' has a 'keep', but its plan says already what stays.")
    maker = done.get(source)
    if isinstance(maker, ModelStep) and maker.model != model:
        raise RecipeError(
            f"Step '{name}' would cut '{model}' by what '{source}' found out about "
            f"'{maker.model}', which is another model: put '{name}' right after '{source}', or a "
            f"step of that kind before '{name}'."
        )
    return given
