"""KV heads of a sentence encoder merged: quality by merge, grouping and ratio.

    python scripts/bench_gqa.py --model FOLDER --data PAIRS --calibrate TEXT --kv-heads 6,3,1

Pairs have a score (--text-column A,B --label-column S). Measured are Spearman's correlation with
it, and the correlation of all similarities among the first 256 texts with those of the original.
Every row is converted, proven, written and reloaded.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from transformers import PreTrainedModel

from headprune import from_pretrained
from headprune.config import ConvertConfig, DataConfig, Grouping
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import tokenized_rows
from headprune.evaluation.quality import embeddings
from headprune.model.loading import load_tokenizer
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


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")],
    data: Annotated[str, typer.Option(help="Pairs with a score.")],
    calibrate: Annotated[str, typer.Option(help="Calibration text.")],
    text_column: Annotated[str, typer.Option(help="Columns of a pair.")],
    label_column: Annotated[str, typer.Option(help="Column of its score.")],
    kv_heads: Annotated[str, typer.Option(help="Numbers of KV heads.")] = "1",
    merges: Annotated[str, typer.Option(help="Merges.")] = "mean,procrustes,lowrank",
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 16_384,
    seq_len: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 512,
) -> None:
    """Convert, measure."""
    source = DataConfig(source=data, text_column=text_column, label_column=label_column)
    pairs = Pairs(model, source)
    rows: list[dict[str, Any]] = []
    each = itertools.product(map(int, kv_heads.split(",")), merges.split(","), Grouping)
    for count, merge, grouping in each:
        if count == 1 and grouping is Grouping.SIMILAR:
            continue  # there is one group
        text = DataConfig(source=calibrate) if merge in NEEDS_CALIBRATION else None
        config = ConvertConfig(
            kv_heads=count,
            merge=merge,
            grouping=grouping,
            calibration_tokens=tokens,
            seq_len=seq_len,
        )
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            convert_gqa(model, out, config, calibrate=text)
            settings = {"kv heads": count, "merge": merge, "grouping": grouping.value}
            rows.append({**settings, **pairs.measure(from_pretrained(out))})
        console.print(rows[-1])
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
