"""Runs the campaign, a part of it, or one case; see the package."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

# before anything is imported: one thread, since the process is forked; nothing of the user's home
HOME = tempfile.TemporaryDirectory(prefix="campaign-")
os.environ |= {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **{"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
    **{"HF_HUB_OFFLINE": "1", "HF_HOME": HOME.name, "MPLCONFIGDIR": HOME.name, "NO_COLOR": "1"},
}
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "FORCE_COLOR", "WORLD_SIZE", "RANK"):
    os.environ.pop(name, None)

from headprune.io.markup import printable
from tests.campaign import faults, kill, originals, summary, warm
from tests.campaign.cases import go_through

PARTS = {part.PART: part for part in (kill, faults)}


def main():
    """Runs what was asked for; 1 if something broke."""
    asked = _arguments()
    warm.up()
    # every parent of the work folder may be read by other users: some faults need one
    work = Path(tempfile.mkdtemp(prefix="work-", dir=None if asked.keep else HOME.name))
    if asked.keep:
        print(f"The folders of the cases stay in {work}.")
    for folder in (Path(HOME.name), work):
        folder.chmod(0o755)
    made = originals.make((asked.originals or work / "originals").resolve())
    results = []
    chosen = list(PARTS) if asked.part == "all" else [asked.part]
    for name in chosen:
        part = PARTS[name]
        cases = [case for seed in asked.seeds for case in part.cases(seed, asked.short)]
        cases = [case for case in cases if _wanted(case, asked)]
        began, broken = time.monotonic(), 0
        acting = _Acting(name, made)
        done = go_through(cases, acting, work, asked.workers, asked.keep)
        for number, result in enumerate(done, 1):
            results.append(result)
            broken += bool(result.broken)
            if number % 500 == 0:
                took = time.monotonic() - began
                print(
                    f"{name}: {number} of {len(cases)}, {broken} broken, {took:.0f} s", flush=True
                )
            _tell(result, asked.tell or asked.number is not None)
        took = time.monotonic() - began
        print(f"{name}: {len(cases)} cases, {broken} broken, {took:.0f} s", flush=True)
    print(summary.by_cause(results), flush=True)
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(summary.page(results, asked.seeds), encoding="utf-8")
    if not results:
        print("There is no such case.", file=sys.stderr)
    return int(not results or any(result.broken for result in results))


class _Acting:
    """Tries a case of a part; goes to the worker processes by name."""

    def __init__(self, part, made):
        self.part, self.made = part, made

    def __call__(self, case, place):
        return PARTS[self.part].act(case, place, self.made)


def _wanted(case, asked):
    return (asked.group in (None, case.group)) and (asked.number in (None, case.number))


def _tell(result, everything):
    if result.broken:
        print(f"BROKEN {result.case.again()}\n       {printable(result.broken)}", flush=True)
    if everything:
        told = "\n".join(map(printable, result.told.split("\n")))
        print(f"{result.case.again()}: {result.ending}{result.skipped}\n{told}", flush=True)


def _arguments():
    parser = argparse.ArgumentParser("python -m tests.campaign", description=__doc__)
    parser.add_argument("part", choices=("all", *PARTS))
    parser.add_argument("--seed", "--seeds", dest="seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--group", help="cases of this command or fault only")
    parser.add_argument("--number", type=int, help="this case only, with all that it says")
    parser.add_argument("--tell", action="store_true", help="all that every case says")
    parser.add_argument("--short", action="store_true", help="a small share of the cases, for CI")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the report there, as Markdown")
    parser.add_argument("--originals", type=Path, help="keep what all cases start from there")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the cases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
