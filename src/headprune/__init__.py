"""headprune: make the attention of Hugging Face models smaller, and prove the result.

evidence  ->  plan  ->  surgery  ->  proof  ->  report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headprune._version import __version__

if TYPE_CHECKING:
    from headprune.models.loading import from_pretrained as from_pretrained

# Loaded on first use: importing headprune, and so `headprune --help`, must not import torch.
_LAZY = {
    "from_pretrained": "headprune.models.loading",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'headprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
