"""The folder in which a training works: OUT-checkpoints, beside the output until that is complete.

config.yaml     what the training was started with; where it is missing there is no run
history.jsonl   one record per step
checkpoints/    what --resume goes on from (see ``training.checkpoints``)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from headprune import devices, processes
from headprune.config import Count, DataConfig, HealConfig, Resuming, TrainGatesConfig
from headprune.errors import (
    CheckpointError,
    DataError,
    HeadpruneError,
    PlanError,
    TrainingError,
)
from headprune.io.outputs import Input, claimed
from headprune.io.parsing import parse_json, read_yaml, validated
from headprune.io.writing import abandoned, beside, real, write_whole
from headprune.training import checkpoints
from headprune.training.checkpoints import PARTIAL

CONFIG, HISTORY, CHECKPOINTS = "config.yaml", "history.jsonl", "checkpoints"
_SUFFIX = "-checkpoints"


class Settings(BaseModel):
    """What a training was started with.

    Attributes:
        model: Folder or hub id.
        data: Where its text comes from.
        processes: How many train; each draws its own random numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    data: DataConfig
    processes: Count = 1


class GatesSettings(Settings):
    """Of ``train-gates``."""

    train_gates: TrainGatesConfig


class HealSettings(Settings):
    """Of ``heal``.

    Attributes:
        teacher: The model to match.
    """

    teacher: str
    heal: HealConfig


_KINDS: dict[str, tuple[str, type[Settings]]] = {
    "train_gates": ("train-gates", GatesSettings),
    "heal": ("heal", HealSettings),
}


@dataclass(frozen=True)
class Work:
    """The folder of one training.

    Attributes:
        folder: Where it is.
    """

    folder: Path

    @classmethod
    def beside(cls, output: Path) -> Work:
        """The folder that belongs to an output."""
        named = output.name not in ("", "..") and not output.is_symlink()
        return cls(beside(output if named else real(output), f"{{}}{_SUFFIX}"))

    @property
    def history(self) -> Path:
        """One JSON record per step."""
        return self.folder / HISTORY

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / CHECKPOINTS

    def check(self, settings: Settings, rerun: Resuming) -> None:
        """Looks at what an earlier run may have left, and changes nothing.

        Raises:
            CheckpointError: If there is a run and nothing says what becomes of it, if there is
                none to resume or only one with other settings, or if the folder is someone else's.
        """
        before = self._begun()
        if before is None:
            self._refuse_others()
            if rerun.resume:
                raise CheckpointError(
                    f"There is no run in '{self.folder}' to resume; leave out --resume."
                )
        elif rerun.resume:
            if changed := _changed(before, settings):
                raise CheckpointError(
                    f"The run in '{self.folder}' was started with other settings ({changed}). "
                    "Resume it with the same ones, or start anew with --overwrite."
                )
        elif not rerun.overwrite:
            raise CheckpointError(
                f"'{self.folder}' holds an interrupted run. Go on with --resume, or start anew "
                "with --overwrite."
            )

    def begin(self, settings: Settings) -> None:
        """Makes room for a run; its settings come last, and say that there is one.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self.remove()
        content = settings.model_dump(mode="json")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise checkpoints.unwritable(self.folder, error) from None
        write_whole(self.folder / CONFIG, yaml.safe_dump(content, sort_keys=False))

    def record(self, step: Any) -> None:
        """Adds the record of a step, a dataclass, to the history.

        Raises:
            CheckpointError: If it cannot be written.
        """
        try:
            with self.history.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(step), allow_nan=False) + "\n")
        except OSError as error:
            raise checkpoints.unwritable(self.history, error) from error

    def cut_history(self, step: int, kind: type) -> None:
        """Drops the records after a step, of which a kill may have left half a line.

        Args:
            step: The last step whose record stays.
            kind: The dataclass of a record.

        Raises:
            CheckpointError: If the records up to the step are not all there.
        """
        kept: list[bytes] = []
        record: TypeAdapter[Any] = TypeAdapter(kind)
        try:
            if step:
                with self.history.open("rb") as file:
                    kept.extend(islice(file, step))
            for number, line in enumerate(kept, 1):
                if record.validate_python(parse_json(line.decode())).step != number:
                    raise ValueError
            if len(kept) < step:
                raise ValueError
        except (OSError, ValueError):  # pydantic's are ValueErrors
            raise CheckpointError(
                f"'{self.history}' is damaged: it needs a record of every step up to {step}. "
                "Bring it back from a copy, or start anew with --overwrite."
            ) from None
        write_whole(self.history, b"".join(kept))

    def remove(self) -> None:
        """Removes the run, its settings first, so that what a kill leaves of it is none."""
        with suppress(OSError):
            (self.folder / CONFIG).unlink(missing_ok=True)
            self.history.unlink(missing_ok=True)
            for folder in (*checkpoints.found(self.checkpoints), self.checkpoints / PARTIAL):
                shutil.rmtree(folder, ignore_errors=True)
            for folder in filter(abandoned, [*self.folder.iterdir()]):  # of a killed run
                shutil.rmtree(folder, ignore_errors=True)
            self.checkpoints.rmdir()  # unless it holds something else
            self.folder.rmdir()

    def _begun(self) -> Settings | None:
        """What the run here was started with; None if there is none.

        Raises:
            CheckpointError: If that is damaged, or none of ours.
        """
        path = self.folder / CONFIG
        try:
            content = read_yaml(path)
        except FileNotFoundError:
            return None
        kind = _kind(content)
        if kind is None:
            raise CheckpointError(
                f"'{path}' is of no training of headprune, or damaged. Move '{self.folder}' away, "
                "or choose another OUTPUT."
            )
        try:
            return validated(_KINDS[kind][1], content, path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} Remove '{self.folder}' to start anew.") from None

    def _refuse_others(self) -> None:
        """Refuses a folder without a run that holds what no training leaves behind."""
        if not self.folder.is_dir():
            return
        ours = {HISTORY, CHECKPOINTS}
        inside = self.folder.iterdir()
        others = [path for path in inside if path.name not in ours and not abandoned(path)]
        if self.checkpoints.is_dir():
            others += [path for path in self.checkpoints.iterdir() if not checkpoints.ours(path)]
        if others:
            raise CheckpointError(
                f"'{self.folder}' is where checkpoints would lie, and it holds something else: "
                f"'{min(others).name}'. Move it away, or choose another OUTPUT."
            )


@contextmanager
def at_work(
    output: Path, settings: Settings, inputs: Sequence[Input], rerun: Resuming
) -> Iterator[Work]:
    """Claims an output, and the folder in which it is trained, while the block lasts.

    A run that fails before its first checkpoint leaves no folder, unless going on may help.

    The main process does so for all; what it cannot do ends all of them.

    Args:
        output: What the training is to write.
        settings: What it is started with.
        inputs: What it reads.
        rerun: What becomes of an earlier output or run.

    Raises:
        CheckpointError: If the output may not be written, or the run not be begun or resumed.
    """
    work = Work.beside(output)
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(claimed(output, rerun.overwrite, inputs)))
        processes.on_main(lambda: work.check(settings, rerun))
        try:
            yield work
        except Exception as error:
            # other processes are not waited for: they may have failed alone, or go on waiting
            if (
                processes.is_main()
                and not _goes_on(error)
                and not checkpoints.found(work.checkpoints)
            ):
                work.remove()
            raise


def _goes_on(error: Exception) -> bool:
    """Whether the user is told to go on with --resume, even from the start."""
    if isinstance(error, HeadpruneError):
        return not isinstance(error, TrainingError | DataError | PlanError)
    return devices.itself_failed(error)


def unfinished(folder: Path) -> str | None:
    """The command that goes on with the training in a folder; None where there is none.

    Raises:
        CheckpointError: If its settings cannot be read.
    """
    if not folder.name.endswith(_SUFFIX) or not (folder / CONFIG).is_file():
        return None
    kind = _kind(read_yaml(folder / CONFIG))
    return None if kind is None else _KINDS[kind][0]


def settings_now(kind: type[Settings], model: str | Path, **others: Any) -> Settings:
    """What a training is started with here."""
    return kind(model=str(model), processes=processes.count(), **others)


def _kind(content: object) -> str | None:
    """Which training the content of a config.yaml belongs to."""
    kinds = [name for name in _KINDS if isinstance(content, dict) and name in content]
    return kinds[0] if len(kinds) == 1 else None


def _changed(before: Settings, now: Settings) -> str:
    """What is not as it was, in words."""
    if type(before) is not type(now):
        named = {settings: command for command, settings in _KINDS.values()}
        return f"of {named[type(before)]}"
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return ", ".join(f"{k}: {old[k]} then, {new[k]} now" for k in new if old[k] != new[k])


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    nested = {
        f"{name}.{key}": value
        for name, section in settings.items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
    return {n: value for n, value in settings.items() if not isinstance(value, dict)} | nested
