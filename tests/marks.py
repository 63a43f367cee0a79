"""Which rows of a test belong to ``make test``, and which to ``make test-all`` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(fast: Callable[..., bool], rows: Iterable[Any]) -> list[Any]:
    """The rows of a parametrised test; those that are not fast are marked slow.

    Args:
        fast: Tells of the values of a row whether ``make test`` runs it.
        rows: All rows: tuples, or single values.
    """
    tuples = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=() if fast(*row) else pytest.mark.slow) for row in tuples]
