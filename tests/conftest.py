"""Loads the fixtures where tests run."""

import gc
import os


def pytest_configure(config):
    """Hides GPUs where none was asked for, and loads the fixtures where they are used."""
    asked = config.getoption("markexpr")
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # the process that hands out tests to workers need not import what they test
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    config.pluginmanager.import_plugin("tests.fixtures")


def pytest_sessionfinish():
    """What is imported after the tests may look for who holds its objects."""
    gc.unfreeze()
