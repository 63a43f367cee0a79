"""The folder of an unfinished training, OUT-checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from headprune import devices, processes
from headprune.config import Resuming
from headprune.errors import CheckpointError, DataError, HeadpruneError, PlanError, TrainingError
from headprune.io.folders import refuse_links
from headprune.io.outputs import Input, claimed, place_of
from headprune.io.parsing import read_yaml
from headprune.io.writing import abandoned, beside, real, refuse_link, write_whole
from headprune.placements import in_shards

CONFIG, HISTORY, CHECKPOINTS = "config.yaml", "history.jsonl", "checkpoints"
STATE = "trainer_state.json"  # the last file of a checkpoint
_SUFFIX = "-checkpoints"
# by the section of their settings
_COMMANDS = {"train_gates": "train-gates", "heal": "heal"}


@dataclass(frozen=True)
class Run:
    """An unfinished training.

    Attributes:
        folder: Its folder; it holds a run if it has a config.yaml.
        settings: Its settings.
    """

    folder: Path
    settings: dict[str, Any]

    @classmethod
    def of(cls, output: Path, section: str, config: BaseModel, **others: Any) -> Run:
        """Return the run that belongs to an output.

        Args:
            output: Folder of the result.
            section: A key of ``_COMMANDS``.
            config: Settings of the command.
            **others: The model, the data, the teacher.
        """
        named = output.name not in ("", "..")
        parts = {name: _plain(value) for name, value in {**others, section: config}.items()}
        parts |= {"processes": processes.count(), "shard": in_shards()}
        return cls(beside(output if named else real(output), f"{{}}{_SUFFIX}"), parts)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def logs(self) -> Path:
        """The folder of TensorBoard's files, which stays."""
        return self.folder.with_name(f"{self.folder.name.removesuffix(_SUFFIX)}-runs")

    def check(self, rerun: Resuming) -> None:
        """Refuse a run that cannot be begun or resumed.

        Raises:
            CheckpointError: If an earlier run is in the way, if none can be resumed, or if the
                folder is not of a training.
        """
        for place in (self.folder, self.logs):
            refuse_link(place)
        refuse_links(self.folder)
        earlier = _settings_in(self.folder)
        if earlier is None:
            self._refuse_foreign()
            if rerun.resume:
                raise CheckpointError(
                    f"There is no run in '{self.folder}' to resume; leave out --resume."
                )
        elif rerun.resume:
            if changed := _differences(earlier, self.settings):
                raise CheckpointError(
                    f"The run in '{self.folder}' was started with other settings ({changed}). "
                    "Resume it with the same ones, or start anew with --overwrite."
                )
        elif not rerun.overwrite:
            raise CheckpointError(
                f"'{self.folder}' holds an interrupted run. Continue it with --resume, or start "
                "anew with --overwrite."
            )

    def begin(self) -> None:
        """Make the folder; the settings come last.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self.remove()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from None
        write_whole(self.folder / CONFIG, yaml.safe_dump(self.settings, sort_keys=False))

    def newest(self) -> Path | None:
        """Remove partial checkpoints of a killed run, and return the newest whole one."""
        steps: dict[int, Path] = {}
        for path in self.checkpoints.glob("checkpoint-*"):
            step = path.name.removeprefix("checkpoint-")
            if step.isdecimal() and _is_whole(path):
                steps[int(step)] = path
            elif step.isdecimal():
                shutil.rmtree(path, ignore_errors=True)
        return steps[max(steps)] if steps else None

    def remove(self) -> None:
        """Remove the run, its settings first: the rest of a killed removal is no run."""
        with suppress(OSError):
            (self.folder / CONFIG).unlink(missing_ok=True)
            (self.folder / HISTORY).unlink(missing_ok=True)
            left = filter(abandoned, self.folder.iterdir())  # by a killed run
            for folder in [*left, *self.checkpoints.glob("checkpoint-*")]:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.checkpoints, self.folder):
            with suppress(OSError):  # a user put something there
                folder.rmdir()

    def _refuse_foreign(self) -> None:
        if not self.folder.is_dir():
            return
        inside = [path for path in self.folder.iterdir() if not abandoned(path)]
        if foreign := {path.name for path in inside} - {HISTORY, CHECKPOINTS}:
            raise CheckpointError(
                f"'{self.folder}' is the place of checkpoints, and it holds '{min(foreign)}'. Move "
                "it away, or choose another OUTPUT."
            )


@contextmanager
def claimed_run(output: Path, run: Run, inputs: Sequence[Any], rerun: Resuming) -> Iterator[None]:
    """Reserve an output and the folder of its run, in the main process.

    A run that fails before its first checkpoint leaves no folder, unless resuming may help.

    Args:
        output: Folder of the finished training.
        run: The training.
        inputs: Its input.
        rerun: Replace an output, or resume a run.

    Raises:
        CheckpointError: If the output may not be written, or the run cannot be begun or resumed.
    """
    places: list[Input] = [place_of(place) for place in inputs]
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(claimed(output, rerun.overwrite, places)))
        processes.on_main(lambda: run.check(rerun))
        try:
            yield
        except Exception as error:  # of any kind: a run with nothing to resume is of no use
            # no waiting for other processes: they may have failed too, or wait
            if processes.is_main() and not _may_resume(error) and run.newest() is None:
                run.remove()
            raise


def unwritable(folder: Path, error: Exception) -> CheckpointError:
    """Return the error of a training that could not write."""
    return CheckpointError(
        f"Could not write to '{folder}' ({str(error).splitlines()[0]}). Free some space, then "
        "continue from the last whole checkpoint with --resume."
    )


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _may_resume(error: Exception) -> bool:
    if isinstance(error, HeadpruneError):
        return not isinstance(error, TrainingError | DataError | PlanError)
    return devices.device_failed(error)


def _is_whole(checkpoint: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        json.loads((checkpoint / STATE).read_bytes())
        return True
    return False


def _section(settings: object) -> str:
    sections = [name for name in _COMMANDS if isinstance(settings, dict) and name in settings]
    return sections[0] if len(sections) == 1 else ""


def _settings_in(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder; None if there is none.

    Raises:
        CheckpointError: If they are damaged, or not those of a training.
    """
    try:
        settings = read_yaml(folder / CONFIG)
    except FileNotFoundError:
        return None
    if not _section(settings):
        raise CheckpointError(
            f"'{folder / CONFIG}' is not of a run of headprune, or damaged. Move '{folder}' "
            "away, or choose another OUTPUT."
        )
    content: dict[str, Any] = settings
    return content


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> str:
    if _section(earlier) != _section(now):
        return f"of {_COMMANDS[_section(earlier)]}"
    old, new = _flat(earlier), _flat(now)
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return ", ".join(f"{name}: {old.get(name)} then, {new.get(name)} now" for name in names)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat |= {f"{name}.{key}": each for key, each in inner} or {name: value}
    return flat
