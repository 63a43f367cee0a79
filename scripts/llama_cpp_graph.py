"""A GGUF file in llama.cpp: its logits, and the speed and cache of a server of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from headprune.engines.xllamacpp import Server

_CACHE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells")


class Times(NamedTuple):
    """Seconds for a prompt and for the tokens after it, and what a token takes of the cache."""

    prefill: float
    decode: float
    cache_bytes_per_token: float


class LlamaCppGraph:
    """A GGUF file; the engine gives hidden states, and the output matrix of the file logits.

    The last product is torch's, as llama.cpp gives the logits of generated tokens alone.
    """

    def __init__(self, file: Path) -> None:
        self.inputs: Mapping[str, tuple[int | None, ...]] = {"input_ids": (None, None)}
        self._file = file
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        output = tensors.get("output.weight", tensors["token_embd.weight"])
        numbers = gguf.dequantize(output.data, output.tensor_type).astype(np.float32)
        self._output = torch.from_numpy(numbers).view(*map(int, output.shape[::-1]))
        self._server: tuple[int, Server] | None = None

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return its logits."""
        ids = inputs["input_ids"]
        length = ids.shape[1]
        if self._server is None or self._server[0] < length:
            if self._server is not None:
                self._server[1].close()
            self._server = length, Server(self._file, length, "states")
        question = {"input": ids.tolist(), "embd_normalize": -1}
        rows = [row["embedding"] for row in self._server[1].ask("/embeddings", question)]
        return {"logits": torch.tensor(rows) @ self._output.T}

    def times(self, ids: Tensor, decoded: int) -> Times:
        """Read a prompt and generate greedily, as llama-server does."""
        server = Server(self._file, ids.shape[1] + decoded + 1, "as served")
        question = {"n_predict": decoded + 1, "temperature": 0, "ignore_eos": True}
        (row,) = ids.tolist()
        answer = server.ask("/completion", {**question, "prompt": row, "cache_prompt": False})
        server.log.seek(0)
        size = _CACHE.search(server.log.read())
        assert size is not None
        server.close()
        timings = answer["timings"]  # the first token comes of the prompt
        cache = float(size[1]) * 2**20 / int(size[2])
        return Times(timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000, cache)
