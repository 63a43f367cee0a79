"""Loads the fixtures where tests run."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands out tests to workers need not import what they test."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    config.pluginmanager.import_plugin("tests.fixtures")
