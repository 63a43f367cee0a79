"""headprune: make the attention of Hugging Face models smaller, and prove the result.

evidence  ->  plan  ->  surgery  ->  proof  ->  report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headprune._version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and the reference, which read these names here
    from headprune.commands.attention import attention as attention
    from headprune.commands.check import check as check
    from headprune.commands.compress import compress as compress
    from headprune.commands.convert_gqa import convert_gqa as convert_gqa
    from headprune.commands.convert_mla import convert_mla as convert_mla
    from headprune.commands.convert_swa import convert_swa as convert_swa
    from headprune.commands.evaluate import evaluate as evaluate
    from headprune.commands.export import export as export
    from headprune.commands.families import families as families
    from headprune.commands.heal import heal as heal
    from headprune.commands.inspect import inspect as inspect
    from headprune.commands.migrate import migrate as migrate
    from headprune.commands.pad import pad as pad
    from headprune.commands.prune import prune as prune
    from headprune.commands.report import report as report
    from headprune.commands.roles import roles as roles
    from headprune.commands.score import score as score
    from headprune.commands.train_gates import train_gates as train_gates
    from headprune.commands.verify import verify as verify
    from headprune.context import Context as Context
    from headprune.model.loading import from_pretrained as from_pretrained
    from headprune.render.attention import attention_picture as attention_picture
    from headprune.schemas.plan import Plan as Plan
    from headprune.surgery.live import apply as apply
    from headprune.surgery.live import undo as undo

# Loaded on first use: importing headprune, and so `headprune --help`, must not import torch.
_COMMANDS = [
    "attention",
    "check",
    "compress",
    "convert_gqa",
    "convert_mla",
    "convert_swa",
    "evaluate",
    "export",
    "families",
    "heal",
    "inspect",
    "migrate",
    "pad",
    "prune",
    "report",
    "roles",
    "score",
    "train_gates",
    "verify",
]
_MODULES = {
    **{name: f"headprune.commands.{name}" for name in _COMMANDS},
    "Context": "headprune.context",
    "Plan": "headprune.schemas.plan",
    "apply": "headprune.surgery.live",
    "attention_picture": "headprune.render.attention",
    "from_pretrained": "headprune.model.loading",
    "undo": "headprune.surgery.live",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'headprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULES])
