# Copyright The headprune authors. Licensed under the Apache License, Version 2.0.
"""The config of a DeciLM: a Llama whose layers differ in KV heads, or have no attention.

transformers has no such class; engines that build the model themselves read this.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


class Block(dict[str, Any]):
    """Settings by attribute, which stay JSON."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Block(value) if isinstance(value, dict) else value


class DeciLMConfig(LlamaConfig):  # type: ignore[misc]  # its decorators leave it without a type
    """Llama's config, and one block per layer."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Any = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.block_configs = [Block(block) for block in block_configs]
