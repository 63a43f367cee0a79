"""headprune held to its own limits: a tiny model is trained, its heads cut, the result checked.

    python scripts/self_check/self_check.py [--update-baseline]

The model, its language and its tokenizer are made on the spot from seeds. The baseline beside this
file was made on another machine, whose sums round otherwise; training carries that on, so the limit
on perplexity leaves room for it. A damaged result must break the limits, or the check is worthless.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
WORDS, SPECIAL = 60, ["<unk>", "<pad>", "<s>", "</s>"]
STEPS, BATCH, LENGTH = 200, 16, 32


def language(words: int, seed: int) -> list[int]:
    """Word numbers: each word says what the second after it is, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, WORDS, (words,), generator=generator).tolist()
    follow = torch.rand(words, generator=generator) < 0.8
    for i in range(2, words):
        if follow[i]:
            draws[i] = (draws[i - 2] * 7 + 3) % WORDS
    return draws


def trained() -> LlamaForCausalLM:
    """A Llama of four layers, six heads each, that has learned the language."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + len(SPECIAL),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(STEPS):
        rows = [language(LENGTH, 1_000 + step * BATCH + row) for row in range(BATCH)]
        ids = torch.tensor(rows) + len(SPECIAL)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("unk_token", "pad_token", "bos_token", "eos_token")
    return PreTrainedTokenizerFast(tokenizer_object=words, **dict(zip(names, SPECIAL, strict=True)))


def headprune(*arguments: object) -> int:
    """Runs a command and shows it; returns its exit code."""
    print("$ headprune", *arguments, flush=True)
    # one thread, so that the number of cores decides nothing; and what fails here on purpose is no
    # annotation of the run around it
    env = {n: v for n, v in os.environ.items() if not n.startswith("GITHUB_")}
    command = [sys.executable, "-m", "headprune", *map(str, arguments)]
    return subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}).returncode


def damage(folder: Path) -> None:
    """Makes one layer of a model answer to nothing it attends to."""
    weights = load_file(folder / "model.safetensors")
    (name, *_) = (name for name in sorted(weights) if name.endswith("o_proj.weight"))
    save_file({**weights, name: torch.zeros_like(weights[name])}, folder / "model.safetensors")


def main() -> None:
    """Train, cut, check; then damage and check."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    update = ["--update-baseline"] if "--update-baseline" in sys.argv[1:] else []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, seed in (("train.txt", 0), ("test.txt", 1)):
            words = " ".join(f"w{word}" for word in language(8_000, seed))
            Path(name).write_text(words, encoding="utf-8")
        trained().save_pretrained("original")
        tokenizer().save_pretrained("original")
        gates = ("train-gates", "original", "--data", "train.txt", "gates")
        budget = ("--target-heads", "0.75", "--steps", 60, "--config", f"seq_len={LENGTH}")
        prune = ("prune", "original", "--gates", "gates", "smaller")
        check = ("check", "--config", HERE / "headprune.yaml", "--baseline", HERE / "baseline.json")
        for command in ((*gates, *budget), prune, (*check, *update)):
            if code := headprune(*command):
                sys.exit(code)
        if not update:
            shutil.copytree("smaller", "damaged")
            damage(Path("damaged"))
            code = headprune(*check, "damaged")
            sys.exit(0 if code == 1 else f"A damaged model was not found out (exit code {code}).")


if __name__ == "__main__":
    main()
