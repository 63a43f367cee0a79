"""Calibration on all sequences at once, of which modules see a few at a time."""

from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headprune
from headprune.model import passes
from headprune.model.attention import attention_of
from headprune.model.passes import entering_output, in_pieces, in_sequence, run_model
from headprune.model.probes import probe_inputs
from tests import tiny
from tests.marks import slow_unless

CASES = tuple(case for case in tiny.FAMILY_CASES if case != "albert")  # whose layers are one


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(passes, "TOKENS", 32)  # two sequences of 16


@contextmanager
def counted(model, kind):
    """How many sequences every module of a kind is given, call by call."""
    seen = {}

    def note(name):
        def called(module, args, kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if tensors:
                seen.setdefault(name, []).append(len(tensors[0]))

        return called

    handles = [
        module.register_forward_pre_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, kind)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def batch():
    ids = torch.randint(5, 60, (5, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids}


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "inner"),
    [
        ("llama-gqa", "layers.0.mlp.up_proj"),
        ("gpt2", "h.1.mlp.c_proj"),
        ("gemma2", "layers.2.mlp.down_proj"),
        ("t5", "block.0.layer.1.DenseReluDense.wo"),
        ("bert-mlm", "layer.0.intermediate.dense"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_all_at_once(case, inner, dtype):
    model = tiny.model(case).to(dtype)
    attentions = attention_of(model)
    watched = {p.module for a in attentions for p in a.projections}
    inside = {name for name, module in model.named_modules() if module in watched}
    given = batch() | ({"decoder_input_ids": batch()["input_ids"]} if case == "t5" else {})
    wanted = run_model(model, given)[0]
    with in_pieces(model, attentions), counted(model, nn.Module) as seen:
        found = run_model(model, given)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert inside and all(seen[name] == [5] for name in inside)
    assert next(calls for name, calls in seen.items() if name.endswith(inner)) == [2, 2, 1]
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_piece_in_the_wrong_place_would_show(monkeypatch):
    model = tiny.model("llama-gqa")
    wanted = run_model(model, batch())[0]
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda x, size: split(x.flip(0), size))
    with in_pieces(model, attention_of(model)):
        assert not torch.allclose(run_model(model, batch())[0], wanted, rtol=1e-3)


def test_the_model_is_as_before_after_an_error():
    model = tiny.model("llama-gqa")
    patched = False
    with suppress(RuntimeError), in_pieces(model, attention_of(model)):
        patched = any("forward" in vars(module) for module in model.modules())
        raise RuntimeError
    assert patched and not any("forward" in vars(module) for module in model.modules())


COMMANDS = {
    "prune": {"plan": "plan.json", "refit": "text.txt"},
    "convert-gqa": {"kv_heads": 1, "calibrate": "text.txt"},
}


@pytest.mark.parametrize(
    ("command", "dtype"),
    slow_unless(
        lambda command, dtype: (command == "prune") is (dtype == torch.bfloat16),
        product(COMMANDS, [torch.float32, torch.bfloat16]),
    ),
)
def test_a_result_is_the_same_in_pieces_and_layer_by_layer(command, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa").to(dtype), tmp_path / "model")
    Path("text.txt").write_text(tiny.text(600))
    Path("plan.json").write_text('{"model.layers.0.self_attn": [0, 1]}')

    def made(name, tokens, **others):
        monkeypatch.setattr(passes, "TOKENS", tokens)
        settings = {"seq_len": 16, "calibration_tokens": 256, **COMMANDS[command], **others}
        getattr(headprune, command.replace("-", "_"))("model", output=name, **settings)
        return load_file(Path(name, "model.safetensors"))

    whole, split = made("whole", 10_000), made("split", 32)
    layers = made("layers", 32, placement="layers")
    # near 1, bfloat16 has a step of 8e-3
    rounding = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0, "atol": 1e-2}
    for name, tensor in split.items():
        assert torch.equal(tensor, layers[name])
        torch.testing.assert_close(tensor, whole[name], **rounding)
    Path("text.txt").write_text(tiny.text(600, 1))
    other = made("other", 32)
    assert any((other[name] - split[name]).abs().max() > 0.05 for name in split)


def entered(model, given, tokens):
    """What enters every output projection of a pass in which modules see so many tokens at once."""
    found = {}

    def enter(attention, x):
        found[attention.path] = x.clone()
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "TOKENS", tokens)
        in_sequence(model, attention_of(model), given, enter)
    return found


def of_five(model):
    """Five examples of whatever it takes; texts are of unequal length and padded."""
    three = [probe_inputs(model, seed) for seed in range(3)]
    return {name: torch.cat([inputs[name] for inputs in three])[:5] for name in three[0]}


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(CASES).__contains__, CASES))
def test_attention_in_pieces_gives_what_it_gives_of_all(case):
    model = tiny.model(case)
    given = of_five(model)
    whole, split = entered(model, given, 10**6), entered(model, given, 48)
    assert split and whole.keys() == split.keys()
    for path, x in split.items():
        torch.testing.assert_close(x, whole[path], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(x.flip(0), whole[path], rtol=1e-2, atol=1e-3)
    assert not any("forward" in vars(module) for module in model.modules())


class Attends(nn.Module):
    """Attention with something about it that pieces must not pass over."""

    def __init__(self, projection, after):
        super().__init__()
        self.projection, self.after = projection, after

    def forward(self, hidden_states, **others):
        return self.after(self.projection(hidden_states), others)


@torch.no_grad()
@pytest.mark.parametrize(
    ("after", "given", "split"),
    [
        (lambda out, others: (out, None), {}, True),
        (lambda out, others: out, {"position_ids": torch.arange(16)[None]}, True),
        (lambda out, others: 2 * out, {}, False),
        (lambda out, others: (out, torch.ones(1)), {}, False),
        (lambda out, others: out.add_(1.0), {}, False),
        (lambda out, others: out, {"attention_mask": torch.ones(16, 16)}, False),
        (lambda out, others: out, {"alibi": torch.ones(5, 1, 16)}, False),
        (lambda out, others: out, {"position_embeddings": torch.ones(5, 8)}, False),
        (lambda out, others: out, {"attention_mask": torch.ones(10, 1, 16, 16)}, False),
        (lambda out, others: out, {"past_key_values": object()}, False),
    ],
)
def test_what_cannot_be_told_apart_runs_together(after, given, split):
    projection = nn.Linear(4, 4)
    module, states = Attends(projection, after), torch.randn(5, 16, 4)
    found = entering_output(module.forward, projection, (states,), given)
    assert (found is not None) is split
    if found is not None:
        inputs, others = found
        result = module(states, **given)
        assert len(states) > passes.TOKENS // 16  # so that it came in several
        assert torch.equal(inputs, states) and not torch.equal(inputs, states.flip(0))
        assert others == (result[1:] if isinstance(result, tuple) else None)
    assert "forward" not in vars(projection)
