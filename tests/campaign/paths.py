"""Strange names of outputs and inputs, and outputs in places where something else is."""

import os
import shlex
import shutil
from pathlib import Path

from tests.campaign.cases import Result
from tests.campaign.facts import facts, link_originals, takes_overwrite
from tests.campaign.kill import JOBS, reference
from tests.campaign.watched import command, flaw

_MODELS = ("llama", "mha", "gqa", "legacy", "result", "speaking")
_INPUTS = (*_MODELS, "scores", "gates", "plan.json", "text.txt")
WRITERS = [name for name, job in JOBS.items() if name != "report"]
NAMES = (
    *(
        "with space",
        "new\nline",
        "qu'ote",
        'dou"ble',
        "ünï-çødé-漢字-🙂",
        "-dash",
        "--resume",
        "a" * 255,
    ),
    *(
        "b" * 243,
        "é" * 127,
        "esc\x1b[2Jape",
        "$(touch pwned)",
        "`touch pwned`",
        "a;b&c|d",
        "%s%n",
        "~",
    ),
    *(" ", "...", "#x", "[bold]x[/]", "\udcff", "back\\slash", ":::error::x", "*?"),
)


def names(case, place, originals):
    """A strange name for the output."""
    name, draw = NAMES[case.number], case.random()
    writer = draw.choice([w for w in WRITERS if w != "migrate"])
    job = JOBS[writer]
    link_originals(place, originals)
    strange = name if len(os.fsencode(name)) > 240 else name + Path(job.out).suffix
    words = [_renamed(word, job.out, strange) for word in shlex.split(job.line)]
    done = command(words, place, limit_s=60)
    broken = flaw(done)
    # what typer or the system refuses is refused; a command must not do half of it
    made = [f.name for f in place.iterdir() if not f.is_symlink()]
    if not broken and done.code == 0:
        plain = place / f"made-{job.out}"
        (place / strange).rename(plain)
        found, wanted = facts(plain), reference(writer, originals).new_facts
        found = {name.removeprefix("made-"): fact for name, fact in found.items()}
        if found != wanted or made != [Path(strange).parts[0]]:
            broken = f"it ends with 0, and there is {made}"
    elif not broken and made:
        broken = f"it failed and left {made}"
    told = f"{words}: ended with {done.code}\n{done.out}{done.err}"
    return Result(case, "broken" if broken else "failed" if done.code else "done", broken, told)


def inputs_named(case, place, originals):
    """A strange name for the model or the data."""
    name = NAMES[case.number]
    link_originals(place, originals)
    try:
        shutil.copytree(originals / "llama", place / name)
    except OSError as error:
        return Result(case, "skipped", skipped=f"there can be no such name: {error}")
    done = command(["prune", "--plan", "plan.json", "--", name, "out"], place)
    broken = flaw(done)
    if not broken and done.code and "is no UTF-8" not in done.err:
        broken = f"a model of that name is refused: {done.err[-200:]!r}"
    return Result(case, "broken" if broken else "done", broken, f"{name!r}\n{done.out}{done.err}")


def _renamed(word, out, strange):
    return strange if word == out else word


def places(case, place, originals):
    """An output that is a link, a file, the input, holds it, or lies in it."""
    kind = list(PLACES)[case.number // len(WRITERS)]
    writer = WRITERS[case.number % len(WRITERS)]
    job = JOBS[writer]
    link_originals(place, originals)
    for name in _INPUTS:  # what may come to harm is a copy
        (place / name).unlink()
        copy = shutil.copytree if (originals / name).is_dir() else shutil.copyfile
        copy(originals / name, place / name)
    model = next((word for word in shlex.split(job.line) if word in _MODELS), "llama")
    out = PLACES[kind](place, model, job.out)
    before = _everything(place)
    words = [_renamed(word, job.out, out) for word in shlex.split(job.line)]
    words += ["--overwrite"] if takes_overwrite(job.line) else []
    done = command(words, place)
    broken = flaw(done)
    after = _everything(place)
    lost = sorted(name for name, digest in before.items() if after.get(name) != digest)
    if not broken and lost:
        broken = f"it ends with {done.code} and changed or removed {lost[:4]}"
    new = sorted({name.split("/")[0] for name in after.keys() - before.keys()})
    if not broken and done.code and [name for name in new if name not in (job.out, "real")]:
        broken = f"it failed and left {new}"
    told = f"{words}, the output is {kind}: ended with {done.code}\n{done.out}{done.err}"
    return Result(case, "broken" if broken else "refused" if done.code else "done", broken, told)


def _everything(place):
    """Every file that is somebody's, and every link."""
    found = {}
    for path in place.rglob("*"):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found.update({name: str(facts(path))})
    return found


def _a_file(place, model, out):
    (place / out).write_text("mine")
    return out


def _a_folder_of_mine(place, model, out):
    (place / out).mkdir()
    (place / out / "thesis.txt").write_text("mine")
    return out


def _a_link_to_mine(place, model, out):
    _a_folder_of_mine(place, model, "real")
    (place / out).symlink_to("real")
    return out


def _a_link_to_a_file(place, model, out):
    (place / "real").write_text("mine")
    (place / out).symlink_to("real")
    return out


def _a_link_to_nothing(place, model, out):
    (place / out).symlink_to("nowhere")
    return out


PLACES = {
    "a file of somebody's": _a_file,
    "a folder of somebody's": _a_folder_of_mine,
    "a link to a folder of somebody's": _a_link_to_mine,
    "a link to a file of somebody's": _a_link_to_a_file,
    "a link to nothing": _a_link_to_nothing,
    "the input": lambda place, model, out: model,
    "the folder of the input": lambda place, model, out: str(place),
    "the current folder": lambda place, model, out: ".",
    "the input's config": lambda place, model, out: f"{model}/config.json",
    "inside the input": lambda place, model, out: f"{model}/{out}",
    "the data": lambda place, model, out: "text.txt",
}
