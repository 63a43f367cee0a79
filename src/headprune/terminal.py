"""The terminal of all commands: consoles, progress, errors, silence."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.segment import Segment
from rich.text import Text

from headprune import processes
from headprune.context import Context
from headprune.errors import HeadpruneError
from headprune.io.markup import inert, json_safe, sentence
from headprune.io.writing import of_full_disk

_STOPPED = 130  # the exit code of what Ctrl-C ends
_SILENCE = 60.0  # seconds without a word, at most


class _Line:
    """The line that is being written, as a command to a CI runner may come in parts."""

    def __init__(self) -> None:
        self._out = ""

    def then(self, text: str) -> str:
        """Return the text to write next, made harmless."""
        shown = inert(self._out + text)
        new, self._out = shown[len(self._out) :], shown.rpartition("\n")[2]
        return new


class _Console(Console):
    """Show text of files as text, never as commands to a terminal or a CI runner."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Renders to segments, whose texts are apart from the styles that rich gives them."""
        line = _Line()
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=line.then(segment.text))

    def on_broken_pipe(self) -> None:
        """Continue in silence, as ``_as_far_as_read``."""
        self.quiet = True
        _drop(self.file)


out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


def quiet_libraries() -> None:
    """Keeps the progress bars and notices of the libraries out of our output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class _Far(ProgressColumn):
    """Progress of a command: a part of the bar, or of a line where there is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.all_began: float | None = None
        self.ends = 0.0
        self.stage("starting")

    def stage(self, what: str) -> None:
        """Begin a stage without known steps."""
        self.what, self.began = what, time.monotonic()
        self.step(0, 0)

    def step(self, done: int, total: int, numbers: str = "") -> None:
        """Take note of what of the stage is done."""
        self.done, self.total, self.numbers = done, total, numbers

    def whole(self, done: int, total: int) -> None:
        """Take note of what of the whole job is done; the rest takes as long, part by part."""
        now = time.monotonic()
        if self.all_began is None:
            self.all_began = now
        self.ends = now + (now - self.all_began) * (total - done) / done if done else 0.0

    def said(self) -> str:
        """Return steps done, time of this stage, and time left."""
        now = time.monotonic()
        told = [f"{self.done}/{self.total}"] if self.total else []
        told.append(_duration(now - self.began))
        if 0 < self.done < self.total:
            left = (now - self.began) * (self.total - self.done) / self.done
            told.append(f"about {_duration(left)} left here")
        if self.ends > now:
            told.append(f"about {_duration(self.ends - now)} left in all")
        return ", ".join([*told, *filter(None, [self.numbers])])

    def render(self, task: Task) -> Text:
        """Return what stands beside the bar."""
        return Text(self.said())


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def bar() -> Iterator[Context]:
    """A bar that starts anew with every stage; where there is no terminal, a line a minute."""
    far = _Far()
    if not processes.is_main():
        yield Context()
        return
    if not err.is_terminal:
        ended = threading.Event()

        def stage(what: str) -> None:
            far.stage(what)
            err.print(f"{what} ...", markup=False)

        def go_on() -> None:
            while not ended.wait(_SILENCE):
                err.print(f"{far.what}: {far.said()}", markup=False, soft_wrap=True)

        said = threading.Thread(target=go_on, daemon=True)
        said.start()
        try:
            yield Context(stage=stage, step=far.step, whole=far.whole)
        finally:
            ended.set()
            said.join()
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), far
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(far.what, total=None)

        def drawn(what: str) -> None:
            far.stage(what)
            progress.reset(task, total=None, description=escape(what))

        def step(done: int, total: int, numbers: str = "") -> None:
            far.step(done, total, numbers)
            # a stage may continue after its last step: the bar then moves without an end
            known = total if done < total else None
            progress.update(task, completed=done, total=known)

        yield Context(stage=drawn, step=step, whole=far.whole)


@contextmanager
def context() -> Iterator[Context]:
    """Yield the context of a command at a terminal."""
    with bar() as shown:

        def line(text: str, good: bool | None = None) -> None:
            mark = {None: "", True: "[green]✓[/] ", False: "[bold red]✗[/] "}[good]
            err.print(f"{mark}{escape(text)}", soft_wrap=True)

        yield replace(shown, line=line)


def warn(sentences: Iterable[str]) -> None:
    """Warn on stderr, so that --json stays JSON."""
    for each in sentences:
        err.print(f"[yellow]warning:[/] {escape(sentence(each, 800))}", soft_wrap=True)


def show_json(text: str) -> None:
    """Prints JSON for ``--json``."""
    with _as_far_as_read(sys.stdout):
        typer.echo(json_safe(text))


def show_command(command: str) -> None:
    """Gives GitHub Actions a workflow command; on stderr, so that --json stays JSON."""
    with _as_far_as_read(err.file):
        print(command, file=err.file, flush=True)


def run(command: Callable[[], None]) -> None:
    """Runs the application; a user's mistake ends in one sentence and an exit code."""
    try:
        with _one_reports(), _interrupts_noted(), _warnings_shown():
            command()
    except SystemExit as end:
        # the page of --help in a closed pipe: rich ends with 1
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.exit(0)
    except HeadpruneError as error:
        where = "" if processes.is_main() else f" (process {processes.rank()})"
        _last(f"[bold red]error:[/]{where} {escape(sentence(str(error)))}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _last("[bold]stopped[/] by Ctrl-C; nothing half-written was left.")
        sys.exit(_STOPPED)
    except MemoryError:  # of a command that runs no model; the others say what takes less
        _last("[bold red]error:[/] out of memory.")
        sys.exit(2)
    except Exception as error:  # a full disk is reported; a bug is raised
        if of_full_disk(error):
            _last(
                "[bold red]error:[/] a disk is full: the output's if it goes to a file, or "
                f"the one of temporary files ({escape(str(error))})."
            )
            sys.exit(2)
        sys.excepthook = _unexpected  # without markup in quoted text; typer has its own there
        raise


def _last(text: str) -> None:
    """Prints why the command ends; if that cannot be written either, its exit code still tells."""
    try:
        err.print(text, soft_wrap=True)
    except OSError:
        _drop(sys.stderr)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop(sys.stdout)


@contextmanager
def _as_far_as_read(stream: IO[str]) -> Iterator[None]:
    """Writes in silence once nobody reads: the exit code is the command's own."""
    try:
        yield
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: IO[str]) -> None:
    """Lets go what waits in a stream, which would fail once more as the interpreter ends."""
    with Path(os.devnull).open("w") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def _one_reports() -> Iterator[None]:
    """Of several processes that train together, all but one write to stdout in vain."""
    if processes.is_main():
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def _interrupts_noted() -> Iterator[None]:
    """Ctrl-C raises as ever, whatever else is made of it.

    Pydantic, while it prepares a class, makes another error of it, and typer a silent exit.
    """
    noted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    usual = before is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (Exception, SystemExit) as end:
        # pydantic's by its name, as its import takes long
        stopped = type(end).__name__ == "SchemaError" or getattr(end, "code", None) == _STOPPED
        if noted and stopped:
            raise KeyboardInterrupt from None
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Show warnings as our own; of several processes, one does."""

    def warned(message: Warning | str, *where: Any, **more: Any) -> None:
        warn([str(message)] if processes.is_main() else [])

    with warnings.catch_warnings():
        warnings.showwarning = warned
        yield


def _unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print where a bug of headprune, or of a library, is."""
    lines = "".join(traceback.format_exception(error))
    err.print(lines.rstrip(), markup=False, soft_wrap=True)
