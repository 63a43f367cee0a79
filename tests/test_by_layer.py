"""Healing layer by layer: nearer to the original, never further, the same in any memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headprune
from headprune.errors import HeadpruneError, Interrupted
from headprune.model.attention import attention_of
from headprune.placements import Placement, placing
from headprune.training.divergence import variance_error
from tests import tiny


def cut(case: str, folder: Path) -> Path:
    """A tiny model, and the same without some heads of its second layer and all of its third."""
    built = tiny.model(case)
    tiny.save(built, folder / "model")
    (folder / "text.txt").write_text(tiny.text(3000))
    second, third = (a.path for a in attention_of(built)[1:3])
    (folder / "plan.json").write_text(json.dumps({second: [0, 1], third: list(range(6))}))
    headprune.prune(folder / "model", plan=folder / "plan.json", output=folder / "cut")
    return folder


@pytest.fixture(
    scope="module", params=["llama-gqa", "bert-base", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut("llama-gqa", tmp_path_factory.mktemp("llama"))


def heal(folder: Path, output: Path, **options: Any) -> Any:
    usual = {"steps": 12, "seq_len": 16, "learning_rate": 3e-3, "by_layer": True}
    given = {"teacher": folder / "model", "data": folder / "text.txt", **usual, **options}
    return headprune.heal(folder / "cut", **given, output=output)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_layer_in_memory_is_healed_as_in_the_whole_model(folder: Path, tmp_path: Path) -> None:
    written = {}
    for placement in ("whole", "layers"):
        healed = heal(folder, tmp_path / placement, placement=placement)
        assert healed.after < 0.8 * healed.before
        record = healed.pruned.manifest.done
        errors = [(layer.before, layer.after) for layer in record.layers.values()]
        assert errors[0] == (0, 0), "the first layer is that of the original"
        assert all(after < before for before, after in errors[1:])
        assert (record.steps, record.taken_after) == (36, 36)
        assert len((tmp_path / placement / "heal.jsonl").read_text().splitlines()) == 36
        assert not (tmp_path / f"{placement}-checkpoints").exists()
        written[placement] = weights(tmp_path / placement)
    assert same(written["whole"], written["layers"])
    before = weights(folder / "cut")
    moved = {name for name in before if not torch.equal(before[name], written["layers"][name])}
    assert moved
    # neither what is in no layer, such as embeddings that are also the head, nor the first one
    assert all(any(f".{number}." in name for number in (1, 2, 3)) for name in moved)
    next(iter(written["layers"].values())).view(torch.int32).view(-1)[0] += 1
    assert not same(written["whole"], written["layers"])


def test_what_is_stopped_or_damaged_goes_on_to_the_same_result(llama: Path, tmp_path: Path) -> None:
    unbroken = heal(llama, tmp_path / "unbroken")

    def stop(done: int, *_: Any) -> None:
        if done == 30:  # of 36: in the last layer
            signal.raise_signal(signal.SIGINT)

    broken = tmp_path / "broken"
    context = headprune.Context(step=stop)
    with pytest.raises(Interrupted, match="Stopped in layer 4 of 4.* by_layer .* resume$"):
        heal(llama, broken, context=context)
    assert not broken.exists()
    kept = tmp_path / "broken-checkpoints" / "checkpoints"
    assert {path.name for path in kept.iterdir()} == {f"checkpoint-{n}" for n in (1, 2, 3)}
    (kept / "checkpoint-3" / "state.safetensors").write_bytes(b"damaged")
    stages: list[str] = []
    steps: list[int] = []
    context = headprune.Context(stage=stages.append, step=lambda done, *_: steps.append(done))
    with pytest.raises(HeadpruneError, match=r"other settings \(heal.seed"):
        heal(llama, broken, resume=True, seed=1)
    resumed = heal(llama, broken, resume=True, context=context, placement="layers")
    assert "checkpoint-3 is damaged: healing layer 3 again" in stages
    assert steps[:24] == list(range(13, 37))  # then come tensors that are written
    assert same(weights(tmp_path / "unbroken"), weights(broken))
    assert resumed.pruned.manifest.done == unbroken.pruned.manifest.done
    histories = [(tmp_path / name / "heal.jsonl").read_text() for name in ("unbroken", "broken")]
    assert histories[0] == histories[1]
    other = weights(broken)
    other["model.layers.3.mlp.up_proj.weight"][0, 0] += 1
    assert not same(weights(tmp_path / "unbroken"), other)


def test_what_brings_it_no_nearer_is_not_taken(llama: Path, tmp_path: Path) -> None:
    healed = heal(llama, tmp_path / "healed", steps=2, learning_rate=50.0)
    assert (healed.taken_after, healed.after) == (0, healed.before)
    assert all(one.after == one.before for one in healed.pruned.manifest.done.layers.values())
    assert same(weights(tmp_path / "healed"), weights(llama / "cut"))
    assert "no nearer" in healed.pruned.warnings[-1]


def test_in_a_run_by_layers_all_layers_at_once_are_held_whole(llama: Path, tmp_path: Path) -> None:
    with placing(Placement.LAYERS):
        heal(llama, tmp_path / "inherited", by_layer=False, steps=2)
    with pytest.raises(HeadpruneError, match="layers: training holds the whole model"):
        heal(llama, tmp_path / "asked", by_layer=False, steps=2, placement="layers")


def test_attention_alone(tmp_path: Path) -> None:
    healed = heal(cut("mistral", tmp_path), tmp_path / "healed", train="attention", steps=4)
    before, after = weights(tmp_path / "cut"), weights(tmp_path / "healed")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("self_attn" in name for name in moved)
    # the layer without heads has nothing to train
    paths = [f"model.layers.{number}" for number in (0, 1, 3)]
    assert list(healed.pruned.manifest.done.layers) == paths


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": "lora"}, "leave out train lora"),
        ({"gradient_checkpointing": True}, "leave out gradient_checkpointing"),
        ({"save_every": 1}, "leave out save_every"),
        ({"shard": True}, "in one process"),
        ({"by_layer": False, "placement": "layers"}, "but for by_layer"),
    ],
)
def test_what_does_not_go_together(
    llama: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(HeadpruneError, match=said):
        heal(llama, tmp_path / "healed", **options)
    assert not list(tmp_path.iterdir())


def test_several_stacks_are_refused(tmp_path: Path) -> None:
    tiny.save(tiny.model("t5"), tmp_path / "model")
    tiny.save(tiny.model("t5"), tmp_path / "cut")
    pairs = "".join(f"{tiny.text(9, n)}\t{tiny.text(9, n)}\n" for n in range(40))
    (tmp_path / "text.tsv").write_text(f"a\tb\n{pairs}")
    with pytest.raises(HeadpruneError, match="a single stack of layers.*Leave out by_layer"):
        heal(tmp_path, tmp_path / "out", data=tmp_path / "text.tsv", text_column="a,b")
    assert not (tmp_path / "out").exists()


def test_the_error_is_relative_to_the_variance_of_every_channel() -> None:
    torch.manual_seed(0)
    target, states, mask = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.tensor([[1, 1, 0]] * 2)
    variance = torch.tensor([1.0, 2.0, 100.0, 0.5])
    by_hand = [
        float((states[i, j, k] - target[i, j, k]) ** 2 / variance[k])
        for i in range(2)
        for j in range(2)
        for k in range(4)
    ]
    wanted = pytest.approx(sum(by_hand) / 16)
    assert float(variance_error(states, target, mask, variance)) == wanted
    assert float(variance_error(states, target, torch.ones_like(mask), variance)) != wanted
