"""headprune convert-gqa."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    Columns,
    Loading,
    OneModel,
    Placed,
    of_text,
    output,
    refuse_healing_by_layers,
)
from headprune.config import (
    ConvertConfig,
    HealConfig,
    HealTrain,
    LayoutOption,
    Length,
    Place,
    Positive,
    Replacing,
    Resuming,
    Steps,
)
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option
from headprune.errors import HeadpruneError
from headprune.placements import Placement, placing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from headprune.distillation.heal import Healed
    from headprune.exporting.convert_gqa import Converted, KvPreview

_HEAL = HealConfig(steps=1)  # for its other settings


class ConvertOptions(OneModel, ConvertConfig, Columns, Replacing, Loading, Placed):
    """Merge KV heads so that more queries share each (GQA, MQA), verify the result, write it."""

    calibrate: Place | None = option(
        "Text that shows what the heads do; as --data elsewhere.",
        None,
        Panel.MAIN,
        metavar="DATA",
    )
    heal_steps: Steps | None = option(
        "Then train the result to match the original, so many steps.",
        None,
        Panel.MAIN,
        flags="--heal",
    )
    output: Path | None = output("Folder for the result; not needed with --dry-run.", None)
    dry_run: bool = option(
        "With --kv-budget and --calibrate: show what every layer would keep, merge or lose, and "
        "what the other ways would have cost; write nothing.",
        False,
        Panel.MAIN,
    )
    layout: LayoutOption = option(
        "uniform: refuse what a plain config of the family cannot hold.",
        LayoutOption.PER_LAYER,
        Panel.CUT,
    )
    train: HealTrain = option("With --heal: what is trained.", _HEAL.train, Panel.TRAINING)
    learning_rate: Positive | None = option(
        "With --heal: highest learning rate. Default: that of heal.",
        _HEAL.learning_rate,
        Panel.TRAINING,
    )
    heal_seq_len: Length | None = option(
        "With --heal: tokens per sequence. Default: --seq-len, up to 256.",
        None,
        Panel.TRAINING,
    )
    bf16: bool = option(
        "With --heal: compute in bfloat16 where the device has it in hardware.",
        _HEAL.bf16,
        Panel.TRAINING,
    )

    def healing(self, steps: int) -> HealConfig:
        """How the result is healed."""
        length = self.heal_seq_len or min(self.seq_len, _HEAL.seq_len)
        return self.part(HealConfig, steps=steps, seq_len=length)


def run(options: ConvertOptions, context: Context) -> Converted | Healed | KvPreview:
    """Converts, and heals if that was asked for; or says what would be done."""
    if options.output is None and not options.dry_run:
        raise HeadpruneError("convert-gqa needs --output, the folder to write (or --dry-run).")
    from headprune.distillation.heal import heal
    from headprune.io.outputs import claimed
    from headprune.io.writing import beside

    if options.output is None or options.dry_run:
        return _preview(options, context)
    inputs = (options.model, options.calibrate)
    healed_after = options.heal_steps is not None
    if healed_after:
        refuse_healing_by_layers(options)
    place = placing(Placement.WHOLE) if healed_after else nullcontext()
    with place, claimed(options.output, options.overwrite, inputs):
        if options.heal_steps is None or options.calibrate is None:
            return _converted(options, options.output, context)
        healing = options.healing(options.heal_steps)
        unhealed = beside(options.output, "{}-unhealed")
        converted = _converted(options, unhealed, context)
        context.line(_summary(converted), True)
        healed = heal(
            unhealed,
            options.model,
            options.examples(options.calibrate),
            options.output,
            healing,
            Resuming(overwrite=options.overwrite),
            context,
        )
        shutil.rmtree(unhealed, ignore_errors=True)
        return healed


def _preview(options: ConvertOptions, context: Context) -> KvPreview:
    from headprune.exporting.convert_gqa import preview

    return preview(
        options.model,
        options.part(ConvertConfig),
        options.source(options.calibrate),
        options.layout,
        context,
    )


def _converted(options: ConvertOptions, output: Path, context: Context) -> Converted:
    from headprune.exporting.convert_gqa import convert_gqa

    return convert_gqa(
        options.model,
        output,
        options.part(ConvertConfig),
        options.source(options.calibrate),
        options.layout,
        options.overwrite,
        context,
    )


def show(result: Converted | Healed | KvPreview, options: ConvertOptions, console: Console) -> None:
    """Prints how many KV heads are left, and what it cost."""
    from headprune.distillation.heal import Healed
    from headprune.exporting.convert_gqa import KvPreview
    from headprune.render import results

    if isinstance(result, Healed):
        results.healed(console, result)
    elif isinstance(result, KvPreview):
        results.kv_preview(console, result)
    else:
        results.converted(console, result)


def _warnings(result: Converted | Healed | KvPreview) -> Iterable[str]:
    pruned = getattr(result, "pruned", None)
    return () if pruned is None else pruned.warnings


def _summary(result: Converted | Healed | KvPreview) -> str:
    from headprune.exporting.convert_gqa import KvPreview

    if isinstance(result, KvPreview):
        return f"{result.kv_heads[1]} of {result.kv_heads[0]} KV heads, not written"
    before, after = result.pruned.manifest.kv_heads
    return f"{after} of {before} KV heads ({getattr(result, 'merge', 'healed')}), verified"


declare(
    Command(
        "convert-gqa",
        Chapter.CUT,
        ConvertOptions,
        run,
        show,
        warnings=_warnings,
        needs={
            **of_text("calibrate"),
            **dict.fromkeys(("calibration_tokens", "seq_len", "heal_steps"), "calibrate"),
            "seed": "calibrate",
            **dict.fromkeys(("train", "learning_rate", "heal_seq_len", "bf16"), "heal_steps"),
        },
    ),
)
