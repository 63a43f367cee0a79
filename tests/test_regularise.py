"""Zero heads: every layer of one kind, and the same numbers."""

from dataclasses import replace

import pytest
import torch

from headprune.errors import PlanError
from headprune.formats.regularise import _spread, regularise
from headprune.formats.source import open_source
from headprune.io.shards import Piece
from headprune.surgery.cut import cut_heads, resolve
from headprune.tensors.zero_heads import padded
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan

IDS = torch.randint(0, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def cut(folder, case, *empty, ragged=False):
    model = tiny.model(case).double()
    plan = ragged_plan(model) if ragged else uneven_plan(model, *empty)
    cut_heads(model, resolve(plan, model, ragged=True))
    model.save_pretrained(folder)
    return model


def shaped(folder, case, shape):
    """A saved model: "whole", "uneven", "ragged", or with layers without heads ("empty")."""
    if shape == "whole":
        model = tiny.model(case).double()
        model.save_pretrained(folder)
        return model
    return cut(folder, case, *([0, 2] if shape == "empty" else []), ragged=shape == "ragged")


def computed(source, **changed):
    net = type(source.net)(source.config).double().eval()
    net.load_state_dict(
        {**{n: p.read() for n, p in source.weights.items()}, **changed}, strict=not tied(source)
    )
    net.tie_weights()
    return net(IDS).logits


def tied(source):
    return bool(source.config.tie_word_embeddings)


@pytest.mark.parametrize("case", ["llama-gqa", "qwen2", "qwen3"])
@pytest.mark.parametrize("shape", ["ragged", "empty"])
def test_zero_heads_change_no_number(case, shape, tmp_path):
    model = cut(tmp_path, case, 0, 2, ragged=shape == "ragged")
    source = open_source(tmp_path)
    regular, said = regularise(source)
    assert len(said) == 1 and ("no cost" in said[0]) == (shape == "ragged")
    assert all(len(set(a.group_sizes)) == 1 for a in regular.attentions)
    wanted = model(IDS).logits
    assert (computed(regular) - wanted).abs().max() < 1e-12
    # a zero head that is none
    name = f"{regular.attentions[0].path}.o_proj.weight"
    broken = regular.weights[name].read()
    broken[:, -1] = 1.0 if shape == "empty" else 0.1
    query = regular.weights[name.replace("o_proj", "v_proj")].read().fill_(0.1)
    changed = {name: broken, name.replace("o_proj", "v_proj"): query}
    assert (computed(regular, **changed) - wanted).abs().max() > 1e-3


def test_ragged_groups_cost_no_cache_and_empty_layers_what_is_said(tmp_path):
    cut(tmp_path / "ragged", "llama-gqa", ragged=True)
    cut(tmp_path / "empty", "llama-gqa", 0, 2)

    def cached(source):
        return sum(2 * a.kv_heads * a.head_dim for a in source.attentions)

    ragged, empty = open_source(tmp_path / "ragged"), open_source(tmp_path / "empty")
    assert cached(regularise(ragged)[0]) == cached(ragged)
    regular, said = regularise(empty)
    assert f"holds {cached(regular) - cached(empty)} numbers per token" in said[0]
    kept, said = regularise(empty, may_be_empty=lambda layer: layer == 2)
    assert [a.query_heads for a in kept.attentions][2] == 0 and "Layer 0 " in said[0]


def test_a_regular_model_stays_the_same_object(tmp_path):
    cut(tmp_path / "uneven", "llama-gqa")
    tiny.model("llama-gqa").save_pretrained(tmp_path / "whole")
    for name in ("uneven", "whole"):
        source = open_source(tmp_path / name)
        assert regularise(source) == (source, ())
        assert regularise(source)[0] is source


def test_a_family_with_more_per_head_is_refused(tmp_path):
    cut(tmp_path, "gpt2", 1)
    with pytest.raises(PlanError, match="separate projections.*--for vllm"):
        regularise(open_source(tmp_path))


def test_slots():
    assert padded((1, 3, 2), 3) == ((0, None, None, 1, 2, 3, 4, 5, None), (0, 1, 2))
    assert padded((), 2) == ((None, None), (None,))
    x = Piece("x", None, torch.arange(6.0).view(1, 6), None, torch.float32, torch.float32)
    assert _spread(x, (1, None, 0), 2, 1).read().tolist() == [[2, 3, 0, 0, 0, 1]]
    none = replace(x, source=torch.zeros(0, 4))
    assert _spread(none, (None,), 2, 0).read().tolist() == [[0.0] * 4] * 2
