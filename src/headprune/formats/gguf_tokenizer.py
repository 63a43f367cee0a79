"""The tokenizer in a GGUF file: taken over from another file, or recognised for certain.

llama.cpp cuts text into words by rules of its own, and a file names one. A rule that is only
similar would give other tokens without a word, so a tokenizer is written by these rules only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from headprune.errors import CheckpointError, HeadpruneError
from headprune.formats.source import ExportSource
from headprune.model.loading import load_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {"type": "Digits", "individual_digits": True}


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes(False)]}


# UTF-8 without control characters and without planes that are not in use
_PRINTED = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)}


@dataclass(frozen=True)
class Rule:
    """A way to cut text.

    Attributes:
        name: The value of tokenizer.ggml.pre; "" for SentencePiece.
        cut: pre_tokenizer of tokenizer.json.
        normalizers: The normalizers that go with it.
        ignores_merges: Whether a word that is a token stays whole, whatever the merges say.
    """

    name: str
    cut: dict[str, Any] | None
    normalizers: tuple[dict[str, Any] | None, ...] = (None,)
    ignores_merges: bool = False

    def fits(self, content: dict[str, Any]) -> bool:
        """Return whether a tokenizer.json cuts text so, and has a token for every byte."""
        model, letters = content["model"], bytes_to_unicode()
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
        if self.name:
            needed = [letters[byte] for byte in _PRINTED]
        return (
            self.cut == _without_offsets(content["pre_tokenizer"])
            and content["normalizer"] in self.normalizers
            and bool(model.get("byte_fallback")) == (not self.name)
            and bool(model.get("ignore_merges")) == self.ignores_merges
            and all(token in model["vocab"] for token in needed)
        )


_PREPENDED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
RULES = {
    "Llama 3": Rule(
        "llama-bpe", _split(rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"), ignores_merges=True
    ),
    "Qwen 2": Rule("qwen2", _split(rf"{_CONTRACTIONS}\p{{N}}{_REST}"), ({"type": "NFC"}, None)),
    "SmolLM": Rule("smollm", {"type": "Sequence", "pretokenizers": [_DIGITS, _bytes(True)]}),
    "GPT-2": Rule("gpt-2", _bytes(True)),
    "SentencePiece": Rule("", None, (_PREPENDED,)),
}


def recognised(content: dict[str, Any]) -> Rule | None:
    """Return the rule of a tokenizer.json; None for an unknown one."""
    model = content["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    return next((rule for rule in RULES.values() if rule.fits(content)), None)


def _without_offsets(cut: Any) -> Any:
    if isinstance(cut, dict):
        return {k: _without_offsets(value) for k, value in cut.items() if k != "trim_offsets"}
    return [_without_offsets(part) for part in cut] if isinstance(cut, list) else cut


def has_tokenizer(source: ExportSource, like: Path | None) -> bool:
    """Return whether the file gets a tokenizer."""
    return like is not None or any((source.folder / name).is_file() for name in _FILES)


def add_tokenizer(writer: Any, source: ExportSource, like: Path | None) -> None:
    """Add the tokenizer of a model, or of the GGUF file ``like``, to a ``GGUFWriter``.

    Raises:
        HeadpruneError: If that file belongs to another model, or the tokenizer is not recognised.
    """
    size = source.shapes["model.embed_tokens.weight"][0]
    if like is not None:
        _take_over(writer, like, size)
        return
    if not has_tokenizer(source, like):
        writer.add_tokenizer_model("none")
        return
    tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    rule = recognised(content)
    if rule is None:
        raise HeadpruneError(
            f"The tokenizer in '{source.folder}' ({type(tokenizer).__name__}) cuts text by none of "
            f"the known rules ({', '.join(RULES)}): give --like FILE, the original model as "
            "llama.cpp's convert_hf_to_gguf.py writes it."
        )
    if len(tokenizer) > size:
        raise HeadpruneError(
            f"The tokenizer in '{source.folder}' has {len(tokenizer):,} tokens, and the model "
            f"embeds {size:,}: it belongs to another model. Put the model's own there."
        )
    _add_tokens(writer, content, rule, size)
    _add_special(writer, source, tokenizer)


def _add_tokens(writer: Any, content: dict[str, Any], rule: Rule, size: int) -> None:
    ids: dict[str, int] = content["model"]["vocab"]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    unknown = content["model"].get("unk_token")
    for token, at in ids.items():
        tokens[at], types[at] = token, _UNKNOWN if token == unknown and not rule.name else _NORMAL
        if not rule.name and len(token) == 6 and token.startswith("<0x"):
            types[at] = _BYTE
    for added in content["added_tokens"]:
        at = added["id"]
        if types[at] != _UNKNOWN:
            tokens[at] = added["content"]
            types[at] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2" if rule.name else "llama")
    writer.add_tokenizer_pre(rule.name or "default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if rule.name:
        writer.add_token_merges(merges)
        return
    # SentencePiece merges whatever makes a piece, by its score, and numbers its pieces by that
    merged = [ids[pair.replace(" ", "")] for pair in merges]
    if merged != sorted(merged) or not set(_pairs(ids)) <= set(merges):
        raise HeadpruneError(
            "The merges of this SentencePiece tokenizer do not follow from its pieces, so their "
            "scores are unknown: give --like FILE, a GGUF file of the original."
        )
    writer.add_token_scores([float(-at) for at in range(size)])
    writer.add_add_space_prefix(True)


def _pairs(ids: dict[str, int]) -> Iterator[str]:
    """Yield every pair of pieces that is a piece together."""
    for piece in ids:
        for at in range(1, len(piece)):
            if piece[:at] in ids and piece[at:] in ids:
                yield f"{piece[:at]} {piece[at:]}"


def _add_special(writer: Any, source: ExportSource, tokenizer: Any) -> None:
    """Add special tokens and the chat template.

    The tokenizer says whether a text gets a beginning and an end: ``SpecialVocab`` leaves it open
    where no file says so, and llama.cpp then adds them by the rule's name.
    """
    from gguf import SpecialVocab

    special = SpecialVocab(source.folder, special_token_types=("bos", "eos", "unk", "pad"))
    ids = tokenizer("a", verbose=False)["input_ids"]
    begins, ends = ids[:1] == [tokenizer.bos_token_id], ids[-1:] == [tokenizer.eos_token_id]
    special.add_special_token = {"bos": begins, "eos": ends}
    special.add_to_gguf(writer, quiet=True)


def _take_over(writer: Any, like: Path, size: int) -> None:
    from gguf import GGUFReader

    if not like.is_file():
        raise CheckpointError(f"There is no file '{like}' (--like).")
    try:
        fields = {
            name: (field.contents(), field.types)
            for name, field in GGUFReader(like).fields.items()
            if name.startswith("tokenizer.")
        }
    except Exception as error:  # whatever a damaged file makes of numpy and struct
        raise CheckpointError(
            f"--like '{like}' cannot be read as GGUF ({error}): it is truncated, damaged, or of a "
            "later version. Get it again, or convert it anew."
        ) from None
    tokens, _ = fields.get("tokenizer.ggml.tokens", ((), ()))
    if len(tokens) != size:
        raise CheckpointError(
            f"--like '{like}' has a vocabulary of {len(tokens):,} tokens, and the model one of "
            f"{size:,}: it is no file of the original. Give one that is."
        )
    for name, (value, types) in fields.items():
        writer.add_key_value(name, value, types[0], sub_type=types[1] if types[1:] else None)
