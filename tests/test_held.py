"""Models, data and plans that a Python user holds."""

import tempfile
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import headprune
from headprune.errors import HeadpruneError
from headprune.model.attention import attention_of
from tests import tiny

IDS = torch.tensor([[5, 6, 7, 8, 9]])
SMALL = {"seq_len": 16, "calibration_tokens": 256}


def texts(seed=0):
    return Dataset.from_dict({"text": [tiny.text(60, seed + number) for number in range(24)]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_memory_is_scored_pruned_and_measured(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    net, pair = tiny.model("llama-gqa", dtype), tiny.tokenizer()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    headprune.score((net, pair), tmp_path / "scores", data=texts(), dtype=torch.float32, **SMALL)
    result = headprune.prune(
        (net, pair), tmp_path / "out", scores=tmp_path / "scores", keep=0.5, refit=texts(), **SMALL
    )
    small = result.model
    heads = [sum(a.query_heads for a in attention_of(each)) for each in (net, small)]
    assert heads[1] == heads[0] // 2 and small.dtype == dtype
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert result.tokenizer("a")["input_ids"] == pair("a")["input_ids"]
    assert f"{heads[0]} to {heads[1]}" in result._repr_html_()
    copied = headprune.from_pretrained(result.save_pretrained(tmp_path / "copy"))
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(copied(input_ids=ids).logits, small(input_ids=ids).logits)
    how = {"seq_len": 16, "speed": False, "dtype": torch.float32}
    report = headprune.evaluate((small, pair), data=texts(9), against=(net, pair), **how)
    on_disk = headprune.evaluate(tmp_path / "out", data=texts(9), against=(net, pair), **how)
    values = [{one.name: one.value for one in each.model.metrics} for each in (report, on_disk)]
    assert values[0] == values[1] and "perplexity" in values[0]
    assert not any((tmp_path / "tmp").iterdir())  # nothing stays behind


def test_a_plan_may_be_a_mapping(tmp_path):
    net = tiny.model("llama-gqa")
    first = attention_of(net)[0]
    net.config.name_or_path = ""
    result = headprune.prune(net, tmp_path / "out", plan={first.path: (0, 1)})
    assert next(a.query_ids for a in attention_of(result.model)) == (2, 3, 4, 5)
    with pytest.raises(HeadpruneError, match="has no usable tokenizer"):
        headprune.evaluate(net, data=texts())


def settings(net):
    """As a folder may hold them: transformers writes none that it finds at odds."""
    net.generation_config.temperature = 0.3
    return net


def _queries(net):
    return [layer.self_attn.q_proj for layer in net.model.layers]


def shared(net):
    """Two layers with the same weights."""
    queries = _queries(net)
    queries[1].weight = queries[2].weight
    return net


def tied(net):
    """As its config does not say."""
    net.lm_head.weight = net.model.embed_tokens.weight
    return net


def overlapping(net):
    """Weights that are parts of one tensor, which they have in common."""
    queries = _queries(net)
    both = queries[0].weight.detach().clone()
    queries[0].weight, queries[1].weight = nn.Parameter(both), nn.Parameter(both[:])
    return net


def offloaded(net):
    """Weights on the meta device, which accelerate fills."""
    return cpu_offload(net, execution_device="cpu")


def on_disk(net):
    """The same, from files."""
    return disk_offload(net, tempfile.mkdtemp(), execution_device="cpu")


def compiled(net):
    """In the wrapper of torch.compile."""
    return torch.compile(net, backend="eager")


def parallel(net):
    """In a wrapper for several devices."""
    return nn.DataParallel(net)


def distributed(net):
    """In the wrapper for several processes."""
    name = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("gloo", init_method=name, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
    finally:
        torch.distributed.destroy_process_group()
    return wrapped


HELD = (settings, shared, tied, overlapping, offloaded, on_disk, compiled, parallel, distributed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", HELD, ids=lambda make: make.__name__)
def test_any_model_in_memory_is_cut(make, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    net = tiny.untied(tiny.model("llama-gqa")).to(dtype).eval()
    given = make(net)
    generation = vars(net)["generation_config"]
    plan = {"model.layers.0.self_attn": [0, 1]}
    result = headprune.prune((given, tiny.tokenizer()), tmp_path / "out", plan=plan)
    assert vars(net)["generation_config"] is generation
    assert result.model.generation_config.temperature == generation.temperature
    found = result.model(input_ids=IDS).logits.detach()
    with torch.no_grad():
        if make in (offloaded, on_disk):
            remove_hook_from_submodules(net)
        whole = given(input_ids=IDS).logits
        width = net.config.head_dim
        net.model.layers[0].self_attn.o_proj.weight[:, : 2 * width] = 0.0
        close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]  # of the largest
        wanted = given(input_ids=IDS).logits
    apart = [float((found - one).abs().max() / one.abs().max()) for one in (wanted, whole)]
    assert apart[0] < close < apart[1] / 2


def adapted(net):
    """With an adapter of peft, in its wrapper."""
    return get_peft_model(net, LoraConfig(target_modules=["q_proj"]))


def with_adapter(net):
    """With one of its own."""
    net.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return net


def empty(net):
    """Without numbers."""
    return net.to("meta")


def normed(net):
    """With a weight that torch computes from others, as in training."""
    weight_norm(_queries(net)[1])
    return net


def spectral(net):
    """The same, in the older form."""
    nn.utils.spectral_norm(_queries(net)[1])
    return net


def masked(net):
    """With a mask of torch."""
    prune.l1_unstructured(_queries(net)[1], "weight", amount=0.3)
    return net


def in_eight_bits(net):
    """Without the bits to compute with."""
    return net.to(torch.float8_e4m3fn)


def other(net):
    """Another kind of module."""
    return nn.Sequential(net.lm_head)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (adapted, "PeftModel holds adapters of peft. Give the model that its merge_and_unload"),
        (with_adapter, "LlamaForCausalLM holds adapters of peft"),
        (empty, "'model.embed_tokens.weight' of the LlamaForCausalLM is on the meta device"),
        *(
            (make, "'model.layers.1.self_attn.q_proj' of the LlamaForCausalLM computes its weights")
            for make in (normed, spectral, masked)
        ),
        (in_eight_bits, r"embed_tokens.weight' of the Llama.* is quantised \(torch.float8_e4m3fn"),
        (other, "A Sequential is no model of transformers"),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("place", ["model", "against"])
def test_a_model_in_memory_without_all_its_weights_is_refused(make, why, place):
    pair = (tiny.model("llama-gqa"), tiny.tokenizer())
    given = {"model": pair, "against": pair, place: make(tiny.model("llama-gqa"))}
    with pytest.raises(HeadpruneError, match=why):
        headprune.evaluate(data=texts(), seq_len=16, speed=False, **given)


def test_what_transformers_does_not_write_is_said(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no such thing.")

    net = tiny.model("llama-gqa")
    monkeypatch.setattr(type(net), "save_pretrained", fails)
    told = "The LlamaForCausalLM in memory: no such thing. Write it yourself"
    with pytest.raises(HeadpruneError, match=told):
        headprune.inspect(net)


def test_several_data_sets_are_domains():
    pair = (tiny.model("llama-gqa"), tiny.tokenizer())
    data = {"main": texts(), "other": texts(50)}
    report = headprune.evaluate(pair, data=data, seq_len=16, speed=False)
    assert {"perplexity", "perplexity[other]"} <= {one.name for one in report.model.metrics}


def test_a_result_is_uploaded_as_it_lies_there(tmp_path, monkeypatch):
    calls = []

    class Api:
        def __init__(self, token):
            calls.append(("token", {"token": token}))

        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options))

        def upload_folder(self, **options):
            calls.append(("upload", options))
            return SimpleNamespace()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    net = tiny.model("llama-gqa")
    result = headprune.prune(net, tmp_path / "out", plan={attention_of(net)[0].path: [0, 1]})
    result.push_to_hub("me/small", private=True, token="t", commit_message="Smaller")
    assert calls == [
        ("token", {"token": "t"}),
        ("me/small", {"private": True, "exist_ok": True}),
        (
            "upload",
            {"repo_id": "me/small", "folder_path": tmp_path / "out", "commit_message": "Smaller"},
        ),
    ]
