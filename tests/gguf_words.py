"""Tokenizers that know every byte and cut text as real ones do."""

import json

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from headprune.formats.gguf_tokenizer import RULES
from tests.tiny import SPECIAL

SIZE = 310  # of the embeddings of a model that takes them
_NAMES = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def words(rule="GPT-2"):
    """BPE by one of the rules: special tokens, letters, and a few merges."""
    row = RULES[rule]
    space = "Ġ" if row.name else "▁"
    merges = [[space, "b"], ["b", "c"], [space, "bc"]]
    merges += [["1", "2"], ["12", "3"], ["123", "4"]]  # rules differ in how they cut numbers
    known = sorted(ByteLevel.alphabet())
    if not row.name:
        known = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁bcdeft.,0123456789"]
    pieces = [*SPECIAL, *known, *("".join(pair) for pair in merges)]
    if not row.name:
        merges.insert(3, [f"{space}b", "c"])
    model = {
        **{"type": "BPE", "dropout": None, "unk_token": None if row.name else "<unk>"},
        **{"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True},
        **{"byte_fallback": not row.name, "ignore_merges": row.ignores_merges},
        **{"vocab": {piece: at for at, piece in enumerate(pieces)}, "merges": merges},
    }
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
        **{"normalizer": row.normalizers[0], "pre_tokenizer": _with_offsets(row.cut)},
        **{"post_processor": None, "model": model},
        "decoder": {**bytewise, "use_regex": True} if row.name else None,
    }
    made = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=made, **_NAMES)


def _with_offsets(cut):
    """A pre-tokenizer as files have it."""
    if isinstance(cut, dict):
        own = {"trim_offsets": True} if cut.get("type") == "ByteLevel" else {}
        return {**{name: _with_offsets(value) for name, value in cut.items()}, **own}
    return [_with_offsets(part) for part in cut] if isinstance(cut, list) else cut
