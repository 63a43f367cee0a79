"""headprune roles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Cutting,
    OneModel,
    Placed,
    output,
)
from headprune.config import Place, Replacing, RolesConfig, sequences_per_pass
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

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.estimates import Estimate, Sizes
    from headprune.schemas.roles import RolesRecord


class RolesOptions(OneModel, RolesConfig, Columns, Replacing, Cutting, Placed):
    """Say what every head does, such as induction, with controls and intervals."""

    data: Place = option(DATA, panel=Panel.MAIN, slot=Slot.DATA)
    output: Path = output("Folder for roles.json and its pictures.")
    against: Place | None = option(
        "The original of a cut model: say which roles were kept, lost and moved.",
        None,
        Panel.MAIN,
        slot=Slot.MODEL,
    )
    card: bool = option(
        "Also write the roles on the model card of MODEL, a result of headprune.",
        False,
        Panel.OUTPUT,
        in_recipes=False,
    )


def run(options: RolesOptions, context: Context) -> RolesRecord:
    """Measures them."""
    from headprune.exporting.card import rewrite_card
    from headprune.role.roles import roles
    from headprune.schemas.manifest import read_manifest

    if options.card:
        read_manifest(Path(options.model))  # refuses early what is no result
    record = roles(
        options.model,
        options.output,
        options.examples(options.data),
        options.part(RolesConfig),
        against=options.against,
        overwrite=options.overwrite,
        context=context,
    )
    if options.card:
        rewrite_card(Path(options.model), record=record)
    return record


def show(result: RolesRecord, options: RolesOptions, console: Console) -> None:
    """Prints the table of heads, and a line per role."""
    from headprune.console.roles import roles

    roles(console, result, options.output)


def _summary(result: RolesRecord) -> str:
    found = sum(head.role is not None for module in result.modules for head in module.heads)
    return f"{found} of {sum(len(module.heads) for module in result.modules)} heads have a role"


def _estimate(options: RolesOptions, sizes: Sizes) -> Estimate:
    """The text, random tokens and their control, and what is run again for every head."""
    from headprune.estimates import OVERHEAD_SECONDS, RECORD_BYTES, Estimate

    batch = options.seq_len * sequences_per_pass(options.batch_size, options.seq_len)
    held = sizes.activations(batch, sizes.computed_itemsize(options.dtype), trained=False)
    models, heads = 1 + (options.against is not None), sizes.layers * sizes.hidden // 64
    tokens = 3 * models * options.sequences * options.seq_len
    tokens += 3 * heads * options.ablation_tokens // 2
    # once to see what is found, and once to see how
    tokens += 2 * models * options.sequences * sum(options.needle_lengths)
    weights = sizes.computed(options.dtype)
    seconds = OVERHEAD_SECONDS + sizes.forward(tokens)
    layers = sizes.by_layers(weights) + held
    return Estimate(seconds, weights + held, RECORD_BYTES, weights, layers)


declare(
    Command(
        "roles",
        Chapter.CHOOSE,
        RolesOptions,
        run,
        show,
        step=InRecipe(Made.ROLES, _summary, _estimate, defaults={"data": "train"}),
    ),
)
