"""headprune convert-swa."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.convert_gqa import warnings
from headprune.commands.listing import Panel
from headprune.config import HealConfig, SwaConfig, build
from headprune.config.values import (
    Length,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    Tokens,
)
from headprune.context import Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed
    from headprune.result.write import Pruned


def _show(console: Console, result: Pruned | Healed, values: Mapping[str, Any]) -> None:
    from headprune.render import results
    from headprune.result.write import Pruned

    given = COMMANDS["convert-swa"].again(values, ACCESS)
    if isinstance(result, Pruned):
        results.windowed(console, result, given)
    else:
        results.healed(console, result, given)


def _warnings(result: Any) -> Any:
    return getattr(result, "warnings", None) or warnings(result)


@command(
    Panel.CUT,
    _show,
    warnings=_warnings,
    needs={
        "heal_steps": "data",
        "text_column": "data",
        **dict.fromkeys(("train", "learning_rate", "bf16"), "heal_steps"),
    },
)
def convert_swa(
    model: o.Model,
    output: o.Output,
    *,
    keep_full: o.KeepFull | None = None,
    window: o.Window | None = None,
    sinks: o.Sinks | None = None,
    level: Annotated[
        Literal["head", "layer"],
        o.option("What gets a window: KV heads, or whole layers. Default: head; layer with --for."),
    ]
    | None = None,
    targets: o.Engines = (),
    context_tokens: o.ContextTokens | None = None,
    max_kv_bytes: Annotated[
        NonNegativeInt,
        o.option("Instead of --keep-full: bytes of KV cache of --context tokens, at most."),
    ]
    | None = None,
    data: o.Data | None = None,
    scores: Annotated[Path | str, o.option("Instead of --data: a folder of score --form window.")]
    | None = None,
    gates: Annotated[
        Path | str, o.option("Instead of --data: a folder of train-gates --form window.")
    ]
    | None = None,
    heal_steps: o.HealSteps | None = None,
    overwrite: o.Overwrite = False,
    text_column: str | None = None,
    calibration_tokens: Tokens = 8_192,
    seq_len: Length | None = None,
    batch_size: PositiveInt = 4,
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
) -> Pruned | Healed:
    """Give KV heads that need no more a window and sinks (SWA), verify the result, write it."""
    from headprune.result import convert_swa as conversion

    config = build(SwaConfig, locals())
    if scores is not None or gates is not None:
        refuse_beside_evidence(locals())
    text = o.data_at(data, text_column)
    scored = None if scores is None else Path(scores)

    def converted(folder: Path) -> Pruned:
        if gates is not None:
            how = (config, overwrite, context)
            return conversion.convert_swa_by_gates(model, folder, Path(gates), *how)
        return conversion.convert_swa(model, folder, config, text, scored, overwrite, context)

    if heal_steps is None or text is None:
        return converted(Path(output))
    from headprune.commands.convert_gqa import refuse_healing_by_layers
    from headprune.distillation.heal import make_and_heal
    from headprune.io.outputs import claimed
    from headprune.model.loading import load_config
    from headprune.model.refusals import refuse_quantised

    refuse_healing_by_layers(placement)
    refuse_quantised(model, load_config(model, trust_remote_code=trust_remote_code))
    healing = build(HealConfig, locals(), steps=heal_steps, seq_len=None, batch_size=None)

    def make(unhealed: Path) -> tuple[str, ...]:
        pruned = converted(unhealed)
        heads = getattr(pruned.manifest.done, "heads", 0)
        context.line(f"{heads} KV heads with a window, verified", True)
        return pruned.warnings

    out = Path(output)
    with claimed(out, overwrite, (model, text.source, scores, gates)):
        return make_and_heal(make, model, text, out, healing, overwrite, context)


def refuse_beside_evidence(values: Mapping[str, Any]) -> None:
    """Refuse settings that scores or gates bring along.

    Raises:
        HeadpruneError: Naming the first.
    """
    usual = COMMANDS["convert-swa"].parameters()
    spelt = COMMANDS["convert-swa"].spell
    names = ["window", "sinks", "level", "seq_len", "calibration_tokens", "batch_size"]
    names += ["data", "seed"] * (values["heal_steps"] is None)
    names += ["context_tokens"] * (values["max_kv_bytes"] is None)
    beside = "scores"
    if values["gates"] is not None:
        beside, names = "gates", [*names, "keep_full", "max_kv_bytes", "scores"]
    for name in names:
        if values[name] != usual[name].default:
            raise HeadpruneError(
                f"{spelt(name)} has no effect beside --{beside}, which have their own: leave it "
                "out."
            )
