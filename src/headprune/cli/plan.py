"""headprune plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    Drop,
    HeadsToKeep,
    Json,
    Model,
    Overwrite,
    Trust,
    WhichScores,
    share_or_count,
)


def plan(
    model: Model,
    scores: Annotated[Path, typer.Option(help="Folder from score.")],
    output: Annotated[Path, typer.Option(help="The plan file to write.")],
    keep: HeadsToKeep = None,
    criterion: WhichScores = None,
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer/--global",
            help="The same share in every layer, or the best of all layers together.",
        ),
    ] = False,
    min_per_layer: Annotated[
        int, typer.Option(help="Query heads that every layer keeps at least.")
    ] = 0,
    max_params: Annotated[int | None, typer.Option(help="Parameters of the whole model.")] = None,
    max_kv_bytes: Annotated[
        int | None, typer.Option(help="KV cache per token in bytes, in the model's dtype.")
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(help="Prefill speed over the whole model's, measured here.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="How often to score: again after each part of the heads has gone."
        ),
    ] = 1,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit", help="Between rounds, refit W_O as prune --refit will do at the end."
        ),
    ] = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Choose what stays, from scores and budgets: heads, KV heads and whole layers' attention."""
    budget = cfg.build(
        cfg.BudgetConfig,
        {
            "keep": share_or_count(keep, "--keep"),
            "per_layer": per_layer,
            "min_per_layer": min_per_layer,
            "max_params": max_params,
            "max_kv_bytes": max_kv_bytes,
            "min_speedup": min_speedup,
        },
    )
    terminal.quiet_libraries()
    from headprune.cli import next_commands
    from headprune.cli import render_scores as render
    from headprune.pipelines.plan import plan as pipeline

    with terminal.watched() as watch:
        result = pipeline(
            model,
            scores,
            budget,
            output,
            criterion,
            rounds,
            refit,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            watch=watch,
        )
    if json_:
        content = {
            "criterion": result.criterion,
            "rounds": result.rounds,
            "notes": list(result.notes),
            "spent": {said: list(pair) for said, pair in result.spent.items()},
            "plan": result.plan.model_dump(mode="json"),
        }
        terminal.show_json(json.dumps(content, indent=2))
    else:
        following = next_commands.after_plan(
            result,
            output,
            model,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
        )
        render.planned(terminal.out, result, output, following)
