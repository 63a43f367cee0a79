"""The tokenizer in a GGUF file: taken over from another file, or recognised for certain.

llama.cpp cuts text into words by rules of its own, which a file names; a rule that is only similar
would give other tokens without a word. So a tokenizer is written only if its rule is one of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from headprune.errors import CheckpointError, HeadpruneError
from headprune.exporting.source import ExportSource
from headprune.model.loading import load_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {"type": "Digits", "individual_digits": True}


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


# of UTF-8: not of control characters, and of planes that hold none that are in use
_PRINTED = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)}


@dataclass(frozen=True)
class Rule:
    """How text is cut, and what llama.cpp calls that.

    Attributes:
        name: The value of tokenizer.ggml.pre; "" for SentencePiece.
        cut: pre_tokenizer of tokenizer.json.
        normalizers: The normalizers that go with it.
        ignores_merges: Whether a word that is a token is taken as a whole, whatever the merges say.
    """

    name: str
    cut: dict[str, Any] | None
    normalizers: tuple[dict[str, Any] | None, ...] = (None,)
    ignores_merges: bool = False

    def bytes_known(self, ids: dict[str, int]) -> bool:
        """Whether there is a token for every byte of printable text."""
        if not self.name:
            return all(f"<0x{byte:02X}>" in ids for byte in range(256))
        letters = bytes_to_unicode()
        return all(letters[byte] in ids for byte in _PRINTED)


_PREPENDED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
RULES = {
    "Llama 3": Rule(
        "llama-bpe",
        _sequence(_split(rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"), _bytes(False)),
        ignores_merges=True,
    ),
    "Qwen 2": Rule(
        "qwen2",
        _sequence(_split(rf"{_CONTRACTIONS}\p{{N}}{_REST}"), _bytes(False)),
        ({"type": "NFC"}, None),
    ),
    "SmolLM": Rule("smollm", _sequence(_DIGITS, _bytes(True))),
    "GPT-2": Rule("gpt-2", _bytes(True)),
    "SentencePiece": Rule("", None, (_PREPENDED,)),
}


@dataclass(frozen=True)
class Vocabulary:
    """The fields of a tokenizer, by their keys in the file; values as ``GGUFWriter`` takes them."""

    fields: dict[str, Any]

    @property
    def speaks(self) -> bool:
        """Whether there is a tokenizer at all."""
        return bool(self.fields["tokenizer.ggml.model"] != "none")


def recognised(content: dict[str, Any]) -> Rule | None:
    """The rule of a tokenizer.json; None where it is none of those that are known."""
    model = content["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    cut, normalizer = _plain(content["pre_tokenizer"]), content["normalizer"]
    for rule in RULES.values():
        same = rule.cut == cut and normalizer in rule.normalizers
        bytewise = bool(model.get("byte_fallback")) == (not rule.name)
        bytewise = bytewise and rule.bytes_known(model["vocab"])
        ignores = bool(model.get("ignore_merges")) == rule.ignores_merges
        if all((same, bytewise, ignores)):
            return rule
    return None


def _plain(cut: Any) -> Any:
    """A pre-tokenizer without what only moves offsets."""
    if isinstance(cut, dict):
        return {name: _plain(value) for name, value in cut.items() if name != "trim_offsets"}
    return [_plain(part) for part in cut] if isinstance(cut, list) else cut


def vocabulary(source: ExportSource, like: Path | None) -> Vocabulary:
    """The tokenizer of a model.

    Args:
        source: The model.
        like: A GGUF file whose tokenizer is taken over.

    Raises:
        HeadpruneError: If that file is none of this vocabulary; or without one, if the tokenizer is
            none that is recognised for certain.
    """
    size = source.shapes["model.embed_tokens.weight"][0]
    if like is not None:
        return _taken_over(like, size)
    if not any((source.folder / name).is_file() for name in _FILES):
        return Vocabulary({"tokenizer.ggml.model": "none"})
    tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else None
    rule = recognised(content) if content is not None else None
    if content is None or rule is None:
        raise HeadpruneError(
            f"The tokenizer in '{source.folder}' ({type(tokenizer).__name__}) cuts text by none of "
            f"the rules that are known for certain ({', '.join(RULES)}): give --like FILE, the "
            "original model as llama.cpp's convert_hf_to_gguf.py writes it."
        )
    if len(tokenizer) > size:
        raise HeadpruneError(
            f"The tokenizer in '{source.folder}' has {len(tokenizer):,} tokens, and the model "
            f"embeds {size:,}: it belongs to another model. Put the model's own there."
        )
    return Vocabulary(_fields(tokenizer, content, rule, size))


def _fields(tokenizer: Any, content: dict[str, Any], rule: Rule, size: int) -> dict[str, Any]:
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
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if rule.name else "llama",
        "tokenizer.ggml.pre": rule.name or "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_special(tokenizer),
    }
    if rule.name:
        return {**fields, "tokenizer.ggml.merges": merges}
    # SentencePiece merges whatever makes a piece, by its score, and numbers its pieces by that
    made = [ids[pair.replace(" ", "")] for pair in merges]
    if made != sorted(made) or not set(_pairs(ids)) <= set(merges):
        raise HeadpruneError(
            "The merges of this SentencePiece tokenizer do not follow from its pieces, so that "
            "their scores are not known: give --like FILE, a GGUF file of the original."
        )
    scores = [float(-at) for at in range(size)]
    return {**fields, "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": True}


def _pairs(ids: dict[str, int]) -> Iterator[str]:
    """Every pair of pieces that is a piece together."""
    for piece in ids:
        for at in range(1, len(piece)):
            if piece[:at] in ids and piece[at:] in ids:
                yield f"{piece[:at]} {piece[at:]}"


def _special(tokenizer: Any) -> dict[str, Any]:
    """Which tokens begin, end, pad and stand for the unknown, and the chat template."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found: dict[str, Any] = {}
    for name, known_as in names.items():
        at = getattr(tokenizer, f"{name}_token_id", None)
        if at is not None:
            found[f"tokenizer.ggml.{known_as}_token_id"] = at
    ids = tokenizer("a", verbose=False)["input_ids"]
    begins, ends = ids[:1] == [tokenizer.bos_token_id], ids[-1:] == [tokenizer.eos_token_id]
    found |= {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.add_eos_token": ends}
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _taken_over(like: Path, size: int) -> Vocabulary:
    import gguf

    try:
        reader = gguf.GGUFReader(like)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith("tokenizer.")
        }
    except FileNotFoundError:
        raise CheckpointError(f"There is no file '{like}' (--like).") from None
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes of numpy and struct
        raise CheckpointError(
            f"--like '{like}' cannot be read as GGUF ({error}): it is truncated, damaged, or of a "
            "later version. Get it again, or convert it anew."
        ) from None
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"--like '{like}' holds no tokenizer. Give a file of a whole model.")
    if len(tokens) != size:
        raise CheckpointError(
            f"--like '{like}' has a vocabulary of {len(tokens):,} tokens, and the model one of "
            f"{size:,}: it is no file of the original. Give one that is."
        )
    return Vocabulary(fields)
