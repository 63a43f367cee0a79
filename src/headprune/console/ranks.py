"""How wide heads are, as a table, as figures, and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from rich.console import Console

from headprune.console.tables import folded, module_table
from headprune.model.attention import layer_names

if TYPE_CHECKING:
    from headprune.model.inspection import Inspection
    from headprune.schemas.ranks import ModuleRanks, Ranks

MEASURES = {"values": "W_V W_O", "scores": "W_Q W_K"}
_MOST = 4  # heads that the advice names


def ranks(console: Console, inspected: Inspection, found: Ranks) -> None:
    """Smallest, median and largest rank of every layer, and what to make of it."""
    columns = [f"{name} {share:.0%}" for name in MEASURES.values() for share in found.shares]
    rows = {module.path: [*_cells(module)] for module in found.modules}
    console.print(
        f"Directions that hold so much of the energy, on {found.tokens:,} tokens: smallest, median "
        "and largest of a layer's heads."
    )
    module_table(console, columns, folded(rows))
    console.print(advice(inspected, found))


def _cells(module: ModuleRanks) -> Iterator[str]:
    for name in MEASURES:
        for of_share in zip(*(getattr(head, name) for head in module.heads), strict=True):
            yield f"{min(of_share)} {median_low(of_share)} {max(of_share)}"


def advice(inspected: Inspection, found: Ranks) -> str:
    """Which heads are narrower than they could be, what that would save, and what decides."""
    layers = layer_names([(module.path, module.kind) for module in found.modules])
    heads = [
        (head.values[-1], module.value_dim, f"{layers[module.path]}.{head.head}")
        for module in found.modules
        for head in module.heads
    ]
    narrow = sorted(head for head in heads if head[0] < head[1])
    held = f"{found.shares[-1]:.0%}"
    rule = (
        "Bounds on head_dim that know only lengths, such as Johnson-Lindenstrauss and the low-rank "
        "bottleneck, do not tell what this model would lose; measure it with evaluate."
    )
    if not narrow:
        return f"Every head writes with all of its head_dim ({held} of the energy). {rule}"
    saved = sum(module.saved for module in found.modules)
    worth = saved * len(heads) / inspected.attention_parameters
    named = ", ".join(f"{name} {rank} of {of}" for rank, of, name in narrow[:_MOST])
    return (
        f"{len(narrow):,} of {len(heads):,} heads hold {held} of what they write in fewer "
        f"directions than head_dim (fewest: {named}): W_V and W_O as narrow as that would save "
        f"{saved:,} parameters ({saved / inspected.attention_parameters:.1%} of attention), as "
        f"many as {worth:.1f} heads have, and no KV cache. {rule}"
    )


def figures(found: Ranks, files: Mapping[str, Path]) -> None:
    """Draws the rank of every head, of values and of scores."""
    from headprune.io.figures import heat_map, save

    for name, file in files.items():
        drawn = [_row(module, name) for module in found.modules]
        figure = heat_map(
            drawn,
            [module.path for module in found.modules],
            f"{MEASURES[name]}: directions that hold {found.shares[-1]:.0%}",
            value_label="directions",
        )
        save(figure, file)


def _row(module: ModuleRanks, name: str) -> list[float | None]:
    """Ranks at the places of ids; None where a head was cut."""
    by_id = {head.head: float(getattr(head, name)[-1]) for head in module.heads}
    return [by_id.get(number) for number in range(max(by_id) + 1)]
