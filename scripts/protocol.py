"""The protocol of published numbers: its texts, its measures, and what may be published.

    python scripts/protocol.py measure configs/bench/smollm2-heads.yaml --model FOLDER \
        --texts FOLDER --work FOLDER
    python scripts/protocol.py pages

A row of a config names a method and, in ``tries``, settings to choose among. All are made from the
first sample, and measured on the development texts: the last quarter of WikiText-2 valid, and UD
English EWT. The best is published: made from three samples, which are the other quarters, and
measured on WikiText-2 test, whole, and on Brown. Every number goes into
docs/benchmarks/results.json, and is not measured again. ``pages`` writes the tables.

Perplexity is that of the published code: rows joined by two newlines, windows without overlap, the
mean over their predicted tokens. Tasks are run by lm-eval on files that are made of Brown: the last
word of a passage, and its last sentence among four. Weights are cut in float32, and measured in
bfloat16, as is the original; in float32, and on some windows, where a config says so.

``measure: far`` is of long contexts: the perplexity of positions after the first 512 in windows of
``length`` tokens; the share of needles found (40, beyond the window of any row) and the loss of
their digits; the bytes of the KV cache of such a context in 16 bits.

``measure: prefilled`` is of caches that get smaller once a context is read, as those of kvpress do:
the perplexity of 512 tokens after a context, and needles whose question comes after it.
Rows of kvpress run by the interpreter that KVPRESS_PYTHON names.

``measure: similarity`` is of encoders: the correlation of the similarities of sentences with those
of the original, on pairs of STSb dev. ``measure: own_text`` is of causal models without a
tokenizer: the perplexity of sequences that the original wrote, which also are its samples.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, ClassVar, Literal

import torch
import typer
import yaml
from datasets import Dataset
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import headprune
from after_prefill import TEXTS as PRESS_TEXTS
from after_prefill import continued
from headprune import from_pretrained
from headprune.config import CalibrationConfig, DataConfig, EvaluateConfig, NeedleConfig
from headprune.data.batches import calibration
from headprune.data.needles import Needle, needles
from headprune.data.passages import passage_words, passages
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import tokenized_rows
from headprune.data.text import evenly
from headprune.evaluation.metrics import similarity_correlation
from headprune.evaluation.quality import LOSSES, Pass, causal_losses, embeddings, position_ranges
from headprune.evaluation.tasks import task_scores
from headprune.evidence.recall import passage_dependent_words
from headprune.model.answers import answered
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache
from headprune.model.gating import fixed, gated
from headprune.model.loading import load_tokenizer
from headprune.schemas.records import Window
from headprune.surgery.sink_logits import IN_ONE_KERNEL
from rivals import CUTTERS, by_scores

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, RESULTS = ROOT / "configs" / "bench", ROOT / "docs" / "benchmarks" / "results.json"
SAMPLES = 3
LONG, SHORT = 2_048, 128  # tokens of a window; the second is the habit of FLAP and LLM-Pruner
WINDOWS = 20  # of 2,048 tokens, of texts that are not read whole
PASSAGES = 400
FAR_WINDOWS, FAR = 10, 512  # windows of a long context, and the position that they count from
NEEDLES = 40
NEXT_WINDOWS, NEXT = 5, 512  # contexts of a text, and the tokens after each
OURS = ("prune", "train_gates", "convert_gqa", "convert_mla", "convert_swa", "compress")
TOKENS, SEQ_LEN = 16_384, 512  # of calibration
OWN = 64  # tokens of a sequence that a model writes; many end not much later

console = Console(highlight=False)


class ProtocolError(typer.BadParameter):
    """A number that the protocol does not publish: exit 2, without a traceback."""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Text:
    """A file under ``--texts``, with the sha256 of its unpacked bytes."""

    file: str
    sha256: str

    def read(self, folder: Path) -> str:
        """Return the text.

        Raises:
            ProtocolError: If it is another one, or cannot be read.
        """
        try:
            content = gzip.decompress((folder / self.file).read_bytes())
        except (OSError, EOFError) as error:
            raise ProtocolError(f"'{folder / self.file}' cannot be read: {error}.") from error
        if _sha256(content) != self.sha256:
            raise ProtocolError(f"'{folder / self.file}' is not the text of the protocol.")
        return content.decode()


VALID = Text(
    "wikitext2/tokenised/valid.txt.gz",
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
)
EWT = Text(
    "ud_english_ewt/en_ewt-ud-dev.conllu.gz",
    "531a54ff90d6ab12201c5a50c3e78e6ddac4de69abc4bce5d275d3cd29efe2b6",
)
WIKITEXT = Text(
    "wikitext2/raw/wiki.test.raw.gz",
    "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
)
BROWN = Text(
    "brown/brown.txt.gz", "2711048c199c5c0dcd5205028129c4bb150dca48a9034c1502bbf4a13fddc819"
)
STSB = Text(
    "stsb/stsb-en-dev.csv.gz", "d29586e96558c4eb52cf5ea5d14e9c24d3bf0e44f111b017caba43a5adc33226"
)
TEXTS = (VALID, EWT, WIKITEXT, BROWN, STSB)


class Strict(BaseModel):
    """Refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(Strict):
    """A row of a table.

    Attributes:
        name: Its name.
        method: A command of headprune, a rival of ``rivals.py``, or "original".
        settings: Arguments of the command, or ``keep`` of a rival.
        tries: Further settings; the best on the development texts are published.
        short: Whether windows of 128 tokens are measured too.
    """

    name: str
    method: str
    settings: dict[str, Any] = {}
    tries: tuple[dict[str, Any], ...] = ({},)
    short: bool = False

    def chosen_of(self, result: Result) -> dict[str, Any]:
        """Return the try that a result is of.

        Raises:
            ProtocolError: If it is of settings that the row has no longer.
        """
        for each in self.tries:
            if {**self.settings, **each} == result.settings:
                return each
        raise ProtocolError(
            f"'{self.name}' in results.json is of other settings, {result.settings}: rename the "
            "row, or take the result out."
        )


class Config(Strict):
    """The rows of a table.

    Attributes:
        model: Name.
        sha256: Digest of its weights.
        measure: What is measured; see the top of this file.
        tasks: Whether to measure passage words and tasks too, half of the time.
        dtype: Element type to measure in.
        windows: Windows of WikiText-2 to read; None for all.
        length: Tokens of a long context.
        needle_keys: Facts in it, of which one is asked for.
    """

    model: str
    sha256: str
    measure: Literal["text", "far", "prefilled", "similarity", "own_text"] = "text"
    tasks: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    windows: int | None = None
    length: int = LONG
    needle_keys: int = 4
    rows: tuple[Row, ...]

    def named(self, name: str) -> Row:
        """Return a row.

        Raises:
            ProtocolError: If there is none of that name.
        """
        names = [row.name for row in self.rows]
        if name not in names:
            raise ProtocolError(f"The config has no row '{name}', only {', '.join(names)}.")
        return self.rows[names.index(name)]


class Result(Strict):
    """Numbers of a row, made from a sample of the calibration text.

    Attributes:
        table: Name of the config.
        row: Name of the row.
        sample: Number of the sample.
        settings: All settings, the chosen ones among them.
        tried: Development score of each of several tries.
        seconds: Time to make it.
        numbers: By name.
        headprune: Version.
        model_sha256: Of the original's weights.
    """

    table: str
    row: str
    sample: int
    settings: dict[str, Any]
    tried: tuple[float, ...] = ()
    seconds: float
    numbers: dict[str, float]
    headprune: str
    model_sha256: str


class Results(Strict):
    """All published numbers, by the sha256 of the texts they were measured on."""

    schema_version: Literal[1] = 1
    texts: dict[str, str]
    results: tuple[Result, ...] = ()

    @classmethod
    def read(cls) -> Results:
        """Return those on disk.

        Raises:
            ProtocolError: If they are of other texts.
        """
        texts = {text.file: text.sha256 for text in TEXTS}
        if not RESULTS.exists():
            return cls(texts=texts)
        stored = cls.model_validate_json(RESULTS.read_text())
        if stored.texts != texts:
            raise ProtocolError(f"'{RESULTS.name}' is of other texts than the protocol's.")
        return stored

    def get(self, table: str, row: str, sample: int) -> Result | None:
        """Return a result; None if it was not measured."""
        wanted = (table, row, sample)
        return next((r for r in self.results if (r.table, r.row, r.sample) == wanted), None)

    def original(self, digest: str, table: str) -> Result | None:
        """Return the original of a digest, measured for a table or any other; None before that."""
        known = [r for r in self.results if r.row == "original" and r.model_sha256 == digest]
        return next((r for r in known if r.table == table), known[0] if known else None)

    def write_with(self, result: Result) -> Results:
        """Write and return all of them and another.

        Raises:
            ProtocolError: If that is there already, as of another process.
        """
        if self.get(result.table, result.row, result.sample) is not None:
            raise ProtocolError(f"'{result.row}', sample {result.sample}, was measured meanwhile.")
        more = self.model_copy(update={"results": (*self.results, result)})
        RESULTS.write_text(more.model_dump_json(indent=1) + "\n")
        return more


def read_config(file: Path) -> Config:
    """Read a config, which must lie in configs/bench.

    Raises:
        ProtocolError: If it lies elsewhere.
    """
    if file.resolve().parent != CONFIGS:
        raise ProtocolError(f"'{file}' is not in configs/bench: its rows may not be published.")
    return Config.model_validate(yaml.safe_load(file.read_text()))


@dataclass(frozen=True)
class Made:
    """A smaller model, and the contexts that it runs in: gates, and a rival's compensation.

    Or the original, and a press of kvpress by name, settings and share of the cache.
    """

    net: PreTrainedModel
    contexts: tuple[AbstractContextManager[Any], ...] = ()
    press: dict[str, Any] | None = None


class Bench:
    """A model, the texts, and everything that is measured on them."""

    seq_len: ClassVar[int] = SEQ_LEN

    def __init__(self, config: Config, model: str, texts: Path, work: Path) -> None:
        """Read texts and tokenizer.

        Raises:
            ProtocolError: If the folder or a text is another than the protocol's, or if another
                run works in the folder.
        """
        work.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(work / "at-work", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ProtocolError(f"Another run is at work in '{work}': give each its own.") from None
        weights = Path(model) / "model.safetensors"
        if not weights.exists() or _sha256(weights.read_bytes()) != config.sha256:
            raise ProtocolError(f"'{model}' is not the {config.model} of the protocol.")
        self.config, self.model, self.work = config, model, work
        self._read(texts)
        self.tokenizer = load_tokenizer(self.model)

    def _read(self, texts: Path) -> None:
        quarters = _quarters(VALID.read(texts))
        self.calibration = [
            _written(self.work / f"sample{k}.txt", quarters[k]) for k in range(SAMPLES)
        ]
        self._develop = (quarters[SAMPLES], _sentences_of(EWT.read(texts)))
        self.wikitext = _as_published(WIKITEXT.read(texts))
        lines = [line for line in BROWN.read(texts).splitlines() if not line.startswith("###")]
        self.brown = "\n".join(lines)
        self._tasks = _tasks(lines, self.work)

    def develop(self, made: Made) -> float:
        """Return the mean loss on the development texts, in nats."""
        with _measured(made, self.config.dtype) as net:
            losses = [self.nll(net, text, 512, 2 * WINDOWS) for text in self._develop]
        return sum(losses) / len(losses)

    def publish(self, made: Made, short: bool) -> dict[str, float]:
        """Return the numbers that are published."""
        with _measured(made, self.config.dtype) as net:
            numbers = {
                "wikitext2": math.exp(self.nll(net, self.wikitext, LONG, self.config.windows)),
                "brown": math.exp(self.nll(net, self.brown, LONG, WINDOWS)),
            }
            if short:
                numbers["wikitext2_128"] = math.exp(self.nll(net, self.wikitext, SHORT))
            if self.config.tasks:
                numbers["passage_words"] = float(answered(net, self._needed, 8).hits.mean())
                scored, _ = task_scores(net, self.tokenizer, self._evaluation)
                numbers |= {one.name.partition(":")[0]: one.value for one in scored}
        return numbers

    @property
    def _evaluation(self) -> EvaluateConfig:
        return EvaluateConfig(tasks=tuple(map(str, self._tasks)), batch_size=8, resamples=10)

    @cached_property
    def _needed(self) -> list[Any]:
        """The words of Brown that only the passage tells the original, in float32."""
        file = _written(self.work / "brown.txt", self.brown)
        examples = read_examples(DataConfig(source=str(file)))
        words = passage_words(examples, PASSAGES, self.tokenizer, LONG)
        return passage_dependent_words(from_pretrained(self.model, dtype="float32"), words, 8)

    def nll(
        self, net: PreTrainedModel, text: str, length: int, windows: int | None = None
    ) -> float:
        """Return the mean loss of predicted tokens in windows of a length; of all, or of some."""
        ids = self._ids(text)
        count = len(ids) // length
        starts = [length * n for n in (range(count) if windows is None else evenly(count, windows))]
        rows = Dataset.from_dict({"input_ids": [ids[at : at + length] for at in starts]})
        losses = causal_losses(Pass(net, rows, self.tokenizer, max(1, LONG // length)))
        return float(losses.nll_nats.sum() / losses.tokens.sum())

    @cache  # noqa: B019  # one bench a run
    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def make(self, row: Row, more: dict[str, Any], sample: int) -> Made:
        """Make a row's model from a sample."""
        if row.method in OURS:
            net = from_pretrained(self.by_command(row, more, sample))
            if row.method == "convert_mla":
                net.set_attn_implementation("even_widths")
            if net.config.model_type == "granite_swa":
                net.set_attn_implementation(IN_ONE_KERNEL)
            return Made(net)
        net = from_pretrained(self.model, dtype="float32").requires_grad_(False)
        if row.method == "original":
            return Made(net)
        settings, text = {**row.settings, **more}, str(self.calibration[sample])
        amount = CalibrationConfig(calibration_tokens=TOKENS, seq_len=self.seq_len)
        some = calibration(net, self.tokenizer, DataConfig(source=text), amount, "bench").fit
        if row.method in CUTTERS:
            gates, context = CUTTERS[row.method](net, attention_of(net), settings["keep"], some)
        else:
            gates, context = by_scores(row.method, net, settings["keep"], settings["even"], some)
        gating = gated(attention_of(net), fixed(gates))
        return Made(net, (context, gating))

    def by_command(self, row: Row, more: dict[str, Any], sample: int) -> Path:
        """Make a row's model by the command that it names; the next one takes its place."""
        settings, text = {**row.settings, **more}, str(self.calibration[sample])
        steps, logits = settings.pop("heal_steps", None), settings.pop("sink_logits", True)
        folder = self.work / "protocol-model"
        shutil.rmtree(folder, ignore_errors=True)  # a run that was killed left some
        folder.mkdir()
        out, scores = folder / "out", folder / "scores"
        amount: dict[str, Any] = {"calibration_tokens": TOKENS, "seq_len": self.seq_len}
        if row.method == "prune":
            own: dict[str, Any] = {
                name: value for name, value in settings.items() if name in ("unit", "criterion")
            }
            of_cut = {n: value for n, value in settings.items() if n not in own}
            headprune.score(self.model, scores, data=text, **own, **amount)
            headprune.prune(self.model, out, scores=scores, **of_cut)
        elif row.method == "train_gates":
            headprune.train_gates(self.model, scores, data=text, **settings)
            if settings.get("form") == "window":
                headprune.convert_swa(self.model, out, gates=scores)
            else:
                headprune.prune(self.model, out, gates=scores, layout="ragged")
        elif row.method == "convert_gqa":
            given: dict[str, Any] = {"calibrate": text, **amount}
            if settings.get("merge") == "mean":
                given = {}
            headprune.convert_gqa(self.model, out, **settings, **given)
        elif row.method == "compress":
            headprune.compress(self.model, out, **settings)  # on the text that comes with it
        elif row.method == "convert_swa":
            of_context: dict[str, Any] = {"seq_len": self.config.length}
            headprune.convert_swa(self.model, out, data=text, **settings, **of_context)
        else:
            headprune.convert_mla(self.model, out, data=text, **settings, **amount)
        if steps:
            cut = out.rename(folder / "cut")
            how = {"teacher": self.model, "data": text, "steps": steps, "sink_logits": logits}
            headprune.heal(cut, out, **how)
        return out


class Far(Bench):
    """A causal model in long contexts."""

    def publish(self, made: Made, short: bool) -> dict[str, float]:
        """Return perplexity beyond the first tokens, needles, and bytes of the cache."""
        with _measured(made, self.config.dtype) as net:
            hits, nats = answered(net, [needle.row for needle in self._needles], 1)
            return {
                "wikitext2_far": math.exp(self.far(net, self.wikitext)),
                "brown_far": math.exp(self.far(net, self.brown)),
                "needles": float(hits.mean()),
                "needle_nats": float(nats.mean()),
                "kv_bytes": KVCache.of(net).elements(self.config.length) * 2,
            }

    def far(self, net: PreTrainedModel, text: str, windows: int = FAR_WINDOWS) -> float:
        """Return the mean loss of tokens after the first 512 of long windows."""
        ids, length = self._ids(text), self.config.length
        starts = [length * n for n in evenly(len(ids) // length, windows)]
        rows = Dataset.from_dict({"input_ids": [ids[at : at + length] for at in starts]})
        columns = causal_losses(Pass(net, rows, self.tokenizer, 1)).columns()
        names = [name for name, each in position_ranges(rows).items() if each.start >= FAR]
        sums = [sum(columns[f"{kind}@{name}"].sum() for name in names) for kind in LOSSES[:2]]
        return float(sums[0] / sums[1])

    @cached_property
    def _needles(self) -> tuple[Needle, ...]:
        """Needles in Brown, beyond a quarter of the context, the widest window of any row."""
        length = self.config.length
        how = NeedleConfig(
            needle_lengths=(length,),
            needle_trials=-(-NEEDLES // 3),  # of five depths three lie beyond the window
            needle_keys=self.config.needle_keys,
        )
        examples = read_examples(DataConfig(source=str(_written(self.work / "b.txt", self.brown))))
        window = Window(size=length // 4, sinks=4)
        beyond = needles(examples, self.tokenizer, how, None, window=window)
        return tuple(beyond[:NEEDLES])


class Prefilled(Far):
    """A causal model whose cache gets smaller once a context is read."""

    def make(self, row: Row, more: dict[str, Any], sample: int) -> Made:
        """Make a row's model, or return the original for a press."""
        if row.method != "kvpress":
            return super().make(row, more, sample)
        if "KVPRESS_PYTHON" not in os.environ:
            raise ProtocolError(f"'{row.name}' needs KVPRESS_PYTHON, an interpreter with kvpress.")
        net = from_pretrained(self.model, dtype="float32")
        return Made(net, press={**row.settings, **more, "sample": sample})

    def publish(self, made: Made, short: bool) -> dict[str, float]:
        """Return perplexity after a context, needles, and bytes of the cache."""
        ends = [ids for text in (self.wikitext, self.brown) for ids in self._windows(text)]
        cuts = [self.config.length] * len(ends)
        asked = self._needles
        rows = [*ends, *(needle.row.ids for needle in asked)]
        cuts += [needle.question for needle in asked]
        sequences = [(ids[:cut], ids[cut:]) for ids, cut in zip(rows, cuts, strict=True)]
        losses = self._continued(made, sequences)
        nats = [mean(each[0]) for each in losses[: len(ends)]]
        answers = [
            (each[0][(at := one.row.start - one.question) :], all(each[1][at:]))
            for each, one in zip(losses[len(ends) :], asked, strict=True)
        ]
        share = made.press["share"] if made.press else 1
        return {
            "wikitext2_next": math.exp(mean(nats[:NEXT_WINDOWS])),
            "brown_next": math.exp(mean(nats[NEXT_WINDOWS:])),
            "needles": mean(hit for _, hit in answers),
            "needle_nats": mean(mean(digits) for digits, _ in answers),
            "kv_bytes": KVCache.of(made.net).elements(self.config.length) * 2 * share,
        }

    def _windows(self, text: str) -> list[list[int]]:
        ids, length = self._ids(text), self.config.length + NEXT
        starts = [length * n for n in evenly(len(ids) // length, NEXT_WINDOWS)]
        return [ids[at : at + length] for at in starts]

    def _continued(
        self, made: Made, sequences: list[tuple[list[int], list[int]]]
    ) -> list[tuple[list[float], list[bool]]]:
        if made.press is None:
            with _measured(made, self.config.dtype) as net:
                return continued(net, sequences)
        text = self.calibration[made.press["sample"]].read_text()
        size = len(text) // PRESS_TEXTS
        texts = [text[size * k : size * (k + 1)] for k in range(PRESS_TEXTS)]
        given = {"sequences": sequences, "texts": texts, "dtype": self.config.dtype}
        file = _written(self.work / "press.json", json.dumps(given))
        program = [os.environ["KVPRESS_PYTHON"], str(ROOT / "scripts" / "after_prefill.py")]
        how = [made.press["press"], json.dumps(made.press["settings"])]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        out = self.work / "pressed.json"
        subprocess.run([*program, self.model, file, out, *how], check=True, env=environment)
        losses: list[tuple[list[float], list[bool]]] = json.loads(out.read_text())
        return losses


class Similarities(Bench):
    """An encoder, and the similarities of sentences by it."""

    seq_len = 256

    def _read(self, texts: Path) -> None:
        super()._read(texts)
        pairs = itertools.islice(csv.reader(STSB.read(texts).splitlines()), PASSAGES)
        self._pairs = tuple(text for row in pairs for text in row[:2])

    def develop(self, made: Made) -> float:
        """Return what the correlation on sentences of EWT lacks of 1."""
        return 1 - self.correlation(made, tuple(self._develop[1].splitlines()[: 2 * PASSAGES]))

    def publish(self, made: Made, short: bool) -> dict[str, float]:
        """Return the correlation on pairs of STSb."""
        return {"similarity": self.correlation(made, self._pairs)}

    def correlation(self, made: Made, sentences: tuple[str, ...]) -> float:
        """Return the correlation of all pairwise similarities with those of the original."""
        return similarity_correlation(self._embedded(made, sentences), self._original(sentences))

    @cache  # noqa: B019  # one bench a run
    def _original(self, sentences: tuple[str, ...]) -> Any:
        return self._embedded(Made(from_pretrained(self.model, dtype="float32")), sentences)

    def _embedded(self, made: Made, sentences: tuple[str, ...]) -> Any:
        examples = Examples([(text,) for text in sentences], None, True)
        rows = tokenized_rows(examples, self.tokenizer, self.seq_len)
        with _measured(made, self.config.dtype) as net:
            return embeddings(Pass(net, rows, self.tokenizer, 32))


class OwnText(Bench):
    """A causal model without a tokenizer, and sequences that it wrote as numbers."""

    seq_len = OWN

    def _read(self, texts: Path) -> None:
        self.model = str(_with_numbers(Path(self.model), self.work / "with-numbers"))
        net = from_pretrained(self.model, dtype="float32")
        *samples, self._development, self._own = (own_text(net, k) for k in range(SAMPLES + 2))
        self.calibration = [
            _written(self.work / f"own{k}.txt", text) for k, text in enumerate(samples)
        ]

    def develop(self, made: Made) -> float:
        """Return the mean loss on other sequences, in nats."""
        with _measured(made, self.config.dtype) as net:
            return self.nll(net, self._development, OWN)

    def publish(self, made: Made, short: bool) -> dict[str, float]:
        """Return the perplexity of sequences that no row has seen."""
        with _measured(made, self.config.dtype) as net:
            return {"own_text": math.exp(self.nll(net, self._own, OWN))}


BENCHES = {
    "text": Bench,
    "far": Far,
    "prefilled": Prefilled,
    "similarity": Similarities,
    "own_text": OwnText,
}


def own_text(net: PreTrainedModel, seed: int, count: int = TOKENS // OWN * 5 // 4) -> str:
    """Return sequences that a causal model writes, those that do not end early: a line each."""
    torch.manual_seed(seed)
    start, lines = torch.full((512, 1), net.config.bos_token_id), list[str]()
    while len(lines) < count:
        how = {"do_sample": True, "max_new_tokens": OWN - 1, "top_k": 0}
        ids = net.generate(start, attention_mask=torch.ones_like(start), **how)
        ended = (ids == net.config.eos_token_id).any(1)
        lines += [" ".join(map(str, row)) for row in ids[~ended].tolist() if len(row) == OWN]
    return "\n".join(lines[:count])


def _with_numbers(model: Path, folder: Path) -> Path:
    """Copy a model without a tokenizer beside one whose words are the numbers of tokens."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({str(n): n for n in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def _even_widths(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by torch's fused kernel, which takes values as wide as keys alone."""
    width = value.shape[-1]
    value = nn.functional.pad(value, (0, key.shape[-1] - width))
    output, _ = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    return output[..., :width], None


AttentionInterface.register("even_widths", _even_widths)
AttentionMaskInterface.register("even_widths", sdpa_mask)


@contextmanager
def _measured(made: Made, dtype: str) -> Iterator[PreTrainedModel]:
    """Yield a model in a type, in its context; the frequencies of rotations stay as they are."""
    with ExitStack() as stack:
        for context in made.contexts:
            stack.enter_context(context)
        buffers = {name: buffer.clone() for name, buffer in made.net.named_buffers()}
        net = made.net.to(getattr(torch, dtype)).eval()
        for name, buffer in net.named_buffers():
            buffer.data = buffers[name]
        yield net


def _quarters(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    bounds = [len(lines) * k // (SAMPLES + 1) for k in range(SAMPLES + 2)]
    return ["".join(lines[a:b]) for a, b in itertools.pairwise(bounds)]


def _as_published(text: str) -> str:
    """Join rows by two newlines, as of the data set on the hub: each ends with a newline."""
    rows = text.removesuffix("\n").split("\n")
    return "\n\n".join(f"{row}\n" if row.strip() else "" for row in rows)


def _sentences_of(conllu: str) -> str:
    marked = "# text = "
    lines = conllu.splitlines()
    return "\n".join(line.removeprefix(marked) for line in lines if line.startswith(marked))


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _tasks(lines: list[str], work: Path) -> list[Path]:
    """Write two tasks of lm-eval: last words of passages, and their last sentences among four."""
    whole = passages(lines, PASSAGES)
    words = [{"context": one.context, "answer": one.word} for one in whole]
    draw, endings = random.Random(0), []
    for one in whole[::2]:
        others = draw.sample([other for other in whole if other is not one], 3)
        choices = [f"{each.sentence} {each.word}" for each in (*others, one)]
        order = draw.sample(range(4), 4)
        start = one.context.removesuffix(one.sentence).strip()
        label = order.index(3)
        endings.append({"context": start, "choices": [choices[k] for k in order], "label": label})
    shared = {"test_split": "test", "metadata": {"version": 1}, "dataset_path": "json"}
    of: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "last_word": (
            words,
            {
                "output_type": "loglikelihood",
                "doc_to_text": "{{context}}",
                "doc_to_target": " {{answer}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean"}],
            },
        ),
        "endings": (
            endings,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{context}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{label}}",
                "metric_list": [{"metric": "acc_norm", "aggregation": "mean"}],
            },
        ),
    }
    files = []
    for name, (rows, how) in of.items():
        data = _written(work / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        given = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        files.append(_written(work / f"{name}.yaml", yaml.safe_dump({**given, **shared, **how})))
    return files


app = typer.Typer(add_completion=False)


@app.command()
def measure(
    config: Annotated[Path, typer.Argument(help="Rows, in configs/bench.")],
    model: Annotated[str, typer.Option(help="Folder of the model.")],
    texts: Annotated[Path, typer.Option(help="Folder of the texts.")],
    work: Annotated[Path, typer.Option(help="Folder for intermediate files.")],
    row: Annotated[str | None, typer.Option(help="Only this row.")] = None,
    samples: Annotated[int, typer.Option(help="Samples.", min=1, max=SAMPLES)] = SAMPLES,
) -> None:
    """Measure the rows that are not in results.json yet."""
    table, rows = config.stem, read_config(config)
    results = Results.read()
    bench = BENCHES[rows.measure](rows, model, texts, work)
    wanted = rows.rows if row is None else [rows.named(row)]
    todo = [
        (one, sample)
        for sample in range(samples)
        for one in wanted
        if not (sample and one.method == "original")
    ]
    for number, (one, sample) in enumerate(todo, 1):
        if results.get(table, one.name, sample) is not None:
            continue
        console.print(f"{number}/{len(todo)} {one.name}, sample {sample}")
        first = results.get(table, one.name, 0)
        tried: tuple[float, ...] = ()
        if first is not None:
            chosen = one.chosen_of(first)
        else:
            if len(one.tries) > 1:
                tried = tuple(bench.develop(bench.make(one, each, 0)) for each in one.tries)
            chosen = one.tries[tried.index(min(tried))] if tried else one.tries[0]
        began = time.monotonic()
        made = bench.make(one, chosen, sample)
        seconds = round(time.monotonic() - began, 1)
        numbers = {n: round(v, 5) for n, v in bench.publish(made, one.short).items()}
        console.print(f"  {chosen} {seconds:.0f} s {numbers}")
        results = Results.read().write_with(
            Result(
                table=table,
                row=one.name,
                sample=sample,
                settings={**one.settings, **chosen},
                tried=tried,
                seconds=seconds,
                numbers=numbers,
                headprune=headprune.__version__,
                model_sha256=rows.sha256,
            )
        )


# columns of tables: name in results, title, and whether more is better
_COLUMNS = {
    "wikitext2": ("WikiText-2", False),
    "wikitext2_128": ("at 128", False),
    "wikitext2_far": ("WikiText-2 after 512", False),
    "brown_far": ("Brown after 512", False),
    "wikitext2_next": ("WikiText-2, next 512", False),
    "brown_next": ("Brown, next 512", False),
    "needles": ("needles", True),
    "needle_nats": ("nats of a needle", False),
    "kv_bytes": ("KV bytes", False),
    "brown": ("Brown", False),
    "passage_words": ("passage words", True),
    "last_word": ("last words", True),
    "endings": ("endings", True),
    "similarity": ("similarity", True),
    "own_text": ("own text", False),
}
_MARK = re.compile(r"(<!-- protocol: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str, results: Results) -> str:
    """Return the table of a config in Markdown: means over samples, relative to the original."""
    config = read_config(CONFIGS / f"{name}.yaml")
    original = results.original(config.sha256, name)
    if original is None:
        return "Not measured yet.\n"
    measured = sorted((r for r in results.results if r.table == name), key=lambda r: r.sample)
    columns = {n: c for n, c in _COLUMNS.items() if any(n in r.numbers for r in measured)}
    head = ["", *(title for title, _ in columns.values()), "samples", "tries", "seconds"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    values = [original.numbers[n] for n in columns]
    whole = [f"{value:,.0f}" if value > 1e6 else f"{value:.3f}" for value in values]
    lines.append(f"| original | {' | '.join(whole)} | | | |")
    for row in config.rows:
        own = [r for r in measured if r.row == row.name]
        if row.method == "original" or not own:
            continue
        cells = []
        for column in columns:
            base = original.numbers[column]
            values = [r.numbers[column] / base for r in own if column in r.numbers]
            cells.append(_mean_of(values))
        for result in own:
            row.chosen_of(result)
        seconds, tries = f"{mean(r.seconds for r in own):.0f}", max(len(own[0].tried), 1)
        lines.append(f"| {row.name} | {' | '.join(cells)} | {len(own)} | {tries} | {seconds} |")
    return "\n".join(lines) + "\n"


def _mean_of(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def rendered(page: str, results: Results) -> str:
    """Return a page with the tables that its marks name."""
    return _MARK.sub(lambda found: found[1] + table(found[2], results) + found[3], page)


@app.command()
def pages() -> None:
    """Write the tables of results.json into the pages that name them."""
    results = Results.read()
    for page in sorted(RESULTS.parent.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := rendered(text, results)) != text:
            page.write_text(new, encoding="utf-8")
            console.print(f"{page.name} written")


if __name__ == "__main__":
    app()
