"""Faults of the machine and of names: full disks, forbidden folders, strange paths, two writers.

A command that cannot do its work says so in a sentence and leaves nothing; an old output stays.
"""

import os
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.campaign.cases import Case, Result
from tests.campaign.facts import facts, link_originals, litter, takes_overwrite
from tests.campaign.kill import JOBS, reference
from tests.campaign.paths import NAMES, PLACES, WRITERS, inputs_named, names, places
from tests.campaign.watched import Outcome, command, flaw

PART = "faults"
NOBODY = 65_534
_ROOT = Path(__file__).parents[2]
_SIZES = (0, 100, 1_000, 4_096, 20_000, 60_000, 150_000, 400_000)  # bytes


def cases(seed, short):
    """The faults of a seed; what depends on nothing drawn is shared out among seeds."""
    writers = len(WRITERS)
    numbers = {
        **{"file-size": range(writers), "full-disk": range(writers)},
        **{"no-permission": range(writers), "two-writers": range(writers)},
        **{"names": range(len(NAMES)), "inputs-named": range(seed % 3, len(NAMES), 3)},
        "places": range(seed % 3, len(PLACES) * writers, 3),
        "environment": range(seed % 2, len(_ENVIRONMENTS), 2),
    }
    if short:
        del numbers["environment"]  # each a process from nothing, of many seconds
        numbers = {name: every[:: max(8, len(every) // 2)] for name, every in numbers.items()}
    return [Case(PART, seed, name, at) for name, every in numbers.items() for at in every]


def act(case, place, originals):
    """Tries one."""
    return _FAULTS[case.group](case, place, originals)


def _writer(case):
    return WRITERS[(case.number + case.seed) % len(WRITERS)]


def _judged(case, name, done, place, originals, told):
    """What is wrong after a command that may have failed: half an output, litter, no sentence."""
    job, unbroken = JOBS[name], reference(name, originals)
    told = f"{told}: ended with {done.code}\n{done.out}{done.err}"
    broken = flaw(done)
    out = place / job.out
    found = facts(out) if out.exists() else None
    if not broken and done.code == 0 and found != unbroken.new_facts:
        broken = "it ends with 0, and its output is not complete"
    other = found is not None and found != unbroken.old_facts
    if not broken and done.code and other:
        broken = "it failed and left something at its output"
    left = [f for f in litter(place, job.out) if not (job.resumes and f.endswith("-checkpoints"))]
    if not broken and left:
        broken = f"it left {left} beside its output"
    return Result(case, "broken" if broken else "failed" if done.code else "done", broken, told)


def _prepared(name, place, originals, over):
    """Lays a folder out for a command, over an old output or none; the command."""
    job, unbroken = JOBS[name], reference(name, originals)
    link_originals(place, originals)
    if not (over and job.old):
        return job.line
    copy = shutil.copytree if unbroken.old.is_dir() else shutil.copyfile
    copy(unbroken.old, place / job.out)
    return f"{job.line} --overwrite" if takes_overwrite(job.line) else job.line


# ---- disks


def _file_size(case, place, originals):
    name, draw = _writer(case), case.random()
    line = _prepared(name, place, originals, over=draw.random() < 0.5)
    size = draw.choice(_SIZES)
    done = command(
        line, place, prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    return _judged(case, name, done, place, originals, f"{line}, files of {size} bytes at most")


def _full_disk(case, place, originals):
    name, draw = _writer(case), case.random()
    size = draw.choice((8, 40, 80, 120, 180, 260, 400, 700)) * 1024
    disk = place / "disk"
    disk.mkdir()
    with _tmpfs(disk, size) as why_not:
        if why_not:
            return Result(case, "skipped", skipped=why_not)
        try:
            line = _prepared(name, disk, originals, over=draw.random() < 0.5)
        except OSError:
            return Result(case, "skipped", skipped="the old output does not fit on the disk")
        done = command(line, disk)
        return _judged(case, name, done, disk, originals, f"{line}, on a disk of {size} bytes")


@contextmanager
def _tmpfs(folder, size):
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mounting, capture_output=True, text=True)
    if done.returncode:
        yield f"no tmpfs can be mounted: {done.stderr.strip()}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _no_permission(case, place, originals):
    if os.getuid() == 0 and not _may_be_read(_ROOT):
        return Result(case, "skipped", skipped=f"{_ROOT} is closed to other users")
    name = _writer(case)
    line = _prepared(name, place, originals, over=case.random().random() < 0.5)
    place.chmod(0o555)

    def drop():
        os.environ["HOME"] = "/nonexistent"
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    done = command(line, place, prepare=drop)
    place.chmod(0o755)
    result = _judged(case, name, done, place, originals, f"{line}, in a folder to be read only")
    if not result.broken and done.code == 0:
        return Result(case, "broken", "it ends with 0 where it must not write", result.told)
    return result


def _may_be_read(path):
    return all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents))


# ---- others


def _two_writers(case, place, originals):
    name, over = _writer(case), case.random().random() < 0.5
    line = _prepared(name, place, originals, over)
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda _: command(line, place, limit_s=60), range(2)))
    told = "\n".join(f"ended with {done.code}: {done.out}{done.err}" for done in ended)
    broken = next(filter(None, map(flaw, ended)), "")
    codes = sorted(done.code for done in ended)
    alone = takes_overwrite(line) and not over
    if not broken and (codes[0] != 0 or (alone and codes == [0, 0])):
        broken = f"two writers of one output end with {codes}"
    best = next((done for done in ended if done.code == 0), ended[0])
    if not broken:
        return _judged(case, name, best, place, originals, f"{line}, twice at a time\n{told}")
    return Result(case, "broken", broken, f"{line}, twice at a time\n{told}")


_ENVIRONMENTS = (
    ("without HOME", {"HOME": None, "HF_HOME": None, "MPLCONFIGDIR": None}),
    ("without TMPDIR", {"TMPDIR": "/nonexistent"}),
    ("with a HOME that is not there", {"HOME": "/nonexistent", "HF_HOME": None}),
    (
        "with a HOME that cannot be written",
        {"HOME": "/proc", "HF_HOME": None, "MPLCONFIGDIR": None},
    ),
    ("with LANG=C", {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    ("with a HF_HOME that is a file", {"HF_HOME": "/etc/passwd"}),
)


def _environment(case, place, originals):
    """Libraries read the environment when they are imported: processes from nothing."""
    said, changed = _ENVIRONMENTS[case.number]
    link_originals(place, originals)
    given = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    given["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), given.get("PYTHONPATH", "")])
    for line in (JOBS["evaluate"].line, JOBS["check-junit"].line):
        run = [sys.executable, "-m", "headprune", *shlex.split(line)]
        done = subprocess.run(
            run, cwd=place, env=given, capture_output=True, text=True, timeout=600
        )
        broken = flaw(Outcome(done.returncode, done.stdout, done.stderr, 0, 0))
        if broken or done.returncode:
            return Result(case, "broken", f"{said}: {broken or done.stderr[-200:]}", f"{run}")
    return Result(case, "done", told=said)


_FAULTS = {
    "file-size": _file_size,
    "full-disk": _full_disk,
    "no-permission": _no_permission,
    "names": names,
    "inputs-named": inputs_named,
    "places": places,
    "two-writers": _two_writers,
    "environment": _environment,
}
