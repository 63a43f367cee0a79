"""headprune: make the attention of Hugging Face models smaller, and prove the result.

evidence  ->  plan  ->  surgery  ->  proof  ->  report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headprune._version import __version__

if TYPE_CHECKING:
    from headprune.config import BudgetConfig as BudgetConfig
    from headprune.config import CalibrationConfig as CalibrationConfig
    from headprune.config import CheckConfig as CheckConfig
    from headprune.config import ConvertConfig as ConvertConfig
    from headprune.config import DataConfig as DataConfig
    from headprune.config import EvaluateConfig as EvaluateConfig
    from headprune.config import HealConfig as HealConfig
    from headprune.config import TrainGatesConfig as TrainGatesConfig
    from headprune.models.loading import from_pretrained as from_pretrained
    from headprune.pipelines.check import check as check
    from headprune.pipelines.convert_gqa import convert_gqa as convert_gqa
    from headprune.pipelines.evaluate import evaluate as evaluate
    from headprune.pipelines.heal import heal as heal
    from headprune.pipelines.import_pickle import import_pickle as import_pickle
    from headprune.pipelines.inspect import inspect as inspect
    from headprune.pipelines.prune import migrate as migrate
    from headprune.pipelines.prune import prune as prune
    from headprune.pipelines.run import run as run
    from headprune.pipelines.score import score as score
    from headprune.pipelines.sweep import sweep as sweep
    from headprune.pipelines.train_gates import train_gates as train_gates
    from headprune.pipelines.verify import verify as verify
    from headprune.plan import Plan as Plan
    from headprune.recipe import read_recipe as read_recipe

# Loaded on first use: importing headprune, and so `headprune --help`, must not import torch.
_LAZY = {
    "BudgetConfig": "headprune.config",
    "CalibrationConfig": "headprune.config",
    "CheckConfig": "headprune.config",
    "ConvertConfig": "headprune.config",
    "DataConfig": "headprune.config",
    "EvaluateConfig": "headprune.config",
    "HealConfig": "headprune.config",
    "Plan": "headprune.plan",
    "TrainGatesConfig": "headprune.config",
    "check": "headprune.pipelines.check",
    "convert_gqa": "headprune.pipelines.convert_gqa",
    "evaluate": "headprune.pipelines.evaluate",
    "from_pretrained": "headprune.models.loading",
    "heal": "headprune.pipelines.heal",
    "import_pickle": "headprune.pipelines.import_pickle",
    "inspect": "headprune.pipelines.inspect",
    "migrate": "headprune.pipelines.prune",
    "prune": "headprune.pipelines.prune",
    "read_recipe": "headprune.recipe",
    "run": "headprune.pipelines.run",
    "score": "headprune.pipelines.score",
    "sweep": "headprune.pipelines.sweep",
    "train_gates": "headprune.pipelines.train_gates",
    "verify": "headprune.pipelines.verify",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'headprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
