"""Commands in forked processes: how they ended, what they said, what they took."""

from __future__ import annotations

import os
import re
import resource
import select
import shlex
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 30.0  # of a processor's time; asleep, a process hangs after four times as long
MOST_BYTES = 4 << 30
MOST_CHARACTERS = 400  # of an error's sentence
_PAGE = resource.getpagesize()
_GLIMPSE_S = 0.05  # how often memory is looked at


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        code: Its exit code; the negative number of the signal that ended it.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
        seconds: How long it took.
        peak_bytes: Most memory that it held beyond what it started with.
        stopped: Why it was stopped from outside: "hang" or "memory"; empty if it was not.
    """

    code: int
    out: str
    err: str
    seconds: float
    peak_bytes: int
    stopped: str = ""


@dataclass(frozen=True)
class Strike:
    """A signal, and when it comes."""

    signal: signal.Signals
    after_s: float


def command(
    arguments, folder, *, prepare=lambda: None, environment=None, strike=None, limit_s=LIMIT_S
):
    """Runs a command of headprune in a forked process.

    Args:
        arguments: Without "headprune"; a line is split as a shell does it.
        folder: Where it runs.
        prepare: Called in the new process before the command: limits, traps.
        environment: Variables that are set as well.
        strike: A signal that it gets.
        limit_s: Seconds after which it hangs.
    """

    def run():
        import torch

        from headprune import app

        # torch makes its pool anew in a forked process, and two threads at once may find none
        torch.set_num_threads(1)
        os.environ.update(environment or {})
        words = shlex.split(arguments) if isinstance(arguments, str) else map(str, arguments)
        sys.argv = ["headprune", *words]
        prepare()
        app.main()

    return watched(run, folder, strike=strike, limit_s=limit_s)


def watched(action, folder, *, strike=None, limit_s=LIMIT_S):
    """Runs something in a forked process, in a folder, and waits for its end."""
    pipes, writing = zip(*(os.pipe() for _ in ("out", "err")), strict=True)
    said = {end: bytearray() for end in pipes}
    held, released = os.pipe()
    start = time.monotonic()
    # a signal that comes too early waits until the new process can take it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid == 0:
        os.read(held, 1)  # until it is known what this process starts with
        _act(action, folder, writing)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # not what this process holds: pages of files, hundreds of MB of libraries, are not inherited
    base = _resident(pid)
    os.write(released, b".")  # closing it does not do: processes of other threads hold it as well
    for end in (held, released, *writing):
        os.close(end)
    told, peak, stopped = os.pidfd_open(pid), 0, ""
    try:
        while told not in _heard([told, *pipes], said, _wait(start, strike)):
            passed = time.monotonic() - start
            if strike is not None and passed >= strike.after_s:
                signal.pidfd_send_signal(told, strike.signal)
                strike = None
            peak = max(peak, _resident(pid) - base)
            hangs = passed > 4 * limit_s or (passed > limit_s and _worked(pid) > limit_s)
            if hangs or peak > MOST_BYTES:
                stopped = "hang" if hangs else "memory"
                signal.pidfd_send_signal(told, signal.SIGKILL)
                break
        _, status, used = os.wait4(pid, 0)
        while _heard(pipes, said, 0):  # children of it may hold them open, and say no more
            pass
    finally:
        for end in (told, *pipes):
            os.close(end)
    seconds = time.monotonic() - start
    out, err = (bytes(words).decode("utf-8", "surrogateescape") for words in said.values())
    peak = max(peak, used.ru_maxrss * 1024 - base)
    if not stopped and peak > MOST_BYTES:
        stopped = "memory"
    return Outcome(os.waitstatus_to_exitcode(status), out, err, seconds, peak, stopped)


def _heard(ends, said, wait_s):
    """Which of some ends had something to tell within a time; what pipes told is added."""
    ready = select.select(ends, [], [], wait_s)[0]
    pieces = {end: os.read(end, 1 << 16) for end in ready if end in said}
    for end, piece in pieces.items():
        said[end] += piece
    return [end for end in ready if pieces.get(end) != b""]


def _wait(start, strike):
    if strike is None:
        return _GLIMPSE_S
    return max(0.0, min(_GLIMPSE_S, start + strike.after_s - time.monotonic()))


def _act(action, folder, ends):
    """The life of the forked process; it never returns to what forked it."""
    code = 1
    try:
        for number, end in enumerate(ends, 1):
            os.dup2(end, number)
            os.close(end)
        os.setsid()
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        action()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # whatever it is, it is what a user would see
        traceback.print_exc()
    finally:
        with suppress(BaseException):  # nothing may lead back to what forked it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _resident(pid):
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _worked(pid):
    """Seconds of processors that a process has used; others may have used them meanwhile."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


_SEEN = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
_RAISED = re.compile(r'File ".*?/headprune/([^"]+)", line (\d+), in (\w+)')


def flaw(outcome, codes=(0, 1, 2)):
    """What is wrong with how a command ended; empty if it ended as one should.

    A command ends with 0, or with 1 where a check failed, or with an error in one line that can
    be printed; nothing it says is a command to a terminal or to a CI runner.
    """
    said = outcome.out + outcome.err
    if outcome.stopped:
        return f"{outcome.stopped} ({outcome.seconds:.0f} s, {outcome.peak_bytes >> 20} MiB)"
    if "Traceback (most recent call last)" in said:
        return f"traceback: {_cause(outcome.err)}"
    if outcome.code not in codes:
        return f"ended with {outcome.code}: {outcome.err[-200:]!r}"
    if bad := _SEEN.search(said):
        return f"control character {bad[0]!r} was printed"
    if re.search(r"^\s*::|##\[", said, re.MULTILINE):
        return "a workflow command was printed"
    return _sentence(outcome) if outcome.code == 2 else ""


def _sentence(outcome):
    lines = outcome.err.rstrip("\n").split("\n")
    if any(line.startswith("Usage:") for line in lines):  # typer, about the command line itself
        return ""
    errors = [at for at, line in enumerate(lines) if line.startswith("error:")]
    if not errors:
        return f"no sentence: {outcome.err[-200:]!r}"
    if errors != [len(lines) - 1]:
        return f"several lines of error: {' | '.join(lines[errors[0] :])[:200]!r}"
    length = len(lines[-1].removeprefix("error:").strip())
    return f"an error of {length} characters" if length > MOST_CHARACTERS else ""


def _cause(err):
    """Exception and the last line of headprune that it came through."""
    places = _RAISED.findall(err)
    raised = [line for line in err.splitlines() if re.match(r"[\w.]+(Error|Exception)?(:|$)", line)]
    what = (raised or err.splitlines() or [""])[-1]
    where = f"{places[-1][0]}:{places[-1][1]} {places[-1][2]}" if places else "?"
    return f"{where}: {what[:160]}"
