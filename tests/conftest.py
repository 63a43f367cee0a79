"""Loads the fixtures where tests run."""

from __future__ import annotations

import gc
from itertools import count

import pytest

_FINISHED = count()


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands out tests to workers need not import what they test."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    config.pluginmanager.import_plugin("tests.fixtures")


def pytest_runtest_logfinish() -> None:
    """What tests have imported stays: collections, one per training, need not look through it.

    A tenth of the suite's time goes with it.
    """
    if next(_FINISHED) % 20 == 0:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """What is imported after the tests may look for who holds its objects."""
    gc.unfreeze()
