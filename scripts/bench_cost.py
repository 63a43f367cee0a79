"""How the cost of every stage grows: ``python scripts/bench_cost.py``, as tables.

Llama shapes with random weights in float32. The unit is one forward pass over the same tokens. The
exponent is the slope of log seconds over log parameters of the layers, at all widths and depths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

from bench_gpu import Size, half_the_groups, machine_of, sample_of
from bench_speed import gate_steps
from headprune.config import ConvertConfig, HealConfig, LayoutOption, ScoreConfig
from headprune.context import Context
from headprune.data.text import Sequences
from headprune.distillation.trainer import HealedModel, trainable
from headprune.evidence.score import gather, scores_of
from headprune.model.attention import attention_of
from headprune.model.heads import HeadWeights
from headprune.model.passes import run_model
from headprune.model.units import default_unit
from headprune.planning.constraints import constraints_of
from headprune.planning.kv_heads import Texts, plan_kv_heads
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.conversion import convert_in_sequence
from headprune.surgery.cut import resolve
from headprune.surgery.merges import MergeContext
from headprune.surgery.merges.merger import Merger
from headprune.surgery.refit import refit

USUAL = Size(256, 688, 2, 8, 4, 256, trained=2048, calibrated=2048, length=256)
WIDTHS, DEPTHS = (128, 256, 384, 512), (1, 2, 4)
HEADS, TOKENS = (4, 8, 16, 32), (1024, 2048, 4096)
FORWARD = "forward"
_LONG = 2.0  # seconds
Seconds = Mapping[str, float]


def shape(width: int, depth: int) -> Size:
    """A Llama of heads of 32 coordinates, two to a KV head."""
    heads = width // 32
    return replace(
        USUAL, hidden=width, inner=width * 43 // 16, layers=depth, heads=heads, kv_heads=heads // 2
    )


class Stages:
    """The stages of one model."""

    def __init__(self, size: Size) -> None:
        self.net: PreTrainedModel = size.build(torch.device("cpu")).float()
        self.sample: Sequences = sample_of(size)
        self.attentions = attention_of(self.net)
        shape = size.trained // size.length, size.length
        self.ids = torch.randint(0, size.vocabulary, shape)
        self.size = size

    def seconds(self) -> Seconds:
        """Return the seconds of every stage over the tokens of the calibration."""
        steps = self.size.calibrated / self.size.trained
        _, gate_step = gate_steps(self.net, self.ids)
        unit = default_unit(self.attentions)
        config = ScoreConfig(criterion="compensated", unit=unit)
        collect = partial(gather, self.net, self.attentions, config, self.sample)
        select = partial(scores_of, "compensated", collect(), self.attentions, unit)
        return {
            FORWARD: timed(self.forward),
            "score, compensated": timed(collect),
            "its selection of heads": timed(select),
            "refit of half the heads": timed(self.refit),
            "lowrank to half the KV heads": timed(self.merge),
            "KV plan": timed(self.plan),
            "gate step": timed(gate_step) * steps,
            "heal step, attention": timed(self.heal()) * steps,
        }

    @torch.no_grad()
    def forward(self) -> None:
        """Run the model."""
        for batch in self.sample.batches():
            run_model(self.net, batch, head=True)

    def refit(self) -> None:
        """Refit every W_O."""
        cuts = [c for c in resolve(half_the_groups(self.net), self.net) if c.attention.query_heads]
        attentions, gates = [cut.attention for cut in cuts], [cut.gate() for cut in cuts]
        refit(self.net, attentions, gates, self.sample.whole())

    def merge(self) -> None:
        """Merge KV heads in pairs."""
        merger = Merger.of(ConvertConfig(kv_heads=1), calibrated=True)

        def converted(
            attention: Attention, heads: HeadWeights, setting: MergeContext
        ) -> HeadWeights:
            groups = merger.groups(heads, setting, attention.kv_heads // 2)
            merger.merged(heads, setting, groups)
            return heads

        convert_in_sequence(self.net, self.attentions, self.sample.whole(), converted)

    def plan(self) -> None:
        """Weigh all ways of all modules."""
        config = ConvertConfig(kv_budget=0.5)
        merger = Merger.of(config, calibrated=True)
        constraints = constraints_of(self.net, LayoutOption.PER_LAYER, ())
        texts = Texts(self.sample.whole(), None)
        plan_kv_heads(self.net, self.attentions, texts, merger, config, constraints, Context())

    def heal(self) -> Callable[[], None]:
        """Return a step of healing."""
        student = trainable(self.net, self.attentions, HealConfig(steps=1))
        teacher = self.size.build(torch.device("cpu")).float()
        model = HealedModel(student, teacher, bf16=False).train()
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        batch: Any = {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}

        def step() -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a run; of a short one, the median of two after it."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < _LONG:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:] or times)


def exponent(parameters: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log parameters."""
    return float(np.polyfit(np.log(parameters), np.log(seconds), 1)[0])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_passes(shapes: Mapping[str, Size], parameters: bool) -> str:
    """Return a table: a row per stage, a column per shape, and the exponent."""
    found = {name: Stages(size).seconds() for name, size in shapes.items()}
    weights = [12 * size.layers * size.hidden**2 for size in shapes.values()]
    rows = []
    for stage in next(iter(found.values())):
        cells = [stage]
        for each in found.values():
            cells.append(
                f"{each[stage]:.3f} s" if stage == FORWARD else f"{each[stage] / each[FORWARD]:.2f}"
            )
        if parameters:
            cells.append(f"{exponent(weights, [each[stage] for each in found.values()]):.2f}")
        rows.append(cells)
    return table(["", *shapes, *["exponent"] * parameters], rows)


def main(
    quick: Annotated[bool, typer.Option(help="Two shapes, to try it out.")] = False,
) -> None:
    """Measure all shapes and print the tables."""
    widths, depths = (WIDTHS[:2], DEPTHS[:1]) if quick else (WIDTHS, DEPTHS)
    by_shape = {f"{w} x {d}": shape(w, d) for d in depths for w in widths}
    parts = [machine_of(torch.device("cpu")), "\n## Width x layers\n\n"]
    parts.append(in_passes(by_shape, parameters=True))
    if not quick:
        by_heads = {f"{n} heads": replace(USUAL, heads=n, kv_heads=n // 2) for n in HEADS}
        by_tokens = {f"{n:,} tokens": replace(USUAL, calibrated=n) for n in TOKENS}
        parts += ["\n## Heads, at width 256\n\n", in_passes(by_heads, parameters=False)]
        parts += ["\n## Tokens, at width 256\n\n", in_passes(by_tokens, parameters=False)]
    print("".join(parts))


if __name__ == "__main__":
    typer.run(main)
