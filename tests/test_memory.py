"""Memory that the proof of a cut takes, by the kernel's count, in a process of its own."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headprune.context import Context
from headprune.model import loading
from headprune.model.stored import StoredDtypes
from headprune.planning.choose import CutRequest
from headprune.result.prune import prune
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.tensors.units import Unit
from tests import forked

STATUS, MARK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PROOF_GB = 0.2  # of 36 million weights in float32
pytestmark = pytest.mark.skipif(not MARK.exists(), reason="no peak of resident memory is counted")


def resident(field):
    """Bytes of this process: now ("VmRSS"), or at most since the mark ("VmHWM")."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_of(call):
    """The most memory that a call takes beside what was there before."""
    threshold = -3  # M_MMAP_THRESHOLD: what is let go goes back to the system, and is not counted
    ctypes.CDLL(None).mallopt(threshold, 1 << 16)
    before = resident("VmRSS")
    MARK.write_text("5", encoding="ascii")
    call()
    return resident("VmHWM") - before


def llama(size, vocabulary=1000):
    """A model with one KV head to every two query heads."""
    sizes = {"hidden_size": size, "intermediate_size": 4 * size, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def cut(model, output):
    """Prunes the last group of every layer, as by default; returns the stages."""
    stages = []
    part = AttentionPlan(query_heads=8, kv_heads=4, keep=tuple(range(6)))
    parts = {f"model.layers.{layer}.self_attn": part for layer in range(4)}
    asked = CutRequest(plan=Plan(unit=Unit.KV_GROUP, attentions=parts))
    prune(model, output, asked, context=Context(stage=stages.append))
    return stages


def measure_proof(folder, mapping):
    """Notes the peak of a cut, after one of a small model, for what is imported by then."""
    if mapping:  # as transformers does by itself
        loading._widens = lambda options, tensors: False
    cut(folder / "small", folder / "before")
    stages = []
    peak = peak_of(lambda: stages.extend(cut(folder / "large", folder / "after")))
    (folder / "peak.json").write_text(json.dumps([peak, stages]), encoding="utf-8")


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mapping", [False, True])
def test_a_proof_takes_the_memory_of_the_weights_it_computes_with(held, mapping, tmp_path):
    for name, size in (("small", 64), ("large", 768)):
        llama(size).to(held).save_pretrained(tmp_path / name)
    assert forked.call(measure_proof, tmp_path, mapping) == 0
    stored = (tmp_path / "large" / "model.safetensors").stat().st_size
    peak, stages = json.loads((tmp_path / "peak.json").read_text(encoding="utf-8"))
    assert f"probing the gated original (takes about {PROOF_GB} GB of memory)" in stages
    # the bound is higher by what activations take beside so few weights
    assert (peak < 2.4 * stored) == (held is torch.float32 or not mapping), peak / stored


def measure_rounding(folder):
    """Notes the peak of rounding embeddings, and their size."""
    net = llama(64, vocabulary=200_000)
    StoredDtypes(torch.bfloat16).round(llama(64))
    peak = peak_of(lambda: StoredDtypes(torch.bfloat16).round(net))
    size = net.get_input_embeddings().weight.nbytes
    (folder / "peak.json").write_text(json.dumps([peak, size]), encoding="utf-8")


def test_rounding_copies_no_weight_as_a_whole(tmp_path):
    assert forked.call(measure_rounding, tmp_path) == 0
    peak, size = json.loads((tmp_path / "peak.json").read_text(encoding="utf-8"))
    assert peak < size / 4, peak / size
