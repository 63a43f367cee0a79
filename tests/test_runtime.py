"""The runtime beside other code: engines that look at it, other versions of itself, tracing."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

import headprune
from headprune.runtime import modeling_headprune
from headprune.runtime.modeling_headprune import (
    REPEATING,
    EmptyLinear,
    Positions,
    pruned_class,
)
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan

IDS = torch.tensor([[5, 6, 7, 8]])


def ragged() -> PreTrainedModel:
    model = tiny.model("llama-gqa")
    cut_heads(model, resolve(ragged_plan(model), model, ragged=True))
    return model


def test_engines_may_ask_for_instances_of_what_init_annotates() -> None:
    """As vLLM does, parameter by parameter, to find its own config among the arguments."""
    cls = pruned_class(LlamaForCausalLM)
    parameters = inspect.signature(cls.__init__).parameters.values()
    annotated = [p.annotation for p in parameters if p.annotation is not inspect.Parameter.empty]
    assert [isinstance(object(), kind) for kind in annotated] == [False] * len(annotated)
    assert cls.__init__.__annotations__ == {}
    with pytest.raises(TypeError):  # what it ran into
        isinstance(object(), "Any")  # type: ignore[arg-type]


def test_a_layer_without_heads_multiplies_by_no_empty_matrix() -> None:
    model = tiny.model("llama-gqa")
    cut_heads(model, resolve(uneven_plan(model, 1), model))
    empty = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == 0]
    assert empty and all(type(m) is EmptyLinear for m in empty)
    x = torch.randn(2, 3, 0)
    for module in empty:
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
        with torch.no_grad():
            module.bias.add_(1.0)
        assert not torch.equal(module(x), nn.functional.linear(x, module.weight))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_openvino_computes_a_layer_without_heads() -> None:
    openvino = pytest.importorskip("openvino")

    class Output(nn.Module):
        def __init__(self, output: nn.Linear) -> None:
            super().__init__()
            self.output = output

        def forward(self, hidden: Tensor) -> Tensor:
            return self.output(hidden.new_zeros(*hidden.shape[:2], 0)) + hidden

    def gap(output: nn.Linear) -> float:
        hidden = torch.randn(2, 3, 5)
        nn.init.constant_(output.bias, 3.0)
        try:
            model = openvino.convert_model(Output(output), example_input=hidden)
            found = openvino.compile_model(model, "CPU")(hidden.numpy())[0]
        except RuntimeError:
            return torch.inf
        return float(
            (torch.from_numpy(found.copy()) - hidden - 3).abs().nan_to_num(torch.inf).max()
        )

    assert gap(EmptyLinear(0, 5)) < 1e-5
    assert gap(nn.Linear(0, 5)) > 1e-2  # why there is a class


def test_results_of_two_schemas_live_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ragged()
    before = model(IDS).logits
    source = Path(modeling_headprune.__file__).read_text(encoding="utf-8")
    broken = "    return attention(module, query * 2, owners.pick(key, 1)"
    source = source.replace("    return attention(module, query, owners.pick(key, 1)", broken)
    other = types.ModuleType("another_modeling_headprune")
    monkeypatch.setitem(__import__("sys").modules, other.__name__, other)
    known = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
    exec(source.replace("SCHEMA = 1 ", "SCHEMA = 0 "), vars(other))
    assert torch.equal(model(IDS).logits, before)
    exec(source, vars(other))  # of the same schema: the last one registered answers
    assert not torch.equal(model(IDS).logits, before)


def test_the_file_beside_another_result_serves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the implementation of attention: every result has a file of its own."""
    folder = tiny.save(tiny.model("t5"), tmp_path / "t5")
    headprune.convert_gqa(folder, output=tmp_path / "out", kv_heads=2, merge="mean")
    model = headprune.from_pretrained(tmp_path / "out")
    model.set_attn_implementation("eager")
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    before = model(**ids).logits
    other = types.ModuleType("another_modeling_headprune")
    monkeypatch.setitem(__import__("sys").modules, other.__name__, other)
    monkeypatch.setattr(
        AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping)
    )
    exec(Path(modeling_headprune.__file__).read_text(encoding="utf-8"), vars(other))
    assert AttentionInterface._global_mapping[REPEATING] is vars(other)["repeating_attention"]
    assert torch.equal(model(**ids).logits, before)
    monkeypatch.setitem(vars(other), "stock_class", type)  # had it taken the class as it is
    with pytest.raises(TypeError):
        model(**ids)


def test_positions_are_copied_to_a_device_once() -> None:
    picked, x = Positions([2, 0, 2]), torch.arange(12).view(3, 4)
    assert torch.equal(picked.pick(x, -1), x[:, [2, 0, 2]])
    (index,) = picked._by_device.values()
    assert torch.equal(picked.pick(x, 0), x[[2, 0, 2]])
    assert next(iter(picked._by_device.values())) is index
    assert picked.pick(x.to("meta"), 0).shape == (3, 4)
    for other in (copy.deepcopy(picked), pickle.loads(pickle.dumps(picked))):
        assert other.numbers == [2, 0, 2] and not other._by_device


def test_a_trace_leaves_nothing_behind() -> None:
    """A model goes on computing after it was exported: no tensor of the trace is kept."""
    model = ragged()
    expected = copy.deepcopy(model)(IDS).logits
    traced = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
    kept = [p for m in model.modules() for p in vars(m).values() if isinstance(p, Positions)]
    assert kept and not any(p._by_device for p in kept)
    assert torch.equal(model(IDS).logits, expected)
    assert torch.allclose(traced.module()(IDS, use_cache=False).logits, expected, atol=1e-5)
