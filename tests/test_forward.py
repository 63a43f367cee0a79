"""A model is run without keeping keys and values, whatever its config says."""

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin

from headprune.model.passes import run_model
from headprune.model.probes import probe_inputs
from tests import tiny
from tests.marks import slow_unless

PER_ROW = tiny.one_per_row(tiny.FAMILY_CASES)


def kept(monkeypatch):
    """Notes the keys that are kept from now on."""
    found = []

    def spied(cls):
        update = cls.update

        def noted(self, key_states, *args, **kwargs):
            found.append(key_states.shape)
            return update(self, key_states, *args, **kwargs)

        monkeypatch.setattr(cls, "update", noted)

    for cls in {*_all_below(CacheLayerMixin)}:
        if "update" in vars(cls):
            spied(cls)
    return found


def _all_below(cls):
    for below in cls.__subclasses__():
        yield below
        yield from _all_below(below)


@torch.no_grad()
@pytest.mark.parametrize("case", slow_unless(PER_ROW.__contains__, tiny.FAMILY_CASES))
def test_no_keys_are_kept(case, monkeypatch):
    model = tiny.model(case)
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(config, "use_cache", None) for config in configs]
    found = kept(monkeypatch)
    assert run_model(model, probe_inputs(model))[0].isfinite().all()
    assert not found
    if any(before) and model.can_generate():
        model(**probe_inputs(model))
        assert found
    assert [getattr(config, "use_cache", None) for config in configs] == before


@torch.no_grad()
def test_the_config_is_as_before_after_an_error():
    model = tiny.model("llama-gqa")
    with pytest.raises(RuntimeError):
        run_model(model, {"input_ids": torch.zeros(1, 2, 3, 4).long()})
    assert model.config.use_cache
