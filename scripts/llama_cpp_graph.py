"""A GGUF file in llama.cpp: its logits, and the speed and cache of a server of it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import gguf
import numpy as np
import torch
import xllamacpp
from torch import Tensor

from headprune.formats.run import LoadedGraph

_CACHE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells")


class Times(NamedTuple):
    """Seconds for a prompt and for the tokens after it, and bytes of the cache per token."""

    prefill: float
    decode: float
    cache_bytes_per_token: float


def _params(file: Path, context: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = context, 1
    params.n_gpu_layers, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    return params


def _ask(server: Any, path: str, question: Mapping[str, Any]) -> Any:
    """Return the answer of the server's own interface, which OpenAI's is not as wide as."""
    headers = {"Content-Type": "application/json"}
    request = Request(server.listening_address + path, json.dumps(question).encode(), headers)
    with build_opener(ProxyHandler({})).open(request) as answer:
        return json.load(answer)


def load(file: Path, cache: str = "F32") -> LoadedGraph:
    """Load a GGUF file as a graph; llama.cpp gives hidden states, in float32.

    ``cache`` is the element type of keys and values, such as Q8_0. The product with the output
    matrix of the file is torch's, as llama.cpp gives the logits of generated tokens alone.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    stored = tensors.get("output.weight", tensors["token_embd.weight"])
    numbers = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    output = torch.from_numpy(numbers).view(*map(int, stored.shape[::-1]))
    servers: dict[int, Any] = {}

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ids = inputs["input_ids"]
        length = ids.shape[1]
        if length not in servers:
            params = _params(file, length)
            params.no_extra_bufts = True
            kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
            params.cache_type_k = params.cache_type_v = kind
            flash = "DISABLED" if cache == "F32" else "ENABLED"  # packed values need it
            params.flash_attn_type = getattr(
                xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}"
            )
            params.embedding, params.embd_normalize = True, -1
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
            params.n_batch = params.n_ubatch = length  # tokens computed in one go
            servers.clear()
            servers[length] = xllamacpp.Server(params)
        question = {"input": ids.tolist(), "embd_normalize": -1}
        rows = [row["embedding"] for row in _ask(servers[length], "/embeddings", question)]
        return {"logits": torch.tensor(rows) @ output.T}

    return LoadedGraph({"input_ids": (None, None)}, run)


def times(file: Path, ids: Tensor, decoded: int) -> Times:
    """Read a prompt and generate greedily, as llama-server does."""
    params = _params(file, ids.shape[1] + decoded + 1)
    params.verbosity = 4  # logs the size of the cache
    (row,) = ids.tolist()
    question: dict[str, Any] = {"n_predict": decoded + 1, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            server = xllamacpp.Server(params)
            question |= {"prompt": row, "cache_prompt": False}
            answer = _ask(server, "/completion", question)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        size = _CACHE.search(log.read())
    assert size is not None
    timings = answer["timings"]  # the first token comes of the prompt
    cache = float(size[1]) * 2**20 / int(size[2])
    return Times(timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000, cache)
