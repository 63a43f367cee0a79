"""A process without privileges, for work on files that nobody vouches for.

    parent                                    child (python -I)
    converse("module", job)   -- job -->      module.main(job, say)
                                                opens what it will write
                                                confine()
                              <-- messages --   reads, and writes to what is open

Python's isolated mode, an almost empty environment and no terminal come with the start; the child
gives up the rest itself, in ``confine``, once all that needs it is done.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from headprune.errors import CheckpointError
from headprune.io.markup import sentence
from headprune.pickles import seccomp

Say = Callable[[dict[str, Any]], None]

# sys.path is the parent's: isolated mode forgets PYTHONPATH and packages of the user
_START = """\
import json, sys
order = json.loads(sys.stdin.buffer.readline())
sys.path[:] = order["path"]
from headprune.pickles.sandbox import serve
serve(order["module"], order["job"])
"""
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "LANG")
_NO_DEVICES_NO_THREADS = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
_SET_NO_NEW_PRIVS = 38


def converse(module: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs ``main(job, say)`` of a module in a child process.

    Args:
        module: Its dotted name. It calls ``confine`` before it touches what is not trusted.
        job: What it is told, as JSON.

    Yields:
        What it says, message by message.

    Raises:
        CheckpointError: In the child's words where it refuses; else, if it came to no end.
    """
    path = [entry for entry in sys.path if Path(entry).is_absolute()]
    order = json.dumps({"path": path, "module": module, "job": job})
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**inherited, **_NO_DEVICES_NO_THREADS},
            start_new_session=True,  # without a terminal to type into
        ) as child,
    ):
        try:
            yield from _messages(child, order.encode())
        except BaseException:
            child.kill()
            raise
        if child.wait():
            raise CheckpointError(_last_words(child.returncode, complaints))


def _messages(child: subprocess.Popen[bytes], order: bytes) -> Iterator[dict[str, Any]]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(order + b"\n")
        child.stdin.close()
    except BrokenPipeError:
        return  # it is dead already; its exit status says so
    for line in child.stdout:
        message = json.loads(line)
        if "refused" in message:
            raise CheckpointError(sentence(str(message["refused"]), 2000))
        yield message


def _last_words(status: int, complaints: IO[bytes]) -> str:
    if status < 0:
        why = f"it was ended by {signal.Signals(-status).name}"
    else:
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").strip().splitlines()
        why = sentence(lines[-1], 300) if lines else f"it ended with exit code {status}"
    return f"The process that reads the files without privileges came to no end: {why}."


def serve(module: str, job: dict[str, Any]) -> None:
    """The child's side of ``converse``."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print

        def say(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=pipe, flush=True)

        try:
            importlib.import_module(module).main(job, say)
        except CheckpointError as error:
            say({"refused": str(error)})


def confine(cpu_s: int) -> list[str]:
    """Gives up what this process does not need from here on; there is no way back.

    What a platform does not have is left out: resource limits need a Unix, the rest Linux.

    Args:
        cpu_s: Processor time after which the process is ended.

    Returns:
        What is on now.
    """
    on = []
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            on.append("no new privileges")
    if sys.platform != "win32":
        import resource

        most = _cpu_seconds_used() + cpu_s
        _limit(resource.RLIMIT_NPROC, 0, 0)
        _limit(resource.RLIMIT_CORE, 0, 0)
        _limit(resource.RLIMIT_CPU, most, most + 5)  # SIGXCPU first, which says why
        on.append("resource limits")
    if seccomp.install():
        on.append("seccomp")
    return on


def _limit(what: int, soft: int, hard: int) -> None:
    """Lowers a limit; one that is lower already stays."""
    import resource

    _, ceiling = resource.getrlimit(what)
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(what, (soft, hard))


def _cpu_seconds_used() -> int:
    used = os.times()
    return int(used.user + used.system) + 1
