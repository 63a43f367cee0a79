"""Results in folders, measured beside their original: the rows "by the commands alone" of the docs.

    python scripts/bench_folders.py MODEL CUT HEALED --data TEST --other BROWN

The protocol is that of bench_quality.py. Ratios are those of perplexity, and the share of the
original's last words that is still right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench_quality import Protocol, ratios
from headprune import from_pretrained

console = Console()


def main(
    model: Annotated[str, typer.Argument(help="The original: folder or hub id.")],
    folders: Annotated[list[str], typer.Argument(help="What was made of it.")],
    data: Annotated[str, typer.Option(help="Test text.")],
    other: Annotated[str, typer.Option(help="Text of another domain.")],
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Load each, measure it, print a row."""
    protocol = Protocol(model, data, 40, 512, other)
    original = protocol.measure(from_pretrained(model, dtype="float32"))
    console.print({"folder": model, **original})
    rows = []
    for folder in folders:
        measured = protocol.measure(from_pretrained(folder, dtype="float32"))
        rows.append({"folder": folder, **ratios(measured, original), **measured})
        console.print(rows[-1])
        if output is not None:
            content = {"original": original, "rows": rows}
            output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
