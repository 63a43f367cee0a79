"""A GPT-2 of two layers whose heads do exactly one thing each.

The stream holds three slots: the token, its place, and the token before, which a head of the first
layer copies there. A head's query and key pick a slot each, so that a query looks at the key that
matches; everything else is zero.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests import tiny

PLACES = 64
_HEADS, _WIDTH = 4, 80
_TOKEN, _PLACE, _BEFORE = 0, 80, 160  # where the slots begin
_SHARP = 40.0


def gpt2():
    """Two layers of heads that do nothing."""
    config = GPT2Config(
        vocab_size=tiny.VOCAB,
        n_positions=PLACES,
        n_embd=_HEADS * _WIDTH,
        n_layer=2,
        n_head=_HEADS,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" not in name:
                parameter.zero_()
        model.transformer.wte.weight[:, _TOKEN : _TOKEN + tiny.VOCAB] = torch.eye(tiny.VOCAB)
        model.transformer.wpe.weight[:, _PLACE : _PLACE + PLACES] = torch.eye(PLACES)
    return model


@torch.no_grad()
def offset(model, layer, head, by):
    """Plants a head that looks so many places back."""
    keys = torch.zeros(PLACES, _WIDTH)
    for place in range(PLACES - by):
        keys[place, place + by] = _SHARP
    _plant(model, layer, head, (_PLACE, _ones(PLACES)), (_PLACE, keys))


@torch.no_grad()
def duplicate(model, layer, head):
    """Plants a head that looks at the first copy of its token."""
    _plant(model, layer, head, (_TOKEN, _ones(tiny.VOCAB)), (_TOKEN, _SHARP * _ones(tiny.VOCAB)))
    query, key = _columns(model, layer, head)
    query[_TOKEN : _TOKEN + tiny.VOCAB, -1] = 1.0
    key[_PLACE : _PLACE + PLACES, -1] = -torch.arange(PLACES) / 2.0  # the earlier, the better


@torch.no_grad()
def partner(model, layer, head, by):
    """Plants a head that looks at the token whose id is so much lower, wherever it is."""
    keys = _SHARP * _ones(tiny.VOCAB)
    _plant(model, layer, head, (_TOKEN, _ones(tiny.VOCAB).roll(by, 0)), (_TOKEN, keys))


@torch.no_grad()
def highest(model, layer, head):
    """Plants a head that looks at the token with the highest id that it sees."""
    query, key = _columns(model, layer, head)
    query[_TOKEN : _TOKEN + tiny.VOCAB, 0] = 1.0
    key[_TOKEN : _TOKEN + tiny.VOCAB, 0] = _SHARP * torch.arange(tiny.VOCAB)


@torch.no_grad()
def induction(model, head):
    """Plants a head of the second layer that looks at what came after an earlier copy."""
    keys = _SHARP * _ones(tiny.VOCAB)
    _plant(model, 1, head, (_TOKEN, _ones(tiny.VOCAB)), (_BEFORE, keys))


def copies(model, head):
    """Has a head of the first layer write the token it looks at into the third slot."""
    writes(model, 0, head, _BEFORE)


@torch.no_grad()
def writes(model, layer, head, slot=_TOKEN, by=0):
    """Has a head write the token it looks at into a slot, or the one so many ids further on."""
    attention, at = model.transformer.h[layer].attn, head * _WIDTH
    values = attention.c_attn.weight[:, 2 * _HEADS * _WIDTH :]
    values[_TOKEN : _TOKEN + tiny.VOCAB, at : at + _WIDTH] = _ones(tiny.VOCAB).roll(by, 0)
    attention.c_proj.weight[at : at + _WIDTH, slot : slot + _WIDTH] = torch.eye(_WIDTH)


@torch.no_grad()
def shuffled(model, layer, head):
    """Spoils a head: its keys no longer match its queries."""
    _, key = _columns(model, layer, head)
    key.copy_(key[:, torch.randperm(_WIDTH, generator=torch.Generator().manual_seed(1))])


def _ones(size):
    return torch.eye(size, _WIDTH)


def _columns(model, layer, head):
    weight, at = model.transformer.h[layer].attn.c_attn.weight, head * _WIDTH
    key = _HEADS * _WIDTH + at
    return weight[:, at : at + _WIDTH], weight[:, key : key + _WIDTH]


def _plant(model, layer, head, asks, answers):
    query, key = _columns(model, layer, head)
    for columns, (start, rows) in ((query, asks), (key, answers)):
        columns[start : start + len(rows)] = rows
