"""headprune check."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Confidence,
    Drop,
    EvaluateBatch,
    Json,
    LabelColumn,
    MaxWindows,
    MeasuredDtype,
    Seed,
    SeqLen,
    Split,
    TextColumn,
    Trust,
    settings_read_by,
)
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from headprune.pipelines.check import CheckReport

_CHECK = cfg.CheckConfig(model="", data="")  # for its other settings


def check(
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=settings_read_by(cfg.read_check),
            help="YAML whose section 'check' holds these settings; options given here win.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model: a folder or a hub id.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Text that it was not trained on; as for evaluate.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Record of an earlier run, for limits such as '<= +2 %'.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The original model, for limits such as '>= 98 %'.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            help="What must hold (repeatable): 'perplexity <= 25', 'perplexity <= +2 %' (since the "
            "baseline), 'perplexity recovery >= 98 %' (of the original), 'query_heads == 201', "
            "'kv_cache_bytes_per_token <= 50 %', 'decode_tokens_per_s >= 120 %', "
            "'load_route == native'.",
        ),
    ] = None,
    confidence: Confidence = _CHECK.confidence,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.")] = _CHECK.resamples,
    strict: Annotated[
        bool, typer.Option("--strict", help="Too close to call exits with 1, not with 0.")
    ] = False,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write --baseline instead of checking.")
    ] = False,
    allow_dirty: Annotated[
        bool,
        typer.Option("--allow-dirty", help="Write it although tracked files are not committed."),
    ] = False,
    allow_other: Annotated[
        bool,
        typer.Option(
            "--allow-other", help="Replace a baseline of other data, settings or another model."
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML there, also over an earlier one.")
    ] = None,
    seq_len: SeqLen = _CHECK.seq_len,
    batch_size: EvaluateBatch = _CHECK.batch_size,
    max_windows: MaxWindows = None,
    dtype: MeasuredDtype = _CHECK.dtype,
    seed: Seed = 0,
    split: Split = "test",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    drop_unexpected: Drop = False,
) -> None:
    """Hold a model to limits, against a stored baseline and the original. For CI.

    Exit codes: 0 passed (or too close to call, with a warning), 1 a limit is broken (with --strict
    also too close to call), 2 it could not run.
    """
    values = {
        "model": model,
        "data": data,
        "baseline": baseline,
        "against": against,
        "limits": limits or (),
        "confidence": confidence,
        "resamples": resamples,
        "strict": strict,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "max_windows": max_windows,
        "dtype": dtype,
        "seed": seed,
        "split": split,
        "text_column": text_column,
        "label_column": label_column,
        "drop_unexpected": drop_unexpected,
    }
    try:
        with _never_one():
            config = _config(values)
            if update_baseline:
                _update(config, allow_dirty, allow_other, trust_remote_code, json_)
                return
            with _junit(junit, config):
                report = _run(config, trust_remote_code)
                _tell(report, junit, json_)
    except HeadpruneError as error:
        if os.environ.get("GITHUB_ACTIONS") == "true":
            from headprune.regression.actions import annotation

            terminal.show_command(annotation("error", f"could not run: {error}"))
        raise
    if not report.passed:
        raise typer.Exit(1)


@contextmanager
def _never_one() -> Iterator[None]:
    """Keeps an exit code of 1 for broken limits: whatever else goes wrong could not run."""
    try:
        yield
    except (HeadpruneError, typer.Exit):
        raise
    except Exception as error:  # any would end with 1, which says that a limit is broken
        if type(error).__name__ in ("MemoryError", "OutOfMemoryError"):
            raise
        terminal.show_traceback(error)
        raise HeadpruneError(
            f"The check itself failed: {type(error).__name__}: {error}. Please report this."
        ) from error


@contextmanager
def _junit(path: Path | None, config: cfg.CheckConfig) -> Iterator[None]:
    """Keeps the JUnit file for this run; if the check cannot run, the file says so.

    An old one would look like this run's.
    """
    if path is None:
        yield
        return
    from headprune.checkpoint.outputs import claimed_file
    from headprune.checkpoint.ownership import JUNIT
    from headprune.regression.junit import junit_error
    from headprune.writing import write_whole

    inputs = (config.model, config.data, config.baseline, config.against)
    with claimed_file(path, JUNIT, overwrite=True, inputs=inputs):
        try:
            yield
        except BaseException as error:  # also by Ctrl-C
            write_whole(path, junit_error(config.model, str(error) or type(error).__name__))
            raise


def _config(values: dict[str, Any]) -> cfg.CheckConfig:
    for name in ("model", "data"):
        if values[name] is None:
            raise HeadpruneError(f"check needs --{name}, or '{name}' in the file of --config.")
    config: cfg.CheckConfig = cfg.build(cfg.CheckConfig, values)
    return config


def _update(
    config: cfg.CheckConfig, allow_dirty: bool, allow_other: bool, trust: bool, json_: bool
) -> None:
    terminal.quiet_libraries()
    from headprune.cli import render_check
    from headprune.pipelines.check import update_baseline

    with terminal.counted("evaluating") as progress:
        baseline = update_baseline(config, allow_dirty, allow_other, trust, progress)
    if json_:
        terminal.show_json(baseline.model_dump_json(indent=2, exclude={"samples"}))
    else:
        render_check.recorded(terminal.out, baseline, str(config.baseline))


def _run(config: cfg.CheckConfig, trust: bool) -> CheckReport:
    terminal.quiet_libraries()
    from headprune.pipelines.check import check as pipeline

    with terminal.counted("evaluating") as progress:
        return pipeline(config, trust, progress)


def _tell(report: CheckReport, junit: Path | None, json_: bool) -> None:
    """To whoever listens: a person, a script, JUnit readers, GitHub Actions."""
    from headprune.cli import render_check
    from headprune.regression import actions
    from headprune.regression.junit import junit_xml
    from headprune.writing import write_whole

    if json_:
        terminal.show_json(report.model_dump_json(indent=2))
    else:
        render_check.checked(terminal.out, report)
    if junit is not None:
        seconds = report.evaluate_s + report.judge_s
        write_whole(junit, junit_xml(report.model, report.limits, report.strict, seconds))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for command in actions.workflow_commands(report.limits, report.strict):
            terminal.show_command(command)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        text = actions.step_summary(report.model, report.limits, report.verdict)
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise HeadpruneError(f"GITHUB_STEP_SUMMARY cannot be written: {error}.") from None
