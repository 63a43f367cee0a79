"""The runtime beside other code: engines that look at it, other versions of itself, tracing."""

import copy
import inspect
import pickle
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_utils import AttentionInterface

import headprune
from headprune.runtime import modeling_headprune
from headprune.runtime.modeling_headprune import REPEATING, EmptyLinear, Positions, pruned_class
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan

IDS = torch.tensor([[5, 6, 7, 8]])


def ragged():
    model = tiny.model("llama-gqa")
    cut_heads(model, resolve(ragged_plan(model), model, ragged=True))
    return model


def test_engines_may_ask_for_instances_of_what_init_annotates():
    """As vLLM does, parameter by parameter, to find its own config among the arguments."""
    cls = pruned_class(LlamaForCausalLM)
    parameters = inspect.signature(cls.__init__).parameters.values()
    annotated = [p.annotation for p in parameters if p.annotation is not inspect.Parameter.empty]
    assert [isinstance(object(), kind) for kind in annotated] == [False] * len(annotated)
    assert cls.__init__.__annotations__ == {}
    with pytest.raises(TypeError):  # what it ran into
        isinstance(object(), "Any")  # type: ignore[arg-type]


def test_a_layer_without_heads_multiplies_by_no_empty_matrix():
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
def test_openvino_computes_a_layer_without_heads():
    openvino = pytest.importorskip("openvino")

    class Output(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, hidden):
            return self.output(hidden.new_zeros(*hidden.shape[:2], 0)) + hidden

    def gap(output):
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


def test_results_of_two_schemas_live_in_one_process(monkeypatch):
    model = ragged()
    before = model(IDS).logits
    source = Path(modeling_headprune.__file__).read_text(encoding="utf-8")
    broken = "    return attention(module, query * 2, owners(key, 1)"
    source = source.replace("    return attention(module, query, owners(key, 1)", broken)
    other = types.ModuleType("another_modeling_headprune")
    monkeypatch.setitem(__import__("sys").modules, other.__name__, other)
    known = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
    exec(source.replace("SCHEMA = 1 ", "SCHEMA = 0 "), vars(other))
    assert torch.equal(model(IDS).logits, before)
    exec(source, vars(other))  # of the same schema: the last one registered answers
    assert not torch.equal(model(IDS).logits, before)


def test_the_file_beside_another_result_serves_as_well(tmp_path, monkeypatch):
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


def test_positions_go_where_the_model_goes():
    picked, x = Positions([2, 0, 2]), torch.arange(12).view(3, 4)
    assert torch.equal(picked(x, -1), x[:, [2, 0, 2]]) and not picked.state_dict()
    for other in (copy.deepcopy(picked), pickle.loads(pickle.dumps(picked))):
        assert other.numbers == [2, 0, 2] and torch.equal(other(x, 0), x[[2, 0, 2]])
    assert picked.to("meta")(x.to("meta"), 0).shape == (3, 4)
    emptied = picked.to_empty(device="cpu")  # as transformers does before it reads weights
    emptied.index.zero_()
    emptied.fill()
    assert torch.equal(emptied(x, 0), x[[2, 0, 2]])


def test_a_model_computes_after_its_export():
    """No tensor of the trace is kept."""
    model = ragged()
    expected = copy.deepcopy(model)(IDS).logits
    traced = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
    assert torch.equal(model(IDS).logits, expected)
    assert torch.allclose(traced.module()(IDS, use_cache=False).logits, expected, atol=1e-5)


def test_continuous_batching_is_refused():
    """Its cache has as many KV heads in every layer."""
    for batched in (
        lambda net: net.generate_batch([IDS[0].tolist()]),
        lambda net: net.generate(IDS, cache_implementation="paged"),
    ):
        with pytest.raises(NotImplementedError, match="the heads of this model differ by layer"):
            batched(ragged())
    stock = tiny.model("llama-gqa")
    assert type(stock.init_continuous_batching()).__name__ == "ContinuousBatchingManager"


GONE = {0: [0], 1: [0, 1, 2, 3, 4, 5], 2: [2, 3]}  # ragged, empty, uneven


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A model and its cut, in both types."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path_factory.mktemp("results")
        whole = tiny.save(tiny.model("llama-gqa", dtype), folder / "whole")
        plan = {f"model.layers.{layer}.self_attn": heads for layer, heads in GONE.items()}
        headprune.prune(whole, folder / "cut", plan=plan, layout="ragged")
        found[dtype] = whole, folder / "cut"
    return found


def loss_of(net):
    """The loss of training, by the logits."""
    logits = net(input_ids=TEXT, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TEXT[:, 1:].flatten())


TEXT = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def trained(net, called=None):
    """The gradients of two steps, the second of which DDP refuses after unused weights."""
    for _ in range(2):
        net.zero_grad()
        loss_of(net if called is None else called).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def distributed(net, folder):
    """By DDP, which waits for a gradient of every weight."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
    )
    try:
        return trained(net, nn.parallel.DistributedDataParallel(net))
    finally:
        torch.distributed.destroy_process_group()


def compiled(net, folder):
    """As one graph, which makes no tensors of lists."""
    made = []

    def backend(graph, example):
        made.extend(str(n.target) for n in graph.graph.nodes if n.target is torch.tensor)
        return graph.forward

    torch._dynamo.reset()
    found = trained(net, torch.compile(net, backend=backend, fullgraph=True))
    assert not made
    return found


def after_generation(net, folder):
    """After tensors of inference went through it."""
    with torch.inference_mode():
        net.generate(TEXT, max_new_tokens=2, do_sample=False)
    return trained(net)


def checkpointed(net, folder):
    """With layers that run again for their gradients."""
    # renamed in transformers 5.2x; the old name warns there
    getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)()
    return trained(net.train())


class Gradients(TrainerCallback):
    """Keeps the gradients of a step of Trainer."""

    def on_pre_optimizer_step(self, *_, model, **__):
        """Keeps them."""
        parameters = [(n, p.grad) for n, p in model.named_parameters()]
        self.found = {name: grad.clone() for name, grad in parameters if grad is not None}


def by_trainer(net, folder):
    """By transformers' Trainer, with such layers."""
    checkpoints = "activation_checkpointing"
    if checkpoints not in TrainingArguments.__dataclass_fields__:
        checkpoints = "gradient_checkpointing"
    settings = {"max_steps": 2, "learning_rate": 0.0, "max_grad_norm": 0.0, checkpoints: True}
    how = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = {"per_device_train_batch_size": len(TEXT), **settings, **how}
    rows = [{"input_ids": row, "labels": row} for row in TEXT]
    kept = Gradients()
    given = TrainingArguments(str(folder / "trainer"), **arguments)
    Trainer(model=net, args=given, train_dataset=rows, callbacks=[kept]).train()
    return kept.found


WAYS = (distributed, compiled, after_generation, checkpointed, by_trainer)


def wanted(whole, dtype, gone):
    """The gradients of transformers' own class, with W_O of some heads at zero, of those left."""
    net = AutoModelForCausalLM.from_pretrained(whole, dtype=dtype)
    width = net.config.head_dim
    columns = {
        layer: [h * width + i for h in heads for i in range(width)] for layer, heads in gone.items()
    }
    for layer, positions in columns.items():
        net.model.layers[layer].self_attn.o_proj.weight.data[:, positions] = 0.0
    loss_of(net).backward()
    found = {n: p.grad for n, p in net.named_parameters()}
    for layer, heads in gone.items():
        left = [h for h in range(6) if h not in heads]
        rows = [h * width + i for h in left for i in range(width)]
        path = f"model.layers.{layer}.self_attn"
        for name in ("q_proj.weight", "q_proj.bias"):
            found[f"{path}.{name}"] = found[f"{path}.{name}"][rows]
        found[f"{path}.o_proj.weight"] = found[f"{path}.o_proj.weight"][:, rows]
        owners = sorted({h // 2 for h in left})
        rows = [h * width + i for h in owners for i in range(width)]
        for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            found[f"{path}.{name}"] = found[f"{path}.{name}"][rows]
    return {name: grad for name, grad in found.items() if grad.numel()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_result_is_trained_as_its_original(way, dtype, results, tmp_path):
    whole, cut = results[dtype]
    net = AutoModelForCausalLM.from_pretrained(cut, dtype=dtype, trust_remote_code=True)
    found = way(net, tmp_path)
    # of the largest gradient; numbers of bfloat16 are 2^-8 apart
    close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]

    def gap(expected):
        assert found.keys() == expected.keys()
        gaps = [float((found[n].float() - g.float()).abs().max()) for n, g in expected.items()]
        return max(gaps) / max(float(g.abs().max()) for g in expected.values())

    assert gap(wanted(whole, dtype, GONE)) < close
    assert gap(wanted(whole, dtype, {**GONE, 0: [1]})) > 2 * close  # of another head
