"""Results load without headprune: every family, uneven layers, a first layer without heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import headprune
from headprune.models.attention import attention_of
from headprune.models.gating import fixed, gated
from headprune.models.surgery import resolve
from headprune.pipelines.prune import prune
from headprune.plan import AttentionPlan, Plan
from headprune.tensors.units import Unit
from tests import tiny

AUTO = {
    "llama-gqa": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "bert-mlm": "AutoModelForMaskedLM",
}

WITHOUT_HEADPRUNE = """
import sys

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "headprune":
            raise ImportError(name)

sys.meta_path.insert(0, Blocked)
import copy, torch, transformers
from safetensors.torch import load_file

folder, auto, again = sys.argv[1:]
expected = load_file(folder + "/../expected.safetensors")
load = lambda name, where: getattr(transformers, name).from_pretrained(
    where, trust_remote_code=True).eval()
model = load(auto, folder)
assert "headprune" not in sys.modules
ids, wanted = expected["ids"], expected["logits"]
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, wanted)
    torch.testing.assert_close(copy.deepcopy(model)(ids).logits, wanted)
    model.save_pretrained(again)
    torch.testing.assert_close(load(auto, again)(ids).logits, wanted)
    base = load("AutoModel", folder)(ids).last_hidden_state
    torch.testing.assert_close(base, expected["states"])
if "tokens" in expected:
    tokens = model.generate(ids[:1], max_new_tokens=12, do_sample=False)
    assert tokens.tolist() == expected["tokens"].tolist(), (tokens, expected["tokens"])
    text = transformers.pipeline("text-generation", model=folder, trust_remote_code=True)
    assert text("w1 w2", max_new_tokens=3)[0]["generated_text"].startswith("w1 w2")
print(type(model).__name__)
"""


def uneven(model: torch.nn.Module, empty: int) -> Plan:
    parts = {}
    for layer, a in enumerate(attention_of(model)):
        group = a.query_heads // a.kv_heads
        kept = [] if layer == empty else range(group * (1 + layer % 2), a.query_heads)
        parts[a.path] = AttentionPlan(
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            keep=tuple(kept),
            scale=tuple(1 - 0.1 * h for h in kept),
        )
    return Plan(unit=Unit.KV_GROUP, attentions=parts)


@pytest.mark.parametrize("empty", [0, 2])
@pytest.mark.parametrize("case", AUTO)
def test_a_result_loads_where_headprune_is_not_installed(
    case: str, empty: int, tmp_path: Path
) -> None:
    model = tiny.model(case)
    source = tiny.save(model, tmp_path / "model")
    plan = uneven(model, empty)
    cuts = resolve(plan, model)
    ids = torch.randint(5, tiny.VOCAB, (2, 9))
    gates = fixed([cut.gate() for cut in cuts])
    with gated([cut.attention for cut in cuts], gates), torch.no_grad():
        expected = {"ids": ids, "logits": model(ids).logits}
        expected["states"] = model.base_model(ids).last_hidden_state
        if case != "bert-mlm":
            expected["tokens"] = model.generate(ids[:1], max_new_tokens=12, do_sample=False)
    prune(source, tmp_path / "out", plan=plan)
    save_file(expected, tmp_path / "expected.safetensors")

    with torch.no_grad():
        ours = headprune.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(ours(ids).logits, expected["logits"])

    arguments = [str(tmp_path / "out"), AUTO[case], str(tmp_path / "again")]
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", WITHOUT_HEADPRUNE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == type(model).__name__

    # the corrupted sibling: the same check refuses logits that are off by one head's gate
    expected["logits"] = expected["logits"].roll(1, 0)
    save_file(expected, tmp_path / "expected.safetensors")
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "not close" in done.stderr


@pytest.mark.parametrize("auto", ["AutoModelForSequenceClassification", "AutoModel"])
def test_another_head_on_a_cut_encoder(auto: str, tmp_path: Path) -> None:
    model = tiny.model("bert-mlm")
    prune(tiny.save(model, tmp_path / "model"), tmp_path / "out", plan=uneven(model, 0))
    other = headprune.from_pretrained(tmp_path / "out", auto_class=auto)
    counts = [a.query_heads for a in attention_of(other)]
    assert counts == [0, 4, 5, 4]
