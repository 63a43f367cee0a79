"""headprune compress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.convert_gqa import refuse_healing_by_layers
from headprune.commands.listing import Panel
from headprune.config import CompressConfig, DataConfig, build, data_configs, domains
from headprune.config.values import Count, Length, PositiveInt, Seed, Tokens, listed
from headprune.context import Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.compression.compress import Compressed, Outline

_QUICK = 4_096  # tokens


@dataclass(frozen=True)
class Curve:
    """Compressions of one model to several sizes."""

    points: tuple[Compressed | Outline, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"points": [point.as_json() for point in self.points]}


def _show(
    console: Console, result: Compressed | Outline | Curve, values: Mapping[str, Any]
) -> None:
    from headprune.compression.compress import Outline
    from headprune.render import results

    for point in result.points if isinstance(result, Curve) else [result]:
        if isinstance(point, Outline):
            results.outline(console, point)
        else:
            results.compressed(console, point, COMMANDS["compress"].again(values, ACCESS))


def _warnings(result: Compressed | Outline | Curve) -> Iterable[str]:
    points = result.points if isinstance(result, Curve) else (result,)
    cut = [each.pruned for each in points if hasattr(each, "pruned")]
    return [warning for each in cut for warning in each.warnings]


@command(
    Panel.CUT,
    _show,
    warnings=_warnings,
    needs={**dict.fromkeys(("text_column", "label_column"), "data"), "max_new_tokens": "metric"},
)
def compress(
    model: o.Model,
    output: o.Output | None = None,
    *,
    keep: Annotated[
        str | float | Sequence[float],
        BeforeValidator(listed),
        o.option(
            "Share to keep of the KV heads where queries share them, else of the heads; several "
            "(0.9,0.75,0.5) make a folder each."
        ),
    ] = (),
    max_params: o.MaxParams | None = None,
    max_kv_bytes: o.MaxKvBytes | None = None,
    context_tokens: Annotated[
        Length, o.option("Tokens of the cache that --max-kv-bytes is of; windows are tried first.")
    ]
    | None = None,
    data: o.Domains = (),
    heal_steps: o.HealSteps | None = None,
    quick: Annotated[bool, o.option("Fit and judge on a quarter of the text.")] = False,
    metric: Annotated[
        str,
        o.option("Metric of written text to choose by: bleu, rouge_l, exact_match, ..."),
    ]
    | None = None,
    targets: o.Engines = (),
    out_dtype: o.Dtype = "auto",
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    calibration_tokens: Tokens = 16_384,
    seq_len: Length = 2_048,
    held_out_tokens: Count = 16_384,
    max_new_tokens: Count = 128,
    batch_size: PositiveInt = 4,
    text_column: str | None = None,
    label_column: str | None = None,
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    device: o.Device = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Compressed | Outline | Curve:
    """Make a model smaller in the best known way, judged on text that nothing was fitted to."""
    if output is None and not dry_run:
        raise HeadpruneError("compress needs OUTPUT, the folder to write (or --dry-run).")
    if heal_steps is not None:
        refuse_healing_by_layers(placement)
    if quick:
        calibration_tokens = min(calibration_tokens, _QUICK)
        held_out_tokens = min(held_out_tokens, _QUICK)
    shares: Sequence[Any] = keep or (None,)  # type: ignore[assignment]  # listed() read it
    call = locals()
    configs = [build(CompressConfig, call, keep=share) for share in shares]
    if 1 in shares:
        raise HeadpruneError(
            "--keep 1 is the whole model: there is nothing to do. Give a smaller share."
        )
    from headprune.compression.compress import compress
    from headprune.io.outputs import claimed

    shared = DataConfig(source="", text_column=text_column, label_column=label_column)
    texts = data_configs(domains(data), shared)
    several = len(configs) > 1
    out = None if dry_run or output is None else Path(output)
    folders = [out and (out / f"{c.keep:g}" if several else out) for c in configs]
    if out is not None and len({*folders}) < len(folders):
        raise HeadpruneError(f"--keep {','.join(map(str, shares))} names a share twice.")
    with ExitStack() as claims:  # all of them before hours of work
        for folder in filter(None, folders):
            claims.enter_context(claimed(folder, overwrite))
        points = [
            compress(str(model), folder, config, texts, overwrite, context)
            for folder, config in zip(folders, configs, strict=True)
        ]
    return Curve(tuple(points)) if several else points[0]
