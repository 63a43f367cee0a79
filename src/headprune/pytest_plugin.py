"""A pytest fixture that holds a model to its baseline; active where headprune is installed.

def test_the_release_candidate(assert_no_regression):
    assert_no_regression("out/smaller", "baseline.json", "perplexity <= +2 %")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headprune.regression.check import CheckReport


@pytest.fixture
def assert_no_regression() -> Callable[..., CheckReport]:
    """Return a function: ``assert_no_regression(model, baseline, *limits, **settings)``.

    Limits, data and settings default to the baseline's. ``settings`` are fields of
    ``headprune.config.CheckConfig``. It fails with one line per broken or undecided limit, or
    returns the report.
    """
    return _assert_no_regression


def _assert_no_regression(
    model: str | Path, baseline: str | Path, *limits: str, **settings: Any
) -> CheckReport:
    from headprune.config import CheckConfig, build
    from headprune.regression.baseline import read_baseline
    from headprune.regression.check import check
    from headprune.regression.verdicts import Verdict

    stored = read_baseline(Path(baseline))
    domains = stored.domains or {}
    further = [
        {"name": name, **{key: value for key, value in domain.items() if key != "sha256"}}
        for name, domain in domains.items()
    ]
    unique = "-".join(["main", *domains])
    first = {"name": unique, "source": stored.data["source"]}
    first |= {"loss": stored.data["loss"]} if "loss" in stored.data else {}
    data = {**stored.data, "data": [first, *further]}
    known = {**stored.settings, **data, "limits": stored.limits}
    defaults = {name: known[name] for name in CheckConfig.model_fields if name in known}
    for name in ("confidence", "resamples"):  # of the evaluation alone
        defaults.pop(name, None)
    options = {"model": str(model), "baseline": str(baseline), **settings}
    if limits:
        options["limits"] = limits
    report = check(build(CheckConfig, **{**defaults, **options}))
    if not report.passed:
        failed = [
            limit.sentence() for limit in report.limits if limit.verdict is not Verdict.PASSED
        ]
        pytest.fail("\n".join(failed), pytrace=False)
    return report
