"""What gates cost while they are trained, and what a physical cut saves. Ratios of one run.

    python scripts/bench_speed.py --model FOLDER --data TEXT

Every ratio is taken between two things timed in turn (A B A B ...) in this process; the median of
the pairwise ratios is reported. Peak memory is that of two separate processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from headprune import from_pretrained
from headprune.config import DataConfig, Train
from headprune.data.read import read_examples
from headprune.data.sequences import packed_sequences
from headprune.gates.gates import Gates
from headprune.gates.objectives import labelled
from headprune.gates.optimizer import GateOptimizer
from headprune.gates.sparsity import HeadTarget
from headprune.gates.trainer import GatedModel, freeze
from headprune.model.attention import attention_of
from headprune.model.gating import gated
from headprune.model.loading import load_tokenizer
from headprune.model.units import default_unit, head_budget, unit_sizes
from headprune.planning.from_scores import plan_from_scores
from headprune.surgery.cut import cut_heads, resolve

console = Console()


def paired_ratio(
    a: Callable[[], object], b: Callable[[], object], pairs: int, device: str
) -> tuple[float, float, float]:
    """Times a and b in turn; returns median seconds of a, of b, and the median ratio b / a."""

    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(a), seconds(b)  # warm-up
    times = [(seconds(a), seconds(b)) for _ in range(pairs)]
    return (
        median(t for t, _ in times),
        median(t for _, t in times),
        median(tb / ta for ta, tb in times),
    )


def plain_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Forward and backward of the frozen model, with gradients to the first layer's input."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded, labels=ids, use_cache=False).loss.backward()


def gate_steps(
    model: PreTrainedModel, ids: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """``plain_step``, and a whole step of gate training."""
    attentions = attention_of(model)
    freeze(model, attentions, Train.GATES)
    gates = Gates(attentions, default_unit(attentions), 3.0, 2 / 3).to(ids.device)
    sizes = [int(size) for size in gates.sizes]
    sparsity = HeadTarget(sum(sizes) * 3 // 4, sizes, warmup=0.5)
    optimizer = GateOptimizer(gates.log_alpha, gates.scale, [], 0.5, 0.02, 0.02)
    trained = GatedModel(model, gates, labelled).train()
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}

    def plain() -> None:
        gates.disable()
        plain_step(model, ids)

    def step() -> None:
        with gated(attentions, gates.source):
            trained(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsity.after_step(gates, done=0.2)

    return plain, step


def gate_step_ratio(model: PreTrainedModel, ids: torch.Tensor, pairs: int) -> dict[str, float]:
    """A whole gate-training step against ``plain_step``."""
    plain_s, step_s, ratio = paired_ratio(*gate_steps(model, ids), pairs, ids.device.type)
    return {"plain_s": plain_s, "gate_step_s": step_s, "ratio": ratio}


def forward_flops(model: PreTrainedModel, length: int) -> tuple[float, float]:
    """FLOPs of a forward over ``length`` tokens: in attention, and in all (embedding look-up free).

    Two per weight and token, and for scores and values 2 x 2 x heads x head_dim x length^2, halved
    where a causal kernel skips the upper triangle.
    """
    attention = 0.0
    for a in attention_of(model):
        weights = sum(p.module.get_parameter("weight").numel() for p in a.projections)
        attention += 2 * weights * length + 2 * a.query_heads * a.head_dim * length**2
    inside = {id(p.module) for a in attention_of(model) for p in a.projections}
    rest = sum(
        m.weight.numel()
        for m in model.modules()
        if isinstance(m, torch.nn.Linear) and id(m) not in inside
    )
    return attention, attention + 2 * rest * length


def prefill_rows(
    build: Callable[[], PreTrainedModel], ids: torch.Tensor, pairs: int
) -> list[dict[str, float]]:
    """Prefill of the original against physical cuts; measured speed-up beside the ideal one."""
    rows = []
    original = build()
    before_attention, before = forward_flops(original, ids.shape[1])
    for removed in (0.25, 0.5, 0.75):
        model = build()
        attentions = attention_of(model)
        unit = default_unit(attentions)
        sizes = unit_sizes(attentions, unit)
        scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
        plan = plan_from_scores(attentions, unit, scores, head_budget(1 - removed, sizes))
        cut_heads(model, resolve(plan, model))
        after_attention, after = forward_flops(model, ids.shape[1])

        @torch.no_grad()
        def prefill(net: PreTrainedModel) -> None:
            net(ids, use_cache=True)

        cut_s, original_s, speedup = paired_ratio(
            partial(prefill, model), partial(prefill, original), pairs, ids.device.type
        )
        ideal = before / after
        rows.append(
            {
                "heads_removed": removed,
                "attention_flops_removed": 1 - after_attention / before_attention,
                "all_flops_removed": 1 - after / before,
                "original_s": original_s,
                "cut_s": cut_s,
                "speedup": speedup,
                "ideal_speedup": ideal,
                "share_of_ideal_gain": (speedup - 1) / (ideal - 1),
            }
        )
        del model
    return rows


def peak_memory_ratio(
    model: str, data: str, steps: int, seq_len: int, batch: int
) -> dict[str, Any]:
    """Peak resident memory of ``headprune train-gates`` against the plain loop, as processes."""

    def peak(command: list[str]) -> int:
        code = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
            "stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *command], check=True, capture_output=True, text=True
        )
        return int(done.stdout.split()[-1])

    sizes = ["--config", f"seq_len={seq_len}", "--config", f"batch_size={batch}"]
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "-m", "headprune", "train-gates", model, "--data", data]
        train += [f"{folder}/g", "--target-heads", "0.75", "--steps", str(steps)]
        gates_kib = peak([*train, *sizes])
    plain = [sys.executable, __file__, "--plain-loop", str(steps), "--model", model, "--data", data]
    plain_kib = peak([*plain, *sizes])
    return {"plain_kib": plain_kib, "train_gates_kib": gates_kib, "ratio": gates_kib / plain_kib}


def batch_of(model: str, data: str, seq_len: int, batch: int) -> torch.Tensor:
    """The first windows of a text."""
    windows = packed_sequences(
        read_examples(DataConfig(source=data)), load_tokenizer(model), seq_len, need=batch
    )
    return torch.tensor(windows[:batch]["input_ids"])


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows of numbers."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help="Model folder.")],
    data: Annotated[str, typer.Option(help="Text for the gate-training step.")],
    pairs: Annotated[int, typer.Option(help="Timed pairs per ratio.")] = 7,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence of a training step.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences per training step.")] = 2,
    prefill: Annotated[int, typer.Option(help="Tokens of the prefill.")] = 1024,
    plain_loop: Annotated[int, typer.Option(help="Only run so many plain steps.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Measure, print, and optionally write."""
    if plain_loop:
        net = from_pretrained(model).requires_grad_(False)
        ids = batch_of(model, data, seq_len, batch_size)
        for _ in range(plain_loop):
            plain_step(net, ids)
        return
    ids = batch_of(model, data, seq_len, batch_size)
    step = gate_step_ratio(from_pretrained(model), ids, pairs)
    show("gate-training step against plain forward + backward", [step])
    rows = prefill_rows(lambda: from_pretrained(model), batch_of(model, data, prefill, 1), pairs)
    show(f"prefill of {prefill} tokens, physical kv-group cuts", rows)
    memory = peak_memory_ratio(model, data, 3, seq_len, batch_size)
    show("peak resident memory", [memory])
    results = {"gate_step": step, "prefill": rows, "peak_memory": memory}
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
