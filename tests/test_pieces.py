"""Calibration on all sequences at once, of which what is beside attention sees a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import headprune
from headprune.model import pieces
from headprune.model.attention import attention_of
from headprune.model.forward import run_model
from headprune.model.pieces import in_pieces
from tests import tiny


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TOKENS", 32)  # two sequences of 16


@contextmanager
def counted(model: PreTrainedModel, kind: type[nn.Module]) -> Iterator[dict[str, list[int]]]:
    """How many sequences every module of a kind is given, call by call."""
    seen: dict[str, list[int]] = {}

    def note(name: str) -> Any:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
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


def batch() -> Any:
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
def test_states_are_those_of_all_at_once(case: str, inner: str, dtype: torch.dtype) -> None:
    model = tiny.model(case).to(dtype)
    attentions = attention_of(model)
    watched = {p.module for a in attentions for p in a.projections}
    inside = {name for name, module in model.named_modules() if module in watched}
    given = batch() | ({"decoder_input_ids": batch()["input_ids"]} if case == "t5" else {})
    wanted: Tensor = run_model(model, given)[0]
    with in_pieces(model, attentions), counted(model, nn.Module) as seen:
        found: Tensor = run_model(model, given)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert inside and all(seen[name] == [5] for name in inside)
    assert next(calls for name, calls in seen.items() if name.endswith(inner)) == [2, 2, 1]
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_piece_in_the_wrong_place_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama-gqa")
    wanted: Tensor = run_model(model, batch())[0]
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda x, size: split(x.flip(0), size))
    with in_pieces(model, attention_of(model)):
        assert not torch.allclose(run_model(model, batch())[0], wanted, rtol=1e-3)


def test_the_model_is_as_before_after_an_error() -> None:
    model = tiny.model("llama-gqa")
    patched = False
    with suppress(RuntimeError), in_pieces(model, attention_of(model)):
        patched = any("forward" in vars(module) for module in model.modules())
        raise RuntimeError
    assert patched and not any("forward" in vars(module) for module in model.modules())


class Told(nn.Module):
    """Tells more than states, as some experts do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, states: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return self.inner(states), len(states)


@torch.no_grad()
def test_a_module_that_tells_more_sees_all_sequences() -> None:
    told = Told(nn.Linear(4, 4))
    states, number = pieces._piecewise(told.forward, torch.ones(5, 16, 4))
    assert (states.shape, number, told.calls) == ((5, 16, 4), 5, 2)


COMMANDS: dict[str, dict[str, Any]] = {
    "prune": {"plan": "plan.json", "refit": "text.txt"},
    "convert-gqa": {"kv_heads": 1, "calibrate": "text.txt"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_is_the_same_in_pieces_and_layer_by_layer(
    command: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa").to(dtype), tmp_path / "model")
    Path("text.txt").write_text(tiny.text(600))
    Path("plan.json").write_text('{"model.layers.0.self_attn": [0, 1]}')

    def made(name: str, tokens: int, **others: Any) -> dict[str, Tensor]:
        monkeypatch.setattr(pieces, "TOKENS", tokens)
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
