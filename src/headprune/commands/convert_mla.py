"""headprune convert-mla."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.convert_gqa import warnings
from headprune.commands.listing import Panel
from headprune.config import LatentConfig, build, data_config
from headprune.config.values import Count, Length, PositiveInt, Seed, Tokens
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed
    from headprune.formats.export import Exported


def _show(console: Console, result: Exported | Healed, values: Mapping[str, Any]) -> None:
    from headprune.formats.export import Exported
    from headprune.render import results

    if isinstance(result, Exported):
        results.exported(console, result)
    else:
        results.healed(console, result, COMMANDS["convert-mla"].again(values, ACCESS))


@command(Panel.CUT, _show, warnings=warnings)
def convert_mla(
    model: o.Model,
    output: o.Output,
    *,
    data: o.Data,
    kv_bytes: Annotated[Count, o.option("KV cache per token in 16 bits, at most.")] | None = None,
    rank: Count | None = None,
    rope_dim: Count | None = None,
    heal_steps: o.HealSteps | None = None,
    calibration_tokens: Tokens = 16_384,
    seq_len: Length = 512,
    batch_size: PositiveInt = 4,
    seed: Seed = 0,
    overwrite: o.Overwrite = False,
    device: str = "auto",
    context: Context = Context(),
) -> Exported | Healed:
    """Give all heads one latent and one rotary key (MLA), verify the result, write it.

    Experimental: the result is a stock DeepseekV3ForCausalLM for transformers.
    """
    from headprune.config import HealConfig
    from headprune.distillation.heal import make_and_heal
    from headprune.formats.mla import convert_mla

    config = build(LatentConfig, locals())
    text = data_config(data, None, None)
    if heal_steps is None:
        return convert_mla(model, Path(output), config, text, overwrite, context)

    def make(unhealed: Path) -> tuple[str, ...]:
        for change in convert_mla(model, unhealed, config, text, overwrite, context).record.changes:
            context.line(change, True)
        return ()

    healing = HealConfig(steps=heal_steps, seed=seed)
    return make_and_heal(make, model, text, Path(output), healing, overwrite, context)
