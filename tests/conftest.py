"""Loads the fixtures where tests run."""

from __future__ import annotations

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands out tests to workers need not import what they test."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    config.pluginmanager.import_plugin("tests.fixtures")


def pytest_sessionfinish() -> None:
    """What is imported after the tests may look for who holds its objects."""
    gc.unfreeze()
