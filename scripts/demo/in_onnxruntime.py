"""A sentence from an exported model: ONNX Runtime, its tokenizer and numpy, and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def continuation(folder: Path, start: str, tokens: int = 24) -> str:
    """Goes on from a few words, token by token, always with the likeliest.

    Args:
        folder: What ``headprune export --to onnx`` wrote.
        start: The words.
        tokens: How many tokens are added at most.
    """
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    caches = [one for one in session.get_inputs() if one.name.startswith("past_key_values")]
    # a cache of each layer's own size: (batch, KV heads, tokens so far, width of a head)
    past = {c.name: np.zeros((1, c.shape[1], 0, c.shape[3]), np.float32) for c in caches}
    names = ["logits", *(name.replace("past_key_values", "present") for name in past)]
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    ids = words.encode(start).ids
    new = list(ids)
    for _ in range(tokens):
        inputs: dict[str, Any] = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids) - len(new), len(ids))[None],
            **past,
        }
        logits, *present = session.run(names, inputs)
        past = dict(zip(past, present, strict=True))
        new = [int(logits[0, -1].argmax())]
        ids += new
        if ids[-1] == stop:
            break
    text: str = words.decode(ids)
    return text
