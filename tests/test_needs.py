"""What a step needs where it runs, and what is said where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from headprune import devices, placements
from headprune.declaration import COMMANDS
from headprune.estimates import Estimate, Sizes
from headprune.placements import Placement, asked_placement, placing, too_large
from headprune.recipes.needs import Needs, needs_of
from tests import tiny
from tests.test_cli import run

GB = 10**9
STEP = Estimate(1.0, 30 * GB, 0, weights_bytes=20 * GB, layers_bytes=6 * GB)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of a command, on a machine with one GPU, as far as choosing goes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with devices.running_on(request.param):
        yield str(devices.chosen())


def needs(
    monkeypatch: pytest.MonkeyPatch, host: int, gpu: int, asked: str = "auto", places: bool = True
) -> Needs:
    monkeypatch.setattr(placements, "available", lambda: host * GB)
    monkeypatch.setattr(placements, "on_device", lambda device: gpu * GB)
    with placing(Placement(asked)):
        return needs_of(STEP, places)


def test_memory_is_told_by_where_a_step_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = needs(monkeypatch, 100, 100)
    assert (found.device, found.placement, found.short) == (device, Placement.WHOLE, "")
    taken = (30 * GB, None) if device == "cpu" else (20 * GB, 30 * GB)
    assert (found.host_bytes, found.device_bytes) == taken
    found = needs(monkeypatch, 100, 100, "layers")
    assert found.placement is Placement.LAYERS
    assert (found.host_bytes, found.device_bytes) == (
        (6 * GB, None) if device == "cpu" else (6 * GB, 6 * GB)
    )
    assert needs(monkeypatch, 100, 100, "layers", places=False).placement is Placement.WHOLE


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("host", "gpu", "asked", "places", "placement", "said"),
    [
        (100, 100, "auto", True, "whole", ""),
        (100, 24, "auto", True, "layers", ""),  # 20 GB and a quarter do not fit
        (24, 100, "auto", True, "layers", ""),  # they are read on the host first
        (100, 26, "auto", True, "whole", "30.0 GB of memory on cuda:0, where 26.0 GB are free. "
         "It fits with --placement layers (6.0 GB)."),
        (100, 26, "whole", True, "whole", "It fits with --placement layers (6.0 GB)."),
        (100, 26, "whole", False, "whole", "It fits with --device cpu (30.0 GB)."),
        (100, 5, "auto", True, "layers", "It fits with --device cpu --placement whole (30.0 GB)."),
        (8, 5, "whole", True, "whole", "It fits with --device cpu --placement layers (6.0 GB)."),
        (8, 5, "whole", False, "whole", "No placement fits here"),
        (5, 5, "layers", True, "layers", "No placement fits here"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_what_would(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    host: int,
    gpu: int,
    asked: str,
    places: bool,
    placement: str,
    said: str,
) -> None:
    found = needs(monkeypatch, host, gpu, asked, places)
    assert found.placement.value == placement
    assert bool(found.short) == bool(said)
    assert said in found.short


def test_a_dry_run_says_it_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(500))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {tmp_path}/model\noutput: {tmp_path}/out\n"
        f"data: {{train: {{source: {tmp_path}/text.txt}}}}\n"
        "steps:\n  train-gates: {target_heads: 0.5, unit: kv-group, steps: 2}\n  prune: {}\n"
    )
    monkeypatch.setattr(placements, "available", lambda: 1_000)
    code, text, err = run(capsys, "run", job, "--dry-run", "--device", "cpu")
    assert code == 0, err
    told = " ".join(err.split())
    assert "Step 'train-gates' takes about" in told and "No placement fits here" in told
    assert "cpu, layers" in text  # prune, which auto would run so
    monkeypatch.setattr(placements, "available", lambda: 10**12)
    code, text, err = run(capsys, "run", job, "--dry-run", "--device", "cpu")
    assert (code, "takes about" in err, "layers" in text) == (0, False, False), err


def test_the_placement_of_a_recipe_is_that_of_its_steps() -> None:
    assert "placement" in COMMANDS["run"].options.model_fields
    for asked in (Placement.LAYERS, Placement.WHOLE):
        with placing(asked), placing(Placement.AUTO):
            assert asked_placement() is asked
    with placing(Placement.AUTO), placing(Placement.LAYERS):
        assert asked_placement() is Placement.LAYERS


def test_layers_take_three_of_them_and_the_embeddings() -> None:
    sizes = Sizes(1_000, 100, 10, 10, 25, True, 4, 1e9)
    assert sizes.by_layers(4_000) == 4 * (500 + 3 * 50)
    few = Sizes(1_000, 100, 2, 10, 25, True, 4, 1e9)
    assert few.by_layers(4_000) == 4_000


def test_the_fuller_place_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with devices.running_on("cpu"):
        monkeypatch.setattr(placements, "available", lambda: 100)
        assert too_large(80) is None
        assert too_large(81) == "cpu"
        monkeypatch.setattr(placements, "available", lambda: None)
        assert too_large(10**15) is None
