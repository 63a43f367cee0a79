"""Pictures of README and docs, from a real run: ``python scripts/pictures.py MODEL TEST WORK``.

MODEL is compressed to three quarters of its KV heads and evaluated on TEST, a text. What is in WORK
already is not run again. docs/pictures gets what a terminal shows (SVG, light and dark), the
report page (PNG, by Chromium) and the drawing of the README.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

import headprune
from headprune.model.attention import attention_of
from headprune.model.open import read_model

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 100  # columns of the terminal
THEMES = {"": DEFAULT_TERMINAL_THEME, "-dark": MONOKAI}
COLOURS = {"": ("#1f2937", "#2563eb", "#d1d5db"), "-dark": ("#e5e7eb", "#60a5fa", "#4b5563")}


def shown(work: Path, name: str, *words: str) -> None:
    """Run a command of headprune, once, and draw what its terminal shows at the end."""
    file = work / f"{name}.ansi"
    if not file.exists():
        env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "headprune", *words]
        done = subprocess.run(command, cwd=work, env=env, stdout=subprocess.PIPE, check=True)
        file.write_bytes(done.stdout)
    text = Text.from_ansi(f"$ headprune {' '.join(words)}\n\n{file.read_text(encoding='utf-8')}")
    for suffix, theme in THEMES.items():
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
            console.print(text)
        target = PICTURES / f"{name}{suffix}.svg"
        console.save_svg(str(target), title=f"headprune {words[0]}", theme=theme)


def photographed(work: Path, page: Path) -> None:
    """Take a picture of a page in light and dark."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        print("No Chromium is installed: report.png stays as it is.")
        return
    for suffix in THEMES:
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,1500"]
        flags += ["--blink-settings=preferredColorScheme=0"] if suffix else []
        target = PICTURES / f"report{suffix}.png"
        subprocess.run(
            [browser, *flags, f"--screenshot={target}", page.as_uri()],
            cwd=work,
            capture_output=True,
            check=True,
        )


def drawing(original: str, small: Path, report: dict[str, Any]) -> None:
    """Draw KV heads before and after, and what is saved and kept."""
    before, after = (
        [attention.kv_heads for attention in attention_of(read_model(place).skeleton)]
        for place in (original, small)
    )
    values = {
        side: {one["name"]: one["value"] for one in report[side]["metrics"]}
        for side in ("model", "against")
    }
    model, base = values["model"], values["against"]
    bars = {
        "KV cache per token": sum(after) / sum(before),
        "last words kept": model["last_word_accuracy"] / base["last_word_accuracy"],
        "perplexity": model["perplexity"] / base["perplexity"],
    }
    for suffix, (ink, fill, pale) in COLOURS.items():
        mpl.rcParams.update({"svg.fonttype": "path", "text.color": ink, "font.size": 11})
        figure, (heads, sizes) = plt.subplots(1, 2, figsize=(9, 2.6), width_ratios=(3, 2))
        _grid(heads, before, after, fill, pale)
        heads.set_title(f"{sum(before)} KV heads, {sum(after)} kept", color=ink)
        _bars(sizes, bars, ink, fill, pale)
        figure.tight_layout()
        figure.savefig(PICTURES / f"heads{suffix}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def _grid(axes: Axes, before: list[int], after: list[int], fill: str, pale: str) -> None:
    """A column per layer, a square per KV head; those that are saved are pale."""
    for layer, (count, left) in enumerate(zip(before, after, strict=True)):
        for head in range(count):
            colour = fill if head < left else pale
            axes.add_patch(Rectangle((layer, head), 0.8, 0.8, color=colour))
    axes.set(xlim=(-0.2, len(before)), ylim=(-0.2, max(before)), aspect="equal")
    axes.axis("off")


def _bars(axes: Axes, bars: dict[str, float], ink: str, fill: str, pale: str) -> None:
    for row, (name, share) in enumerate(reversed(bars.items())):
        axes.barh(row, 1.0, color=pale, height=0.55)
        axes.barh(row, share, color=fill, height=0.28)
        axes.text(-0.03, row, name, ha="right", va="center", color=ink)
        axes.text(max(share, 1.0) + 0.02, row, f"{share:.2f} x", va="center", color=ink)
    axes.set(xlim=(-0.75, 1.45), ylim=(-0.6, len(bars) - 0.4))
    axes.set_title("over the original", color=ink)
    axes.axis("off")


def main(
    model: Annotated[str, typer.Argument(help="Folder of the model.")],
    test: Annotated[Path, typer.Argument(help="Text to measure on.")],
    work: Annotated[Path, typer.Argument(help="Folder for the runs.")],
) -> None:
    """Run, and draw."""
    work.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    link, text = work / "SmolLM2-135M", work / "test.txt"
    for place, target in ((link, Path(model)), (text, test)):
        if not place.exists():
            place.symlink_to(target.resolve())
    name = link.name
    shown(work, "inspect", "inspect", name)
    shown(work, "compress", "compress", name, "small", "--keep", "0.75")
    how = ["--data", text.name, "--against", name, "--max-windows", "40"]
    shown(work, "evaluate", "evaluate", "small", "small/report.json", *how)
    report = json.loads((work / "small" / "report.json").read_text(encoding="utf-8"))
    headprune.report([work / "small"], work / "report.html", overwrite=True)
    photographed(work, work / "report.html")
    drawing(model, work / "small", report)


if __name__ == "__main__":
    typer.run(main)
