"""How much of a test ``make test`` runs, and what is for ``make test-all`` and campaigns."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings


def slow_unless(fast, rows):
    """The rows of a parametrised test; those that are not fast are marked slow.

    Args:
        fast: Tells of the values of a row whether ``make test`` runs it.
        rows: All rows: tuples, or single values.
    """
    tuples = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=() if fast(*row) else pytest.mark.slow) for row in tuples]


def tried(examples):
    """Settings of hypothesis: always the same few examples, or as many others as are asked for."""
    asked = int(os.environ.get("HEADPRUNE_EXAMPLES", "0"))
    return settings(
        max_examples=asked or examples,
        derandomize=not asked,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],
    )
