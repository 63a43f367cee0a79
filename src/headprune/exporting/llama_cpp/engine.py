"""llama.cpp itself, by the package xllamacpp: what it generates, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.engines.xllamacpp import Server
from headprune.errors import CheckpointError, ProofError
from headprune.exporting.llama_cpp.file import as_held
from headprune.exporting.source import ExportSource
from headprune.exporting.weights import Weights
from headprune.model.loading import load_tokenizer
from headprune.schemas.exports import ExportProof
from headprune.schemas.proofs import PROBE_SEED

_PROMPT, _STEPS, _PROMPTS = 24, 64, 16
TOLERANCE = 2e-3  # of log-probabilities, in float32
# of how far rounding states moves them in torch; kernels do so as far, at other ties: 0.7 to 1.0
# times on SmolLM2-135M, whole and cut, in q8_0, bfloat16 and float16
_ROUNDED = 3.0
_SHOWN = 20  # most probable tokens of a step
_MODULE = "xllamacpp"
# what rules of cutting text differ in: contractions, numbers, runs of spaces and lines, accents
_TEXT = "It's 12345 b c  bc,\n\n DON'T é b.\tbcb   7.5%  naïve über 日本 ...'ll"

Steps = list[list[tuple[int, float]]]
"""Per step the most probable tokens with their log-probabilities, the chosen one first."""


def installed() -> bool:
    """Whether the engine is there."""
    return find_spec(_MODULE) is not None


def prove(source: ExportSource, file: Path, kind: Type, own_words: bool) -> ExportProof:
    """Has the engine generate, and torch say how probable every token was.

    The engine chooses greedily. What is compared are the log-probabilities of its most probable
    tokens at every step. A text must give the same as the token ids that the model's own tokenizer
    makes of it.

    In float32 the largest difference counts, and torch must find no token more probable than the
    one it chose. Kernels for other types round states, too, before they multiply them, and one that
    is rounded to the other side now and then moves a step far. There the median difference counts,
    from torch with the weights as the file holds them; and what it is held to is how far it moves
    torch to round the states.

    Args:
        source: The model, prepared.
        file: The GGUF file.
        kind: Element type of the matrices in it.
        own_words: Whether the tokenizer in the file is that beside the model.

    Raises:
        ProofError: If it cannot be run, or cuts text into other tokens.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    vocabulary = source.shapes["model.embed_tokens.weight"][0]
    length = min(_PROMPT, source.config.max_position_embeddings // 2)
    steps = min(_STEPS, source.config.max_position_embeddings - length)
    prompts: list[Any] = torch.randint(
        0, vocabulary, (_PROMPTS, length), generator=generator
    ).tolist()
    if own_words:
        _refuse_other_words(source, file)
    answers = generate(file, prompts, steps)
    told = [probable for answer in answers for step in answer for _, probable in step]
    if not told:
        raise ProofError("llama.cpp chose nothing but parts of characters, and told no numbers.")
    net = source.made_of(_Held(source, kind))
    wanted, behind = _by_torch(net, prompts, answers)
    gaps = (torch.tensor(told, dtype=torch.float64) - wanted).abs()
    if kind is Type.F32:
        which, difference, tolerance = "", torch.cat([gaps, behind]).max(), TOLERANCE
    else:
        _round_states(net, kind)
        rounded, _ = _by_torch(net, prompts, answers)
        which, difference = f"median, with weights in {kind.name}, of ", gaps.median()
        tolerance = TOLERANCE + _ROUNDED * float((rounded - wanted).abs().median())
    return ExportProof(
        how="engine",
        engine=f"llama.cpp (xllamacpp {metadata.version(_MODULE)})",
        compared=f"{which}log-probabilities of {len(gaps)} tokens in {len(behind)} greedy steps",
        difference=float(difference),  # NaN, if one is
        tolerance=tolerance,
        details={
            "greedy tokens equal": int((behind == 0).sum()),
            "mean difference": float(gaps.mean()),
        },
    )


def _refuse_other_words(source: ExportSource, file: Path) -> None:
    """Refuses a file whose tokenizer is not that beside the model.

    Raises:
        ProofError: Naming the option.
    """
    tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
    texts = [_TEXT, tokenizer(_TEXT)["input_ids"]]
    by_text, by_ids = generate(file, texts, steps=2)
    if by_text[:1] != by_ids[:1]:
        raise ProofError(
            "llama.cpp cuts a text into other tokens than the tokenizer beside the model. Give "
            "--like FILE, the original model as llama.cpp's convert_hf_to_gguf.py writes it."
        )


class _Held(Weights):
    """Weights as a file holds them."""

    def __init__(self, source: ExportSource, kind: Type) -> None:
        self._weights, self._kind = source.weights, kind

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        return as_held(tensor, tuple(tensor.shape), self._kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _round_states(net: PreTrainedModel, kind: Type) -> None:
    """Has every matrix multiply states that are rounded as its own numbers are."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda of, given: (as_held(given[0], tuple(of.weight.shape), kind),)
            )


def generate(file: Path, prompts: list[Any], steps: int) -> list[Steps]:
    """What the engine generates greedily for prompts, until there are enough steps.

    Args:
        file: The GGUF file.
        prompts: Token ids, or text.
        steps: How many, of all prompts together.

    Raises:
        ProofError: If it does not load the file, or dies of it.
    """
    try:
        with closing(Server(file, max(map(len, prompts)) + steps + 8, "exact")) as server:
            answers: list[Steps] = []
            for prompt in prompts:
                answers.append(_greedy(server, prompt, steps))
                steps -= len(answers[-1])
            return answers
    except CheckpointError as error:
        raise ProofError(f"What was written cannot be run. {error}") from None


def _greedy(server: Server, prompt: Any, steps: int) -> Steps:
    """The steps after a prompt; one after a text.

    A request per token, on the cache of the one before: the steps of a longer request are told
    apart by whole characters, which a token need not be.
    """
    shown: Steps = []
    while len(shown) < (steps if isinstance(prompt, list) else 1):
        said = prompt + [step[0][0] for step in shown] if shown else prompt
        asked = {"n_predict": 1, "temperature": 0, "n_probs": _SHOWN, "cache_prompt": bool(shown)}
        told = server.ask("/v1/completions", {**asked, "prompt": said})["choices"][0]["logprobs"]
        if not told or not told["content"]:  # the end, or a part of a character: it says no more
            break
        (step,) = told["content"]
        others = [(t["id"], t["logprob"]) for t in step["top_logprobs"] if t["id"] != step["id"]]
        shown.append([(step["id"], step["logprob"]), *others])
    return shown


@torch.no_grad()
def _by_torch(
    net: PreTrainedModel, prompts: list[list[int]], answers: list[Steps]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of all steps, and how far each choice is behind the best."""
    found, behind = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        chosen = [step[0][0] for step in answer]
        logits = net(torch.tensor([prompt + chosen]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
        for row, step in zip(rows, answer, strict=True):
            found += [row[token] for token, _ in step]
            behind.append(row.max() - row[step[0][0]])
    return torch.stack(found), torch.stack(behind)
