"""Generate with llama.cpp on a GGUF file, in a process that the engine's assertions may end.

Standard input holds the arguments of ``generate`` as JSON; the last line of standard output gets
its result. Run it with ``python -P``: files in this folder have the names of packages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_SHOWN = 20  # most probable tokens of a step

Step = list[Any]
"""Pairs of a token id and its log-probability, the chosen token first."""


def generate(
    file: str,
    threads: int,
    texts: list[str | list[int]],
    prompts: list[list[int]],
    steps: int,
    context: int,
) -> dict[str, list[list[Step]]]:
    """Generate greedily, with states and cache in float32.

    Args:
        file: The GGUF file.
        threads: Threads of the CPU.
        texts: Texts or token ids to generate one token after.
        prompts: Token ids to generate from.
        steps: Tokens for all prompts together.
        context: Tokens of any prompt with its steps, at most.

    Returns:
        The steps after every text, and after every prompt.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = context, 1
    params.n_gpu_layers, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.no_extra_bufts = True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    after_texts = [_greedy(server, text, 1) for text in texts]
    after_prompts: list[list[Step]] = []
    for prompt in prompts:
        after_prompts.append(_greedy(server, prompt, steps))
        steps -= len(after_prompts[-1])
    return {"texts": after_texts, "prompts": after_prompts}


def _greedy(server: Any, prompt: Any, steps: int) -> list[Step]:
    """Generate a token per request, on the cache of the one before.

    The steps of a longer request are separated by whole characters, which a token need not be.
    """
    taken: list[Step] = []
    while len(taken) < steps:
        question = {
            **{"prompt": prompt + [step[0][0] for step in taken] if taken else prompt},
            **{"n_predict": 1, "temperature": 0, "n_probs": _SHOWN, "cache_prompt": bool(taken)},
        }
        shown = server.handle_completions(question)["choices"][0]["logprobs"]
        if not shown or not shown["content"]:  # the end, or a part of a character
            break
        (best,) = shown["content"]
        rest = [(t["id"], t["logprob"]) for t in best["top_logprobs"] if t["id"] != best["id"]]
        taken.append([(best["id"], best["logprob"]), *rest])
    return taken


if __name__ == "__main__":
    print(f"\n{json.dumps(generate(**json.load(sys.stdin)))}", flush=True)
