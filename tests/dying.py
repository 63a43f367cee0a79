"""Replaces a folder, and dies before one file operation after the other; tells what is left.

Run as ``python -m tests.dying FOLDER exchange|journal``. Prints a JSON list with, for every death,
what stood at the output right after it, what stood there and beside it once the next run had
reserved it, and after that run had written it.
"""

import json
import os
import signal
import sys
from pathlib import Path

from headprune.io import writing
from headprune.io.outputs import claimed, whole_folder, write_whole

FILES = ("scores.json", "scores.safetensors")


def write(output, version):
    """Writes a scores folder of two files that say the same, as far as outputs know scores."""
    fields = ("versions", "model", "unit", "modules", "criteria")
    with claimed(output, overwrite=True), whole_folder(output) as new:
        (new / "inside").mkdir()
        write_whole(new / FILES[0], json.dumps(dict.fromkeys(fields, version)))
        (new / FILES[1]).write_text(json.dumps({"model": version}))


def state(output):
    """The version that stands whole at an output, or what else there is."""
    if not output.exists():
        return "nothing"
    if {path.name for path in output.iterdir()} != {*FILES, "inside"}:
        return f"parts: {sorted(path.name for path in output.iterdir())}"
    one, other = (json.loads((output / name).read_text())["model"] for name in FILES)
    return int(one) if one == other else "mixed"


def apart(action):
    """Does something in a process of its own; returns the signal that killed it, 0 for none."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def dies(action, before):
    """Does something until so many operations were announced."""
    seen = 0

    def announced(event, _):
        nonlocal seen
        if event.startswith(("os.", "open", "shutil.", "fcntl.", "ctypes.dlsym")):
            seen += 1
            if seen == before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(announced)
    action()


def main(folder, how):
    """Kills the writer at every point, in a folder of its own each time."""
    if how == "journal":
        writing._exchanged = lambda one, other: False
    told = []
    for number in range(1, 1000):
        home = folder / str(number)
        output = home / "out"
        write(output, 1)
        killed = apart(lambda: dies(lambda: write(output, 2), number))  # noqa: B023
        if not killed:
            break
        left = state(output)
        with claimed(output, overwrite=True):
            taken_up = state(output)
        beside = [path.name for path in home.iterdir() if path != output]
        write(output, 3)
        told.append([left, taken_up, beside, state(output), len(list(home.iterdir()))])
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
