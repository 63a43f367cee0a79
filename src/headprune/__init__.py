"""headprune: make the attention of Hugging Face models smaller, and prove the result.

evidence  ->  plan  ->  surgery  ->  proof  ->  report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headprune._version import __version__ as __version__

if TYPE_CHECKING:  # and for the reference, which reads these names here
    from headprune.context import Context as Context
    from headprune.model.loading import from_pretrained as from_pretrained
    from headprune.render.attention import attention_picture as attention_picture
    from headprune.schemas.plan import Plan as Plan

# Loaded on first use: importing headprune, and so `headprune --help`, must not import torch.
_OTHERS = {
    "Context": "headprune.declaration",
    "Plan": "headprune.schemas.plan",
    "attention_picture": "headprune.render.attention",
    "from_pretrained": "headprune.model.loading",
}


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        return getattr(importlib.import_module(_OTHERS[name]), name)
    if not name.startswith("_"):
        commands = importlib.import_module("headprune.declaration").COMMANDS
        if name.replace("_", "-") in commands:
            return commands[name.replace("_", "-")]
    raise AttributeError(f"module 'headprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    commands = importlib.import_module("headprune.declaration").COMMANDS
    functions = [command.section for command in commands.values()]
    return sorted(["__version__", *_OTHERS, *functions])
