"""Pruning without training: criteria with and without refit, beside what others do.

    python scripts/bench_scores.py --model FOLDER --data CALIBRATION --test TEST

Everything happens in memory and at equal head counts: heads are closed by gates, which a cut model
equals (every ``prune`` proves it). Language models are measured as in bench_quality.py (windows of
512 tokens, the first token of each unscored, float32); encoders on scored sentence pairs (Spearman)
and on the correlation of their pairwise similarities with the original's. A causal model without a
tokenizer is measured on sequences that it writes itself, where neither data nor test is given.
Seeds take other parts of the calibration text.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from bench_quality import Protocol
from headprune import from_pretrained
from headprune.config import (
    CalibrationConfig,
    DataConfig,
    ScoreConfig,
)
from headprune.data.batches import calibration
from headprune.data.read import Examples, read_examples
from headprune.data.sequences import tokenized_rows
from headprune.data.text import Sequences
from headprune.evaluation.metrics import rank_correlation, similarity_correlation
from headprune.evaluation.quality import causal_losses, embeddings
from headprune.evidence.score import gather, scores_of
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.gating import fixed, gated
from headprune.model.loading import load_tokenizer, task_of
from headprune.surgery.refit import refit
from headprune.tensors import least_squares
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit
from rivals import CUTTERS, RIVALS, by_scores

console = Console()
OWN_LENGTH = 64  # tokens; most sequences that such a model writes end sooner or later
Quality = Callable[[PreTrainedModel], dict[str, float]]


def language(model: str, test: str, windows: int, other: str | None) -> Quality:
    """What the protocol measures."""
    return Protocol(model, test, windows, 512, other).measure


def own_text(net: PreTrainedModel, count: int, length: int, seed: int) -> Dataset:
    """Sequences that a causal model writes itself, those that do not end before ``length``."""
    torch.manual_seed(seed)
    config = net.config
    found: list[list[int]] = []
    start = torch.full((32, 1), config.bos_token_id)
    while len(found) < count:
        ids = net.generate(start, do_sample=True, max_new_tokens=length - 1, top_k=0)
        ended = (ids == config.eos_token_id).any(1)
        found += [row.tolist() for row, over in zip(ids, ended, strict=True) if not over]
    rows = found[:count]
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * length] * count})


def own_likelihood(net: PreTrainedModel) -> Quality:
    """NLL in nats per token of held-out sequences that the model wrote itself."""
    rows = own_text(net, 128, OWN_LENGTH, seed=1000)

    class Tokens:
        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(map(str, ids))

    def nll(cut: PreTrainedModel) -> dict[str, float]:
        losses = causal_losses(cut, rows, Tokens(), 16)
        return {"nll": float(losses.nll_nats.sum() / losses.tokens.sum())}

    return nll


def pairs(model: str, net: PreTrainedModel, test: str, count: int) -> Quality:
    """Spearman on scored pairs, and fidelity to the original's similarities."""
    examples = read_examples(DataConfig(source=test, text_column="a,b", label_column="score"))
    texts = [(text,) for pair in list(examples.texts)[:count] for text in pair]
    rows = tokenized_rows(Examples(texts, None, True), load_tokenizer(model), 128)
    scores = torch.tensor([float(s) for s in list(examples.labels or [])[:count]]).numpy()
    original = embeddings(net, rows, None or load_tokenizer(model), 32)

    def measured(cut: PreTrainedModel) -> dict[str, float]:
        vectors = embeddings(cut, rows, load_tokenizer(model), 32)
        similar = (vectors[::2] * vectors[1::2]).sum(1)
        return {
            "spearman": rank_correlation(similar, scores.astype(float)),
            "similarity": similarity_correlation(vectors, original),
        }

    return measured


def calibration_of(
    net: PreTrainedModel, model: str, data: str | None, tokens: int, length: int, seed: int
) -> Sequences:
    """Another part of the calibration text per seed."""
    if data is None:
        rows = own_text(net, max(2, tokens // OWN_LENGTH), OWN_LENGTH, seed)

        def collate(features: list[dict[str, Any]]) -> Batch:
            ids = torch.tensor([f["input_ids"] for f in features])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

        return Sequences(rows, collate, batch_size=8)
    config = CalibrationConfig(calibration_tokens=10**9, seq_len=length)
    every = calibration(net, load_tokenizer(model), DataConfig(source=data), config, "bench").fit
    count = max(2, tokens // length)
    step = len(every.rows) / count
    shift = seed / 3  # of a step
    chosen = every.rows.select([int((i + shift) * step) for i in range(count)])
    return replace(every, rows=chosen)


def main(
    model: Annotated[str, typer.Option(help="Model folder.")],
    data: Annotated[str | None, typer.Option(help="Calibration text.")] = None,
    test: Annotated[str | None, typer.Option(help="Test text or pairs.")] = None,
    keep: Annotated[str, typer.Option(help="Shares of heads to keep.")] = "0.75,0.5",
    criteria: Annotated[str, typer.Option(help="Criteria, or none.")] = "gradient,fisher",
    rivals: Annotated[bool, typer.Option(help="Also what others do.")] = False,
    cutters: Annotated[
        bool, typer.Option(help="Also what others do layer by layer, or to layers.")
    ] = False,
    plain: Annotated[bool, typer.Option(help="Also without refit.")] = True,
    seeds: Annotated[int, typer.Option(help="Seeds.")] = 1,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 16_384,
    windows: Annotated[int, typer.Option(help="Test windows (or pairs / 25).")] = 40,
    seq_len: Annotated[int, typer.Option(help="Tokens per calibration sequence.")] = 512,
    products: Annotated[
        str, typer.Option(help="What sums over tokens multiply in: float64, or as a GPU float32.")
    ] = "float64",
    other: Annotated[
        str | None, typer.Option(help="Text of another domain, to measure on.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Score, close, refit, measure."""
    least_squares.product_dtype = lambda device: getattr(torch, products)
    net = from_pretrained(model, dtype="float32").requires_grad_(False)
    if test is None:
        quality = own_likelihood(net)
    elif task_of(net) == "features":
        quality = pairs(model, net, test, windows * 25)
    else:
        quality = language(model, test, windows, other)
    attentions = attention_of(net)
    base = quality(net)
    console.print(f"original: {base}")
    heads = [a.query_heads for a in attentions]
    names = [name for name in criteria.split(",") if name != "none"]
    rows: list[dict[str, Any]] = []

    def add(
        method: str, refitted: bool, share: float, seed: int, measured: dict[str, float]
    ) -> None:
        rows.append({"method": method, "refit": refitted, "keep": share, "seed": seed, **measured})
        first = next(iter(measured))
        ratio = measured[first] / base[first]
        console.print(
            f"{method} refit={refitted} keep={share} seed={seed}: {measured} {ratio:.3f} x"
        )
        if output is not None:
            output.write_text(json.dumps({"base": base, "rows": rows}, indent=2) + "\n")

    shares = sorted(map(float, keep.split(",")), reverse=True)
    for seed in range(seeds):
        examples = calibration_of(net, model, data, tokens, seq_len, seed)
        config = ScoreConfig(criterion=sorted(names), unit=Unit.HEAD, seed=seed) if names else None
        evidence = gather(net, attentions, config, examples) if config else []
        scores = {name: scores_of(name, evidence, attentions, Unit.HEAD) for name in names}
        for name in names:
            for share in shares:
                kept = keep_best(scores[name].tolist(), [1] * sum(heads), round(share * sum(heads)))
                mask = torch.zeros(sum(heads)).bool()
                mask[kept] = True
                gates = _gates(mask, heads)
                if plain:
                    with gated(attentions, fixed(gates)):
                        add(name, False, share, seed, quality(net))
                current = copy.deepcopy(net)
                refit(current, attention_of(current), gates, examples.whole())
                with gated(attention_of(current), fixed(gates)):
                    add(name, True, share, seed, quality(current))
        each = itertools.product(RIVALS if rivals else (), shares, (False, True))
        for label, share, even in each:
            gates, context = by_scores(label, net, share, even, examples)
            name = f"{label}, {'equal layers' if even else 'global'}"
            with context, gated(attentions, fixed(gates)):
                add(name, False, share, seed, quality(net))
        for label, share in itertools.product(CUTTERS if cutters else (), shares):
            gates, context = CUTTERS[label](net, attentions, share, examples)
            closed = sum(int((gate == 0).sum()) for gate in gates)
            with context, gated(attentions, fixed(gates)):
                add(f"{label}, {closed} heads", False, share, seed, quality(net))
    _print(rows, base)


def _gates(kept: Tensor, heads: Sequence[int]) -> list[Tensor]:
    return [part.float() for part in kept.split(list(heads))]


def _print(rows: list[dict[str, Any]], base: dict[str, float]) -> None:
    grid = Table(title=f"mean over seeds (lowest to highest); original {base}")
    for column in ("method", "refit", "keep", *base):
        grid.add_column(column, justify="right")
    groups: dict[tuple[str, bool, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["refit"], row["keep"]), []).append(row)
    for (method, refitted, share), own in groups.items():
        cells = []
        for name in base:
            values = [row[name] for row in own]
            cells.append(f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        grid.add_row(method, "yes" if refitted else "", f"{share:.0%}", *cells)
    console.print(grid)


if __name__ == "__main__":
    typer.run(main)
