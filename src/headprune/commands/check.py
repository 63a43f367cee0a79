"""headprune check."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from headprune import devices
from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config import CheckConfig, build
from headprune.config.values import Count, Length, Level, PositiveInt, Seed, possible_place, several
from headprune.context import Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.regression.baseline import Baseline
    from headprune.regression.check import CheckReport


def _show(console: Console, result: CheckReport | Baseline, values: Mapping[str, Any]) -> None:
    from headprune.regression.baseline import Baseline
    from headprune.render import checks

    if isinstance(result, Baseline):
        checks.recorded(console, result, str(values["baseline"]))
    else:
        checks.checked(console, result)


def _notify(
    result: CheckReport | Baseline | HeadpruneError,
    values: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Tell GitHub Actions."""
    from headprune.regression.check import CheckReport
    from headprune.render import checks as actions

    on_actions = os.environ.get("GITHUB_ACTIONS") == "true"
    if isinstance(result, HeadpruneError) and on_actions:
        say(actions.annotation("error", f"could not run: {result}"))
    if not isinstance(result, CheckReport):
        return
    for line in actions.workflow_commands(result.limits) if on_actions else ():
        say(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        text = actions.step_summary(result.model, result.limits, result.verdict)
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise HeadpruneError(f"GITHUB_STEP_SUMMARY cannot be written: {error}.") from None


def _mark_failed(values: Mapping[str, Any], error: HeadpruneError) -> None:
    """Write the error into the JUnit file, unless that is another's."""
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import JUNIT
    from headprune.io.writing import write_whole
    from headprune.regression.junit import junit_error

    if (junit := values.get("junit")) is not None:
        file, inputs = Path(junit), [values[n] for n in ("model", "baseline") if n in values]
        with suppress(HeadpruneError), claimed_file(file, JUNIT, True, inputs):
            write_whole(file, junit_error(str(values.get("model", "")), str(error)))


def _exit_code(result: CheckReport | Baseline) -> int:
    verdict = getattr(result, "verdict", "passed")  # a baseline is none that could fail
    return {"passed": 0, "broken": 1}.get(verdict, 2)


@command(
    Panel.JUDGE,
    _show,
    as_json=lambda result: result.model_dump_json(indent=2, exclude={"samples"}),
    exit_code=_exit_code,
    failed=_mark_failed,
    notify=_notify,
)
def check(
    model: o.Model,
    output: Annotated[o.File, o.argument("OUTPUT", "JSON file to write; replaced.")] | None = None,
    *,
    data: o.Domains,
    text_column: str | None = None,
    label_column: str | None = None,
    limits: Annotated[
        str | Sequence[str],
        BeforeValidator(several),
        o.option(
            "What must hold (repeatable): 'perplexity <= +2 %' of the baseline, 'perplexity <= "
            "105 %' of the original, 'query_heads == 201'.",
        ),
    ] = (),
    baseline: Annotated[
        str | Path, BeforeValidator(possible_place), o.option("Record of an earlier run.")
    ]
    | None = None,
    update_baseline: Annotated[bool, o.option("Write --baseline instead of checking.")] = False,
    against: o.Against | None = None,
    tasks: o.Tasks = (),
    max_windows: Count | None = None,
    junit: Annotated[o.File, o.option("JUnit XML to write; replaced.", panel=o.OUTPUT)]
    | None = None,
    split: str = "test",
    drop_unexpected: bool = False,
    seq_len: Length = 512,
    batch_size: PositiveInt = 4,
    confidence: Level = 0.99,
    resamples: PositiveInt = 10_000,
    needle_lengths: o.Lengths = (),
    needle_trials: PositiveInt = 4,
    needle_keys: int = 4,
    max_new_tokens: int = 128,
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    device: str = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> CheckReport | Baseline:
    """Hold a model to limits, against a stored baseline and the original. For CI.

    Exit codes: 0 passed, 1 a limit is broken, 2 it could not run or a limit cannot be decided.
    """
    dropped = drop_unexpected or context.allowed.drop_unexpected
    config = build(CheckConfig, locals(), drop_unexpected=dropped)
    output, junit = (None if each is None else Path(each) for each in (output, junit))
    remote = context.allowed.trust_remote_code
    with _never_one(context):
        from headprune.regression import check

        context.stage("evaluating")
        if update_baseline:
            if output is not None or junit is not None:
                raise HeadpruneError(
                    "--update-baseline writes the baseline alone: leave out OUTPUT and --junit."
                )
            return check.update_baseline(config, remote, context.step)
        with _files(config, output, junit):
            report = check.check(config, remote, context.step)
            _write(report, output, junit)
            return report


@contextmanager
def _never_one(context: Context) -> Iterator[None]:
    """Keep exit code 1 for broken limits: after any other error the check could not run."""
    try:
        yield
    except HeadpruneError:
        raise
    except Exception as error:  # any would end with 1, which says that a limit is broken
        if devices.is_device_failure(error):
            raise
        context.line("".join(traceback.format_exception(error)).rstrip())
        raise HeadpruneError(
            f"The check itself failed: {type(error).__name__}: {error}. Please report this."
        ) from error


@contextmanager
def _files(config: CheckConfig, output: Path | None, junit: Path | None) -> Iterator[None]:
    """Reserve the files."""
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import CHECK, JUNIT

    sources = [domain.source for domain in config.data]
    inputs = (config.model, *sources, config.baseline, config.against)
    with ExitStack() as claims:
        for path, kind in ((junit, JUNIT), (output, CHECK)):
            if path is not None:
                claims.enter_context(claimed_file(path, kind, overwrite=True, inputs=inputs))
        yield


def _write(report: CheckReport, output: Path | None, junit: Path | None) -> None:
    from headprune.io.writing import write_whole
    from headprune.regression.junit import junit_xml

    if output is not None:
        write_whole(output, report.model_dump_json(indent=2) + "\n")
    if junit is not None:
        seconds = report.evaluate_s + report.judge_s
        write_whole(junit, junit_xml(report.model, report.limits, seconds))
