"""llama.cpp itself, by the package xllamacpp: what it generates, against torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.errors import ProofError
from headprune.exporting.llama_cpp import server
from headprune.exporting.source import ExportSource
from headprune.model.loading import load_tokenizer
from headprune.schemas.exports import ExportProof
from headprune.schemas.proofs import PROBE_SEED

_PROMPT, _STEPS, _PROMPTS = 24, 32, 16
TOLERANCE = 2e-3  # of log-probabilities, in float32
_MODULE = "xllamacpp"
# what rules of cutting text differ in: contractions, numbers, runs of spaces and lines, accents
_TEXT = "It's 12345 b c  bc,\n\n DON'T é b.\tbcb   7.5%  naïve über 日本 ...'ll"

Steps = list[list[tuple[int, float]]]
"""Per step the most probable tokens with their log-probabilities, the chosen one first."""


def installed() -> bool:
    """Whether the engine is there."""
    return find_spec(_MODULE) is not None


def prove(source: ExportSource, file: Path, own_words: bool) -> ExportProof:
    """Has the engine generate, and torch say how probable every token was.

    The engine chooses greedily. What is compared are the log-probabilities of its most probable
    tokens at every step, and that torch finds none more probable than the one it chose. A text must
    give the same as the token ids that the model's own tokenizer makes of it.

    Args:
        source: The model.
        file: The GGUF file.
        own_words: Whether the tokenizer in the file is that beside the model.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    vocabulary = source.shapes["model.embed_tokens.weight"][0]
    length = min(_PROMPT, source.config.max_position_embeddings // 2)
    steps = min(_STEPS, source.config.max_position_embeddings - length)
    prompts: list[Any] = torch.randint(
        0, vocabulary, (_PROMPTS, length), generator=generator
    ).tolist()
    if own_words:
        tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
        texts = [_TEXT, tokenizer(_TEXT)["input_ids"]]
        by_text, by_ids = generate(file, texts, steps=2)
        if by_text[:1] != by_ids[:1]:
            raise ProofError(
                "llama.cpp cuts a text into other tokens than the tokenizer beside the model. Give "
                "--like FILE, the original model as llama.cpp's convert_hf_to_gguf.py writes it."
            )
    net, gaps, behind = source.load(), [], []
    for prompt, answer in zip(prompts, generate(file, prompts, steps), strict=True):
        chosen = [step[0][0] for step in answer]
        wanted = _log_probabilities(net, prompt + chosen)[length - 1 : -1]
        for row, step in zip(wanted, answer, strict=True):
            gaps += [abs(said - float(row[token])) for token, said in step]
            behind.append(float(row.max() - row[step[0][0]]))
    if not gaps:
        raise ProofError("llama.cpp chose nothing but parts of characters, and told no numbers.")
    equal, mean = behind.count(0.0), sum(gaps) / len(gaps)
    return ExportProof(
        how="engine",
        engine=f"llama.cpp (xllamacpp {metadata.version(_MODULE)})",
        compared=f"log-probabilities of {len(gaps)} tokens in {len(behind)} greedy steps",
        difference=float(
            torch.tensor([*gaps, *behind], dtype=torch.float64).max()
        ),  # NaN, if one is
        tolerance=TOLERANCE,
        details={"greedy tokens equal": equal, "mean difference": mean},
    )


def generate(file: Path, prompts: list[Any], steps: int) -> list[Steps]:
    """What the engine generates for every prompt.

    Raises:
        ProofError: If it does not load the file, or dies of it.
    """
    asked = json.dumps(
        {"file": str(file), "prompts": prompts, "steps": steps, "threads": torch.get_num_threads()}
    )
    command = [sys.executable, server.__file__]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = re.findall(r".*(?:ASSERT|[Ee]rror).*", done.stderr) or ["it said nothing"]
        raise ProofError(f"llama.cpp cannot run the file that was written: {lines[0].strip()}.")
    answers: list[Steps] = [
        [[(token, probable) for token, probable in step] for step in answer]
        for answer in json.loads(done.stdout)
    ]
    return answers


@torch.no_grad()
def _log_probabilities(net: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = net(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)
