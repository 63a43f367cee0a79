"""Every row of the family table: gate = cut = reloaded, decoding, layers without heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headprune.errors import ProofError
from headprune.models import proof
from headprune.models.attention import attention_of, refuse_unknown_settings
from headprune.models.loading import task_of
from headprune.models.surgery import cut_heads, resolve
from tests import tiny
from tests.cutting import prove, uneven_plan

EMPTY = {"none": (), "first": (0,), "last": (-1,), "both": (0, -1)}


def build(case: str, attn: str) -> PreTrainedModel:
    """A tiny model, or a skip where its classes have no such attention."""
    model = tiny.model(case)
    if attn == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{type(model).__name__} has no sdpa")
    model.set_attn_implementation(attn)
    return model


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("case", tiny.FAMILY_CASES)
def test_gated_is_cut_is_reloaded(case: str, attn: str, empty: str, tmp_path: Path) -> None:
    model = build(case, attn)
    cuts = resolve(uneven_plan(model, *EMPTY[empty]), model)
    result = prove(model, cuts, tmp_path)
    assert result.passed
    if any(cut.query_positions for cut in cuts):
        assert result.control is not None and result.control > 1e2 * result.tolerance


@pytest.mark.parametrize("case", tiny.FAMILY_CASES)
def test_a_cut_of_another_head_fails_the_proof(case: str) -> None:
    model = tiny.model(case)
    cuts = resolve(uneven_plan(model), model)
    inputs = proof.probe_inputs(model)
    wanted = proof.probe_gated(model, cuts, inputs)
    first = next(i for i, c in enumerate(cuts) if c.scale and len(set(c.scale)) > 1)
    assert cuts[first].scale is not None
    cuts[first] = replace(cuts[first], scale=cuts[first].scale[::-1])
    cut_heads(model, cuts)
    cut = proof.probe(model, inputs)
    with pytest.raises(ProofError, match="nothing was written"):
        proof.conclude(wanted, cut, cut, None, model.dtype)


GENERATING = [
    case for case in tiny.FAMILY_CASES if task_of(tiny.model(case)) in ("causal-lm", "seq2seq-lm")
]


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("case", GENERATING)
def test_generation_does_not_depend_on_the_cache(case: str, empty: str) -> None:
    model = tiny.model(case)
    model.generation_config.eos_token_id = None  # so that all run to the end
    cut_heads(model, resolve(uneven_plan(model, *EMPTY[empty]), model))
    inputs: dict[str, Any] = dict(proof.probe_inputs(model))
    inputs.pop("decoder_input_ids", None)
    if task_of(model) == "causal-lm":  # decoders are padded on the left
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    else:
        inputs["decoder_start_token_id"] = 2
    options = {**inputs, "max_new_tokens": 9, "do_sample": False}
    uncached = model.generate(**options, use_cache=False).tolist()
    assert model.generate(**options).tolist() == uncached
    # the stock Falcon with alibi does not take a static cache either
    if model._can_compile_fullgraph and not getattr(model.config, "alibi", False):
        assert model.generate(**options, cache_implementation="static").tolist() == uncached
    beams = model.generate(**options, num_beams=3).tolist()
    assert beams == model.generate(**options, num_beams=3, use_cache=False).tolist()


@pytest.mark.parametrize("case", tiny.FAMILY_CASES)
def test_every_setting_of_the_config_is_known(case: str) -> None:
    refuse_unknown_settings(tiny.config(case))
