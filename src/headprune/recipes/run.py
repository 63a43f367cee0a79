"""headprune run: the steps of a recipe, each done once for the same inputs."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headprune import processes
from headprune.data.sources import digest_of_data, refuse_missing_file
from headprune.declaration import Context, Door, Slot
from headprune.errors import CheckpointError, HeadpruneError, HeadpruneWarning, Interrupted
from headprune.estimates import duration
from headprune.evaluation.tasks import digest_of_tasks
from headprune.io.folders import digest_of
from headprune.io.markup import sentence
from headprune.io.outputs import refuse_input
from headprune.io.ownership import is_ours, part_of
from headprune.io.writing import adopt, put, work_folder, write_error, write_whole
from headprune.model.loading import load_config
from headprune.recipes.recipe import Recipe, options_of
from headprune.recipes.steps import LOADING, ORIGINAL, Step
from headprune.schemas.manifest import utc_now, versions
from headprune.schemas.runs import (
    LOCK,
    PARTIAL,
    RECIPE,
    RECORD,
    RunRecord,
    StepRecord,
    digest_of_place,
    hashes,
    id_of_result,
    read_run,
    write_lock,
)

UNKNOWN = "not there yet"  # digest of the output of a step that is still to run


@dataclass(frozen=True)
class Outlook:
    """Whether a step has to run.

    Attributes:
        cached: Its output is there, whole, and made of the same inputs.
        why: Why it has to run.
        inputs: What its key is made of.
    """

    cached: bool
    why: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        output: The recipe's output folder.
        record: What became of its steps.
        cached: The steps whose output was there already.
    """

    output: Path
    record: RunRecord
    cached: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no step found a limit broken."""
        return all(step.passed for step in self.record.steps.values())

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        steps = {
            name: {
                **step.model_dump(mode="json", exclude={"inputs", "files"}),
                "output": str(self.output / name),
                "cached": name in self.cached,
            }
            for name, step in self.record.steps.items()
        }
        return {"schema_version": 1, "name": self.record.name, "passed": self.passed} | {
            "steps": steps
        }


def run(recipe: Recipe, context: Context | None = None, trust_remote_code: bool = False) -> Run:
    """Runs the steps of a recipe whose output is not there yet.

    A step's output is a folder of its name in ``recipe.output``; it appears whole or not at all.
    What was interrupted goes on when the same recipe runs again.

    Args:
        recipe: The recipe.
        context: Who is told how it goes on.
        trust_remote_code: Allow code that comes with the model. A recipe may say that its model
            needs some, which allows none.

    Raises:
        RecipeError: If the recipe's model needs code that is not allowed.
        HeadpruneError: If a step's input does not fit together, naming the step; or if the output
            folder belongs to another recipe.
        ProofError: If a step's result does not compute what it should.
        Interrupted: After Ctrl-C in a training.
    """
    context, recipe = context or Context(), recipe.trusted(trust_remote_code)
    _refuse_several()
    open_run(recipe)  # refuses before anything is written
    with _alone(recipe.output):
        record = open_run(recipe)  # to which another run may have added up to now
        # a step that the recipe has no more is no part of the run
        steps = {name: record.steps[name] for name in recipe.steps if name in record.steps}
        for left in (recipe.output / name for name in record.steps if name not in steps):
            if left.exists():
                context.line(f"'{left}' is of a step that the recipe no longer has; it stays there")
        record = record.model_copy(update={"steps": steps, "versions": versions()})
        _begin(recipe, record)
        for name in recipe.steps:
            with _writing(recipe.output / name):
                adopt(recipe.output / PARTIAL / name, recipe.output / name, _old(recipe, name))
        cached = []
        original = digest_of_model(recipe)
        for name in recipe.steps:
            outlook = look(recipe, name, record, original)
            if outlook.cached:
                cached.append(name)
                context.line(f"{name}: done before", True)
                continue
            record = _run_step(recipe, name, record, outlook.inputs, context)
        order = {name: record.steps[name] for name in recipe.steps}
        record = record.model_copy(update={"steps": order})
        record.write(recipe.output)
        shutil.rmtree(recipe.output / PARTIAL, ignore_errors=True)
    return Run(recipe.output, record, tuple(cached))


def open_run(recipe: Recipe) -> RunRecord:
    """The record of what the recipe made before; an empty one if it never ran.

    Raises:
        HeadpruneError: If a step asks for what there is not: a file, a criterion, a metric.
        CheckpointError: If the output folder is another recipe's, or none of ours.
    """
    for data in recipe.data.values():
        refuse_missing_file(data.source)
    output = recipe.output
    for name in recipe.steps:
        refuse_input(output / name, _places(recipe))
    if output.is_file():
        raise CheckpointError(f"The output '{output}' is a file; give a folder name.")
    record = read_run(output)
    if record is None:
        begun = (work_folder(output / name).name for name in (RECORD, RECIPE, LOCK))
        ours = {PARTIAL, RECIPE, LOCK, _lock(output).name, *begun}
        others = output.is_dir() and {file.name for file in output.iterdir()} - ours
        if others:
            raise CheckpointError(
                f"The output folder '{output}' holds other files ('{sorted(others)[0]}'), and no "
                f"{RECORD} of this recipe. Choose another one: --set output=FOLDER."
            )
        return RunRecord(name=recipe.name, versions=versions())
    if record.name != recipe.name:
        raise CheckpointError(
            f"The output folder '{output}' belongs to the recipe '{record.name}', and this one is "
            f"'{recipe.name}'. Choose another one: --set output=FOLDER."
        )
    return record


def _places(recipe: Recipe) -> list[str]:
    """Where the model, the data, and what steps take from elsewhere lie, or ids of the hub."""
    taken = [
        str(getattr(step, slot))
        for step in recipe.steps.values()
        for slot, kind in step.slots().items()
        if kind is not Slot.DATA and getattr(step, slot) not in (None, ORIGINAL, *recipe.steps)
    ]
    return [recipe.model, *(data.source for data in recipe.data.values()), *taken]


def digest_of_model(recipe: Recipe) -> str:
    """Who the original is: the files of a folder, or the commit of a hub model."""
    if Path(recipe.model).is_dir():
        return digest_of_place(Path(recipe.model))
    config = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code)
    return f"hub:{recipe.model}@{getattr(config, '_commit_hash', None)}"


def look(recipe: Recipe, name: str, record: RunRecord, original: str) -> Outlook:
    """Says whether a step's output is there, whole, and made of the same inputs.

    Args:
        recipe: The recipe.
        name: The step.
        record: What became of the steps before it.
        original: Digest of the recipe's model.
    """
    step, before = recipe.steps[name], record.steps.get(name)
    inputs: dict[str, Any] = {
        "step": step.step,
        "settings": _settings(step),
        "loading": {name: getattr(recipe, name) for name in LOADING},
        "versions": versions(),
    }
    if step.kind().about_all is not None:
        names = list(recipe.steps)
        earlier = names[: names.index(name)]
        inputs["steps"] = {source: _made(record, source) for source in earlier}
    tasks = digest_of_tasks(getattr(step, "tasks", ()))
    if tasks is not None:
        inputs["tasks"] = tasks
    for slot, kind in step.slots().items():
        source = getattr(step, slot)
        if not source:  # none, or a list without any
            continue
        if kind is Slot.DATA:
            inputs[slot] = _read(recipe, step, slot)
        elif kind is Slot.MODEL and source == ORIGINAL:
            inputs[slot] = original
        elif source in recipe.steps:
            inputs[slot] = _made(record, source)
        else:
            inputs[slot] = digest_of_place(Path(source))
    if before is None:
        return Outlook(False, "never ran", inputs)
    if before.key != digest_of(inputs):
        return Outlook(False, _difference(before.inputs, inputs), inputs)
    if not before.done:
        return Outlook(False, "was interrupted", inputs)
    now = hashes(recipe.output / name)
    for file in sorted({*now, *before.files}):
        if now.get(file) != before.files.get(file):
            what = "is missing" if file not in now else "was changed"
            what = "was added" if file not in before.files else what
            return Outlook(False, f"its output: {file} {what}", inputs)
    return Outlook(True, "", inputs)


def _read(recipe: Recipe, step: Step, slot: str) -> dict[str, Any]:
    """What a step reads: the first source as it is, and others, if there are some, by name."""
    found, sources = {}, step.sources(slot)
    for name in sources:
        data = recipe.data[name]
        if "split" not in data.model_fields_set:
            default = step.command.options.model_fields["split"].default
            data = data.model_copy(update={"split": default})
        columns = data.model_dump(mode="json", exclude={"source"})
        found[name] = {**columns, "sha256": digest_of_data(data)}
    first = found.pop(sources[0])
    return {**first, **({"further": found} if found else {})}


def _made(record: RunRecord, name: str) -> str:
    """Digest of a step's output."""
    made = record.steps.get(name)
    return made.digest if made is not None and made.done else UNKNOWN


def _settings(step: Step) -> dict[str, Any]:
    """The settings that are no inputs, but for those that are still open."""
    return step.model_dump(mode="json", include=set(step.settings()) - step.left_open())


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What changed first, in words."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for name in {**new, **old}:
        was, is_ = old.get(name), new.get(name)
        if was != is_:
            hidden = any(isinstance(v, str) and len(v) == 64 for v in (was, is_))
            if hidden or UNKNOWN in (was, is_):
                return f"{name.removesuffix('.sha256')} changed"
            return sentence(f"{name}: {was} -> {is_}", 200)
    return "its inputs changed"


def _flat(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _refuse_several() -> None:
    """Several processes would each do every step, and write the same files."""
    if processes.count() > 1:
        raise HeadpruneError(
            f"A recipe is run by one process, and {processes.count()} were started; run it without "
            "'accelerate launch' or torchrun."
        )


def _lock(output: Path) -> Path:
    return output / ".lock"


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keeps a second run out of the folder for as long as this one lasts, or lives."""
    lock = FileLock(_lock(output), timeout=0)
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"Another run is at work in '{output}'. Wait for it, or choose another folder: "
                "--set output=FOLDER."
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Says in one sentence why writing failed."""
    try:
        yield
    except OSError as error:
        raise write_error(place, error) from error


def _begin(recipe: Recipe, record: RunRecord) -> None:
    record.write(recipe.output)
    write_whole(recipe.output / RECIPE, recipe.as_yaml())
    write_lock(recipe.output)


def _run_step(
    recipe: Recipe, name: str, record: RunRecord, inputs: dict[str, Any], context: Context
) -> RunRecord:
    """Runs a step, moves its output into place, and records it."""
    step = recipe.steps[name]
    kind, command, partial = step.kind(), step.command, recipe.output / PARTIAL
    before, key = record.steps.get(name), digest_of(inputs)
    interrupted = before is not None and not before.done and before.key == key
    work = partial / f"{name}-checkpoints" / "config.yaml"  # of a training
    resume = interrupted and kind.resumes and work.exists()
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    _refuse_others(recipe.output / name, before)
    started = utc_now()
    unfinished = StepRecord(step=step.step, key=key, inputs=inputs, started=started)
    record = record.with_step(name, unfinished)
    record.write(recipe.output)
    output = partial / name
    if kind.file:  # what is in a folder of its own
        with _writing(output):
            output.mkdir(parents=True)
    start = time.monotonic()
    try:
        options = options_of(recipe, name, output, resume)
        result = command.start(options, _told_for(name, context))
    except Interrupted:
        raise Interrupted(
            f"Stopped in step '{name}'; what is done is kept. Run the same command again, and it "
            "goes on from there."
        ) from None
    except HeadpruneError as error:
        told = Door.KEY.translate(str(error), command.options)
        raise type(error)(f"Step '{name}': {told}") from error
    seconds = time.monotonic() - start
    for warning in command.warnings(result):
        warnings.warn(f"Step '{name}': {warning}", HeadpruneWarning, stacklevel=2)
    files = hashes(output)
    with _writing(recipe.output / name):
        put(output, recipe.output / name, _old(recipe, name))
    summary, passed = kind.summary(result), command.passed(result)
    made = {"files": files, "model_id": id_of_result(recipe.output / name)}
    done = {"seconds": seconds, "summary": summary, "passed": passed, **made}
    record = record.with_step(name, unfinished.model_copy(update=done))
    record.write(recipe.output)
    context.line(f"{name}: {summary} ({duration(seconds)})", passed)
    return record


def _told_for(name: str, context: Context) -> Context:
    """The context, which tells which step a stage is of; nobody is asked anything."""
    return replace(
        context,
        stage=lambda stage: context.stage(f"{name}: {stage}"),
        ask=None,
        confirm=None,
    )


def _refuse_others(place: Path, before: StepRecord | None) -> None:
    """Refuses to replace what a step did not write."""
    known = before.files if before is not None else {}
    for name in hashes(place):
        file = place / name
        if not (name in known or part_of(place, file) or is_ours(file)):
            raise CheckpointError(
                f"'{name}' in '{place}' is no part of what headprune wrote there; move it away, "
                "and the step runs anew."
            )


def _old(recipe: Recipe, name: str) -> Path:
    """Where the earlier output of a step waits while the new one takes its place."""
    return recipe.output / PARTIAL / f"{name}.old"
