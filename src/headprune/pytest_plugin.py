"""A pytest fixture that holds a model to its baseline; on wherever headprune is installed.

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
    """A function: ``assert_no_regression(model, baseline, *limits, **settings)``.

    Limits default to the baseline's, data and settings too.
    ``settings`` are fields of ``headprune.config.CheckConfig``. Fails with one line per limit
    that is broken or cannot be decided; returns the report.
    """
    return _assert_no_regression


def _assert_no_regression(
    model: str | Path, baseline: str | Path, *limits: str, **settings: Any
) -> CheckReport:
    from headprune.config import CheckConfig, build
    from headprune.regression.baseline import read_baseline
    from headprune.regression.check import check
    from headprune.regression.verdicts import Verdict

    made = read_baseline(Path(baseline))
    domains = made.domains or {}
    further = [
        {"name": name, **{key: value for key, value in said.items() if key != "sha256"}}
        for name, said in domains.items()
    ]
    first = {"name": "-".join(["main", *domains]), "source": made.data["source"]}  # no other's name
    data = {**made.data, "data": [first, *further]}
    known = {**made.settings, **data, "limits": made.limits}
    defaults = {name: known[name] for name in CheckConfig.model_fields if name in known}
    for other in ("confidence", "resamples"):  # the evaluation's own, which decide nothing here
        defaults.pop(other, None)
    asked = {"model": str(model), "baseline": str(baseline), **settings}
    if limits:
        asked["limits"] = limits
    report = check(build(CheckConfig, **{**defaults, **asked}))
    if not report.passed:
        failed = [one.sentence() for one in report.limits if one.verdict is not Verdict.PASSED]
        pytest.fail("\n".join(failed), pytrace=False)
    return report
