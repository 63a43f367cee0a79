"""A cut model healed, measured on the kind of text it learned from and on another.

    python scripts/bench_healing.py --model FOLDER --cut CUT --data MIXED --test TEST --other BROWN

The protocol is that of bench_quality.py. The cut is healed, proven, written and reloaded for every
seed.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench_quality import Protocol, ratios, say_step
from headprune import from_pretrained
from headprune.config import DataConfig, HealConfig, HealObjective, HealOptimizer
from headprune.context import Allowed, Context
from headprune.distillation.heal import heal

console = Console()


def main(
    model: Annotated[str, typer.Option(help="The original: folder or hub id.")],
    cut: Annotated[str, typer.Option(help="What is healed: a folder.")],
    data: Annotated[str, typer.Option(help="Text to heal on.")],
    test: Annotated[str, typer.Option(help="Test text.")],
    other: Annotated[str, typer.Option(help="Text of another domain.")],
    steps: Annotated[int, typer.Option(help="Steps of 1,024 tokens.")] = 300,
    seeds: Annotated[str, typer.Option(help="Seeds.")] = "0",
    optimizer: Annotated[HealOptimizer, typer.Option()] = HealOptimizer.AUTO,
    objective: Annotated[HealObjective, typer.Option()] = HealObjective.AUTO,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Heal, reload, measure."""
    protocol = Protocol(model, test, 40, 512, other)
    original = protocol.measure(from_pretrained(model, dtype="float32"))
    allowed = Allowed(trust_remote_code=True)  # an uneven cut brings ours
    rows: list[dict[str, Any]] = []
    for seed in map(int, seeds.split(",")):
        config = HealConfig(
            steps=steps,
            optimizer=optimizer,
            objective=objective,
            learning_rate=learning_rate,
            seed=seed,
        )
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            context = Context(step=say_step, allowed=allowed)
            out = Path(folder) / "healed"
            done = heal(cut, model, DataConfig(source=data), out, config, context=context)
            seconds = time.monotonic() - start
            measured = protocol.measure(from_pretrained(out, trust_remote_code=True))
        rows.append(
            {
                "seed": seed,
                "taken_after": done.taken_after,
                "loss": [done.before, done.after],
                **ratios(measured, original),
                **measured,
                "seconds": seconds,
            }
        )
        console.print(rows[-1])
        if output is not None:
            content = {"original": original, "steps": steps, "cut": cut, "rows": rows}
            output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
