"""headprune roles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config import RolesConfig, build
from headprune.config.data import data_config
from headprune.config.values import Length, Level, NonNegativeInt, PositiveInt, Seed, possible_place
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.roles import RolesRecord


def _show(console: Console, result: RolesRecord, values: Mapping[str, Any]) -> None:
    from headprune.render.roles import roles

    roles(console, result, values["output"])


@command(Panel.CHOOSE, _show)
def roles(
    model: o.Model,
    output: o.Output,
    *,
    data: o.Data,
    sequences: PositiveInt = 64,
    ablation_tokens: NonNegativeInt = 0,
    trees: Annotated[
        str | Path,
        BeforeValidator(possible_place),
        o.option("Parsed sentences (CoNLL-U, also .gz), for syntactic roles."),
    ]
    | None = None,
    against: o.Against | None = None,
    overwrite: o.Overwrite = False,
    needle_lengths: o.Lengths = (),
    card: bool = False,
    attention: o.Kinds = (),
    text_column: str | None = None,
    label_column: str | None = None,
    seq_len: Length = 512,
    batch_size: PositiveInt = 4,
    confidence: Level = 0.95,
    resamples: PositiveInt = 1000,
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    device: str = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> RolesRecord:
    """Say what every head does, such as induction, with controls and intervals."""
    from headprune.result.card import rewrite_card
    from headprune.role.measure import roles
    from headprune.schemas.manifest import read_manifest

    config = build(RolesConfig, locals())
    if card:
        read_manifest(Path(model))  # refuses a folder without a manifest early
    source = data_config(data, text_column, label_column)
    original = None if against is None else str(against)
    record = roles(str(model), Path(output), source, config, original, overwrite, context)
    if card:
        rewrite_card(Path(model), record=record)
    return record
