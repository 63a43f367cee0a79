"""headprune check."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune import devices
from headprune.commands.shared import Placed, Trust
from headprune.config import CheckConfig, NeedleConfig
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.regression.baseline import Baseline
    from headprune.regression.check import CheckReport


class CheckOptions(CheckConfig, Trust, Placed):
    """Hold a model to limits, against a stored baseline and the original. For CI.

    Exit codes: 0 passed, 1 a limit is broken, 2 it could not run or a limit cannot be decided.
    """

    update_baseline: bool = option("Write --baseline instead of checking.", False, Panel.MAIN)
    allow_dirty: bool = option("Write it although tracked files are not committed.", False)
    allow_other: bool = option(
        "Replace a baseline of other data, settings or another kind of model.",
        False,
    )
    output: Path | None = option(
        "Write the report as JSON, also over an earlier one.", None, Panel.OUTPUT
    )
    junit: Path | None = option(
        "Write JUnit XML there, also over an earlier one.", None, Panel.OUTPUT
    )


def run(options: CheckOptions, context: Context) -> CheckReport | Baseline:
    """Checks, or writes the baseline."""
    config = options.part(CheckConfig)
    with _never_one(context):
        from headprune.regression import check

        context.stage("evaluating")
        if options.update_baseline:
            return check.update_baseline(
                config,
                options.allow_dirty,
                options.allow_other,
                options.trust_remote_code,
                context.step,
            )
        with _files(options):
            report = check.check(config, options.trust_remote_code, context.step)
            _write(report, options)
            return report


@contextmanager
def _never_one(context: Context) -> Iterator[None]:
    """Keeps an exit code of 1 for broken limits: whatever else goes wrong could not run."""
    try:
        yield
    except HeadpruneError:
        raise
    except Exception as error:  # any would end with 1, which says that a limit is broken
        if devices.gave_out(error):
            raise
        context.line("".join(traceback.format_exception(error)).rstrip())
        raise HeadpruneError(
            f"The check itself failed: {type(error).__name__}: {error}. Please report this."
        ) from error


@contextmanager
def _files(options: CheckOptions) -> Iterator[None]:
    """Keeps the files for this run; if the check cannot run, that of JUnit says so.

    An old one would look like this run's.
    """
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import CHECK, JUNIT
    from headprune.io.writing import write_whole
    from headprune.regression.junit import junit_error

    read = [domain.source for domain in options.data]
    inputs = (options.model, *read, options.baseline, options.against)
    with ExitStack() as claims:
        for path, kind in ((options.junit, JUNIT), (options.output, CHECK)):
            if path is not None:
                claims.enter_context(claimed_file(path, kind, overwrite=True, inputs=inputs))
        try:
            yield
        except BaseException as error:  # also by Ctrl-C
            if options.junit is not None:
                text = junit_error(options.model, str(error) or type(error).__name__)
                write_whole(options.junit, text)
            raise


def _refused(settings: Mapping[str, Any], why: HeadpruneError) -> None:
    """Has the file of JUnit say so, unless it is another's."""
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import JUNIT
    from headprune.io.writing import write_whole
    from headprune.regression.junit import junit_error

    junit, model, *others = (settings.get(n) for n in ("junit", "model", "baseline", "against"))
    if not isinstance(junit, (str, Path)):
        return
    inputs = [place for place in (model, *others) if isinstance(place, (str, Path))]
    file = Path(junit)
    with suppress(HeadpruneError), claimed_file(file, JUNIT, overwrite=True, inputs=inputs):
        write_whole(file, junit_error(str(model or ""), str(why)))


def _write(report: CheckReport, options: CheckOptions) -> None:
    from headprune.io.writing import write_whole
    from headprune.regression.junit import junit_xml

    if options.output is not None:
        write_whole(options.output, report.model_dump_json(indent=2) + "\n")
    if options.junit is not None:
        seconds = report.evaluate_s + report.judge_s
        write_whole(options.junit, junit_xml(report.model, report.limits, seconds))


def show(result: CheckReport | Baseline, options: CheckOptions, console: Console) -> None:
    """Prints limit by limit."""
    from headprune.regression.baseline import Baseline
    from headprune.render import checks

    if isinstance(result, Baseline):
        checks.recorded(console, result, str(options.baseline))
    else:
        checks.checked(console, result)


def _tell(result: CheckReport | Baseline | HeadpruneError, say: Callable[[str], None]) -> None:
    """Tells GitHub Actions, where it runs there."""
    from headprune.regression.check import CheckReport
    from headprune.render import checks as actions

    if os.environ.get("GITHUB_ACTIONS") == "true":
        if isinstance(result, HeadpruneError):
            say(actions.annotation("error", f"could not run: {result}"))
        elif isinstance(result, CheckReport):
            for command in actions.workflow_commands(result.limits):
                say(command)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary and isinstance(result, CheckReport):
        text = actions.step_summary(result.model, result.limits, result.verdict)
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise HeadpruneError(f"GITHUB_STEP_SUMMARY cannot be written: {error}.") from None


def _as_json(result: CheckReport | Baseline) -> str:
    return result.model_dump_json(indent=2, exclude={"samples"})


def _exit_code(result: CheckReport | Baseline) -> int:
    verdict = getattr(result, "verdict", "passed")  # a baseline is none that could fail
    return {"passed": 0, "broken": 1}.get(verdict, 2)


declare(
    Command(
        "check",
        Chapter.JUDGE,
        CheckOptions,
        run,
        show,
        as_json=_as_json,
        exit_code=_exit_code,
        tell=_tell,
        refused=_refused,
        needs={
            **dict.fromkeys(NeedleConfig.model_fields, "limits=needle_accuracy"),
            "role_sequences": "limits=roles_lost",
            **dict.fromkeys(("allow_dirty", "allow_other"), "update_baseline"),
            # settings of the judgement stay in the file of --config that both runs share
            **dict.fromkeys(("output", "junit"), "!update_baseline"),
        },
    )
)
