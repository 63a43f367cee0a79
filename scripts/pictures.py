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
from statistics import mean

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

import headprune
from headprune.evaluation.report import Report
from headprune.io.figures import GRID, INK, MUTED, PAPER, Series, curve, save
from headprune.render import terminal
from headprune.render.blocks import Block
from headprune.render.models import evaluation, inspection
from headprune.render.records import proof
from headprune.schemas.manifest import read_manifest
from protocol import Result, Results

ROOT = Path(__file__).resolve().parents[1]
PICTURES, DEMO = ROOT / "docs" / "pictures", ROOT / "demo-results"
SMALL = DEMO / "half" / "smollm2-small"
SENTENCE = "The cat sat on the mat, and the dog lay on the rug. The cat sat on the mat again."
WIDTH = 108  # columns of the terminal
THEMES = {"": DEFAULT_TERMINAL_THEME, "-dark": MONOKAI}
DARK = {INK: "#e5e7eb", MUTED: "#9ca3af", GRID: "#374151", PAPER: "#1e2129"}
# first letters and last of rows in results.json, and what a curve calls them
CACHES = {
    ("kv-cache", "original"): "16, 8 and 4 bits",
    ("smollm2-kv", "by layer"): "KV heads, by layer",
    ("smollm2-kv", "latent"): "one latent",
    ("smollm2-windows", "KV heads"): "windows, at 2,048 tokens",
    ("smollm2-windows", "KV heads: gates, 60 steps"): "windows by gates",
}
ORIGINALS = ("original", "original, F16")
WORST = 2  # a ratio beyond which nobody would use it, and all others would look alike


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
    every = Results.read().results
    results = [r for r in every if r.sample == 0]
    tables = {"smollm2-heads", *(table for table, _ in CACHES)}
    whole = {r.table: _perplexity(r) for r in results if r.table in tables and r.row in ORIGINALS}
    whole["smollm2-kv"] = whole["smollm2-heads"]
    for one in results:
        for (table, part), name in CACHES.items():
            if one.table == table and (one.row.startswith(part) or one.row.endswith(part)):
                samples = [r for r in every if (r.table, r.row) == (one.table, one.row)]
                ratio = mean(map(_perplexity, samples)) / whole[table]
                points[name] += [(_bytes_per_token(one), ratio)] * (ratio < WORST)
    series = [
        Series(way, [size for size, _ in sorted(at)], [ratio for _, ratio in sorted(at)])
        for way, at in points.items()
    ]
    title, x, y = (
        f"SmolLM2-135M-Instruct, below {WORST} x",
        "KV bytes per token",
        "perplexity, ratio",
    )
    file = save(curve(series, title, x, y, 1.0, higher_is_better=False), PICTURES / "cache.svg")
    in_the_dark(file)


def _perplexity(result: Result) -> float:
    numbers = result.numbers  # of a long context, that of the tokens after the first 512
    return numbers["wikitext2_far" if "wikitext2_far" in numbers else "wikitext2"]


def _bytes_per_token(result: Result) -> float:
    if "kv_bytes" in result.numbers:
        return result.numbers["kv_bytes"] / 2_048
    return result.settings.get("bytes") or float(result.row.split()[0].replace(",", ""))


def in_the_dark(file: Path) -> None:
    """Write a picture in the colours of a dark page as well."""
    drawn = file.read_text(encoding="utf-8")
    for light, dark in DARK.items():
        drawn = drawn.replace(light, dark)
    (PICTURES / f"{file.stem}-dark.svg").write_text(drawn, encoding="utf-8")


def main() -> None:
    """Draw."""
    PICTURES.mkdir(exist_ok=True)
    report = Report.model_validate_json((SMALL.parent / "report.json").read_text(encoding="utf-8"))
    manifest = read_manifest(SMALL)
    assert report.against is not None
    inspected = headprune.inspect(report.against.name)
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shown("inspect", f"headprune inspect {name}", lambda console: inspection(console, inspected))
    shown(
        "convert-swa",
        f"headprune convert-swa {name} small --context 4096 --max-kv-bytes 47185920",
        lambda console: terminal.show(console, [*proof(manifest)]),
    )
    shown(
        "evaluate",
        f"headprune evaluate small --data test.txt --against {name}",
        lambda console: evaluation(console, report),
    )
    pasted("proof", proof(manifest))
    photographed(DEMO / "report.html", "1200,1500")
    looked_at(report.against.name)
    curve_of_caches()


if __name__ == "__main__":
    main()
