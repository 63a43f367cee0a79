"""Commands of headprune in processes of their own that need not import everything anew.

They are forked from one process that has, and that has done nothing else: Python's fork server.
Where it matters how a process starts, tests start one from nothing.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.imported"])
_ROOT = Path(__file__).parents[1]


class Process:
    """A command that runs; stdin is at its end."""

    def __init__(self, arguments, *, folder=None, environment=None, prepare=None):
        """Starts it.

        Args:
            arguments: Of headprune.
            folder: Where it runs.
            environment: What is added to the environment.
            prepare: Called in the new process first.
        """
        self.arguments = [*map(str, arguments)]
        self._said = tempfile.TemporaryDirectory()
        self._files = [Path(self._said.name, name) for name in ("out", "err")]
        variables = {**os.environ, **(environment or {})}
        place = _Place(os.fspath(folder or Path.cwd()), variables, [*map(str, self._files)])
        given = (place, prepare, self.arguments)
        self._process = _started(_act, given)

    def running(self):
        """Whether it has not ended."""
        return self._process.is_alive()

    def send_signal(self, number):
        """Sends it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def finish(self):
        """Waits for its end; how it was, and what it said."""
        self._process.join()
        code = self._process.exitcode
        out, err = (path.read_text(encoding="utf-8") for path in self._files)
        self._said.cleanup()
        assert code is not None
        return subprocess.CompletedProcess(self.arguments, code, out, err)


def headprune(*arguments, **how):
    """Runs a command of headprune to its end; ``how`` is what Process takes."""
    return Process(arguments, **how).finish()


def together(count, *arguments, folder=None, prepare=None):
    """Runs a command in several processes that find each other as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(count):
        own = {name: str(x) for name, x in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(Process(arguments, folder=folder, environment=own, prepare=prepare))
    done = [rank.finish() for rank in ranks]
    code = next((one.returncode for one in done if one.returncode), 0)
    out, err = "".join(one.stdout for one in done), "".join(one.stderr for one in done)
    return subprocess.CompletedProcess(done[0].args, code, out, err)


def call(function, *arguments):
    """Calls a function of a module in a process of its own; returns the exit code."""
    process = _started(_bare, (dict(os.environ), function, arguments))
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _started(target, arguments):
    here = Path.cwd()
    os.chdir(_ROOT)  # from where the server, which is started once, can import tests
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


class _Place:
    """Where a process runs: its folder, its environment, the files of what it says."""

    def __init__(self, folder, environment, files):
        self.folder, self.environment, self.files = folder, environment, files

    def enter(self):
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ends = (os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in self.files)
        for number, end in enumerate(ends, 1):
            os.dup2(end, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))


def _act(place, prepare, arguments):
    from headprune import app

    place.enter()
    if prepare is not None:
        prepare()
    sys.argv = ["headprune", *arguments]
    app.main()


def _bare(environment, function, arguments):
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
