"""Proof of a GGUF file in llama.cpp: the tokens that it generates, against torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import ProofError
from headprune.formats import llama_cpp_process
from headprune.formats.format import ExportProof
from headprune.formats.gguf_file import as_stored
from headprune.formats.llama_cpp_process import Step
from headprune.formats.source import ExportSource
from headprune.model.loading import load_tokenizer
from headprune.planning.targets import windowed_layers
from headprune.schemas.proofs import PROBE_SEED

_PROMPT, _STEPS, _PROMPTS = 24, 64, 16
_CONTEXT = 512  # tokens, at least
MOST = 8_192  # tokens of a window that a prompt fills
TOLERANCE = 2e-3  # of log-probabilities, in float32
# times that rounding states moves torch; kernels round at other ties: 0.7 to 1.0 times on
# SmolLM2-135M, whole and cut, in q8_0, bfloat16 and float16
_ROUNDED = 3.0
_PATIENCE_S = 3_600.0  # a few tokens of a model that fits into memory take minutes
# rules of cutting text differ in contractions, numbers, runs of spaces and lines, accents
_TEXT = "It's 12345 b c  bc,\n\n DON'T é b.\tbcb   7.5%  naïve über 日本 ...'ll"


def prove(source: ExportSource, file: Path, kind: Type, same_tokenizer: bool) -> ExportProof:
    """Compare log-probabilities of the most probable tokens at every greedy step with torch's.

    In float32 the largest difference counts, and torch must find no token more probable than the
    chosen one. Kernels for other types round states, too, before they multiply them, and a state
    rounded to the other side moves a step far. There the median difference counts, from torch with
    the weights of the file, against the difference that rounding states makes in torch.

    Args:
        source: The model, prepared.
        file: The GGUF file.
        kind: Element type of its matrices.
        same_tokenizer: Whether its tokenizer is the model's: a text must then give the same as its
            token ids.

    Raises:
        ProofError: If llama.cpp cannot run it, or cuts text into other tokens.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    vocabulary = source.shapes["model.embed_tokens.weight"][0]
    positions = source.config.max_position_embeddings
    window = source.config.sliding_window if any(windowed_layers(source.config)) else 0
    length = min(_PROMPT + window, max(positions // 2, positions - _STEPS))
    steps = min(_STEPS, positions - length)
    shape = (_PROMPTS, length)
    prompts = torch.randint(0, vocabulary, shape, generator=generator).tolist()
    answers = _generated(source, file, prompts, steps, same_tokenizer)
    given = [probable for answer in answers for step in answer for _, probable in step]
    if not given:
        raise ProofError("llama.cpp chose only parts of characters, and gave no numbers.")
    net = source.made()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(as_stored(weight, tuple(weight.shape), kind))
    wanted, behind = _by_torch(net, prompts, answers)
    gaps = (torch.tensor(given, dtype=torch.float64) - wanted).abs()
    if kind is Type.F32:
        which, difference, tolerance = "", torch.cat([gaps, behind]).max(), TOLERANCE
    else:
        _round_states(net, kind)
        rounded, _ = _by_torch(net, prompts, answers)
        which, difference = f"median, with weights in {kind.name}, of ", gaps.median()
        tolerance = TOLERANCE + _ROUNDED * float((rounded - wanted).abs().median())
    return ExportProof(
        how="engine",
        engine=f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})",
        compared=f"{which}log-probabilities of {len(gaps)} tokens in {len(behind)} greedy steps",
        difference=float(difference),  # NaN, if one is
        tolerance=tolerance,
        details={
            "greedy tokens equal": int((behind == 0).sum()),
            "mean difference": float(gaps.mean()),
        },
    )


def _generated(
    source: ExportSource, file: Path, prompts: list[list[int]], steps: int, same_tokenizer: bool
) -> list[list[Step]]:
    texts: list[Any] = []
    if same_tokenizer:
        tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
        texts = [_TEXT, tokenizer(_TEXT)["input_ids"]]
    question = {
        **{"file": str(file), "threads": torch.get_num_threads()},
        **{"texts": texts, "prompts": prompts, "steps": steps},
        "context": max(_CONTEXT, len(prompts[0]) + steps),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", llama_cpp_process.__file__],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise ProofError(
            f"llama.cpp was not done with {steps} tokens after {_PATIENCE_S:,.0f} s. Nothing was "
            "left there; --prove read-back does without the engine."
        ) from None
    if done.returncode:
        lines = re.findall(r".*(?:ASSERT|[Ee]rror).*", done.stderr)
        why = lines[0].strip() if lines else f"it ended with {done.returncode}"
        raise ProofError(f"llama.cpp cannot run the file: {why}. Nothing was left there.")
    answers = json.loads(done.stdout.splitlines()[-1])
    if texts and answers["texts"][0] != answers["texts"][1]:
        raise ProofError(
            "llama.cpp cuts a text into other tokens than the tokenizer beside the model. Give "
            "--like FILE, the original model as llama.cpp's convert_hf_to_gguf.py writes it."
        )
    steps_of: list[list[Step]] = answers["prompts"]
    return steps_of


def _round_states(net: PreTrainedModel, kind: Type) -> None:
    """Round the states that every matrix multiplies as its numbers are rounded."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda of, inputs: (as_stored(inputs[0], tuple(of.weight.shape), kind),)
            )


@torch.no_grad()
def _by_torch(
    net: PreTrainedModel, prompts: list[list[int]], answers: list[list[Step]]
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the tokens of all steps, and each choice's gap to the best."""
    probable, behind = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        chosen = [step[0][0] for step in answer]
        ids, count = torch.tensor([prompt + chosen]), len(chosen) + 1
        logits = net(ids, use_cache=False, logits_to_keep=count).logits[0]
        rows = logits[:-1].double().log_softmax(-1)
        for row, step in zip(rows, answer, strict=True):
            probable += [row[token] for token, _ in step]
            behind.append(row.max() - row[step[0][0]])
    return torch.stack(probable), torch.stack(behind)
