"""Bits per byte count the bytes of the text itself, whatever the tokenizer and wherever it cuts."""

import json
import math
import random
from itertools import accumulate, pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import BartForConditionalGeneration, LlamaForCausalLM, PreTrainedTokenizerFast

import headprune
from headprune.data.tokens import TextBytes
from tests import tiny

PIECES = [
    "naïve",
    "café",
    "日本語の文章です。",
    "😀😀",
    "猫は座る",
    "plain",
    "words",
    "e\u0301",
    "Ж",
]
NAMES = dict(zip(("unk", "pad", "bos", "eos", "mask"), tiny.SPECIAL, strict=True))
SEQ = 12


def words(count, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(PIECES) for _ in range(count))


def tokenizer_of(kind):
    """A tokenizer trained on the words; the emoji is in no vocabulary of whole characters."""
    text = [words(400).replace("😀", "")]
    special = {"special_tokens": tiny.SPECIAL, "show_progress": False}
    if kind == "bytes":
        built = Tokenizer(models.BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        text = [words(400)]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **special)
    elif kind == "metaspace":
        octets = [f"<0x{number:02X}>" for number in range(256)]
        built = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=[*tiny.SPECIAL, *octets], show_progress=False
        )
    else:
        built = Tokenizer(models.WordPiece(unk_token="<unk>"))
        built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        built.normalizer = normalizers.BertNormalizer(handle_chinese_chars=False)
        trainer = trainers.WordPieceTrainer(vocab_size=60, **special)
    built.train_from_iterator(text, trainer)
    tokens = {f"{name}_token": token for name, token in NAMES.items()}
    return PreTrainedTokenizerFast(tokenizer_object=built, **tokens)


def by_hand(text, of, kind):
    """The bytes of every token of words, each with the space before it."""
    sizes = list[int]()
    for number, word in enumerate(text.split(" ")):
        spaced = word if kind == "bytes" and not number else f" {word}"
        ids = of(spaced if kind == "bytes" else word, add_special_tokens=False)["input_ids"]
        tokens = of.convert_ids_to_tokens(ids)
        if kind == "bytes":
            row = [len(token) for token in tokens]  # a character per byte
        elif kind == "metaspace":
            row = [1 if len(t) == 6 and t[:3] == "<0x" else len(t.encode()) for t in tokens]
            row[0] -= len("▁".encode()) - 1  # it stands for a space
        else:
            ends = list(accumulate(len(token.removeprefix("##")) for token in tokens))
            cuts = [0, *ends] if "<unk>" not in tokens else [0, len(word)]
            row = [len(word[a:b].encode()) for a, b in pairwise(cuts)]
            row[0] += 1  # the space
        assert sum(row) == len(spaced.encode())
        sizes += row
        if not number and kind != "bytes":
            sizes[0] -= 1
    return sizes


def llama(of):
    net = tiny.model("llama-gqa", vocab_size=len(of))
    assert isinstance(net, LlamaForCausalLM)
    return net


def saved(net, of, folder):
    net.save_pretrained(folder)
    of.save_pretrained(folder)
    return folder


def found(folder, data, **settings):
    fast = {"speed": False, "last_words": 0, "resamples": 20, "batch_size": 3}
    report = headprune.evaluate(folder, data=data, **{**fast, **settings})
    return {one.name: one.value for one in report.model.metrics}["bits_per_byte"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bytes", "metaspace", "wordpiece"])
def test_windows_count_the_text(kind, dtype, tmp_path):
    of, text = tokenizer_of(kind), words(90, seed=1)
    if kind == "wordpiece":  # it leaves out accents, which belong to no token
        text = text.replace("e\u0301", "plain")
    folder = saved(llama(of).to(getattr(torch, dtype)), of, tmp_path / "m")
    net = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    (tmp_path / "text.txt").write_text(text)
    ids = of(text, add_special_tokens=False)["input_ids"]
    count = len(ids) // SEQ
    rows = torch.tensor(ids[: count * SEQ]).view(count, SEQ)
    sizes = by_hand(text, of, kind)
    assert len(sizes) == len(ids)
    scored = torch.tensor(sizes[: count * SEQ]).view(count, SEQ)[:, 1:]
    with torch.no_grad():
        logits = torch.cat([net(some).logits[:, :-1].float() for some in rows.split(3)])
    nats = float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    value = found(folder, tmp_path / "text.txt", seq_len=SEQ)
    assert value == pytest.approx(nats / math.log(2) / float(scored.sum()), rel=1e-5)
    named = of.batch_decode(rows[:, 1:])
    if kind != "wordpiece":
        assert len("".join(named).encode()) != pytest.approx(float(scored.sum()), rel=1e-3)


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "wordpiece"])
def test_targets_count_the_text(kind, tmp_path):
    of = tokenizer_of(kind)
    net = tiny.model("bart", vocab_size=len(of))
    assert isinstance(net, BartForConditionalGeneration)
    pairs = [(words(4, n), words(3 + n % 3, n + 50)) for n in range(6)]
    rows = [{"source": source, "target": target} for source, target in pairs]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    nats = 0.0
    for source, target in pairs:
        given, wanted = of(source, return_tensors="pt"), of(target, return_tensors="pt")
        with torch.no_grad():
            loss = net(**given, labels=wanted["input_ids"]).loss
        nats += float(loss) * wanted["input_ids"].shape[1]
    wanted_bytes = sum(len(target.encode()) for _, target in pairs)
    settings = {"text_column": "source,target", "seq_len": 120}
    value = found(saved(net, of, tmp_path / "m"), data, **settings)
    assert value == pytest.approx(nats / math.log(2) / wanted_bytes, rel=1e-5)


@pytest.mark.parametrize("end", ["</s>", "<|im_end|>"])
def test_answers_count_the_text(end, tmp_path):
    of = tokenizer_of("bytes")
    of.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    of.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + 'END' }}{% endfor %}"
    ).replace("END", end)
    net, chats = llama(of), [[words(2, n), words(4, n + 9)] for n in range(5)]
    data, nats = tmp_path / "chats.jsonl", 0.0
    with data.open("w") as file:
        for question, said in chats:
            roles = {"user": question, "assistant": said}
            chat = [{"role": role, "content": content} for role, content in roles.items()]
            file.write(json.dumps({"messages": chat}) + "\n")
            ids = list(
                of(f"user: {question}{end}assistant:", add_special_tokens=False)["input_ids"]
            )
            start = len(ids)
            ids += of(f" {said}{end}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = net(torch.tensor([ids])).logits[0, start - 1 : -1]
            nats += float(F.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum"))
    value = found(saved(net, of, tmp_path / "m"), data, loss="answers", seq_len=120)
    # the space merges with the first letter, and the name of the end is no text
    wanted = sum(len(f" {said}".encode()) for _, said in chats)
    assert value == pytest.approx(nats / math.log(2) / wanted, rel=1e-5)


@pytest.mark.parametrize(
    "text", ["😀", " two  spaces ", "é", f"{words(9)} plain", "", "\n\nline\n"]
)
@pytest.mark.parametrize("kind", ["bytes", "metaspace", "wordpiece"])
def test_all_tokens_stand_for_the_whole_text(kind, text):
    of = tokenizer_of(kind)
    given = of(text, return_offsets_mapping=True)
    sizes = TextBytes(of).of(text, given["input_ids"], given["offset_mapping"])
    trailing = len(text) - len(text.rstrip()) if kind == "wordpiece" else 0
    assert sizes.sum() == pytest.approx(len(text.encode()) - trailing)
    apart = TextBytes(of).of(text, given["input_ids"], None)  # as of a slow tokenizer
    assert apart.sum() == pytest.approx(len(text.encode()) if len(apart) else 0)
    assert (sizes >= 0).all()
