"""Wrong cuts: none has a proof, however little the outputs show of it."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from headprune.config import ProofOption, Writing
from headprune.errors import ProofError
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.result import write as streamed
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.runtime.modeling_headprune import input_dim
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import Cut, cut_heads
from headprune.tensors.units import Unit
from tests import tiny
from tests.damage import edit
from tests.marks import slow_unless

CASES = [
    *("llama-mha", "llama-gqa", "qwen2", "gpt2", "bert-mlm"),
    *("opt", "gpt_neox", "bart", "whisper", "vit"),
]
SCALES = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6]
KINDS = ["heads", "groups", "bias", "columns"]
ALL = list(product(CASES, SCALES, KINDS))


@torch.no_grad()
def small(case, scale, dtype=torch.float32):
    """A model with small weights in the W_O of one module, and which that is."""
    model = tiny.model(case, dtype)
    attentions = attention_of(model)
    number = (sum(map(ord, case)) + round(1 / scale) % 7) % len(attentions)
    attentions[number].output_projection.get_parameter("weight").mul_(scale)
    return model, number


def kept(attention, kv_positions):
    """The cut that leaves some KV heads with their queries."""
    group = attention.query_heads // attention.kv_heads
    queries = tuple(kv * group + query for kv in kv_positions for query in range(group))
    return Cut(attention, queries, kv_positions, None, (group,) * len(kv_positions))


def right(attention):
    """All but the first KV head stay."""
    return kept(attention, tuple(range(1, attention.kv_heads)))


@torch.no_grad()
def spoil(cut, kind, cuts, model):
    """Cuts a model, one module of it wrongly."""
    attention, number = cut.attention, cuts.index(cut)
    if kind == "heads":
        cuts[number] = kept(attention, tuple(range(attention.kv_heads - 1)))
    if kind == "groups":
        cuts[number] = replace(cut, kv_positions=(*cut.kv_positions[1:], cut.kv_positions[0]))
    cut_heads(model, cuts)
    if kind == "bias":
        values = next(p.module for p in attention.projections if "v" in p.holds)
        bias = values.get_parameter("bias")
        bias.copy_(bias.roll(attention.head_dim))
    if kind == "columns":
        projection = attention.output_projection
        weight = projection.get_parameter("weight")
        weight.copy_(weight.roll(attention.head_dim, input_dim(projection)))


@pytest.mark.parametrize(
    ("case", "scale", "kind"),
    slow_unless(lambda *row: (ALL.index(row) // len(KINDS) + KINDS.index(row[2])) % 7 == 0, ALL),
)
def test_no_wrong_cut_has_a_proof(case, scale, kind):
    model, number = small(case, scale)
    cuts = [right(attention) for attention in attention_of(model)]
    expected = equivalence.expect(model, cuts, decoded=False)
    spoil(cuts[number], kind, cuts, model)
    cut = probes.probe(model, expected.inputs, decoded=False)
    with pytest.raises(ProofError, match="nothing was written"):
        equivalence.conclude(expected, cut)


@pytest.mark.parametrize(
    ("case", "scale"), slow_unless(lambda case, scale: scale == 1e-6, product(CASES, SCALES))
)
def test_a_right_cut_of_small_weights_has_a_proof(case, scale):
    model, _ = small(case, scale)
    cuts = [right(attention) for attention in attention_of(model)]
    expected = equivalence.expect(model, cuts, decoded=False)
    cut_heads(model, cuts)
    cut = probes.probe(model, expected.inputs, decoded=False)
    assert equivalence.conclude(expected, cut).passed


def test_a_module_without_heads_gives_nothing_but_its_bias():
    model = tiny.model("llama-gqa")
    first, *others = attention_of(model)
    cuts = [kept(first, ()), *(kept(a, (0, 1)) for a in others)]
    expected = equivalence.expect(model, cuts, decoded=False)
    wrong = tiny.model("llama-gqa")
    with torch.no_grad():
        attention_of(wrong)[0].output_projection.get_parameter("weight").mul_(1e-9)
    for net, cut in ((model, kept(first, ())), (wrong, kept(attention_of(wrong)[0], (0,)))):
        cut_heads(net, [cut, *(kept(a, (0, 1)) for a in attention_of(net)[1:])])
    good, bad = (probes.probe(net, expected.inputs, decoded=False) for net in (model, wrong))
    assert equivalence.conclude(expected, good).passed
    with pytest.raises(ProofError, match=f"1.00e.00 of the largest value.*'{first.path}'"):
        equivalence.conclude(expected, bad)


def as_plan(cuts):
    parts = {
        cut.attention.path: AttentionPlan(
            query_heads=cut.attention.query_heads,
            kv_heads=cut.attention.kv_heads,
            keep=cut.query_positions,
        )
        for cut in cuts
    }
    return Plan(unit=Unit.HEAD, attentions=parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_failed_proof_writes_nothing(dtype, tmp_path, monkeypatch):
    model, number = small("llama-gqa", 1e-6, dtype)
    base = tiny.save(model, tmp_path / "model")
    request = CutRequest(plan=as_plan([right(a) for a in attention_of(model)]))

    def wrongly(net, cuts, *rest):
        wrong = kept(cuts[number].attention, (0, 1))
        return cut_pieces(net, [*cuts[:number], wrong, *cuts[number + 1 :]], *rest)

    assert prune(base, tmp_path / "right", request).manifest.proof
    cut_pieces = streamed.cut_pieces
    monkeypatch.setattr(streamed, "cut_pieces", wrongly)
    with pytest.raises(ProofError, match=rf"W_O of 'model.layers.{number}.self_attn'"):
        prune(base, tmp_path / "wrong", request)
    assert not (tmp_path / "wrong").exists()


def test_a_proof_that_shows_nothing_at_one_module_writes_nothing(tmp_path):
    model = tiny.model("llama-mha")
    attentions = attention_of(model)
    with torch.no_grad():
        heads = attentions[1].output_projection.get_parameter("weight").view(-1, 6, 10)
        heads[:, [0, 2]] *= 1e-8
    base = tiny.save(model, tmp_path / "model")
    plan = as_plan([kept(a, (0, 1)) for a in attentions])
    refused = r"show nothing.*'model.layers.1.self_attn'.*--config proof=tensors"
    with pytest.raises(ProofError, match=refused):
        prune(base, tmp_path / "out", CutRequest(plan=plan))
    assert not (tmp_path / "out").exists()
    writing = Writing(proof=ProofOption.TENSORS)
    written = prune(base, tmp_path / "out", CutRequest(plan=plan), writing=writing)
    assert written.manifest.tensor_proof is not None


def test_verify_compares_modules_with_the_original(tmp_path):
    model, number = small("llama-gqa", 1e-6)
    attentions = attention_of(model)
    base = tiny.save(model, tmp_path / "model")
    request = CutRequest(plan=as_plan([right(a) for a in attentions]))
    result = prune(base, tmp_path / "cut", request).output
    assert verify(result, against=base).passed
    name = f"model.layers.{number}.self_attn.o_proj.weight"
    edit(result / "model.safetensors", lambda held: held[name].mul_(1.1))
    checks = verify(result, against=base).checks
    assert [check.passed for check in checks] == [False, True, True, False, False]
    assert all(f"model.layers.{number}.self_attn" in check.found for check in checks[-2:])
