"""headprune convert-mla."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.export import show
from headprune.commands.listing import Panel
from headprune.config import LatentConfig, build
from headprune.config.values import Count, Length, Tokens
from headprune.context import Context

if TYPE_CHECKING:
    from headprune.formats.export import Exported


@command(Panel.CUT, show)
def convert_mla(
    model: o.Model,
    output: o.Output,
    *,
    data: o.Data,
    kv_bytes: Annotated[Count, o.option("KV cache per token in 16 bits, at most.")] | None = None,
    rank: Annotated[Count, o.option("Instead: width of the latent, with --rope-dim.")]
    | None = None,
    rope_dim: Annotated[Count, o.option("Width of the rotary key.")] | None = None,
    calibration_tokens: Tokens = 16_384,
    seq_len: Length = 512,
    overwrite: o.Overwrite = False,
    context: Context = Context(),
) -> Exported:
    """Give all heads one latent and one rotary key (MLA), verify the result, write it.

    Experimental: the result is a stock DeepseekV3ForCausalLM for transformers.
    """
    from headprune.config import DataConfig
    from headprune.formats.mla import convert_mla

    config = build(
        LatentConfig,
        kv_bytes=kv_bytes,
        rank=rank,
        rope_dim=rope_dim,
        calibration_tokens=calibration_tokens,
        seq_len=seq_len,
    )
    text = DataConfig(source=str(data))
    return convert_mla(model, Path(output), config, text, overwrite, context)
