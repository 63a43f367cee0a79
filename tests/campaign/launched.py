"""Trainings in two processes, of which one dies."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from tests.campaign.cases import Result
from tests.campaign.facts import facts, link_originals, litter
from tests.campaign.originals import GATES, HEAL

_LINES = (f"{GATES} --train attention out", f"{HEAL} out")
_ROOT = Path(__file__).parents[2]


def two_processes(case, place, originals):
    """Kills the main process of a training before a file operation, and goes on with it."""
    at = case.number % len(_LINES)
    line, draw = _LINES[at], case.random()
    wanted = _unbroken(at, originals)
    link_originals(place, originals)
    fatal = draw.randint(3, 30)
    died = _launched(line, place, dies=f"0:{fatal}")
    told = f"{line} in two processes, the first dies before its file operation {fatal}"
    if (place / "out").exists() and facts(place / "out") != wanted:
        return Result(case, "broken", "its output is half written", f"{told}\n{died.stderr}")
    state = "new" if (place / "out").exists() else "absent"
    done = _launched(f"{line} --resume" if state == "absent" else f"{line} --overwrite", place)
    if done.returncode and state == "absent":  # it died before there was anything to go on with
        done = _launched(line, place)
    told = f"{told}\n{died.stderr[-2000:]}\n{done.stderr[-2000:]}"
    if done.returncode:
        broken = f"the run after it ends with {done.returncode}: {done.stderr[-300:]!r}"
    elif facts(place / "out") != wanted:
        broken = "the run after it ends otherwise"
    else:
        left = litter(place, "out")
        broken = f"the run after it leaves {left} beside its output" if left else ""
    return Result(case, "broken" if broken else state, broken, told)


def _unbroken(at, originals):
    folder = originals / f"kill-launched-{at}"
    with FileLock(originals / f".kill-launched-{at}.lock"):
        record = folder / "record.json"
        if not record.exists():
            folder.mkdir(exist_ok=True)
            link_originals(folder, originals)
            done = _launched(_LINES[at], folder)
            if done.returncode:
                raise RuntimeError(f"torchrun {_LINES[at]}: {done.stderr}")
            record.write_text(json.dumps(facts(folder / "out")))
        return json.loads(record.read_text())


def _launched(line, folder, dies=":"):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *launcher, "-m", "tests.campaign.launcher", *shlex.split(line)],
        cwd=folder,
        env=os.environ | {"CAMPAIGN_DIES": dies, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
