"""Random draws that depend on nothing but their purpose."""

from __future__ import annotations

import hashlib

import torch


def generator_for(content: bytes) -> torch.Generator:
    """Return a generator on the CPU, seeded by a content."""
    digest = hashlib.sha256(content).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
