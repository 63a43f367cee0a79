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
own model. A command that can be a step says so in its own file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    create_model,
)

from headprune.config import DataConfig, Place, possible_place
from headprune.declaration import (
    Command,
    Door,
    InRecipe,
    Made,
    Options,
    Slot,
    appearance,
    build,
    option,
    warn_of_old_names,
)
from headprune.errors import HeadpruneError, RecipeError
from headprune.io.parsing import Loader, parse_yaml, read_yaml, shown
from headprune.registry import did_you_mean

ORIGINAL = "original"
LOADING = ("trust_remote_code", "assume_supported", "drop_unexpected")
EVIDENCE = (Made.GATES, Made.SCORES, Made.PLAN)


def _possible(path: Path) -> Path:
    possible_place(str(path))
    return path


class Step(Options):
    """One step; its other fields are the settings of its command.

    Attributes:
        command: Its command.
        step: The command's name.
    """

    command: ClassVar[Command[Any, Any]]

    step: str

    @classmethod
    def slots(cls) -> dict[str, Slot]:
        """The fields that name inputs."""
        looks = {name: appearance(info) for name, info in cls.model_fields.items()}
        return {name: look.slot for name, look in looks.items() if look.slot is not None}

    @classmethod
    def kind(cls) -> InRecipe[Any, Any]:
        """What its command is in a recipe."""
        assert cls.command.step is not None
        return cls.command.step

    def settings(self) -> dict[str, Any]:
        """The settings that are no inputs."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "step" and name not in self.slots()
        }


@cache
def kinds() -> dict[str, type[Step]]:
    """The commands that can be steps, as classes of steps."""
    return {one.name: _kind(one) for one in Command.listed() if one.step is not None}


def _kind(command: Command[Any, Any]) -> type[Step]:
    fields: dict[str, Any] = {}
    assert command.step is not None
    for name, info in command.options.model_fields.items():
        look = appearance(info)
        if look.slot is not None:  # an input may be left out: it is what was made last
            default = command.step.defaults.get(name)
            described = option(info.description or "", default, slot=look.slot)
            fields[name] = (Place | None, described)
        elif look.in_recipes:
            default = ... if info.is_required() else info.default
            described = Field(default, description=info.description)
            fields[name] = (Annotated[(info.annotation, *info.metadata)], described)
    made: type[Step] = create_model(f"{command.options.__name__}Step", __base__=Step, **fields)
    made.command = command
    made.renamed, made.flattened = command.options.renamed, command.options.flattened
    return made


class Recipe(Options):
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

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[Place, Field(min_length=1)]
    output: Annotated[Path, AfterValidator(_possible)]
    data: dict[str, DataConfig] = Field(default_factory=dict)
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
        raise RecipeError(f"It has no steps. There are: {', '.join(kinds())}.")
    recipe = recipe.model_copy(update={"steps": _resolved(recipe)})
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


def options_of(recipe: Recipe, name: str, output: Path, resume: bool = False) -> Options:
    """The options of a step's command.

    Args:
        recipe: The recipe.
        name: The step.
        output: Folder that it writes.
        resume: Whether it goes on from what lies there.

    Raises:
        HeadpruneError: If they do not go together.
    """
    step = recipe.steps[name]
    options, kind = step.command.options, step.kind()
    values = step.settings()
    for slot, input_kind in step.slots().items():
        source = getattr(step, slot)
        if source is not None and input_kind is Slot.DATA:
            data = recipe.data[source]
            values |= {**data.model_dump(exclude={"source"}), slot: data.source}
        elif source is not None:
            values[slot] = place_of(recipe, source)
    if kind.about_all is not None:
        values[kind.about_all] = (recipe.output,)
    given = {
        **{option: output / file for option, file in kind.outputs.items()},
        **{name: getattr(recipe, name) for name in LOADING},
        "overwrite": True,
        "resume": resume,
    }
    values |= {name: value for name, value in given.items() if name in options.model_fields}
    made: Options = build(options, values, Door.KEY)
    return made


def place_of(recipe: Recipe, source: str) -> str:
    """Where a model, or evidence, lies that a step names."""
    step = recipe.steps.get(source)
    if step is not None:
        return str(recipe.output / source / step.kind().file)
    return recipe.model if source == ORIGINAL else source


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
        path = ".".join(map(str, [*filter(None, [where]), *first["loc"]]))
        if first["type"] == "extra_forbidden":
            section, _, key = path.rpartition(".")
            near = _at(model, first["loc"]).near(key)
            place = f"'{section}' has" if section else "It has"
            raise RecipeError(f"{place} no setting '{key}'.{near}") from None
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
