"""Experts as graphs have them, against the implementations of transformers."""

import pytest
import torch

from headprune.formats.experts import _all_experts, run_all_experts
from headprune.model.probes import probe_inputs
from tests import tiny

CASES = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "ernie4_5_moe", "glm4_moe", "granitemoe"]
CASES += ["hunyuan_v1_moe", "phimoe", "qwen2_moe", "deepseek_v3", "qwen3_vl_moe"]


def seen(model):
    """Every module of experts, with what it was given and gave."""
    found = []
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            module.register_forward_hook(lambda *run: found.append(run))
    with torch.no_grad():
        model(**probe_inputs(model))
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_experts_are_those_that_were_chosen(case):
    model = tiny.model(case)
    runs = seen(model)
    assert runs
    for module, (states, chosen, weights), wanted in runs:
        scale = wanted.abs().max()
        assert scale > 0
        found = _all_experts(module, states, chosen, weights)
        assert (found - wanted).abs().max() < 1e-5 * scale
        other = _all_experts(module, states, (chosen + 1) % module.num_experts, weights)
        assert (other - wanted).abs().max() > 1e-2 * scale
    run_all_experts(model)
    assert model.config.get_text_config()._experts_implementation == "headprune_all"


@pytest.mark.parametrize("case", ["llama-gqa", "bert"])
def test_a_model_without_experts_stays_as_it_is(case):
    model = tiny.model(case)
    before = model.config._experts_implementation
    run_all_experts(model)
    assert model.config._experts_implementation == before
