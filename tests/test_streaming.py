"""Cutting shard by shard: the same result as in memory, proven, and whole or not at all."""

import errno
import json
import os
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import headprune
from headprune import memory
from headprune.config import Dtype, LayoutOption, ProofOption, Writing
from headprune.context import Context
from headprune.errors import CheckpointError, PlanError, ProofError
from headprune.io import shards
from headprune.io.shards import Piece, write_shards
from headprune.model.attention import attention_of, identity
from headprune.model.inspection import inspect
from headprune.model.loading import uneven_heads_are_known
from headprune.model.open import Model, open_model
from headprune.model.skeleton import Unmapped
from headprune.model.stored import stored_tensors
from headprune.planning.choose import CutRequest
from headprune.result import write as streamed
from headprune.result.preview import Preview, preview
from headprune.result.prune import migrate, prune
from headprune.result.verify import verify
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import cut_heads, fold_gates, resolve
from headprune.surgery.streamed import cut_pieces
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import uneven_plan
from tests.damage import edit, flip
from tests.marks import slow_unless
from tests.test_cli import refuses, run

# their projections are fused on disk and split when they are loaded
FUSED = tiny.present("gte", "jina_embeddings_v3", "nomic_bert")
CASES = sorted({*tiny.FAMILY_CASES, *tiny.CASES} - set(FUSED))
SHARD = "40KB"
SHARDS = Writing(max_shard_size=SHARD)
TENSORS, OUTPUTS = (Writing(proof=each) for each in (ProofOption.TENSORS, ProofOption.OUTPUTS))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 1_000)  # several to a tensor


def saved(case, folder, dtype=torch.bfloat16):
    tiny.model(case).to(dtype).save_pretrained(folder, max_shard_size=SHARD)
    return folder


def opened(model, plan, **how):
    """A model, the cuts of a plan, and the types that it is stored in."""
    weights, opened = (
        how.pop("weights", True),
        open_model(model, how.pop("dtype", Dtype.AUTO), **how),
    )
    net = opened.net if weights else opened.skeleton
    return net, resolve(plan(net), net, ragged=True), opened.result_dtypes()


def in_memory(model, plan, out, **how):
    net, cuts, stored = opened(model, plan, **how)
    cuts = fold_gates(cuts)
    stored.round(net)
    cut_heads(net, cuts)
    with uneven_heads_are_known():
        stored.save(net, out, model)
        config = (out / "config.json").read_bytes()
        net.save_pretrained(out)  # with the weights
    (out / "config.json").write_bytes(config)
    return out


def on_disk(model, plan, out, **how):
    net, cuts, stored = opened(model, plan, weights=False, **how)
    assert net.device.type == "meta"
    pieces, _ = cut_pieces(net, cuts, stored, stored_tensors(model))
    out.mkdir()
    with uneven_heads_are_known():
        stored.save(net, out, model)
    write_shards(pieces, out, net.num_parameters(), SHARD)
    return out


def weights(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def differing(folder, other):
    """Tensors and other files that are not the same in two folders."""
    one, two = weights(folder), weights(other)
    found = [n for n in {*one, *two} if n not in one or n not in two or not same(one[n], two[n])]
    for name in {file.name for place in (folder, other) for file in place.iterdir()}:
        if "safetensors" not in name:
            files = [place / name for place in (folder, other)]
            equal = all(f.is_file() for f in files) and len({f.read_bytes() for f in files}) == 1
            found += [] if equal else [name]
    return sorted(found)


def same(one, two):
    return one.dtype == two.dtype and torch.equal(one, two)


def first_gone(net):
    """Other heads in every layer, none in the first, where there are several."""
    return uneven_plan(net, *([0] if len(attention_of(net)) > 1 else []))


def even_plan(net, scaled=False):
    """One KV head less in every module that has several, another in each."""
    parts = {}
    for layer, a in enumerate(attention_of(net)):
        group, gone = a.query_heads // max(a.kv_heads, 1), layer % max(a.kv_heads, 1)
        positions = [p for p in range(a.query_heads) if a.kv_heads == 1 or p // group != gone]
        keep = tuple(sorted(a.query_ids[p] for p in positions))
        scale = tuple(1 - 0.05 * i for i in keep) if scaled else None
        parts[a.path] = AttentionPlan(
            query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep, scale=scale
        )
    return Plan(unit=Unit.HEAD, attentions=parts)


def scaled_plan(net):
    return even_plan(net, scaled=True)


def ragged_plan(net):
    parts = {}
    for layer, a in enumerate(attention_of(net)):
        keep = tuple(i for i in a.query_ids if i != layer % len(a.query_ids))
        scale = tuple(1 - 0.05 * i for i in keep)
        parts[a.path] = AttentionPlan(
            query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep, scale=scale
        )
    return Plan(unit=Unit.HEAD, attentions=parts)


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_layout(CASES).__contains__, CASES))
def test_on_disk_is_in_memory(case, tmp_path):
    model = saved(case, tmp_path / "model")
    whole = in_memory(model, first_gone, tmp_path / "whole")
    assert differing(whole, on_disk(model, first_gone, tmp_path / "streamed")) == []
    # with another head in one tensor it would not be
    net, cuts, stored = opened(model, first_gone, weights=False)
    pieces, _ = cut_pieces(net, cuts, stored, stored_tensors(model))
    piece, kept = [(p, p.kept) for p in pieces if p.kept and 0 not in p.shape][-1]
    wrong = replace(piece, kept=replace(kept, indices=kept.indices.roll(1)))
    assert same(numbers(piece), weights(whole)[piece.name])
    assert not same(numbers(wrong), weights(whole)[piece.name])


def numbers(piece):
    return torch.cat([block.clone() for block in piece.blocks()])


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_layout(CASES).__contains__, CASES))
def test_even_cuts_and_cuts_of_cuts_are_the_same_as_well(case, tmp_path):
    model = saved(case, tmp_path / "model", torch.float32)
    whole = in_memory(model, even_plan, tmp_path / "whole")
    assert differing(whole, on_disk(model, even_plan, tmp_path / "streamed")) == []
    again = in_memory(whole, scaled_plan, tmp_path / "again")
    assert differing(again, on_disk(whole, scaled_plan, tmp_path / "streamed again")) == []


@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.FLOAT16, Dtype.BFLOAT16])
@pytest.mark.parametrize("half", [torch.float32, torch.float16])
def test_what_it_is_computed_in_counts(dtype, half, tmp_path):
    model = saved("llama-gqa", tmp_path / "model", half)
    whole = in_memory(model, ragged_plan, tmp_path / "whole", dtype=dtype)
    found = differing(whole, on_disk(model, ragged_plan, tmp_path / "streamed", dtype=dtype))
    # in memory a model in half precision is scaled in it, where prune widens it first
    narrow = dtype is not Dtype.FLOAT64
    assert all("o_proj.weight" in name for name in found) if narrow else found == []


@pytest.mark.parametrize("case", FUSED)
def test_what_is_fused_on_disk_is_cut_in_memory(case, tmp_path):
    model = saved(case, tmp_path / "model")
    with pytest.raises(Unmapped, match="is made of several tensors of the checkpoint"):
        on_disk(model, first_gone, tmp_path / "streamed")
    plan = first_gone(headprune.from_pretrained(model))
    manifest = prune(model, tmp_path / "out", CutRequest(plan=plan), writing=SHARDS).manifest
    assert manifest.proof is not None
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    with pytest.raises(
        CheckpointError, match="--config proof=tensors: 'roberta|gte|nomic.*leave out"
    ):
        prune(model, tmp_path / "other", CutRequest(plan=plan), writing=TENSORS)
    assert not (tmp_path / "other").exists()


# Names on disk


def renamed(folder, change):
    """Gives the tensors of a checkpoint other names, in one file."""
    found = {name: tensor.clone() for name, tensor in change(weights(folder)).items()}
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def old_norms(found):
    """As TensorFlow called them."""
    new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name, old in new.items():
        found = {key.replace(name, old): tensor for key, tensor in found.items()}
    return found


def without_prefix(found):
    return {name.removeprefix("transformer."): tensor for name, tensor in found.items()}


def with_masks(found):
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(4)}
    return {**found, **masks}


def tied_twice(found):
    return {**found, "lm_head.weight": found["transformer.wte.weight"]}


def untied(found):
    return {**found, "lm_head.weight": 2 * found["transformer.wte.weight"]}


NAMES = {
    "old norms": ("bert-mlm", old_norms),
    "no prefix": ("gpt2", without_prefix),
    "masks": ("gpt2", with_masks),
    "tied twice": ("gpt2", tied_twice),
    "untied": ("gpt2", untied),
}


@pytest.mark.parametrize("names", NAMES)
def test_names_that_change_on_load(names, tmp_path):
    case, change = NAMES[names]
    before = set(weights(saved(case, tmp_path / "model")))
    model = renamed(tmp_path / "model", change)
    assert set(weights(model)) != before
    whole = in_memory(model, first_gone, tmp_path / "whole")
    assert differing(whole, on_disk(model, first_gone, tmp_path / "streamed")) == []


# Headers alone


@pytest.mark.parametrize(
    "case",
    slow_unless(
        {*FUSED, *tiny.one_per_layout(CASES)}.__contains__,
        [*FUSED, *sorted(tiny.one_per_row(CASES) | tiny.one_per_layout(CASES))],
    ),
)
def test_headers_say_who_a_model_is(case, tmp_path):
    model = saved(case, tmp_path / "model")
    whole = headprune.from_pretrained(model)
    bare = headprune.from_pretrained(model, weights=False)
    assert bare.device.type == "meta"
    assert identity(bare, model) == identity(whole, model)
    assert (bare.name_or_path, bare.config.to_dict()) == (str(model), whole.config.to_dict())
    sizes = ({n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (bare, whole))
    assert next(sizes) == next(sizes)


def test_headers_of_another_model_are_another_identity(tmp_path):
    model = saved("llama-gqa", tmp_path / "model")
    was = identity(headprune.from_pretrained(model, weights=False), model)

    def other(found):
        found["model.layers.3.self_attn.o_proj.weight"][0, 63 % 60] += 1
        return found

    renamed(model, other)
    assert identity(headprune.from_pretrained(model, weights=False), model) != was


def test_inspect_and_dry_runs_need_no_weights(tmp_path):
    model = saved("llama-gqa", tmp_path / "model")
    plan = first_gone(headprune.from_pretrained(model))
    wanted = inspect(model), preview(model, CutRequest(plan=plan))
    pruned = prune(model, tmp_path / "out", CutRequest(plan=plan)).manifest
    # a file as long as the header says, and nothing in it
    for file in model.glob("*.safetensors"):
        content, size = file.read_bytes(), file.stat().st_size
        header = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:header])
        os.truncate(file, size)
    bare = plan.model_copy(update={"model": None})
    found = preview(model, CutRequest(plan=bare))
    assert inspect(model) == wanted[0]
    assert found.parameters == wanted[1].parameters == pruned.parameters
    assert isinstance(found, Preview) and found.kv_heads == pruned.kv_heads


# What prune makes of it


@pytest.fixture
def model(tmp_path):
    return tiny.save(tiny.model("llama-gqa").bfloat16(), tmp_path / "model")


@pytest.fixture
def plan(model):
    return first_gone(headprune.from_pretrained(model))


def test_prune_streams_and_proves_outputs(model, plan, tmp_path, monkeypatch):
    alive, steps = list[weakref.ref[PreTrainedModel]](), list[tuple[int, int]]()
    real_load, real_write = Model.weighted, streamed.write_shards

    def watched(model):
        net = real_load(model)
        alive.append(weakref.ref(net))
        return net

    def checked(*args):
        assert [ref() for ref in alive[:1]] == [
            None
        ]  # the original is let go before the result comes
        real_write(*args)

    monkeypatch.setattr(Model, "weighted", watched)
    monkeypatch.setattr(streamed, "write_shards", checked)
    result = prune(
        model,
        tmp_path / "out",
        CutRequest(plan=plan),
        writing=SHARDS,
        context=Context(step=lambda *s: steps.append(s)),
    )
    assert alive
    proof = result.manifest.proof
    assert proof is not None and proof.passed
    assert result.manifest.tensor_proof is not None
    tensors = len(stored_tensors(tmp_path / "out"))
    assert steps == 2 * [(done, tensors) for done in range(1, tensors + 1)]  # and compared
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_parameters"] == result.manifest.parameters[1]
    assert all(check.passed for check in verify(tmp_path / "out", model).checks)


def test_prune_proves_tensors(model, plan, tmp_path):
    result = prune(model, tmp_path / "out", CutRequest(plan=plan), writing=TENSORS)
    made = read_manifest(tmp_path / "out")
    assert made == result.manifest and made.proof is made.probe is None
    assert made.tensor_proof.tensors == len(weights(tmp_path / "out"))
    assert made.tensor_proof.cut == 4 * (4 + 3)  # weights of four projections, biases of three
    assert "no outputs were compared" in (tmp_path / "out" / "README.md").read_text()
    found = verify(tmp_path / "out", model)
    assert found.passed and [check.name for check in found.checks][:2] == ["hashes", "headers"]
    assert found.checks[2].found == (
        f"settings, files and {made.tensor_proof.tensors} tensors equal"
    )
    # the same files as with the other proof
    prune(model, tmp_path / "other", CutRequest(plan=plan))
    assert made.files == read_manifest(tmp_path / "other").files
    # and a result of it is pruned like any other
    again = even_plan(headprune.from_pretrained(tmp_path / "out"))
    assert prune(tmp_path / "out", tmp_path / "again", CutRequest(plan=again)).manifest.lineage


def test_a_tensor_that_changed_fails_verify(model, plan, tmp_path):
    prune(model, tmp_path / "out", CutRequest(plan=plan), writing=TENSORS)
    flip(max((tmp_path / "out").glob("*.safetensors")))
    found = verify(tmp_path / "out", model)
    assert [check.passed for check in found.checks] == [False, True, False]
    assert "is not what stays of the original's" in found.checks[2].found


@pytest.mark.parametrize("proof", [ProofOption.TENSORS, ProofOption.OUTPUTS])
def test_what_is_written_wrongly_is_not_kept(proof, model, plan, tmp_path, monkeypatch):
    real = streamed._take_over

    def corrupting(folder, *rest):
        real(folder, *rest)
        name = "model.layers.2.self_attn.o_proj.weight"
        edit(folder / "model.safetensors", lambda t: t.update({name: t[name].roll(10, dims=1)}))

    monkeypatch.setattr(streamed, "_take_over", corrupting)
    with pytest.raises(ProofError, match="The proof failed"):
        prune(model, tmp_path / "out", CutRequest(plan=plan), writing=Writing(proof=proof))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_too_little_memory_leads_to_tensors(model, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1_000_000)
    result = prune(model, tmp_path / "out", CutRequest(plan=plan))
    assert result.manifest.proof is not None  # it has 0.2 million parameters
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    result = prune(model, tmp_path / "small", CutRequest(plan=plan))
    assert result.manifest.proof is None and result.manifest.tensor_proof is not None
    assert any("No outputs were compared: that takes" in said for said in result.warnings)
    asked = prune(model, tmp_path / "asked", CutRequest(plan=plan), writing=OUTPUTS)
    assert asked.manifest.proof is not None and asked.warnings == ()


CGROUPS = {
    "0::": ("", "memory.max", "memory.current", "inactive_file"),
    "4:cpu,memory:": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_memory_is_what_the_machine_and_every_group_above_leave(version, tmp_path, monkeypatch):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUP", groups)
    assert memory.available() is None
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n")
    assert memory.available() == 2048
    (proc / "self" / "cgroup").write_text(f"1:cpuset:/other\n{version}/slurm/job_7/step_0\n")
    assert memory.available() == 2048

    top, limited, taken, unused = CGROUPS[version]

    def limit(group, most, used, files=0):
        place = groups / top / group
        place.mkdir(parents=True, exist_ok=True)
        (place / limited).write_text(f"{most}\n")
        (place / taken).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 3\n{unused} {files}\n")

    limit("slurm/job_7/step_0", "max", 5)
    limit("slurm/job_8", "10", 9)  # another job
    assert memory.available() == 2048
    limit("", "1500", 500)  # all that is there of a container whose paths are those of the host
    assert memory.available() == 1000
    limit("slurm/job_7", "12", 5)
    assert memory.available() == 7
    limit("slurm/job_7", "12", 5, 2)
    assert memory.available() == 9  # what was read of files gives way
    limit("slurm/job_7/step_0", "8", 5)
    assert memory.available() == 3
    limit("slurm/job_7/step_0", "4", 5)
    assert memory.available() == 0


def test_proof_of_tensors_is_refused_where_weights_change(model, plan, tmp_path):
    from headprune.config import DataConfig

    text = tmp_path / "text.txt"
    text.write_text(tiny.text(400))
    with pytest.raises(PlanError, match="^proof=tensors compares the result with the checkpoint"):
        prune(
            model,
            tmp_path / "out",
            CutRequest(plan=plan),
            refit=DataConfig(source=str(text)),
            writing=TENSORS,
        )


def test_a_weight_that_overflows_is_refused(model, plan, tmp_path):
    def large(found):
        found["model.norm.weight"][3] = 1e6
        return found

    renamed(model, large)
    with pytest.raises(
        CheckpointError, match=r"'model.norm.weight' holds 9.99e\+05, and float16 ends"
    ):
        prune(
            model,
            tmp_path / "out",
            CutRequest(plan=plan),
            writing=TENSORS.model_copy(update={"out_dtype": Dtype.FLOAT16}),
        )
    assert not (tmp_path / "out").exists()


def test_what_is_infinite_stays_so():
    mask = torch.full((4, 4), float("-inf"))
    for given in (mask, mask.tril()):
        piece = Piece("mask", None, given, None, torch.float32, torch.bfloat16)
        assert torch.equal(torch.cat(list(piece.blocks())), given.bfloat16())


def test_a_weight_that_is_nan_is_refused(model, plan, tmp_path):
    def damaged(found):
        found["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
        return found

    renamed(model, damaged)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' holds NaN"):
        prune(model, tmp_path / "out", CutRequest(plan=plan), writing=TENSORS)
    assert not (tmp_path / "out").exists()


def test_migrate_streams(tmp_path):
    bert = saved("bert-mlm", tmp_path / "bert", torch.float32)
    plan = uneven_plan(headprune.from_pretrained(bert)).model_copy(update={"model": None})
    parts = {
        path: part.model_copy(update={"scale": None, "keep": part.keep})
        for path, part in plan.attentions.items()
    }
    plan = plan.model_copy(update={"attentions": parts})
    done = prune(bert, tmp_path / "cut", CutRequest(plan=plan))
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    layout = config.pop("headprune")["layout"]
    gone = {
        str(layer): [head for head in range(6) if head not in heads["query_heads"]]
        for layer, heads in enumerate(layout.values())
    }
    for name in ("auto_map", "per_layer_config", "allow_global_per_layer_attribute_access"):
        config.pop(name, None)
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps({**config, "pruned_heads": gone}))
    save_file(weights(tmp_path / "cut"), old / "model.safetensors", metadata={"format": "pt"})
    for proof in (ProofOption.OUTPUTS, ProofOption.TENSORS):
        result = migrate(
            old, tmp_path / proof.value, writing=Writing(proof=proof, max_shard_size=SHARD)
        )
        assert result.manifest.layout == done.manifest.layout
        assert differing(tmp_path / proof.value, tmp_path / "cut")[-1:] != ["config.json"]


def test_ragged_results_are_streamed(model, tmp_path):
    plan = ragged_plan(headprune.from_pretrained(model))
    proven = prune(model, tmp_path / "out", CutRequest(plan=plan, layout=LayoutOption.RAGGED))
    assert proven.manifest.proof is not None
    whole = in_memory(model, ragged_plan, tmp_path / "whole")
    assert weights(whole).keys() == weights(tmp_path / "out").keys()
    assert all(same(t, weights(whole)[n]) for n, t in weights(tmp_path / "out").items())


# Bad input: exit 2, one sentence, nothing half-written


def vanishing(model):
    max(model.glob("*.safetensors")).unlink()


def shrinking(model):
    file = max(model.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)


BAD = {
    "vanishes": (vanishing, "is damaged: [Errno 2] No such file or directory"),
    "shrinks": (shrinking, "is damaged: it ends too early. Get it again."),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_shard_that_goes_while_it_is_read(bad, plan, tmp_path, monkeypatch, capsys):
    change, said = BAD[bad]
    model = saved("llama-gqa", tmp_path / "sharded")
    plan.model_copy(update={"model": None}).write(tmp_path / "plan.json")
    real_write = shards._write

    def writing(*args):
        real_write(*args)
        if any(model.glob("*.safetensors")) and not done:
            done.append(change(model))

    done = []
    monkeypatch.setattr(shards, "_write", writing)
    before = sorted(p.name for p in tmp_path.iterdir())
    command = ["prune", model, "--plan", tmp_path / "plan.json"]
    command += ["--config", f"max_shard_size={SHARD}"]
    code, _, err = run(capsys, *command, tmp_path / "out")
    assert (code, done) == (2, [None])
    assert said in err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_disk_that_fills_in_the_middle_of_a_shard(model, plan, tmp_path, monkeypatch, capsys):
    real, room = os.write, [60_000]

    def left(count):
        """A full disk takes what fits first."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(count, room[0])
        room[0] -= count
        return count

    def write(file, content):
        return real(file, content[: left(len(content))])

    plan.write(tmp_path / "plan.json")
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr(shards.os, "write", write)
    command = ["prune", model, "--plan", tmp_path / "plan.json", tmp_path / "out"]
    code, _, err = run(capsys, *command)
    assert code == 2 and room == [0]
    assert "the disk is full. Nothing was left there" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("size", ["5", "0GB", "5 GiB", "big"])
def test_sizes_of_shards_have_a_unit(size, capsys):
    words = ("prune", "m", "--plan", "p", "--dry-run", "--config", f"max_shard_size={size}")
    refuses(capsys, "give a number with its unit, such as 5GB", *words)
