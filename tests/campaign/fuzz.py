"""Damaged files, of every kind that headprune reads: refused in a sentence, or read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.cases import Case, Result, shared_out
from tests.campaign.mutants import mutator_of
from tests.campaign.originals import MEASURING, RESUME, ROLES, SCORING, TRAINING
from tests.campaign.watched import Outcome, command, flaw, watched

PART = "fuzz"
WHOLE, SHORT = 3_400, 100  # mutants of a seed


@dataclass(frozen=True)
class Reader:
    """What reads a kind of file.

    Attributes:
        target: The file that is damaged, or a pattern, of whose files one is.
        lines: Commands that read it.
        beside: Originals that the commands need as well, undamaged.
        read: Reads it without a command, in three cases of four.
        weight: How many of all mutants, compared with other readers.
        folder: Where the commands run.
    """

    target: str
    lines: Sequence[str]
    beside: Sequence[str] = ()
    read: Callable[[], object] | None = None
    weight: float = 1.0
    folder: str = "."


def _config() -> object:
    from headprune.model.loading import load_config

    return load_config("llama")


def _tokenizer() -> object:
    from headprune.model.loading import load_tokenizer

    return load_tokenizer("llama")


def _plan() -> object:
    from headprune.schemas.plan import read_plan

    return read_plan(Path("plan.json"), {"model.layers.0.self_attn": (range(6), 3)})


def _manifest() -> object:
    from headprune.schemas.manifest import read_manifest

    return read_manifest(Path("result"))


def _scores() -> object:
    from headprune.schemas.scores import read_scores

    return read_scores(Path("scores"))


def _roles() -> object:
    from headprune.schemas.roles import read_roles

    return read_roles(Path("roles"))


def _trees() -> object:
    from headprune.role.trees import read_trees

    return read_trees("trees.conllu")


def _check() -> object:
    return _settings("check", "check.yaml")


def _train() -> object:
    return _settings("train-gates", "train.yaml")


def _settings(command: str, file: str) -> object:
    """What --config gives a command."""
    from headprune.command_line import settings_in
    from headprune.commands.command import named

    required = {"model": "m", "data": "d", "output": "o"}
    return named(command).arguments({**required, **settings_in(Path(file), named(command))})


def _baseline() -> object:
    from headprune.regression.baseline import read_baseline

    return read_baseline(Path("baseline.json"))


def _examples(name: str) -> Callable[[], object]:
    def read() -> object:
        from headprune.config import DataConfig
        from headprune.data.read import read_examples

        return read_examples(DataConfig(source=name))

    return read


_EVALUATE = f"--no-speed {MEASURING}"
_LLAMA = f"evaluate llama --data text.txt {_EVALUATE}"
_DRY = "prune llama --plan plan.json --dry-run"
_GATED = ("prune llama --gates gates --dry-run", "prune llama --gates gates out")
_SCORED = (
    "prune llama --scores scores --criterion fisher --keep 0.5 --dry-run --save-plan out.json",
    "prune llama --scores scores --criterion fisher --keep 4 --dry-run",
    "report result scores out.html",
)
_PLANNED = "prune llama --scores scores --criterion fisher --keep 0.5 --roles roles --dry-run"
_CHECK = ("check --config check.yaml",)
_BESIDE_CHECK = ("llama", "text.txt", "baseline.json", "check.yaml")
_DATA = ("text.txt", "text.txt.gz", "rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.tsv")

READERS: dict[str, Reader] = {
    "config": Reader(
        "llama/config.json",
        ("inspect llama", _DRY, _LLAMA),
        ("plan.json", "text.txt"),
        _config,
        weight=4,
    ),
    "config-bert": Reader("bert/config.json", ("inspect bert",)),
    "config-gpt2": Reader("gpt2/config.json", ("inspect gpt2",)),
    "config-t5": Reader("t5/config.json", ("inspect t5",)),
    "generation-config": Reader("llama/generation_config.json", (_LLAMA,), ("text.txt",)),
    "tokenizer": Reader("llama/tokenizer*", (_LLAMA,), ("text.txt",), _tokenizer, weight=3),
    "weights": Reader("llama/model.safetensors", ("inspect llama", _DRY), ("plan.json",), weight=2),
    "index": Reader("sharded/model.safetensors.index.json", ("inspect sharded",)),
    "shards": Reader("sharded/*.safetensors", ("inspect sharded",), weight=0.5),
    "manifest": Reader(
        "result/headprune.json",
        (
            "verify result",
            "inspect result",
            "report result out.html",
            "convert-gqa result --kv-heads 1 out",
        ),
        read=_manifest,
        weight=4,
    ),
    "layout": Reader(
        "result/config.json",
        ("inspect result", "verify result", f"evaluate result --data text.txt {_EVALUATE}"),
        ("text.txt",),
        weight=2,
    ),
    "result": Reader(
        "result/*",
        ("verify result", "verify result --against llama", "report result out.html"),
        ("llama",),
    ),
    "plan": Reader(
        "plan.json", (_DRY, _DRY.replace("--dry-run", "out")), ("llama",), _plan, weight=6
    ),
    "plan-short": Reader("short.json", ("prune llama --plan short.json --dry-run",), ("llama",)),
    "gates": Reader("gates/gates.json", _GATED, ("llama",), weight=2),
    "gates-tensors": Reader("gates/*.safetensors", _GATED, ("llama",), weight=2),
    "gates-folder": Reader("gates/*", ("report result gates out.html",), ("result",)),
    "scores": Reader("scores/scores.json", _SCORED, ("llama", "result"), _scores, weight=5),
    "scores-tensors": Reader(
        "scores/scores.safetensors", _SCORED, ("llama", "result"), _scores, weight=2
    ),
    "check": Reader("check.yaml", _CHECK, _BESIDE_CHECK, _check, weight=5),
    "baseline": Reader("baseline.json", _CHECK, _BESIDE_CHECK, _baseline, weight=6),
    "train-gates": Reader(
        "train.yaml",
        (
            "train-gates llama --data text.txt out --config train.yaml "
            + TRAINING.replace("--steps 6", "--steps 1"),
        ),
        ("llama", "text.txt"),
        _train,
        weight=4,
    ),
    "report": Reader("report.json", ("report result report.json out.html",), ("result",)),
    "checked": Reader("result/checked.json", ("report result out.html",)),
    "work-gates": Reader("resume-gates/out*/**/*", (RESUME["gates"],), folder="resume-gates"),
    "work-heal": Reader("resume-heal/out*/**/*", (RESUME["heal"],), folder="resume-heal"),
    **{
        f"data-{name}": Reader(
            name,
            (
                f"evaluate llama --data {name} {_EVALUATE}",
                f"score llama --data {name} --criterion fisher {SCORING} out",
            ),
            ("llama",),
            _examples(name),
            weight=1.5,
        )
        for name in (*_DATA, "rows.parquet")
    },
    "pruned-heads": Reader("legacy/config.json", ("inspect legacy", "migrate legacy out")),
    "roles": Reader(
        "roles/roles.json",
        (f"{_PLANNED} --keep-roles broad --save-plan out.json", _PLANNED),
        ("llama", "scores"),
        _roles,
        weight=3,
    ),
    "trees": Reader(
        "trees.conllu",
        (f"{ROLES} --trees trees.conllu out",),
        ("llama", "text.txt"),
        _trees,
        weight=2,
    ),
    "exported": Reader(
        "exported/*",
        (f"evaluate exported --data text.txt {_EVALUATE}", "inspect exported"),
        ("text.txt",),
    ),
    "gguf": Reader(
        "spoken/model.gguf",
        (
            "export speaking --to gguf --like spoken/model.gguf --config prove=read-back out",
            "inspect spoken",
        ),
        ("speaking",),
    ),
    "heads": Reader(
        "heads.json",
        ("convert-gqa llama --kv-heads heads.json out",),
        ("llama",),
        None,
        0.5,
    ),
}


def cases(seed: int, short: bool) -> list[Case]:
    """The mutants of a seed."""
    counts = shared_out(SHORT if short else WHOLE, {n: r.weight for n, r in READERS.items()})
    return [Case(PART, seed, name, at) for name, count in counts.items() for at in range(count)]


def act(case: Case, place: Path, originals: Path) -> Result:
    """Damages a file and has it read."""
    reader, draw = READERS[case.group], case.random()
    lay_out(reader, place, originals)
    found = sorted(f for f in place.glob(reader.target) if f.is_file() and not f.is_symlink())
    target = draw.choice(found)
    target.write_bytes(mutator_of(target.name)(target.read_bytes(), draw))
    here = place / reader.folder
    before = {file.name for file in here.iterdir()}
    read, at = reader.read, case.number // 4
    if read is None or case.number % 4 == 0:
        line = reader.lines[(at if read else case.number) % len(reader.lines)]
        outcome = command(line, here)
    else:
        line, outcome = "reading alone", _alone(read, here)
    broken = flaw(outcome)
    left = {file.name for file in here.iterdir()} - before
    # what a training leaves is for --resume
    left -= {name for name in left if name.endswith("-checkpoints") or "--resume" in line}
    if not broken and outcome.code and left:
        broken = f"it was refused and left {sorted(left)}"
    ending = "broken" if broken else "refused" if outcome.code else "accepted"
    told = f"{target.relative_to(place)}, {line}\n{outcome.out}{outcome.err}"
    return Result(case, ending, broken, told)


def lay_out(reader: Reader, place: Path, originals: Path) -> None:
    """Copies what is damaged, and links to what is not."""
    damaged = reader.target.partition("/")[0]
    for name in (damaged, *(name for name in reader.beside if name != damaged)):
        source = originals / name
        if name != damaged:
            (place / name).symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, place / name, symlinks=True)
        else:
            shutil.copyfile(source, place / name)
    if reader.target.endswith("checked.json"):
        shutil.copyfile(originals / "checked.json", place / "result" / "checked.json")


def _alone(read: Callable[[], object], here: Path) -> Outcome:
    """Reads without a command, and ends as a command does."""

    def run() -> None:
        from headprune import terminal

        terminal.run(lambda: (read(), None)[1])

    return watched(run, here)
