"""Two streams in one pass: the first stays the original, the second is what the model becomes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from headprune.errors import CheckpointError, PlanError
from headprune.model.attention import attention_of
from headprune.model.batch import doubled, real_tokens, token_mask, without_labels
from headprune.model.gating import fixed, gated
from headprune.model.heads import project_output, read_output
from headprune.model.passes import OneStream, RunsTwice, Stream, entering, in_sequence, run_model
from headprune.model.probes import probe_inputs
from headprune.surgery.conversion import convert_in_sequence, geometry
from headprune.surgery.merges import MERGES
from headprune.surgery.refit import refit
from tests import tiny

CASES = tiny.present("llama-gqa", "gpt2", "bert-mlm", "t5", "qwen3", "gpt_neox")


def batch_for(model, count=40, length=12):
    ids = torch.randint(5, 60, (count, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": ids.flip(0), "labels": ids}
    return batch


def states(model, batch):
    with torch.no_grad():
        result = run_model(model, batch)[0]  # hidden states; of a T5, logits
    return result


def watched(model):
    """Gets what the model gives below its head at every run."""
    found = []

    def look(module, args, result):
        found.append(result[0])  # type: ignore[index]

    model.base_model.register_forward_hook(look)
    return found


def merged(attention, heads, context):
    return MERGES["lowrank"](heads, [range(len(heads.k))], context)


@pytest.mark.parametrize("case", CASES)
def test_a_merge_sees_the_original_and_the_converted_model(case):
    model = tiny.model(case)
    batch = batch_for(model)
    batch.pop("labels", None)
    before, found = states(model, batch), watched(model)
    convert_in_sequence(model, attention_of(model), batch, merged)
    assert len(found) == 1
    original, changed = (stream.of(found[0]) for stream in Stream)
    torch.testing.assert_close(original, before)
    torch.testing.assert_close(changed, states(model, batch))
    assert not torch.allclose(original, changed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_a_refit_sees_the_original_and_the_cut_model(case):
    model = tiny.model(case)
    batch, attentions = batch_for(model), attention_of(model)
    gates = [torch.ones(a.query_heads) for a in attentions]
    gates[0][0] = gates[-1][1] = 0.0
    before, found = states(model, batch), watched(model)
    refit(model, attentions, gates, batch)
    assert len(found) == 1
    original, changed = (stream.of(found[0]) for stream in Stream)
    torch.testing.assert_close(original, before)
    with gated(attentions, fixed(gates)):
        torch.testing.assert_close(changed, states(model, batch))
    assert not torch.allclose(original, changed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_a_pass_leaves_nothing_behind(case):
    model = tiny.model(case)
    batch, attentions = batch_for(model), attention_of(model)
    configs = [getattr(a.module, "config", None) for a in attentions]
    before = model.config._attn_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def failing(attention, heads, context):
        if attention is attentions[1]:
            raise ZeroDivisionError
        return heads

    batch.pop("labels", None)
    with pytest.raises(ZeroDivisionError):
        convert_in_sequence(model, attentions, batch, failing)
    convert_in_sequence(model, attentions, batch, lambda attention, heads, context: heads)
    geometry(model, attentions, probe_inputs(model))
    assert [getattr(a.module, "config", None) for a in attentions] == configs
    assert model.config._attn_implementation == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module)
    after = model.state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_what_calibration_shows_is_what_the_model_computes():
    model = tiny.model("llama-gqa")
    batch, first = batch_for(model, 3), attention_of(model)[0]
    given = []
    first.output_projection.register_forward_hook(lambda m, args, out: given.append(out))
    states(model, batch)

    def look(attention, heads, context):
        seen = context.activations
        torch.testing.assert_close(seen.outputs, given[0])
        rows, part = torch.arange(12), slice(1, 2)
        probabilities = seen.attention(seen.queries[part], seen.keys[part], part, rows)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(1, len(heads.q), 12))
        assert not probabilities.triu(1).any()
        scores = seen.queries[part] @ seen.keys[part][:, heads.owners].mT * seen.scaling
        hidden = torch.ones(12, 12).triu(1).bool()
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(probabilities, expected)
        other = seen.attention(seen.queries[part], seen.keys[0:1], part, rows)
        assert not torch.allclose(other, expected, atol=1e-3)
        return heads

    convert_in_sequence(model, [first], batch, look)


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2", "qwen3"))
def test_a_merge_sees_the_scores_of_the_module_itself_and_the_outputs_of_the_original(case):
    model = tiny.model(case)
    batch, attentions = batch_for(model, 3), attention_of(model)
    seen = []

    def look(attention, heads, context):
        if attention is attentions[1]:
            known = context.activations
            seen.append((known.queries, known.keys, known.outputs))
        return heads

    def louder(attention, heads, context):
        heads = look(attention, heads, context)
        return replace(heads, o=heads.o * 5) if attention is attentions[0] else heads

    for convert in (look, louder, look):  # in the last, the louder model is the original
        convert_in_sequence(model, attentions, batch, convert)
    original, between, own = seen
    torch.testing.assert_close(between[:2], own[:2])
    torch.testing.assert_close(between[2], original[2])
    for quiet, loud in zip(original, own, strict=True):
        assert not torch.allclose(quiet, loud, rtol=1e-2, atol=1e-3)


def test_projections_compute_one_stream():
    projection = nn.Linear(4, 3)
    x = torch.randn(6, 5, 4)
    rows = []
    plain = projection(x)
    projection.register_forward_hook(lambda m, args, out: rows.append(len(args[0])))
    known = torch.full((3, 5, 3), 7.0)
    for stream, other in ((Stream.ORIGINAL, None), (Stream.CHANGED, None), (Stream.CHANGED, known)):
        with entering(projection, lambda x: OneStream(stream, stream.of(x), other)):  # noqa: B023
            found = projection(x)
        apart = Stream.CHANGED if stream is Stream.ORIGINAL else Stream.ORIGINAL
        assert torch.equal(stream.of(found), stream.of(plain))
        assert torch.equal(apart.of(found), torch.zeros(3, 5, 3) if other is None else other)
    with entering(projection, lambda x: 2 * x):
        torch.testing.assert_close(projection(x), 2 * plain - projection.bias)
    assert rows == [3, 3, 3, 6]
    assert torch.equal(projection(x), plain)


def test_a_module_that_runs_twice_is_named():
    model = tiny.model("albert")
    batch, attentions = batch_for(model), attention_of(model)
    with pytest.raises(RunsTwice, match="runs in more than one layer"):
        in_sequence(model, attentions, batch, lambda attention, x: x)
    with pytest.raises(PlanError, match=r"more than one layer.* Use a merge that needs no cal"):
        convert_in_sequence(model, attentions, batch, lambda attention, heads, context: heads)


def test_outputs_past_hooks_are_the_projections_own():
    for case in ("llama-gqa", "gpt2", "bert-mlm"):
        attention = attention_of(tiny.model(case))[0]
        width = attention.query_heads * read_output(attention)[0].shape[-1]
        x = torch.randn(2, 5, width)
        plain = attention.output_projection(x)
        with entering(attention.output_projection, torch.zeros_like):
            assert torch.equal(project_output(attention, x), plain)
            assert not torch.equal(attention.output_projection(x), plain)


def test_batches():
    ids = torch.arange(6).reshape(2, 3)
    batch = {"input_ids": ids, "attention_mask": (ids != 5).long(), "use_cache": False}
    both = doubled(batch)
    assert all(torch.equal(stream.of(both["input_ids"]), ids) for stream in Stream)
    assert both["use_cache"] is False
    mask = token_mask(batch, "self")
    x = torch.randn(2, 3, 4)
    assert torch.equal(real_tokens(x, mask), x.flatten(0, 1)[:5])
    assert real_tokens(x, None).shape == (6, 4)
    assert real_tokens(x, torch.ones(2, 2, dtype=torch.bool)).shape == (6, 4)  # nothing is padded
    with pytest.raises(CheckpointError, match="reads 6 positions, and the padded texts have 4"):
        real_tokens(x, torch.tensor([[True, True], [True, False]]))
    pair = {**batch, "decoder_input_ids": ids, "labels": torch.tensor([[1, -100], [2, 3]])}
    assert token_mask(pair, "cross") is not None
    assert torch.equal(token_mask(pair, "decoder"), torch.tensor([[True, False], [True, True]]))  # type: ignore[arg-type]
    assert torch.equal(token_mask(pair, "encoder"), mask)  # type: ignore[arg-type]
    assert set(without_labels(pair)) == {*batch, "decoder_input_ids"}
