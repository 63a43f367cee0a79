"""Trained gates: exact counts, planted useless heads, resume, objectives."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from headprune import from_pretrained, packages, training
from headprune.config import DataConfig, Resuming, Train, TrainGatesConfig
from headprune.context import Context
from headprune.distillation.trainer import HealedModel
from headprune.errors import HeadpruneError, Interrupted, PlanError
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation, labelled
from headprune.gates.sparsity import ConstantPenalty, HeadTarget
from headprune.gates.train_gates import original_of, train_gates
from headprune.gates.trainer import GatedModel, freeze
from headprune.model.attention import attention_of
from headprune.model.embedding import head_of
from headprune.model.gating import fixed, gated
from headprune.model.heads import output_rows
from headprune.model.loading import load_tokenizer
from headprune.model.losses import divergence, kl_divergence, recompute_activations, relative_error
from headprune.planning.choose import CutRequest
from headprune.result.preview import preview
from headprune.result.prune import prune
from headprune.runtime.modeling_headprune import input_dim
from headprune.schemas.gates import read_metadata
from headprune.tensors import hard_concrete
from headprune.tensors.hard_concrete import BOUND
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit
from tests import tiny
from tests.marks import slow_unless


def run(folder, text, output, **settings):
    rerun = Resuming(**{k: settings.pop(k) for k in ("resume", "overwrite") if k in settings})
    context = Context(**{name: settings.pop(name) for name in ("step", "line") if name in settings})
    defaults = {"target_heads": 0.5, "steps": 10, "batch_size": 4, "seq_len": 16}
    config = TrainGatesConfig(**defaults | settings)
    return train_gates(folder, DataConfig(source=str(text)), output, config, rerun, context)


PLANTED = ["llama-mha", "gpt2", "bert-base", "bert-mlm"]
TARGETS = [
    ("llama-gqa", None, 0.75, 18),  # 12 groups of 2
    ("llama-gqa", None, 8, 8),
    ("llama-gqa", Unit.HEAD, 7, 7),
    ("llama-gqa", Unit.QUERY_SLOT, 0.5, 12),
    ("llama-gqa", None, 0.0, 0),
    ("llama-gqa", None, 1.0, 24),
    ("gpt2", None, 23, 23),
    ("gpt2", None, 1, 1),
    ("bert-mlm", None, 0.3, 7),
    ("bert-base", None, 12, 12),
]


@pytest.mark.parametrize(
    ("case", "unit", "target", "kept"),
    slow_unless(lambda *row: row[2] in (0.75, 7, 0.5, 0.3), TARGETS),
)
def test_the_target_is_hit_exactly(case, unit, target, kept, text_file, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    result = run(folder, text_file, tmp_path / "gates", unit=unit, target_heads=target)
    assert result.metadata.kept_heads == kept
    if unit is not Unit.HEAD:  # single heads of a grouped model leave ragged groups
        pruned = prune(folder, tmp_path / "out", CutRequest(gates=tmp_path / "gates"))
        assert sum(len(a.keep) for a in pruned.plan.attentions.values()) == kept
        assert pruned.manifest.proof.gated_vs_reloaded < 2e-5


def plant_useless_heads(model, heads):
    """Gives some heads hardly any values and the largest W_O: only what they do tells them."""
    for layer, attention in enumerate(attention_of(model)):
        output = weight_of(attention.output_projection)
        norms = output.unflatten(1, (attention.query_heads, -1)).norm(dim=(0, 2))
        for head in heads.get(layer, []):
            columns = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            with torch.no_grad():
                output[:, columns] *= 1.05 * norms.max() / norms[head]
                for projection in attention.projections:
                    rows = output_rows(attention, projection).get("v")
                    if rows is not None:
                        weight_of(projection.module)[rows[head]] *= 1e-4
                        if projection.module.bias is not None:
                            projection.module.bias[rows[head]] *= 1e-4


def weight_of(projection):
    """A weight, output first."""
    weight = projection.get_parameter("weight")
    return weight if input_dim(projection) == 1 else weight.T


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("case", slow_unless({"llama-mha"}.__contains__, PLANTED))
def test_planted_useless_heads_are_the_ones_removed(case, scored, text_file, tmp_path, monkeypatch):
    """Also by gates that start equal, so that nothing but their training tells them apart."""
    model = tiny.model(case)
    planted = {0: [1, 4], 2: [0], 3: [2, 5]}
    plant_useless_heads(model, planted)
    for layer, heads in planted.items():  # their weights would keep them
        output = weight_of(attention_of(model)[layer].output_projection).detach()
        norms = output.unflatten(1, (6, -1)).norm(dim=(0, 2))
        assert {*norms.topk(len(heads)).indices.tolist()} == {*heads}
    folder = tiny.save(model, tmp_path / "model")
    if not scored:
        monkeypatch.setattr("headprune.gates.train_gates._CRITERIA", ())
    # matching the original, every other head is missed, so exactly the planted ones must go
    settings = {"target_heads": 19, "steps": 60, "gate_lr": 0.3}
    run(folder, text_file, tmp_path / "gates", **settings)
    plan = prune(folder, tmp_path / "out", CutRequest(gates=tmp_path / "gates")).plan
    removed = {
        layer: sorted(set(range(6)) - set(part.keep))
        for layer, part in enumerate(plan.attentions.values())
        if len(part.keep) < 6
    }
    assert removed == planted


def state_of(output):
    return load_file(output / "gates.safetensors")


def test_a_stopped_run_leaves_a_checkpoint(llama_folder, text_file, tmp_path):
    import os
    import signal

    def stop(step, total, *numbers):
        if numbers and step == 4:  # of the training, and not of the scores
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="Stopped after step 4 of 10.*--resume") as caught:
        run(llama_folder, text_file, tmp_path / "g", step=stop)
    assert caught.value.exit_code == 130
    steps = []
    run(
        llama_folder,
        text_file,
        tmp_path / "g",
        resume=True,
        step=lambda step, total, *numbers: steps.append(step) if numbers else None,
    )
    assert steps == [5, 6, 7, 8, 9, 10]


def test_frozen_weights_do_not_move_and_trained_ones_do(llama_folder, text_file, tmp_path):
    short = tmp_path / "short.txt"  # too short for a refit
    short.write_text(tiny.text(60))
    run(llama_folder, short, tmp_path / "frozen", seq_len=4, batch_size=2)
    assert not (tmp_path / "frozen" / "weights.safetensors").exists()
    run(llama_folder, text_file, tmp_path / "attention", train=Train.ATTENTION)
    weights = load_file(tmp_path / "attention" / "weights.safetensors")
    assert weights and all(".self_attn." in name for name in weights)
    original = load_file(llama_folder / "model.safetensors")
    assert any(not torch.equal(weights[name], original[name]) for name in weights)


def test_trained_weights_reach_the_pruned_model(llama_folder, text_file, tmp_path):
    run(llama_folder, text_file, tmp_path / "g", train=Train.ALL, weight_lr=1e-2, target_heads=1.0)
    prune(llama_folder, tmp_path / "out", CutRequest(gates=tmp_path / "g"))
    trained = load_file(tmp_path / "g" / "weights.safetensors")["model.norm.weight"]
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], trained
    )


def test_a_larger_constant_penalty_leaves_fewer_heads(llama_folder, text_file, tmp_path):
    kept = [
        run(
            llama_folder,
            text_file,
            tmp_path / f"g{penalty}",
            target_heads=None,
            l0_penalty=penalty,
            steps=40,
            gate_lr=0.3,
        ).metadata.kept_heads
        for penalty in (1e-6, 2.0)
    ]
    assert kept[0] > 20 and kept[1] < 12


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_gradient_checkpointing_changes_no_number(case, text_file, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    plain = run(folder, text_file, tmp_path / "plain", seed=3)
    saved = run(folder, text_file, tmp_path / "saved", seed=3, gradient_checkpointing=True)
    assert saved.metadata.final_loss == pytest.approx(plain.metadata.final_loss, rel=1e-5)
    torch.testing.assert_close(
        state_of(tmp_path / "plain")["log_alpha"], state_of(tmp_path / "saved")["log_alpha"]
    )


def settled_gates(model):
    attentions = attention_of(model)
    gates = Gates(attentions, Unit.HEAD, 1.0, 2 / 3)
    gates.choose(range(0, len(gates.kept), 2))
    return gates


@pytest.mark.parametrize("objective", ["labelled", "distill"])
def test_losses_do_not_depend_on_batch_size(objective):
    model = tiny.model("llama-gqa")
    gates, ids = settled_gates(model), torch.randint(5, tiny.VOCAB, (6, 11))
    loss = labelled if objective == "labelled" else Distillation(head_of(model))

    def mean_loss(size, rows=ids):
        batches = [
            {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part}
            for part in rows.split(size)
        ]
        return torch.stack([loss(model, gates, batch) for batch in batches]).mean()

    with gated(attention_of(model), gates.source), torch.no_grad():
        torch.testing.assert_close(mean_loss(1), mean_loss(6))
        torch.testing.assert_close(mean_loss(2), mean_loss(3))
        assert (mean_loss(6) - mean_loss(6, ids.roll(1, 1))).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation_keeps_no_copies_of_logits(dtype):
    """They are as large as the vocabulary."""
    mask = torch.ones(2, 700)
    logits, target = (torch.randn(2, 700, 90).to(dtype).requires_grad_() for _ in range(2))
    target = target.detach()
    given = {x.untyped_storage().data_ptr() for x in (logits, target)}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def plain(target, logits):
        both = [x.float().log_softmax(-1).flatten(0, 1) for x in (logits, target)]
        return F.kl_div(*both, reduction="batchmean", log_target=True)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = kl_divergence(logits, target, mask)
        assert sum(kept.values()) < 0.2 * logits.nbytes
        wanted = plain(target, logits)
        assert sum(kept.values()) > logits.nbytes  # else the hooks see nothing
    torch.testing.assert_close(loss, wanted)
    gradients = [torch.autograd.grad(each, logits)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*gradients)
    wrong = torch.autograd.grad(plain(target.roll(1, 0), logits), logits)[0]
    assert not torch.allclose(gradients[0], wrong)


def test_distillation_ignores_padding():
    target, logits = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    masked = kl_divergence(logits, target, mask)
    logits[1, 2:] = 9.0
    torch.testing.assert_close(kl_divergence(logits, target, mask), masked)
    assert not torch.allclose(kl_divergence(logits, target, torch.ones_like(mask)), masked)
    assert kl_divergence(target, target, mask).abs() < 1e-6
    assert relative_error(target, target, mask) == 0
    torch.testing.assert_close(relative_error(2 * target, target, mask), torch.tensor(1.0))


@pytest.mark.parametrize("target", [0, 1, 11, 24])
def test_the_target_is_met_within_the_bounds_of_gates(target):
    gates = Gates(attention_of(tiny.model("gpt2")), Unit.HEAD, 0.0, 2 / 3)
    sparsity = HeadTarget(target)
    with torch.no_grad():
        gates.log_alpha.normal_(std=5)
    assert gates.log_alpha.abs().max() > BOUND
    sparsity.after_step(gates)
    assert gates.log_alpha.abs().max() <= BOUND
    assert gates.expected_open().item() == pytest.approx(target, abs=1e-3)


def test_units_move_by_their_size_onto_the_target():
    """The projection of Lagrange's equation: the price of a unit is its size."""
    attentions = attention_of(tiny.model("llama-gqa"))
    gates = Gates(attentions, Unit.HEAD, 0.0, 2 / 3)
    gates.sizes[::2] = 3
    gates.sizes /= 2
    HeadTarget(12).after_step(gates)
    assert gates.expected_open().item() == pytest.approx(12, abs=1e-3)
    small, large = gates.log_alpha[1].item(), gates.log_alpha[0].item()
    assert large == pytest.approx(3 * small) and small < 0
    windows = Gates(attentions, Unit.KV_GROUP, 0.0, 2 / 3, by_heads=False)
    assert windows.sizes.tolist() == [1] * 12


def test_a_constant_penalty_is_that_of_voitas_code():
    """Lambda times the sum of P(open) over all heads, clamped; log alpha is not."""
    gates = Gates(attention_of(tiny.model("gpt2")), Unit.HEAD, 0.0, 0.33)
    with torch.no_grad():
        gates.log_alpha.normal_(std=5)
        gates.log_alpha[0] = 30
    before = gates.log_alpha.detach().clone()
    by_hand = torch.sigmoid(before - 0.33 * math.log(0.1 / 1.1)).clamp(1e-6, 1 - 1e-6)
    penalty = ConstantPenalty(0.05)
    torch.testing.assert_close(penalty.penalty(gates), 0.05 * by_hand.sum())
    assert not torch.isclose(ConstantPenalty(0.06).penalty(gates), 0.05 * by_hand.sum())
    penalty.after_step(gates)
    assert torch.equal(gates.log_alpha, before)


def test_the_config_of_voita_is_the_schedule_of_the_paper(text_file, tmp_path, monkeypatch):
    """Equal gates, beta 0.33, one lambda at every step while heads are chosen, no bound."""
    settings = yaml.safe_load((Path(__file__).parents[1] / "configs" / "voita.yaml").read_text())
    own = {name: settings[name] for name in settings if name in TrainGatesConfig.model_fields}
    assert settings.keys() - own == {"model", "output", "data", "text_column"}
    assert own["temperature"] == 0.33 and own["attention"] == "encoder"
    pairs = tmp_path / "pairs.csv"
    words = text_file.read_text().split()
    rows = (f"{' '.join(words[at : at + 9])},{' '.join(words[at : at + 7])}" for at in range(80))
    pairs.write_text("\n".join(["en,de", *rows]))
    folder = tiny.save(tiny.model("bart"), tmp_path / "model")
    drawn, penalties = list[torch.Tensor](), list[float]()
    sample, penalty = hard_concrete.sample, ConstantPenalty.penalty

    def noted(log_alpha, temperature, draws):
        drawn.append(log_alpha.detach().clone())
        assert temperature == 0.33
        return sample(log_alpha, temperature, draws)

    def priced(sparsity, gates):
        value = penalty(sparsity, gates)
        penalties.append(float((value / gates.open_probability().sum()).detach()))
        return value

    monkeypatch.setattr(hard_concrete, "sample", noted)
    monkeypatch.setattr(ConstantPenalty, "penalty", priced)
    config = TrainGatesConfig(**own | {"steps": 10, "batch_size": 8, "gate_lr": 3.0})
    data = DataConfig(source=str(pairs), text_column="en,de")
    result = train_gates(folder, data, tmp_path / "g", config)
    assert (drawn[0] == own["init_log_alpha"]).all()
    assert penalties == pytest.approx([own["l0_penalty"]] * 8)  # heads are chosen after 80 %
    assert torch.stack(drawn).abs().max() > BOUND
    assert result.metadata.judgement is None and result.metadata.trained_weights


def test_a_saturated_gate_still_has_a_gradient():
    def moving(log_alpha):
        gates = torch.full((1,), log_alpha, requires_grad=True)
        draws = hard_concrete.sample(gates, 2 / 3, draws=4000)
        return float(((draws > 0) & (draws < 1)).float().mean())

    assert moving(BOUND) > 0.03 > moving(2 * BOUND)


def test_weights_are_clipped_without_the_gates(llama_folder, text_file, tmp_path, monkeypatch):
    norms, step = list[list[float]](), torch.optim.AdamW.step

    def freeze_loudly(scale, model, *others):
        freeze(model, *others)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * scale)

    def record(optimizer, *_):
        groups = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
        norms.append([float(torch.cat([g.flatten() for g in each]).norm()) for each in groups])
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    for scale in (1.0, 1000.0):
        monkeypatch.setattr("headprune.gates.train_gates.freeze", partial(freeze_loudly, scale))
        run(llama_folder, text_file, tmp_path / f"g{scale}", train=Train.ATTENTION, steps=1)
    (gates, _), (gates_beside_large_weights, weights) = norms
    assert gates_beside_large_weights == pytest.approx(gates, rel=1e-4)
    assert weights == pytest.approx(1, rel=1e-3)


TEXT_CASES = [c for c in tiny.FAMILY_CASES if tiny.reads_text(c)]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(TEXT_CASES).__contains__, TEXT_CASES))
def test_open_gates_and_an_equal_student_have_no_divergence(case, recompute):
    """Functional dropout reads a flag of its layer, which recomputation reads as well."""
    net = tiny.model(case, **dict.fromkeys(tiny.dropouts(case), 0.4))
    student, teacher = copy.deepcopy(net), copy.deepcopy(net)
    if recompute and net.supports_gradient_checkpointing:
        recompute_activations(net)
        recompute_activations(student)
    ids = torch.randint(5, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if net.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": ids, "labels": ids}
    attentions = attention_of(net)
    gates = Gates(attentions, Unit.HEAD, 3.0, 2 / 3)
    gates.choose(range(len(gates.kept)))
    gated_model = GatedModel(net, gates, Distillation(head_of(net)))
    healed = HealedModel(student, teacher, bf16=False)
    with gated(attentions, gates.source):
        for module, training in product((gated_model, healed), (True, False)):
            loss = module.train(training)(batch)
            assert loss.abs().item() < 1e-6
            if training:
                loss.backward()
    if case == "opt" and not recompute:  # the comparison can fail
        healed.train()
        for layer in student.modules():
            layer.training = isinstance(layer, GradientCheckpointingLayer)
        assert healed(batch).item() > 1e-4


def test_the_most_open_gates_are_chosen_and_are_one():
    gates = Gates(attention_of(tiny.model("gpt2")), Unit.HEAD, 3.0, 2 / 3)
    with torch.no_grad():
        gates.log_alpha.normal_(std=3)
    order = gates.log_alpha.argsort(descending=True)
    assert not torch.isin(gates.values(), torch.tensor([0.0, 1.0])).all()
    with gates.choosing([1, 2]):
        assert gates.values().nonzero().flatten().tolist() == [1, 2]
    assert not gates.chosen and gates.kept.all()
    gates.choose(HeadTarget(12).choice(gates))
    assert sorted(order[:12].tolist()) == gates.kept.nonzero().flatten().tolist()
    assert torch.equal(gates.values(), gates.kept.float())
    assert gates.expected_open() == gates.open_probability().sum() == 12


def test_gates_start_in_the_order_of_scores():
    gates = Gates(attention_of(tiny.model("gpt2")), Unit.HEAD, 3.0, 2 / 3)
    scores = torch.randn(24, generator=torch.Generator().manual_seed(0))
    gates.start_from(scores, 18)
    assert HeadTarget(18).choice(gates) == sorted(scores.topk(18).indices.tolist())
    assert HeadTarget(18).choice(gates) != sorted(scores.neg().topk(18).indices.tolist())
    assert (gates.log_alpha > 0).sum() == 18
    near = scores.argsort()[4:8]  # of the threshold
    assert gates.log_alpha[near].abs().max() < 1.2 < gates.log_alpha[scores.argmax()]


def test_a_draw_is_one_per_sequence_until_the_heads_are_chosen():
    model = tiny.model("llama-gqa")
    gates = Gates(attention_of(model), Unit.KV_GROUP, 0.0, 2 / 3)
    gates.sample(3)
    first = gates.source(0)
    assert first is not None and first.shape == (3, 6)
    assert torch.equal(first[:, 0], first[:, 1])  # heads of a group stand together
    assert not torch.equal(first[0], first[1])
    gates.choose([0, 5])
    gates.sample(3)
    settled = gates.source(0)
    assert settled is not None and settled.shape == (1, 6)
    assert (settled > 0).tolist() == [[True, True, False, False, False, False]]
    gates.disable()
    assert gates.source(0) is None


def test_a_preview_says_what_is_open(llama_folder, text_file, tmp_path):
    run(llama_folder, text_file, tmp_path / "g")
    shown = preview(llama_folder, CutRequest(gates=tmp_path / "g"))
    (evidence,) = {shape.evidence for shape in shown.shapes[:1]}
    assert 0 < evidence < 1


def test_gates_are_never_worse_than_their_scores(llama_folder, text_file, tmp_path):
    """A rate that throws the gates about leaves the choice by scores, and says so."""
    for number, rate in enumerate((0.3, 1e-9)):
        result = run(llama_folder, text_file, tmp_path / str(number), gate_lr=rate, steps=30)
        judgement = result.metadata.judgement
        assert judgement is not None
        by_scores, by_gates = judgement.choose
        if judgement.taken_after:
            assert by_gates < by_scores and judgement.exchanged
        else:
            assert by_gates >= by_scores
        assert result.metadata == read_metadata(tmp_path / str(number))
    assert judgement.taken_after == judgement.exchanged == 0  # gates that never moved


def test_a_refit_brings_the_gated_model_nearer(llama_folder, text_file, tmp_path):
    result = run(llama_folder, text_file, tmp_path / "g", steps=1, target_heads=12)
    assert result.metadata.refitted and result.metadata.trained_weights
    gates, net = tmp_path / "g", from_pretrained(llama_folder)
    kept, weights = state_of(gates)["kept"], load_file(gates / "weights.safetensors")
    attentions = attention_of(net)
    assert len(weights) == 2 * len(attentions)  # with biases
    ids = load_tokenizer(llama_folder)(text_file.read_text())["input_ids"][:256]
    batch = {"input_ids": torch.tensor(ids).reshape(4, 64)}
    wanted = net(**batch)
    closed = fixed(list(kept.float().repeat_interleave(2).split(6)))

    def away():
        with torch.no_grad(), gated(attentions, closed):
            return float(divergence(net(**batch), wanted, batch, head_of(net)))

    without = away()
    net.load_state_dict(weights, strict=False)
    assert away() < 0.9 * without


def test_a_teacher_shares_what_does_not_change(llama_folder):
    net = from_pretrained(llama_folder)
    changed = [a.output_projection.weight for a in attention_of(net)]
    teacher = original_of(net, changed)
    pairs = zip(net.parameters(), teacher.parameters(), strict=True)
    assert [id(one) for one, other in pairs if one is not other] == list(map(id, changed))
    ids = torch.arange(16)[None]
    before = teacher(input_ids=ids).logits
    with torch.no_grad():
        changed[0].mul_(2)
    assert torch.equal(teacher(input_ids=ids).logits, before)
    assert not torch.equal(net(input_ids=ids).logits, before)
    assert original_of(net, ()) is None


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_a_refit_in_half_precision_is_that_of_float32(dtype, text_file, tmp_path):
    folder = tiny.save(tiny.model("llama-mha").to(dtype), tmp_path / "model")
    settings = {"steps": 2, "target_heads": 12, "dtype": "bfloat16", "gate_lr": 1e-9}
    result = run(folder, text_file, tmp_path / "g", **settings)
    assert result.metadata.kept_heads == 12
    weights = load_file(tmp_path / "g" / "weights.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    run(folder, text_file, tmp_path / "f", **settings | {"dtype": "float32"})
    exact = load_file(tmp_path / "f" / "weights.safetensors")
    plain = dict(from_pretrained(folder, dtype="float32").named_parameters())
    for name in weights:
        rounding, fitted = (
            float((exact[name] - other[name].detach().float()).norm()) for other in (weights, plain)
        )
        assert fitted == 0 or rounding < 0.1 * fitted, name
    pruned = prune(folder, tmp_path / "out", CutRequest(gates=tmp_path / "g"))
    assert pruned.plan.kept_heads == 12


def test_refitted_gates_are_cut_as_they_were_fitted(llama_folder, text_file, tmp_path):
    run(llama_folder, text_file, tmp_path / "g", target_heads=12)
    text, gates = DataConfig(source=str(text_file)), tmp_path / "g"
    prune(llama_folder, tmp_path / "same", CutRequest(gates=gates, keep=12))
    for keep in (8, 0.75):
        with pytest.raises(PlanError, match="refitted to 12 of 24 heads. Leave out --keep"):
            prune(llama_folder, tmp_path / "other", CutRequest(gates=gates, keep=keep))
    with pytest.raises(PlanError, match="W_O was refitted when these gates were made"):
        prune(llama_folder, tmp_path / "other", CutRequest(gates=gates), refit=text)
    assert not (tmp_path / "other").exists()


def test_text_too_short_for_a_refit_trains_plain_gates(llama_folder, tmp_path):
    short, lines = tmp_path / "short.txt", []
    short.write_text(tiny.text(60))
    heard = {"line": lambda line, good=None: lines.append(line)}
    result = run(llama_folder, short, tmp_path / "g", seq_len=4, batch_size=2, **heard)
    assert "no scores by compensated: The data has 60 tokens" in lines[0]
    assert lines[-1] == "all gates start equal, and W_O stays as it is"
    assert result.metadata.judgement is None and not result.metadata.refitted
    assert result.metadata.kept_heads == 12


def test_every_module_keeps_its_best_unit_where_it_must():
    scores, sizes = torch.tensor([9.0, 8.0, 7.0, 1.0, 2.0, 3.0, 0.0]), [1] * 7
    assert keep_best(scores.tolist(), sizes, 3) == [0, 1, 2]
    assert HeadTarget(3).best(scores, sizes) == [0, 1, 2]
    assert HeadTarget(3, [3, 2, 2]).best(scores, sizes) == [0, 4, 5]
    assert HeadTarget(4, [3, 2, 2]).best(scores, sizes) == [0, 1, 4, 5]
    assert scores.tolist() == [9, 8, 7, 1, 2, 3, 0]


class Dashboard(TrainerCallback):
    """Keeps what a dashboard would show."""

    shown: list[tuple[int, dict[str, Any]]] = []  # noqa: RUF012  # emptied by the test
    logging_dir: str | None = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.shown.append((state.global_step, logs))


def test_a_dashboard_gets_the_numbers_of_every_step(llama_folder, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(training.INTEGRATION_TO_CALLBACK, "wandb", Dashboard)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match="--report-to wandb needs wandb: pip install wandb"):
        run(llama_folder, text_file, tmp_path / "gates", steps=3, report_to="wandb")
    assert not list(tmp_path.glob("gates*"))
    monkeypatch.undo()
    monkeypatch.setitem(training.INTEGRATION_TO_CALLBACK, "wandb", Dashboard)
    monkeypatch.setattr(training, "refuse_missing", lambda what, name: None)
    Dashboard.shown.clear()
    result = run(llama_folder, text_file, tmp_path / "gates", steps=3, report_to="wandb")
    steps = [(step, logs["loss"]) for step, logs in Dashboard.shown if "expected_open" in logs]
    lines = (result.output / "history.jsonl").read_text().splitlines()
    recorded = [(r["step"], r["loss"]) for r in map(json.loads, lines)]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert steps == recorded
