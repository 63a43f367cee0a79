"""headprune compress."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Cutting,
    OneModel,
    Placed,
    output,
    refuse_healing_by_layers,
)
from headprune.config import AnyDomains, CompressConfig, Replacing
from headprune.declaration import (
    Chapter,
    Command,
    Context,
    InRecipe,
    Made,
    Panel,
    Slot,
    declare,
    option,
)
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.compression.compress import Compressed, Outline
    from headprune.estimates import Estimate, Sizes


class CompressOptions(OneModel, CompressConfig, Columns, Replacing, Cutting, Placed):
    """Make a model smaller in the best known way, judged on text that nothing was fitted to."""

    data: AnyDomains = option(
        DATA + " Repeatable, also named, as in wiki=a.txt: they are mixed evenly. Default: text "
        "that ships with headprune.",
        (),
        Panel.MAIN,
        slot=Slot.DATA,
    )
    output: Path | None = output("Folder for the result; not needed with --dry-run.", None)
    dry_run: bool = option(
        "Say what would be made and measured, write nothing.", False, Panel.MAIN, in_recipes=False
    )


def run(options: CompressOptions, context: Context) -> Compressed | Outline:
    """Compresses, or says how."""
    if options.output is None and not options.dry_run:
        raise HeadpruneError("compress needs --output, the folder to write (or --dry-run).")
    if options.heal_steps is not None:
        refuse_healing_by_layers(options)
    from headprune.compression.compress import compress

    return compress(
        options.model,
        None if options.dry_run else options.output,
        options.part(CompressConfig),
        options.domains(options.data),
        options.overwrite,
        context,
    )


def show(result: Compressed | Outline, options: CompressOptions, console: Console) -> None:
    """Prints what was chosen, and what the alternatives would have cost."""
    from headprune.compression.compress import Outline
    from headprune.console import compressed

    if isinstance(result, Outline):
        compressed.outline(console, result)
    else:
        compressed.compressed(console, result)


def _warnings(result: Compressed | Outline) -> Iterable[str]:
    pruned = getattr(result, "pruned", None)
    return () if pruned is None else pruned.warnings


def _summary(result: Compressed | Outline) -> str:
    from headprune.compression.compress import Compressed

    assert isinstance(result, Compressed)  # a step of a recipe is no dry run
    best = result.choice.chosen
    return f"{best.name}: {result.choice.measure} {best.held_out:.4f} on held-out text, verified"


def _estimate(options: CompressOptions, sizes: Sizes) -> Estimate:
    """Scored once, then several candidates refitted or merged, written and measured."""
    from headprune.estimates import OVERHEAD_SECONDS, Estimate

    candidates = 5
    passes = 3 * options.calibration_tokens + options.held_out_tokens
    seconds = candidates * (sizes.forward(passes) + sizes.writing(options.out_dtype))
    batch = options.tokens_per_pass
    held = max(
        sizes.activations(batch, sizes.computed_itemsize(options.dtype), trained=True),
        sizes.calibration(options.calibration_tokens, options.dtype, streams=2),
    )
    weights, stored = 2 * sizes.computed(options.dtype), sizes.stored(options.out_dtype)
    healed = options.heal_steps is not None
    layers = None if healed else sizes.by_layers(weights) + held
    seconds += OVERHEAD_SECONDS
    return Estimate(seconds, weights + held, 2 * stored, weights, layers)


declare(
    Command(
        "compress",
        Chapter.CUT,
        CompressOptions,
        run,
        show,
        warnings=_warnings,
        step=InRecipe(Made.MODEL, _summary, _estimate),
    ),
)
