"""Cases, what came of them, and the processes that go through them."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One attempt to break something; a pure function of its fields.

    Attributes:
        part: kill or faults.
        seed: Of the whole part.
        group: The command or fault.
        number: Among the cases of that group.
    """

    part: str
    seed: int
    group: str
    number: int

    def random(self):
        """Draws that are this case's own."""
        return random.Random(zlib.crc32(repr(self).encode()))

    def again(self):
        """The command that runs this case alone."""
        return (
            f"python -m tests.campaign {self.part} --seed {self.seed} "
            f"--group {self.group} --number {self.number}"
        )


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        case: The case.
        ending: In a word or two, to be counted: done, refused, old output stays ...
        broken: What is wrong; empty if headprune held.
        told: What was done and said, for whoever runs the case alone.
        skipped: Why it could not be tried on this machine; empty if it was.
    """

    case: Case
    ending: str
    broken: str = ""
    told: str = ""
    skipped: str = ""


def go_through(cases, act, folder, workers, keep=False):
    """Runs cases in some processes, each case in an empty folder of its own.

    Args:
        cases: What to try.
        act: Tries one.
        folder: Where the cases' folders lie.
        workers: How many are tried at a time.
        keep: Leave the folders there.

    Yields:
        Results, in the order in which they come.
    """
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        jobs = [(case, act, folder, keep) for case in cases]
        yield from pool.imap_unordered(_one, jobs)


def _one(job):
    case, act, folder, keep = job
    place = Path(tempfile.mkdtemp(prefix=f"{case.part}-", dir=folder))
    try:
        return act(case, place)
    except Exception:  # a mistake of the campaign must not end it, nor be overlooked
        return Result(case, "not tried", f"the campaign failed: {traceback.format_exc()[-900:]}")
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def shared_out(total, weights):
    """How many of a total fall to each group, at least one each."""
    whole = sum(weights.values())
    return {name: max(1, round(total * weight / whole)) for name, weight in weights.items()}
