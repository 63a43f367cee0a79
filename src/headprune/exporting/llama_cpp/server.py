"""Runs a GGUF file in llama.cpp; a process of its own, which the engine's assertions may end.

Standard input holds ``file``, ``prompts`` (token ids or text), ``steps`` in all, and ``threads``.
Standard output gets, per prompt and step, the most probable tokens with their log-probabilities,
the chosen one first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SHOWN = 20


def generate(
    file: str, prompts: list[Any], steps: int, threads: int
) -> list[list[list[tuple[int, float]]]]:
    """Generates greedily in float32: so are the cache and all kernels."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = max(map(len, prompts)) + steps + 8, 1
    params.n_gpu_layers, params.warmup, params.no_extra_bufts = 0, False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    # a request per token, on the cache of the one before: the steps of a longer request are told
    # apart by whole characters, which a token need not be
    asked = {"n_predict": 1, "temperature": 0, "n_probs": SHOWN}
    answers = []
    for prompt in prompts:
        shown: list[list[tuple[int, float]]] = []
        while len(shown) < (steps if isinstance(prompt, list) else 1):
            said = prompt + [step[0][0] for step in shown] if shown else prompt
            done = server.handle_completions(
                {**asked, "prompt": said, "cache_prompt": bool(shown)}  # a new prompt starts anew
            )
            told = done["choices"][0]["logprobs"]
            if (
                not told or not told["content"]
            ):  # the end, or a part of a character: it says no more
                break
            (step,) = told["content"]
            shown.append([(step["id"], step["logprob"]), *_others(step)])
        steps -= len(shown)
        answers.append(shown)
    return answers


def _others(step: Any) -> list[tuple[int, float]]:
    return [(t["id"], t["logprob"]) for t in step["top_logprobs"] if t["id"] != step["id"]]


if __name__ == "__main__":
    print(json.dumps(generate(**json.load(sys.stdin))))
