"""headprune inspect."""

from __future__ import annotations

from headprune.cli import terminal
from headprune.cli.options import Drop, Json, Model, Trust


def inspect(
    model: Model,
    json_: Json = False,
    trust_remote_code: Trust = False,
    drop_unexpected: Drop = False,
) -> None:
    """Show a model's attention: heads, head_dim, parameters, KV cache, and what a cut saves."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.inspect import inspect as pipeline

    report = pipeline(model, trust_remote_code, drop_unexpected)
    if json_:
        terminal.show_json(report.model_dump_json(indent=2))
    else:
        render.inspection(terminal.out, report)
