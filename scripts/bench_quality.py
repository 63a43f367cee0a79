"""Perplexity after trained gates, against the original: the table in docs/benchmarks.

    python scripts/bench_quality.py --model FOLDER --data TEST --train-data TRAIN

Protocol: the test text as one document, its first 40 windows of 512 tokens, no overlap, the
first token of each window unscored, float32. Gates are trained on another text with the weights
frozen, 300 steps of 1,024 tokens. Every row is cut, proven, written and reloaded; single heads of a
grouped-query model leave ragged groups.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from headprune import from_pretrained
from headprune.config import (
    CalibrationConfig,
    DataConfig,
    Dtype,
    LayoutOption,
    Method,
    Objective,
    Train,
    TrainGatesConfig,
)
from headprune.context import Context
from headprune.data.passages import lines_of, passages
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import packed_sequences
from headprune.evaluation.metrics import Samples
from headprune.evaluation.probes import last_word_columns, last_words
from headprune.evaluation.quality import causal_losses
from headprune.gates.train_gates import train_gates
from headprune.model.answers import answered
from headprune.model.batch import most_tokens
from headprune.model.loading import load_tokenizer
from headprune.planning.from_evidence import CutRequest
from headprune.result.prune import prune
from headprune.tensors.units import Unit

console = Console()
LAST_WORDS = 400  # passages of another domain


class Protocol:
    """The windows that every row is measured on."""

    def __init__(
        self, model: str, data: str, windows: int, seq_len: int, other: str | None = None
    ) -> None:
        self.tokenizer = load_tokenizer(model)
        self._shape = windows, seq_len
        self.windows = self._packed(read_examples(DataConfig(source=data)))
        self.other = None if other is None else read_examples(DataConfig(source=other))

    def perplexity(self, model: PreTrainedModel) -> float:
        """Perplexity of a model over the windows."""
        return self._perplexity(model, self.windows)

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """The same, and what a text of another domain shows, if there is one."""
        found = {"perplexity": self.perplexity(model)}
        if self.other is None:
            return found
        found["other_perplexity"] = self._perplexity(model, self._packed(self.other))
        most = most_tokens(model, self.tokenizer)
        given = last_words(passages(lines_of(self.other), LAST_WORDS), self.tokenizer, most)
        words = last_word_columns(given, answered(model, [one.row for one in given], 4))
        samples = Samples(words)
        for name in samples.metrics():
            found[name] = samples.value(name)
        return found

    def _packed(self, examples: Examples) -> Dataset:
        windows, seq_len = self._shape
        packed = packed_sequences(examples, self.tokenizer, seq_len, need=windows)
        return packed.select(range(windows))

    def _perplexity(self, model: PreTrainedModel, windows: Dataset) -> float:
        losses = causal_losses(model, windows, self.tokenizer, batch_size=2)
        return Samples(losses._asdict()).value("perplexity")


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")],
    data: Annotated[str, typer.Option(help="Test text.")],
    train_data: Annotated[str, typer.Option(help="Training text.")],
    keep: Annotated[str, typer.Option(help="Shares of heads to keep.")] = "0.75,0.5",
    units: Annotated[str, typer.Option(help="Units.")] = "head,kv-group",
    method: Annotated[Method, typer.Option(help="How heads are chosen.")] = Method.AUTO,
    train: Annotated[Train, typer.Option(help="What is trained beside the gates.")] = Train.GATES,
    objective: Annotated[Objective, typer.Option(help="The loss.")] = Objective.AUTO,
    refit: Annotated[
        bool, typer.Option(help="Also cut with W_O refitted, on the training text.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of batch-size x seq-len tokens.")] = 300,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    dtype: Annotated[Dtype, typer.Option(help="Element type in training.")] = Dtype.AUTO,
    windows: Annotated[int, typer.Option(help="Test windows.")] = 40,
    window: Annotated[int, typer.Option(help="Tokens per test window.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the training.")] = 0,
    other: Annotated[str | None, typer.Option(help="Text of another domain.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Train, cut, measure."""
    protocol = Protocol(model, data, windows, window, other)
    original = protocol.measure(from_pretrained(model, dtype="float32"))
    console.print(f"original: {original}")
    rows: list[dict[str, Any]] = []
    for unit in map(Unit, units.split(",")):
        for share in map(float, keep.split(",")):
            config = TrainGatesConfig(
                target_heads=share,
                unit=unit,
                method=method,
                train=train,
                objective=objective,
                steps=steps,
                batch_size=batch_size,
                seq_len=seq_len,
                dtype=dtype,
                seed=seed,
            )
            with tempfile.TemporaryDirectory() as folder:
                gates = Path(folder) / "gates"
                text = DataConfig(source=train_data)
                start = time.monotonic()
                run = train_gates(model, text, gates, config, context=Context(step=say_step))
                seconds = time.monotonic() - start
                layout = LayoutOption.RAGGED if run.ragged else LayoutOption.PER_LAYER
                # a refit may be in the gates, and goes with no trained weights
                fits = refit and train is Train.GATES and run.metadata.method is not Method.REFIT
                for fitted in (None, text) if fits else (None,):
                    out = Path(folder) / f"out-{fitted is not None}"
                    result = prune(
                        model,
                        out,
                        CutRequest(gates=gates, layout=layout),
                        refit=fitted,
                        calibration=CalibrationConfig(dtype=Dtype.FLOAT32),
                    )
                    measured = protocol.measure(from_pretrained(out))
                    rows.append(
                        {
                            "unit": unit.value,
                            "refit": result.manifest.refit is not None,
                            "heads_kept": run.metadata.kept_heads,
                            "heads": run.metadata.query_heads,
                            "kv_heads": result.manifest.kv_heads[1],
                            **ratios(measured, original),
                            **measured,
                            "train_s": seconds,
                        }
                    )
                    console.print(rows[-1])
            if output is not None:
                content = {"model": model, "original": original, "steps": steps, "rows": rows}
                output.write_text(json.dumps(content, indent=2) + "\n")
    table = Table(title=f"original {original}")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def ratios(measured: dict[str, float], original: dict[str, float]) -> dict[str, float]:
    """Perplexities over the original's, and the share of its last words that is still right."""
    named = {"ratio": "perplexity", "other_ratio": "other_perplexity"}
    named["last_words"] = "last_word_accuracy"
    return {n: measured[key] / original[key] for n, key in named.items() if key in measured}


def say_step(step: int, steps: int, numbers: str = "") -> None:
    """One line every twenty steps."""
    if step % 20 == 0:
        console.print(f"  step {step}/{steps} {numbers}")


if __name__ == "__main__":
    typer.run(main)
