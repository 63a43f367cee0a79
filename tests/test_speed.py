"""Timing: the passes that count, the moves between devices, and peak memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headprune.config import DataConfig, EvaluateConfig
from headprune.evaluation import speed
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.speed import measure
from headprune.model import placement
from headprune.model.placement import alone_on_device, together_on_device
from headprune.render.models import evaluated
from tests import tiny

CUDA = torch.device("cuda")


def test_a_model_that_was_moved_passes_untimed_first(monkeypatch):
    """The pass after a move allocates memory, which is no part of the speed."""
    net, passes = tiny.model("llama-gqa"), [0.0]

    def timed(*arguments):
        passes.append(passes[-1] + 1.0)
        return passes[-1], passes[-1]

    monkeypatch.setattr(speed, "_times", timed)
    (one,) = measure([net], repeats=2)
    assert one.prefills_s == (2.0, 3.0)  # the first round warms up
    monkeypatch.setattr(speed, "devices", SimpleNamespace(chosen=lambda: CUDA))
    passes[:] = [0.0]
    (one,) = measure([net], repeats=2)
    assert one.prefills_s == (4.0, 6.0)


@pytest.mark.parametrize(("memory", "moves"), [(10**9, 2), (10, 6)])
def test_models_stay_on_a_gpu_that_holds_them(memory, moves, monkeypatch):
    nets, moved, emptied = [tiny.model("llama-gqa"), tiny.model("llama-mha")], [], []
    for net in nets:
        at = SimpleNamespace(device=torch.device("cpu"))

        def to(device, at=at, net=net):
            moved.extend([device.type] * (device != at.device))
            at.device = device
            return net

        monkeypatch.setattr(net, "to", to)
        monkeypatch.setattr(net, "parameters", lambda at=at: iter([at]))
        monkeypatch.setattr(net, "get_memory_footprint", lambda: 100)
    gpu = SimpleNamespace(chosen=lambda: CUDA, announce=lambda: None)
    monkeypatch.setattr(placement, "devices", gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, memory))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with together_on_device(nets):
        for net in nets * 3:
            with alone_on_device(net):
                pass
    assert moved.count("cuda") == moved.count("cpu") == len(emptied) == moves


def test_peak_memory_is_said_where_it_is_of_one_model(text_file, llama_folder):
    data, config = DataConfig(source=str(text_file)), EvaluateConfig(seq_len=16, resamples=200)
    report = evaluate(llama_folder, data, config, against=llama_folder)
    found = [(side, side.speed) for side in (report.model, report.against) if side is not None]
    assert [timed and timed.peak_memory_bytes for _, timed in found] == [None, None]
    assert "peak memory" not in repr(evaluated(report))
    on_gpu = [
        side.model_copy(update={"speed": timed and replace(timed, peak_memory_bytes=n * 2**30)})
        for n, (side, timed) in enumerate(found, start=1)
    ]
    sides = dict(zip(("model", "against"), on_gpu, strict=True))
    shown = repr(evaluated(report.model_copy(update=sides)))
    assert "('peak memory', '1.00 GiB', '2.00 GiB', '0.500 x')" in shown
