"""One layer at a time gives what the whole model gives, number by number."""

import gc
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from transformers import PreTrainedModel

import headprune
from headprune import placements
from headprune.compression.compress import Compressed
from headprune.errors import CheckpointError, HeadpruneError
from headprune.io import hub
from headprune.model import stored
from headprune.model.attention import attention_of
from headprune.model.heads import read_output, write_output
from headprune.model.open import open_model
from headprune.model.probes import probe, probe_inputs
from headprune.model.residency import residency_of
from headprune.model.stored import fetch_weights
from headprune.placements import Placement, placing
from headprune.proof import equivalence
from headprune.proof.equivalence import difference
from tests import tiny
from tests.test_verify import old_folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A tiny Llama in several files, in bfloat16."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny.save(tiny.model("llama-gqa"), folder)
    net = headprune.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    net.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    (folder / "text.txt").write_text(tiny.text(4000))
    return folder


def _weights(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("criterion", ["compensated", "fisher", "wanda"])
def test_scores(sharded, tmp_path, criterion):
    found = {}
    for placement in ("whole", "layers"):
        scores = headprune.score(
            sharded,
            data=sharded / "text.txt",
            criterion=(criterion,),
            output=tmp_path / placement,
            calibration_tokens=600,
            seq_len=32,
            placement=placement,
        )
        found[placement] = scores.scores[criterion]
    assert torch.equal(found["whole"], found["layers"])
    assert not torch.equal(found["whole"], found["layers"].roll(1))


@pytest.mark.parametrize("made", ["converted", "refitted"])
def test_half_precision_is_proven_without_a_whole_copy(made, sharded, tmp_path, monkeypatch):
    """Its proofs, which are in float32, hold no more than the checkpoint takes."""
    right, seen = equivalence.expect, list[tuple[torch.dtype, int]]()
    others = [each for each in gc.get_objects() if isinstance(each, PreTrainedModel)]

    def expect(net, *given, **how):
        gc.collect()
        nets = [each for each in gc.get_objects() if isinstance(each, type(net))]
        nets = [each for each in nets if not any(each is other for other in others)]
        weights = {id(p): p for each in nets for p in each.parameters() if not p.is_meta}
        seen.append((net.dtype, sum(p.nbytes for p in weights.values())))
        return right(net, *given, **how)

    monkeypatch.setattr(equivalence, "expect", expect)
    how = {"seq_len": 32, "calibration_tokens": 600, "dtype": "bfloat16"}
    text = sharded / "text.txt"
    if made == "converted":
        result = headprune.convert_gqa(sharded, tmp_path, kv_heads=1, calibrate=text, **how).pruned
    else:
        plan = {"model.layers.0.self_attn": [0, 1]}
        result = headprune.prune(sharded, tmp_path, plan=plan, refit=text, **how)
    assert result.manifest.proof is not None and result.manifest.proof.passed
    parameters = headprune.from_pretrained(sharded, weights=False).num_parameters()
    assert len(seen) > 1 and {dtype for dtype, _ in seen} == {torch.float32}
    assert max(nbytes for _, nbytes in seen) < 2.6 * parameters


@pytest.mark.parametrize("judged", [True, False])
def test_refit(sharded, tmp_path, judged):
    plan = {"model.layers.0.self_attn": [0, 1], "model.layers.2.self_attn": [2, 3]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    written, records = {}, []
    for placement in ("whole", "layers"):
        done = headprune.prune(
            sharded,
            plan=tmp_path / "plan.json",
            refit=sharded / "text.txt",
            output=tmp_path / placement,
            # of all of the text, none is left to judge the refit by
            calibration_tokens=600 if judged else 100_000,
            seq_len=32,
            placement=placement,
        )
        written[placement] = _weights(tmp_path / placement)
        records.append((done.manifest.refit, done.manifest.done))
    assert records[0] == records[1]
    assert _same(written["whole"], written["layers"])
    if not judged:
        name = "model.layers.1.self_attn.o_proj.weight"
        assert not torch.equal(written["layers"][name], _weights(sharded)[name])
    written["layers"][next(iter(written["layers"]))].view(torch.int16)[0, 0] += 1
    assert not _same(written["whole"], written["layers"])


@pytest.mark.parametrize(
    ("merge", "calibrated"), [("lowrank", True), ("mean", False), ("procrustes", False)]
)
def test_merges(sharded, tmp_path, merge, calibrated):
    text = {"calibrate": sharded / "text.txt", "calibration_tokens": 600, "seq_len": 32}
    written = {}
    for placement in ("whole", "layers"):
        headprune.convert_gqa(
            sharded,
            kv_heads=1,
            merge=merge,
            **(text if calibrated else {}),
            output=tmp_path / placement,
            placement=placement,
        )
        written[placement] = _weights(tmp_path / placement)
    assert _same(written["whole"], written["layers"])
    written["layers"]["model.layers.1.self_attn.k_proj.weight"].view(torch.int16)[0, 0] += 1
    assert not _same(written["whole"], written["layers"])


def test_a_kv_budget(sharded, tmp_path):
    written = {}
    for placement in ("whole", "layers"):
        headprune.convert_gqa(
            sharded,
            kv_budget=0.5,
            calibrate=sharded / "text.txt",
            calibration_tokens=600,
            seq_len=32,
            output=tmp_path / placement,
            placement=placement,
        )
        written[placement] = _weights(tmp_path / placement)
    assert _same(written["whole"], written["layers"])
    written["layers"]["model.layers.1.self_attn.q_proj.weight"].view(torch.int16)[0, 0] += 1
    assert not _same(written["whole"], written["layers"])


def test_an_evaluation_and_a_proof(sharded, tmp_path):
    data = sharded / "text.txt"
    some = {"calibration_tokens": 600, "seq_len": 32}
    scores = tmp_path / "scores"
    headprune.score(sharded, data=data, criterion=("reconstruction",), output=scores, **some)
    quality, verified = {}, {}
    for placement in ("whole", "layers"):
        report = headprune.evaluate(
            sharded, data=data, seq_len=32, max_windows=4, speed=False, placement=placement
        )
        quality[placement] = [metric.value for metric in report.model.metrics]
    assert quality["whole"] == quality["layers"]
    out = tmp_path / "out"
    headprune.prune(
        sharded,
        plan=headprune.prune(sharded, dry_run=True, scores=scores, keep=0.5).plan,
        output=out,
    )
    for placement in ("whole", "layers"):
        verified[placement] = headprune.verify(out, against=sharded, placement=placement)
        assert verified[placement].passed
    whole, layers = (len(verified[p].checks) for p in ("whole", "layers"))
    assert (whole, layers) == (5, 4)  # transformers alone loads nothing layer by layer
    first = next(out.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-64] + b"\x3f" * 64)
    assert not headprune.verify(out, against=sharded, placement="layers").passed


def test_what_is_written_stays_and_what_was_there_comes_back(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with placing(Placement.LAYERS):
        net = open_model(sharded).net
    residency = residency_of(net)
    assert residency is not None
    attention = attention_of(net)[1]
    heads, _ = read_output(attention)
    write_output(attention, heads + 1, None)
    write_output(attention, heads + 2, None)
    assert torch.equal(read_output(attention)[0], heads + 2)
    assert list(residency.written()) == ["model.layers.1.self_attn.o_proj.weight"]
    file = next(iter(residency.written().values())).file
    assert file.exists() and not [*tmp_path.iterdir()]  # without a name, a kill leaves nothing
    assert all(weight.is_meta for weight in attention.module.parameters())
    residency._reader.shutdown()  # it may be reading ahead
    del residency, net, attention
    gc.collect()
    assert not file.exists()


def test_a_shard_that_vanishes(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "model")
    with placing(Placement.LAYERS):
        net = open_model(folder).net
    for file in folder.glob("*.safetensors"):
        file.unlink()
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(CheckpointError, match="is damaged: .*Get it again"):
        net(input_ids=ids)


def test_no_room_for_weights_that_change(sharded, monkeypatch):
    with placing(Placement.LAYERS):
        net = open_model(sharded).net
    attention = attention_of(net)[0]
    heads, _ = read_output(attention)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device. Set TMPDIR to a folder"):
        write_output(attention, heads + 1, None)


@pytest.mark.parametrize("case", ["gpt2", "t5", "bert-mlm", "opt", "phi3", "bart", "bloom"])
def test_families(case, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    whole = open_model(folder).net
    with placing(Placement.LAYERS):
        net = open_model(folder).net
    inputs = probe_inputs(whole)
    wanted = probe(whole, inputs)
    assert difference(wanted, probe(net, inputs)) < 1e-6  # single tokens: by their alignment
    with torch.no_grad():
        assert torch.equal(whole(**inputs)[0], net(**inputs)[0])
    residency = residency_of(net)
    for name, weight in residency.blocks[0].named_parameters():
        if weight.dim() == 2:
            with residency.holding(0), torch.no_grad():
                residency.blocks[0].get_parameter(name).mul_(1.5)
            break
    assert difference(wanted, probe(net, inputs)) > 1e-6


def test_a_model_whose_layers_are_not_known_is_refused(tmp_path):
    folder = tiny.save(tiny.model("deberta-v2"), tmp_path / "model")
    wanted = (
        "placement=layers: .* does not say which of its modules are layers. Use --config placement"
    )
    with placing(Placement.LAYERS), pytest.raises(CheckpointError, match=wanted):
        _ = open_model(folder).net


def test_auto_goes_by_what_is_free(sharded, monkeypatch):
    said = []
    for free in (10_000, 10**12):
        monkeypatch.setattr(placements, "available", lambda free=free: free)
        with placing(Placement.AUTO, said.append):
            net = open_model(sharded).net
        assert (residency_of(net) is not None) == (free == 10_000)
    assert said == ["placement: layers (0.0 GB of weights, and 0.0 GB are free on cpu)"]


def test_a_block_that_changes_while_others_run(sharded):
    """What was read ahead of the change is not what it is filled with."""
    with placing(Placement.LAYERS):
        net = open_model(sharded).net
    residency, attention = residency_of(net), attention_of(net)[3]
    with residency.holding(3):
        heads, _ = read_output(attention)
        write_output(attention, heads + 1, None)
        for number in (1, 2):  # after the second, the third is read ahead
            with residency.holding(number):
                pass
    assert torch.equal(read_output(attention)[0], heads + 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_there_while_it_runs(tied, tmp_path):
    model = tiny.model("llama-gqa")
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    ids = {"input_ids": torch.randint(5, 60, (2, 16))}
    wanted = model(**ids, labels=ids["input_ids"])
    wanted.loss.backward()
    with placing(Placement.LAYERS):
        net = open_model(tiny.save(model, tmp_path / "model")).net
    head, first = net.get_output_embeddings(), net.get_input_embeddings()
    assert head.weight.is_meta is not tied and not first.weight.is_meta
    states = net.base_model(**ids)
    assert head.weight.is_meta is not tied
    scale = torch.ones(states[0].shape[-1], requires_grad=True)
    net.base_model.norm.register_forward_hook(lambda m, args, out: out * scale)
    found = net(**ids, labels=ids["input_ids"])
    assert head.weight.is_meta is not tied
    assert torch.equal(found.logits, wanted.logits)
    found.loss.backward()
    assert scale.grad is not None and scale.grad.abs().sum() > 0
    norm = model.base_model.norm.weight
    torch.testing.assert_close((scale.grad / norm), norm.grad, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(scale.grad.roll(1) / norm, norm.grad, rtol=1e-2, atol=1e-4)


def test_roles(sharded, tmp_path):
    found = [
        headprune.roles(
            sharded,
            data=sharded / "text.txt",
            output=tmp_path / placement,
            sequences=4,
            seq_len=32,
            placement=placement,
        )
        for placement in ("whole", "layers")
    ]
    whole, layers = (roles.modules for roles in found)
    assert whole == layers and whole != whole[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.5, 0.75])
def test_compress(sharded, tmp_path, keep):
    written, choices = {}, []
    for placement in ("whole", "layers"):
        out = tmp_path / placement
        result = headprune.compress(
            sharded,
            out,
            data=[sharded / "text.txt"],
            keep=keep,
            seq_len=16,
            calibration_tokens=256,
            held_out_tokens=128,
            placement=placement,
        )
        assert isinstance(result, Compressed)
        written[placement] = _weights(out)
        choices.append(
            [(one.name, one.held_out, one.held_out_words) for one in result.choice.contenders]
        )
    assert choices[0] == choices[1] and len(choices[0]) == 5
    whole, layers = written.values()
    assert _same(whole, layers)
    next(iter(layers.values())).view(torch.int16).view(-1)[0] += 1
    assert not _same(whole, layers)


def test_check(sharded):
    given = {"data": (str(sharded / "text.txt"),), "seq_len": 16, "max_windows": 8}
    given["against"] = str(sharded)
    found = {
        placement: headprune.check(
            sharded, limits=("perplexity <= 400",), placement=placement, **given
        ).metrics
        for placement in ("whole", "layers")
    }
    assert found["whole"] == found["layers"]
    one, *others = found["layers"]
    assert found["whole"] != (one.model_copy(update={"value": one.value + 1e-9}), *others)
    with pytest.raises(HeadpruneError, match="placement=whole, or leave this limit out"):
        headprune.check(
            sharded, limits=("decode_tokens_per_s >= 95 %",), placement="layers", **given
        )


def test_migrate(tmp_path):
    old = old_folder(tiny.model("bert-mlm"), tmp_path / "old", {0: [1, 4], 2: [0, 1, 2]})
    for placement in ("whole", "layers"):
        done = headprune.migrate(old, tmp_path / placement, placement=placement)
        assert done.manifest.proof is not None
    whole, layers = (_weights(tmp_path / placement) for placement in ("whole", "layers"))
    assert _same(whole, layers)
    next(iter(layers.values())).view(torch.int32).view(-1)[0] += 1
    assert not _same(whole, layers)


def test_weights_of_the_hub_are_fetched_first(sharded, monkeypatch):
    fetched = []

    def download(model, file, **_):
        fetched.append(file)
        if not (sharded / file).is_file():
            raise EntryNotFoundError("404")
        return str(sharded / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "why_not", lambda: None)
    fetch_weights("someone/model")
    index = ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert fetched == [*index, *sorted(file.name for file in sharded.glob("*.safetensors"))]
    fetched.clear()
    fetch_weights(sharded)
    with monkeypatch.context() as cached:
        there = {path.name: str(path) for path in sharded.iterdir()}
        last = there.pop(max(name for name in there if name.endswith(".safetensors")))
        cached.setattr(stored, "try_to_load_from_cache", lambda model, file, *_: there.get(file))
        fetch_weights("someone/model")
    assert fetched == ["model.safetensors", Path(last).name]  # the cache has all others
    fetched.clear()
    monkeypatch.setattr(hub, "why_not", lambda: "no network")
    fetch_weights("someone/model")
    assert not fetched
