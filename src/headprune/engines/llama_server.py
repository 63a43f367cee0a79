"""Serves a GGUF file by llama.cpp; a process of its own, which the engine's assertions may end.

The first line of standard input holds ``file``, ``context``, ``threads`` and ``use`` as JSON: what
``xllamacpp.Use`` names. Standard output gets the address. The process ends with its input.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def serve(file: str, context: int, threads: int, use: str) -> Any:
    """Starts the server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = context, 1
    params.n_gpu_layers, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 4  # says how large the cache is
    if use != "as served":
        params.no_extra_bufts = True
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if use == "states":
        params.embedding, params.embd_normalize = True, -1
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
        params.n_batch = params.n_ubatch = context  # which are computed in one go
    return xllamacpp.Server(params)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files have the names of packages
    server = serve(**json.loads(sys.stdin.readline()))
    print(server.listening_address, flush=True)
    sys.stdin.read()
