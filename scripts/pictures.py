"""Pictures and pasted outputs of README and docs, from the demo: ``python scripts/pictures.py``.

docs/pictures gets terminals, roles and the drawing of the README as SVG, light and dark. The pages
of report and attention become PNG, by Chromium.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

import headprune
from headprune.evaluation.report import Report
from headprune.io.figures import GRID, INK, MUTED, PAPER, Series, curve, save
from headprune.model.attention import attention_of
from headprune.model.open import read_model
from headprune.render import terminal
from headprune.render.blocks import Block
from headprune.render.models import evaluation, inspection
from headprune.render.records import contenders, proof
from headprune.schemas.manifest import read_manifest
from protocol import Results

ROOT = Path(__file__).resolve().parents[1]
PICTURES, DEMO = ROOT / "docs" / "pictures", ROOT / "demo-results"
SMALL = DEMO / "three-quarters" / "smollm2-small"
SENTENCE = "The cat sat on the mat, and the dog lay on the rug. The cat sat on the mat again."
WIDTH = 108  # columns of the terminal
THEMES = {"": DEFAULT_TERMINAL_THEME, "-dark": MONOKAI}
DARK = {INK: "#e5e7eb", MUTED: "#9ca3af", GRID: "#374151", PAPER: "#1e2129"}
# first letters and last of rows in results.json, and what a curve calls them
CACHES = {
    ("kv-cache", "original"): "16, 8 and 4 bits",
    ("smollm2-kv", "by layer"): "KV heads, by layer",
    ("smollm2-kv", "latent"): "one latent",
}
ORIGINALS = ("original", "original, F16")
COLOURS = {"": ("#1f2937", "#2563eb", "#d1d5db"), "-dark": ("#e5e7eb", "#60a5fa", "#4b5563")}


def shown(name: str, command: str, show: Callable[[Console], None]) -> None:
    """Draw what the terminal of a command shows."""
    for suffix, theme in THEMES.items():
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
            console.print(f"[bold]$ {command}[/]\n", highlight=False)
            show(console)
        console.save_svg(str(PICTURES / f"{name}{suffix}.svg"), title="headprune", theme=theme)


def pasted(name: str, blocks: list[Block]) -> None:
    """Put text of a terminal below its marks in README and docs."""
    console = Console(width=80, color_system=None, record=True, file=io.StringIO())
    terminal.show(console, blocks)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    text = "\n".join(line for line in lines if line.strip(" ─"))
    mark = f"<!-- output: {name} -->\n```text\n"
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        before, found, after = page.read_text(encoding="utf-8").partition(mark)
        if found:
            rest = after[after.index("```") :]
            page.write_text(f"{before}{mark}{text}\n{rest}", encoding="utf-8")


def photographed(page: Path, size: str) -> None:
    """Take a picture of a page in light and dark."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        print(f"No Chromium is installed: {page.stem}.png stays as it is.")
        return
    for suffix in THEMES:
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}"]
        flags += ["--blink-settings=preferredColorScheme=0"] if suffix else []
        target = PICTURES / f"{page.stem}{suffix}.png"
        subprocess.run(
            [browser, *flags, f"--screenshot={target}", page.as_uri()],
            capture_output=True,
            check=True,
        )


def looked_at(model: str) -> None:
    """Draw the roles of a model's heads, and the attention of one of them in a sentence."""
    roles, page = DEMO / "roles", DEMO / "attention.html"
    headprune.roles(
        model,
        roles,
        data=DEMO.parent / "scripts" / "demo" / "test.txt",
        sequences=16,
        overwrite=True,
    )
    in_the_dark(Path(shutil.copy(roles / "roles.svg", PICTURES / "roles.svg")))
    headprune.attention(model, page, text=SENTENCE, head=("18.6",), overwrite=True)
    photographed(page, "1200,900")


def curve_of_caches() -> None:
    """Draw perplexity by KV bytes per token, of all that is in results.json."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in CACHES.values()}
    results = [r for r in Results.read().results if r.sample == 0]
    whole = {r.table: r.numbers["wikitext2"] for r in results if r.row in ORIGINALS}
    whole["smollm2-kv"] = whole["smollm2-heads"]
    for one in results:
        for (table, part), name in CACHES.items():
            if one.table == table and (one.row.startswith(part) or one.row.endswith(part)):
                size = one.settings.get("bytes") or float(one.row.split()[0].replace(",", ""))
                points[name].append((size, one.numbers["wikitext2"] / whole[table]))
    series = [
        Series(way, [size for size, _ in sorted(at)], [ratio for _, ratio in sorted(at)])
        for way, at in points.items()
    ]
    title, x, y = "SmolLM2-135M-Instruct, untrained", "KV bytes per token", "perplexity, ratio"
    file = save(curve(series, title, x, y, 1.0, higher_is_better=False), PICTURES / "cache.svg")
    in_the_dark(file)


def in_the_dark(file: Path) -> None:
    """Write a picture in the colours of a dark page as well."""
    drawn = file.read_text(encoding="utf-8")
    for light, dark in DARK.items():
        drawn = drawn.replace(light, dark)
    (PICTURES / f"{file.stem}-dark.svg").write_text(drawn, encoding="utf-8")


def drawing(report: Report) -> None:
    """Draw KV heads before and after, the saving and its price."""
    assert report.against is not None
    before, after = (
        [attention.kv_heads for attention in attention_of(read_model(place).skeleton)]
        for place in (report.against.name, SMALL)
    )
    model, base = (
        {one.name: one.value for one in side.metrics} for side in (report.model, report.against)
    )
    bars = {
        "KV cache per token": sum(after) / sum(before),
        "perplexity": model["perplexity"] / base["perplexity"],
    }
    for suffix, (ink, fill, pale) in COLOURS.items():
        mpl.rcParams.update({"svg.fonttype": "path", "text.color": ink, "font.size": 11})
        figure, (heads, sizes) = plt.subplots(1, 2, figsize=(9, 2.6), width_ratios=(3, 2))
        _grid(heads, before, after, fill, pale)
        heads.set_title(f"{sum(before)} KV heads, {sum(after)} kept; a column per layer", color=ink)
        _bars(sizes, bars, ink, fill, pale)
        figure.tight_layout()
        figure.savefig(PICTURES / f"heads{suffix}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def _grid(axes: Axes, before: list[int], after: list[int], fill: str, pale: str) -> None:
    """A column per layer, a square per KV head; saved ones are pale."""
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


def main() -> None:
    """Draw."""
    PICTURES.mkdir(exist_ok=True)
    report = Report.model_validate_json((SMALL.parent / "report.json").read_text(encoding="utf-8"))
    manifest = read_manifest(SMALL)
    assert report.against is not None
    assert manifest.choice is not None
    choice, inspected = manifest.choice, headprune.inspect(report.against.name)
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shown("inspect", f"headprune inspect {name}", lambda console: inspection(console, inspected))
    shown(
        "compress",
        f"headprune compress {name} small --keep 0.75",
        lambda console: terminal.show(console, [contenders(choice), *proof(manifest)]),
    )
    shown(
        "evaluate",
        f"headprune evaluate small --data test.txt --against {name}",
        lambda console: evaluation(console, report),
    )
    pasted("proof", proof(manifest))
    photographed(DEMO / "report.html", "1200,1500")
    looked_at(report.against.name)
    drawing(report)
    curve_of_caches()


if __name__ == "__main__":
    main()
