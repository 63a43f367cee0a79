"""KV heads merged: quality by merge, grouping and ratio, and what converting costs.

    python scripts/bench_gqa.py --model FOLDER --data TEST --calibrate TEXT --kv-heads 1

A language model is measured as in bench_quality.py: the first 40 windows of 512 tokens of the test
text. A sentence encoder is measured on pairs with a score (--text-column A,B --label-column S):
Spearman correlation with the score, and the correlation of all similarities among its first 256
texts with those of the original. Every row is converted, proven, written and reloaded.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from transformers import PreTrainedModel

from bench_quality import Protocol
from headprune import from_pretrained
from headprune.config import ConvertConfig, DataConfig, Grouping, HealConfig, HealTrain
from headprune.context import Context
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import tokenized_rows
from headprune.distillation.heal import heal
from headprune.evaluation.quality import embeddings
from headprune.model.loading import load_tokenizer, task_of
from headprune.result.convert_gqa import convert_gqa
from headprune.surgery.merges import NEEDS_CALIBRATION

console = Console()
FIDELITY_TEXTS = 256


class Pairs:
    """Sentence pairs with a score, and the original's similarities among the first texts."""

    def __init__(self, model: str, data: DataConfig) -> None:
        self.tokenizer = load_tokenizer(model)
        examples = read_examples(data)
        self.scores = np.array([float(label) for label in examples.labels or ()])
        self.texts = [text for pair in examples.texts for text in pair]
        self.similarities = self._similarities(self._embedded(from_pretrained(model)))

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Spearman with the scores, correlation of similarities with the original's."""
        vectors = self._embedded(model)
        cosines = (vectors[::2] * vectors[1::2]).sum(1)
        fidelity = np.corrcoef(self._similarities(vectors), self.similarities)[0, 1]
        return {
            "similarity": float(fidelity),
            "spearman": float(spearmanr(cosines, self.scores).statistic),
        }

    def _embedded(self, model: PreTrainedModel) -> np.ndarray:
        rows = tokenized_rows(Examples([(t,) for t in self.texts], None, True), self.tokenizer, 128)
        return np.asarray(embeddings(model, rows, self.tokenizer, 32))

    def _similarities(self, vectors: np.ndarray) -> np.ndarray:
        first = vectors[:FIDELITY_TEXTS]
        return np.asarray((first @ first.T)[np.triu_indices(len(first), 1)])


class Perplexity:
    """Perplexity of a language model, and its ratio to the original's."""

    def __init__(self, model: str, data: DataConfig, windows: int, window: int) -> None:
        self.protocol = Protocol(model, data.source, windows, window)
        self.original = self.protocol.perplexity(from_pretrained(model, dtype="float32"))
        console.print(f"original perplexity: {self.original:.3f}")

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Perplexity and ratio."""
        perplexity = self.protocol.perplexity(model)
        return {"perplexity": perplexity, "ratio": perplexity / self.original}


class Clock:
    """Tells the time that merging took from that of loading, writing and proving."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def on_stage(self, stage: str) -> None:
        """Notes when a stage began."""
        self._began[stage] = time.monotonic()

    def merging(self) -> float:
        """Seconds of the merging itself, and of measuring what a budget is spent on."""
        stages = list(self._began)
        spent = 0.0
        for stage, following in itertools.pairwise(stages):
            if stage.startswith(("merging", "measuring")):
                spent += self._began[following] - self._began[stage]
        return spent


@torch.no_grad()
def plain_forward(model: str, calibrate: str, tokens: int, seq_len: int) -> float:
    """Seconds of one forward of the original over as many tokens, four windows at a time."""
    net, tokenizer = from_pretrained(model, dtype="float32"), load_tokenizer(model)
    text = " ".join(t for t, *_ in read_examples(DataConfig(source=calibrate)).texts)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    windows = torch.tensor(ids[: len(ids) // seq_len * seq_len]).view(-1, seq_len)
    net(input_ids=windows[:1])
    start = time.monotonic()
    for part in windows.split(4):
        net(input_ids=part)
    return time.monotonic() - start


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")],
    data: Annotated[str, typer.Option(help="Test text, or pairs with a score.")],
    calibrate: Annotated[str, typer.Option(help="Calibration text; also for healing.")],
    kv_heads: Annotated[str, typer.Option(help="Numbers of KV heads.")] = "1",
    kv_budgets: Annotated[str, typer.Option(help="Also these shares of KV heads.")] = "",
    merges: Annotated[str, typer.Option(help="Merges.")] = "mean,procrustes,lowrank",
    groupings: Annotated[str, typer.Option(help="Groupings.")] = "adjacent,similar",
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 16_384,
    seq_len: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 512,
    heal_steps: Annotated[int, typer.Option("--heal", help="Also heal, so many steps.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Of healing.")] = 1e-4,
    train: Annotated[HealTrain, typer.Option(help="What healing trains.")] = HealTrain.ALL,
    bf16: Annotated[bool, typer.Option("--bf16", help="Heal in bfloat16.")] = False,
    windows: Annotated[int, typer.Option(help="Test windows.")] = 40,
    window: Annotated[int, typer.Option(help="Tokens per test window.")] = 512,
    text_column: Annotated[str | None, typer.Option(help="Columns of a pair.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of its score.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Convert, measure."""
    source = DataConfig(source=data, text_column=text_column, label_column=label_column)
    causal = task_of(from_pretrained(model)) == "causal-lm"
    measured: Any = Perplexity(model, source, windows, window) if causal else Pairs(model, source)
    forward = plain_forward(model, calibrate, tokens, seq_len)
    console.print(f"one plain forward over {tokens:,} tokens: {forward:.1f} s")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        console.print(row)
        if output is not None:
            content = {"model": model, "forward_s": forward, "rows": rows}
            output.write_text(json.dumps(content, indent=2) + "\n")

    asked = [
        {"kv_heads": count, "merge": merge, "grouping": Grouping(grouping)}
        for count in map(int, filter(None, kv_heads.split(",")))
        for merge in merges.split(",")
        for grouping in (groupings.split(",") if count > 1 else ["adjacent"])
    ]
    asked += [{"kv_budget": share} for share in map(float, filter(None, kv_budgets.split(",")))]
    for settings in asked:
        config = ConvertConfig(**settings, calibration_tokens=tokens, seq_len=seq_len)
        planned = config.merge is None
        text = None
        if planned or config.merge in NEEDS_CALIBRATION:
            text = DataConfig(source=calibrate)
        with tempfile.TemporaryDirectory() as folder:
            out, healed = Path(folder) / "out", Path(folder) / "healed"
            clock = Clock()
            result = convert_gqa(
                model, out, config, calibrate=text, context=Context(stage=clock.on_stage)
            )
            row = {
                "kv_heads": result.pruned.manifest.kv_heads[1],
                "parameters": result.pruned.manifest.parameters[1],
                "merge": "planned" if planned else config.merge,
                "grouping": config.grouping.value,
                "heal": 0,
                **measured.measure(from_pretrained(out)),
            }
            add({**row, "merging_s": clock.merging(), "forwards": clock.merging() / forward})
            if heal_steps:
                healing = HealConfig(
                    steps=heal_steps, train=train, learning_rate=learning_rate, bf16=bf16
                )
                words = DataConfig(source=calibrate)
                heal(out, model, words, healed, healing, context=Context(step=say_step))
                found = measured.measure(from_pretrained(healed))
                add({**row, "heal": heal_steps, **found})
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*cells)
    console.print(table)


def say_step(step: int, steps: int, numbers: str = "") -> None:
    """One line every twenty steps."""
    if numbers and step % 20 == 0:
        console.print(f"  step {step}/{steps} {numbers}")


if __name__ == "__main__":
    typer.run(main)
