"""Metrics as local modules of the evaluate library: hub metrics would need a network.

One folder and one file of the same name each, so that ``evaluate.load(folder)`` finds it. We take
the class from there ourselves: ``evaluate.load`` copies code and numbers to the user's home, which
may not be writable.
"""

from __future__ import annotations

import tempfile
from importlib import import_module

import evaluate


def load(name: str) -> evaluate.Metric:
    """Loads one of the metrics of this folder; it keeps its numbers in memory."""
    module = import_module(f"{__name__}.{name}.{name}")
    (metric,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, evaluate.Metric)
    )
    with tempfile.TemporaryDirectory(prefix="headprune-") as unused:
        return metric(keep_in_memory=True, cache_dir=unused)
