"""Deaths: every command that writes is killed or stopped, and run again.

After a death the output is absent, the complete old one or the complete new one. The same command
again (with --resume where a training is gone on with) then succeeds, with the numbers of a run
that nobody broke, and leaves nothing beside its output.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.campaign.cases import Case, Result, shared_out
from tests.campaign.facts import facts, link_originals, litter, takes_overwrite
from tests.campaign.launched import two_processes
from tests.campaign.originals import GATES, HEAL, MEASURING, REFITTING, ROLES, SCORING
from tests.campaign.trap import Trap
from tests.campaign.watched import Strike, command, flaw

PART = "kill"
WHOLE, SHORT = 200, 16  # deaths of a seed
PAIRS = "two-processes"  # started by torchrun, of which one dies


@dataclass(frozen=True)
class Job:
    """A command that writes.

    Attributes:
        line: The command.
        old: What made the good output that stands there before; empty where none can.
        out: Its output.
        resumes: Whether it goes on with what a death left, with --resume.
        weight: How many of all deaths, compared with other commands.
    """

    line: str
    old: str = ""
    out: str = "out"
    resumes: bool = False
    weight: float = 1.0


_PLAN = "prune llama --scores scores --criterion fisher --dry-run --save-plan out.json --keep"
_PRUNE = "prune llama --plan plan.json"
_OLD_MODEL = "prune llama --plan short.json out"
_CHECK = f"check llama --data text.txt {MEASURING}"
_BASELINE = f"{_CHECK} --baseline out.json --update-baseline"
_SCORE = f"score llama --data text.txt {SCORING} out"
_COMPRESS = f"compress llama --data text.txt --keep 0.5 {SCORING} --config held_out_tokens=64"
_EVALUATE = f"evaluate llama --data text.txt --no-speed {MEASURING} out.json"

JOBS = {
    "score": Job(f"{_SCORE} --criterion fisher", f"{_SCORE} --criterion magnitude"),
    "plan": Job(f"{_PLAN} 6", f"{_PLAN} 4", "out.json"),
    "prune": Job(f"{_PRUNE} out", _OLD_MODEL),
    "prune-refit": Job(f"{_PRUNE} --refit text.txt {REFITTING} out", _OLD_MODEL),
    "convert-gqa": Job("convert-gqa mha --kv-heads 2 out", _OLD_MODEL),
    "convert-gqa-text": Job(
        f"convert-gqa mha --kv-heads 2 --calibrate text.txt {REFITTING} out", _OLD_MODEL
    ),
    "train-gates": Job(
        f"{GATES} --train attention out", f"{GATES} --config seed=7 out", resumes=True, weight=2
    ),
    "heal": Job(f"{HEAL} out", _OLD_MODEL, resumes=True, weight=2),
    "compress": Job(f"{_COMPRESS} out", _OLD_MODEL, weight=0.5),
    "migrate": Job("migrate legacy out", _OLD_MODEL),
    "roles": Job(f"{ROLES} out", f"{ROLES} --config seed=7 out"),
    "attention": Job(
        "attention llama --text 'w1 w2 w3' out.html",
        "attention llama --text 'w4 w5' out.html",
        "out.html",
        weight=0.5,
    ),
    "export-folder": Job("export result --to vllm out", "export llama --to vllm out", weight=0.5),
    "export-file": Job(
        "export speaking --to gguf --config prove=read-back out",
        "export llama --to vllm out",
        weight=0.5,
    ),
    "evaluate": Job(_EVALUATE, f"{_EVALUATE} --config seed=7", "out.json"),
    "report": Job("report result out.html", "report healed out.html", "out.html", weight=0.5),
    "check-baseline": Job(_BASELINE, f"{_BASELINE} --config confidence=0.9", "out.json"),
    "check-junit": Job(
        f"{_CHECK} --limit 'perplexity <= 1000000' --junit out.xml",
        f"{_CHECK} --limit 'perplexity <= 2000000' --junit out.xml",
        "out.xml",
    ),
}


def cases(seed, short):
    """The deaths of a seed."""
    counts = shared_out(SHORT if short else WHOLE, {n: job.weight for n, job in JOBS.items()})
    if not short:
        counts[PAIRS] = 2
    return [Case(PART, seed, name, at) for name, count in counts.items() for at in range(count)]


def act(case, place, originals):
    """Kills a command, looks at what it left, and runs it again."""
    if case.group == PAIRS:
        return two_processes(case, place, originals)
    job = JOBS[case.group]
    unbroken = reference(case.group, originals)
    draw = case.random()
    link_originals(place, originals)
    # by turns: before a file operation or at a moment, over nothing or over an old output
    over = bool(job.old) and (case.number + case.seed) % 2 == 1
    before_operation = (case.number + case.seed) // 2 % 2 == 0
    hit = signal.SIGINT if not before_operation and draw.random() < 0.4 else signal.SIGKILL
    line = job.line
    if over:
        _copy(unbroken.old, place / job.out)
        line += " --overwrite" if takes_overwrite(line) else ""
    if before_operation:
        fatal = draw.randint(1, unbroken.operations)
        died = command(line, place, prepare=Trap(place, fatal).set)
        told = f"SIGKILL before file operation {fatal} of {unbroken.operations}"
    else:
        strike = Strike(hit, draw.uniform(0.03, 1.1 * unbroken.seconds))
        died = command(line, place, strike=strike)
        told = f"{hit.name} after {strike.after_s:.2f} s"
    told = f"{line}, {'over an old output' if over else 'fresh'}, {told}: ended with {died.code}"
    state = _state(place / job.out, unbroken)
    broken = _left(died, hit, state, over, job, place)
    if not broken:
        again, broken = _again(job, place, state)
        told = f"{told}\n{state}; then {again.code}\n{again.out}{again.err}"
        if not broken and facts(place / job.out) != unbroken.new_facts:
            broken = f"the run after it ends otherwise: {_apart(place / job.out, unbroken)}"
        if not broken and (left := litter(place, job.out)):
            broken = f"the run after it leaves {left} beside its output"
    return Result(case, "broken" if broken else state, broken, told)


@dataclass(frozen=True)
class Unbroken:
    """What a command does that nobody interrupts.

    Attributes:
        old: The output that stands there before.
        old_facts: What is in it.
        new_facts: What is in the new one.
        seconds: How long it took.
        operations: How many file operations it made.
    """

    old: Path
    old_facts: dict[str, str]
    new_facts: dict[str, str]
    seconds: float
    operations: int


def reference(name, originals):
    """Runs a command in peace, once."""
    job, folder = JOBS[name], originals / f"kill-{name}"
    with FileLock(originals / f".kill-{name}.lock"):
        record = folder / "record.json"
        if not record.exists():
            folder.mkdir(exist_ok=True)
            link_originals(folder, originals)
            old = {}
            if job.old:
                _well(job.old, folder)
                old = facts(folder / job.out)
                (folder / job.out).rename(folder / f"old-{job.out}")
            count = originals / f".kill-{name}.count"
            done = _well(job.line, folder, Trap(folder, count=count))
            found = (old, facts(folder / job.out), done.seconds, count.stat().st_size)
            record.write_text(json.dumps(found))
        return Unbroken(folder / f"old-{job.out}", *json.loads(record.read_text()))


def _well(line, folder, trap=None):
    done = command(line, folder, prepare=trap.set if trap else lambda: None, limit_s=120)
    if done.code:
        raise RuntimeError(f"headprune {line}: {done.out}{done.err}")
    return done


def _copy(old, place):
    if old.is_dir():
        shutil.copytree(old, place)
    else:
        shutil.copyfile(old, place)


def _state(out, unbroken):
    if not out.exists() and not out.is_symlink():
        return "absent"
    found = facts(out)
    if found == unbroken.new_facts:
        return "new"
    return "old" if found == unbroken.old_facts else "half"


def _left(died, hit, state, over, job, place):
    """What is wrong with what a death left."""
    if state == "half":
        return "its output is neither the old one nor the new one"
    if over and state == "absent":
        return "the old output is gone, and there is no new one"
    if hit is signal.SIGINT and "KeyboardInterrupt" in died.err and "/headprune/" not in died.err:
        return ""  # it came before the command began
    if died.stopped or died.code not in (0, -hit, 130):
        return f"it did not end by the signal: {flaw(died) or died.code}"
    if hit is signal.SIGINT and died.code == 130:
        hidden = [name for name in litter(place, job.out) if name.startswith(".")]
        said = flaw(dataclasses.replace(died, code=0))
        return said or (f"after Ctrl-C it leaves {hidden}" if hidden else "")
    return ""


def _again(job, place, state):
    """Runs the command once more, as its user would."""
    line = job.line
    if state in ("old", "new") and takes_overwrite(line):
        line += " --overwrite"
    lines = [f"{line} --resume", line] if job.resumes and state != "new" else [line]
    for line in lines:
        done = command(line, place, limit_s=60)
        broken = flaw(done)
        if broken or not done.code:
            break
    if not broken and done.code:
        broken = f"the run after it is refused: {done.err.strip().splitlines()[-1][:200]}"
    return done, broken


def _apart(out, unbroken):
    found, wanted = facts(out) if out.exists() else {}, unbroken.new_facts
    names = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
    return ", ".join(names[:5])
