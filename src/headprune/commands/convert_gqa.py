"""headprune convert-gqa."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import ConvertConfig, HealConfig, LayoutOption, build
from headprune.config.values import (
    Positive,
    Seed,
    Share,
    Tokens,
    kv_head_counts,
    possible_place,
)
from headprune.context import Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed
    from headprune.result.convert_gqa import Converted, KvPreview

    Result = Converted | Healed | KvPreview


def _show(console: Console, result: Result, values: Mapping[str, Any]) -> None:
    from headprune.distillation.heal import Healed
    from headprune.render import results
    from headprune.result.convert_gqa import KvPreview

    given = COMMANDS["convert-gqa"].again(values, ACCESS)
    if isinstance(result, Healed):
        results.healed(console, result, given)
    elif isinstance(result, KvPreview):
        results.kv_preview(console, result)
    else:
        results.converted(console, result, given)


def warnings(result: Any) -> Iterable[str]:
    """Warnings of a result that holds a cut model, if it does."""
    pruned = getattr(result, "pruned", None)
    return () if pruned is None else tuple(pruned.warnings)


@command(
    Panel.CUT,
    _show,
    warnings=warnings,
    needs={
        **dict.fromkeys(("calibration_tokens", "seq_len", "heal_steps", "seed"), "calibrate"),
        "text_column": "calibrate",
        **dict.fromkeys(("train", "learning_rate", "bf16"), "heal_steps"),
    },
)
def convert_gqa(
    model: o.Model,
    output: o.Output | None = None,
    *,
    kv_heads: Annotated[
        int | str | Path | Sequence[int],
        BeforeValidator(kv_head_counts),
        o.option("KV heads per layer: a number, a comma-separated list, or a JSON file."),
    ]
    | None = None,
    kv_budget: Annotated[Share, o.option("Instead: share of all KV heads to keep.")] | None = None,
    calibrate: Annotated[
        str | Path,
        BeforeValidator(possible_place),
        o.option("Text to calibrate merges on, as --data elsewhere.", metavar="DATA"),
    ]
    | None = None,
    merge: Annotated[str, o.option("mean, procrustes or lowrank (default with --calibrate).")]
    | None = None,
    targets: o.Engines = (),
    heal_steps: o.HealSteps | None = None,
    seq_len: o.SeqLen = 512,
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    grouping: Literal["adjacent", "similar"] = "adjacent",
    calibration_tokens: Tokens = 16_384,
    layout: Literal["per-layer", "uniform", "ragged", "padded"] = "per-layer",
    attention: o.Kinds = (),
    text_column: str | None = None,
    train: Literal["attention", "lora", "all"] = "all",
    learning_rate: Positive | None = None,
    bf16: bool = True,
    dtype: o.Dtype = "auto",
    out_dtype: o.Dtype = "auto",
    seed: Seed = 0,
    device: o.Device = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Converted | Healed | KvPreview:
    """Merge KV heads so that more queries share each (GQA, MQA), verify the result, write it."""
    if output is None and not dry_run:
        raise HeadpruneError("convert-gqa needs OUTPUT, the folder to write (or --dry-run).")
    output = None if output is None else Path(output)
    from headprune.result import convert_gqa as conversion

    config = build(ConvertConfig, locals())
    text, shape = o.data_at(calibrate, text_column), LayoutOption(layout)

    def converted(folder: Path) -> Converted:
        return conversion.convert_gqa(model, folder, config, text, shape, overwrite, context)

    if output is None or dry_run:
        return conversion.preview(model, config, text, shape, context)
    if heal_steps is None or text is None:
        return converted(output)
    refuse_healing_by_layers(placement)
    healing = build(HealConfig, locals(), steps=heal_steps, seq_len=None)
    from headprune.distillation.heal import make_and_heal

    def make(unhealed: Path) -> tuple[str, ...]:
        merged = converted(unhealed)
        before, after = merged.pruned.manifest.kv_heads
        context.line(f"{after} of {before} KV heads ({merged.merge}), verified", True)
        return merged.pruned.warnings

    return make_and_heal(make, model, text, output, healing, overwrite, context)


def refuse_healing_by_layers(placement: str) -> None:
    """Refuse to heal layer by layer.

    Raises:
        HeadpruneError: If ``placement`` is "layers".
    """
    if placement == "layers":
        raise HeadpruneError(
            "--heal trains the whole model, which placement 'layers' has not in memory: leave out "
            "one of the two."
        )
