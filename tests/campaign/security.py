"""Attacks by what a stranger may send: code, paths, and strings that are commands.

A canary tells whether code ran: whatever is smuggled in makes the file ``pwned`` where it runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.campaign.cases import Case, Result
from tests.campaign.facts import link_originals
from tests.campaign.markup import ACTIONS, PAGES, STRINGS, actions, breaks, pages, strings
from tests.campaign.originals import MEASURING
from tests.campaign.smuggled import CANARY, CARRIERS, code, resume
from tests.campaign.watched import Outcome, command, flaw

PART = "security"
SECRET = "the secret of the machine"


def cases(seed: int, short: bool) -> list[Case]:
    """The attacks of a seed; what depends on nothing drawn is shared out among seeds."""
    numbers = {
        **{"code": range(4 * len(CARRIERS)), "resume": range(8)},
        "paths": range(seed % 3, len(_PATHS), 3),
        **{"strings": range(2 * len(STRINGS)), "pages": range(len(PAGES))},
        "actions": range(len(ACTIONS)),
    }
    if short:
        numbers = {name: every[: max(2, len(every) // 8)] for name, every in numbers.items()}
    return [Case(PART, seed, name, at) for name, every in numbers.items() for at in every]


def act(case: Case, place: Path, originals: Path) -> Result:
    """Tries one attack."""
    outside = shutil.copytree(originals / "result", place / "outside")
    shutil.copytree(originals / "sharded", outside / "model")
    (outside / "secret.txt").write_text(SECRET)
    here = place / "here"
    here.mkdir()
    before = _files(outside)
    told, done = _ATTACKS[case.group](case, here, originals)
    broken = ""
    if list(place.rglob(CANARY)):
        broken = "code ran"
    elif _files(outside) != before:
        broken = "something outside was changed"
    elif SECRET in done.out + done.err or _holds_secret(here):
        broken = "something outside was read"
    else:
        broken = flaw(_without_annotations(done)) or breaks(here)
    told = f"{told}: ended with {done.code}\n{done.out}{done.err}"
    return Result(case, "broken" if broken else "held", broken, told)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def _holds_secret(here: Path) -> bool:
    files = (f for f in here.rglob("*") if f.is_file() and not f.is_symlink())
    return any(SECRET.encode() in f.read_bytes() for f in files)


def _without_annotations(done: Outcome) -> Outcome:
    """Without the workflow commands that check means."""
    meant = re.compile(r"^::(error|warning) title=headprune check::[^\n]*\n?", re.MULTILINE)
    return dataclasses.replace(done, out=meant.sub("", done.out), err=meant.sub("", done.err))


# ---- paths that lead out of where they are


def _index(name: str) -> Callable[[Path], str]:
    """An index whose shards lie elsewhere."""

    def attack(here: Path) -> str:
        shutil.copytree(here / "sharded", here / "evil")
        index = here / "evil" / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        where = name.replace("OUTSIDE", str(here.parent / "outside"))
        content["weight_map"] = {k: f"{where}/{v}" for k, v in content["weight_map"].items()}
        index.write_text(json.dumps(content))
        return "!inspect evil"

    return attack


def _renamed(original: str, old: str, new: str, line: str) -> Callable[[Path], str]:
    """A copy of an original, in one of whose files a name is another."""

    def attack(here: Path) -> str:
        source, file = original.split("/")
        shutil.copytree(here / source, here / "evil")
        place = here / "evil" / file
        content, other = place.read_text(), new.replace("OUTSIDE", str(here.parent / "outside"))
        if old not in content:
            raise LookupError(f"{place} has no {old}")
        place.write_text(content.replace(old, other))
        return line

    return attack


_CUT = "prune evil --plan plan.json out"
_EVALUATED = f"evaluate evil --data text.txt --no-speed {MEASURING}"
_SECRET = "OUTSIDE/secret.txt"
_FILES = f'{{"vocab_file": "{_SECRET}", "tokenizer_file": "{_SECRET}", '
# commands that must be refused begin with "!"
_PATHS: tuple[Callable[[Path], str], ...] = (
    *map(_index, ("../../outside/model", "OUTSIDE/model", "../sharded", "./../here/sharded")),
    _renamed(
        "result/headprune.json", '"config.json"', '"../../outside/secret.txt"', "!verify evil"
    ),
    _renamed("result/headprune.json", '"config.json"', f'"{_SECRET}"', "!verify evil"),
    _renamed(
        "result/config.json", '"LlamaForCausalLM"', '"../../outside/secret.txt"', "!inspect evil"
    ),
    _renamed(
        "gates/gates.json",
        "model.layers.0.self_attn",
        "../../outside/x",
        "!prune llama --gates evil out",
    ),
    _renamed("gates/config.yaml", "text.txt", _SECRET, "report result evil out.html"),
    _renamed(
        "scores/scores.json",
        '"fisher"',
        '"../../outside/x"',
        "!prune llama --scores evil --criterion fisher --keep 0.5 --dry-run",
    ),
    _renamed("llama/tokenizer_config.json", "{", _FILES, _EVALUATED),
)


def _paths(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    return _expecting(_PATHS[case.number], here, originals)


def _expecting(attack: Callable[[Path], str], here: Path, originals: Path) -> tuple[str, Outcome]:
    link_originals(here, originals)
    line = attack(here)
    done = command(line.removeprefix("!"), here)
    if line.startswith("!") and done.code == 0 and not done.stopped:
        done = dataclasses.replace(done, code=99, err=f"it was not refused\n{done.err}")
    return line, done


_ATTACKS = {
    **{"code": code, "resume": resume, "paths": _paths},
    **{"strings": strings, "pages": pages, "actions": actions},
}
