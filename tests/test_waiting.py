"""The host never waits for a GPU within a step: the meta device refuses to say any number."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, TrainerState, masking_utils

from headprune import devices
from headprune.evidence import statistics
from headprune.evidence.statistics import IN_PASS, collect
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation, labelled
from headprune.gates.sparsity import ConstantPenalty, HeadTarget
from headprune.gates.trainer import GateCallback, GatedModel, GateTrainer
from headprune.model.attention import attention_of
from headprune.model.embedding import head_of
from headprune.model.gating import gated
from headprune.tensors.units import Unit
from tests import tiny


@pytest.fixture
def net(monkeypatch):
    """A model on a device that has no numbers; transformers does not look at its masks."""
    monkeypatch.setattr(devices, "chosen", lambda: torch.device("meta"))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setattr(masking_utils, "fast_all", lambda mask: True)
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **settings: nullcontext())
    config = tiny.model("llama-gqa").config
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def batches(count, device="cpu"):
    ids = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    moved = {name: value.to(device) for name, value in batch.items()}
    return [moved] * count


@pytest.mark.parametrize("asks", [False, True])
def test_scoring_asks_the_device_once(asks, net, monkeypatch):
    taken = []
    monkeypatch.setattr(statistics._Sums, "finished", lambda *arguments: {})
    monkeypatch.setattr(
        statistics._Finite, "confirm", lambda self: taken.append(list(self._sentences))
    )
    if asks:  # as a look at the numbers of every batch would
        finish = statistics._Collector.finish

        def curious(self, *arguments):
            finish(self, *arguments)
            bool(self.sums[0].gradients[-1].isfinite().all())

        monkeypatch.setattr(statistics._Collector, "finish", curious)

    def scored():
        collect(net, attention_of(net), batches(3), IN_PASS)

    if asks:
        with pytest.raises(RuntimeError, match="meta tensors"):
            scored()
    else:
        scored()
        # two kinds of numbers, of every module and batch, in one question
        assert [len(each) for each in taken] == [2 * 3 * len(attention_of(net))]


SPARSITIES = [
    lambda units: HeadTarget(units // 2),
    lambda units: ConstantPenalty(0.1),
]


@pytest.mark.parametrize("sparsity_of", SPARSITIES)
@pytest.mark.parametrize(
    ("objective", "asks"), [("labels", False), ("distillation", False), ("labels", True)]
)
def test_a_gate_step_asks_the_device_nothing(asks, objective, sparsity_of, net):
    attentions = attention_of(net)
    gates = Gates(attentions, Unit.HEAD, 2.0, 2 / 3).to("meta")
    sparsity = sparsity_of(len(gates.sizes))
    loss = labelled if objective == "labels" else Distillation(head_of(net))
    module, (batch,) = GatedModel(net, gates, loss), batches(1, "meta")
    net.requires_grad_(False)
    optimizer = torch.optim.AdamW([gates.log_alpha], lr=0.1)
    trainer = GateTrainer.__new__(GateTrainer)  # Trainer itself puts nothing on this device
    trainer.model, trainer.sparsity, trainer.choosing = module, sparsity, None
    penalty = 0.1 if isinstance(sparsity, ConstantPenalty) else None
    trainer.config = SimpleNamespace(l0_penalty=penalty)
    trainer.args = SimpleNamespace(device=torch.device("cuda"))
    callback, state = GateCallback(trainer, print, bool), TrainerState(max_steps=9)

    def step(number):
        value = trainer.compute_loss(module, batch)
        value.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        if asks:
            value.item()
        optimizer.step()
        state.global_step = number
        return callback.record(state)

    with gated(attentions, gates.source):
        if asks:
            with pytest.raises(RuntimeError, match="meta tensors"):
                step(1)
            return
        for number in (1, 2):
            record = step(number)
    on_device = {name for name, value in record.items() if isinstance(value, Tensor)}
    assert on_device == {"loss", "finite", "expected_open", "undecided"}


BREAKS = """
import torch
from headprune.gates.gates import Gates
from headprune.model.attention import attention_of
from headprune.model.gating import gated
from headprune.tensors.units import Unit
from tests import tiny

net = tiny.model("llama-gqa").eval()
attentions = attention_of(net)
gates = Gates(attentions, Unit.HEAD, 2.0, 2 / 3)
gates.sample(2)

def asking(position):
    gate = gates.source(position)
    return gate if float(gate.sum()) else None

for source in (lambda position: None, gates.source, asking):
    with gated(attentions, source):
        torch._dynamo.reset()
        ids = torch.zeros(2, 8, dtype=torch.long)
        print(torch._dynamo.explain(net)(input_ids=ids, use_cache=False).graph_break_count)
"""


@pytest.mark.slow
def test_gates_do_not_break_a_compiled_graph():
    """In a process of its own: here, types are checked as the code runs."""
    done = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    plain, gated_, asking = map(int, done.stdout.split())
    assert gated_ == plain < asking
