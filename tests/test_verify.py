"""Proving a folder again, migrating old ones, and folders that were tampered with."""

import json
import os

import pytest
import torch
import transformers

import headprune
from headprune.config import ConvertConfig
from headprune.context import CommandProvenance, Context
from headprune.errors import CheckpointError, HeadpruneError, PlanError
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import migrate, prune
from headprune.result.verify import verify
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Migration
from headprune.surgery.cut import cut_heads, resolve
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import uneven_plan
from tests.damage import edit, in_shards, of


@pytest.fixture
def result(llama_folder, tmp_path):
    """A tiny Llama, cut unevenly."""
    plan = uneven_plan(headprune.from_pretrained(llama_folder))
    return prune(llama_folder, tmp_path / "result", CutRequest(plan=plan)).output


def failed(verification):
    return [check.name for check in verification.checks if not check.passed]


def test_a_result_is_proven_again(result, llama_folder):
    verification = verify(result, against=llama_folder)
    assert verification.passed
    assert [check.name for check in verification.checks] == [
        "hashes",
        "headprune.from_pretrained",
        "AutoModelForCausalLM.from_pretrained, trust_remote_code=True",
        f"against {llama_folder}",
        f"what stays of {llama_folder}",
    ]


def test_a_changed_weight_is_seen_in_every_check(result, llama_folder):
    name = "model.layers.1.self_attn.v_proj.weight"
    edit(result / "model.safetensors", lambda weights: weights[name][0].add_(0.05))
    verification = verify(result, against=llama_folder)
    assert len(failed(verification)) == 5
    assert "model.safetensors was changed" in verification.checks[0].found


def test_a_result_from_before_a_probe_is_proven_by_those_it_stored(result):
    manifest = json.loads((result / "headprune.json").read_text())
    chunks = manifest["probe"]["outputs"].pop("logits_decoded_in_chunks")
    (result / "headprune.json").write_text(json.dumps(manifest))
    assert verify(result).passed
    chunks["values"] = [value + 1 for value in chunks["values"]]
    manifest["probe"]["outputs"]["logits_decoded_in_chunks"] = chunks
    (result / "headprune.json").write_text(json.dumps(manifest))
    assert len(failed(verify(result))) == 2


def test_a_native_result_needs_no_code_to_be_verified(llama_folder, tmp_path):
    model = headprune.from_pretrained(llama_folder)
    keep = {a.path: (0, 1, 4, 5) for a in attention_of(model)}
    parts = {p: AttentionPlan(query_heads=6, kv_heads=3, keep=k) for p, k in keep.items()}
    plan = Plan(unit=Unit.KV_GROUP, attentions=parts)
    out = prune(llama_folder, tmp_path / "out", CutRequest(plan=plan)).output
    verification = verify(out)
    assert verification.passed
    assert verification.checks[-1].name == "AutoModelForCausalLM.from_pretrained"


def test_the_wrong_base_is_refused(result, tmp_path):
    other = tiny.save(tiny.model("llama-mha"), tmp_path / "other")
    with pytest.raises(PlanError, match="Give the model it was made for"):
        verify(result, against=other)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
    ],
)
def test_a_machine_that_gives_out_is_no_failed_check(result, error, monkeypatch):
    def full(*arguments):
        raise error

    monkeypatch.setattr(probes, "probe", full)
    with pytest.raises(type(error)):
        verify(result)


def test_what_headprune_did_not_write_is_not_verified(llama_folder):
    with pytest.raises(CheckpointError, match="no headprune.json"):
        verify(llama_folder)


def old_folder(model, folder, pruned):
    """What prune_heads and save_pretrained of transformers 4 left."""
    config = model.config.to_dict()
    parts = {}
    for layer, a in enumerate(attention_of(model)):
        keep = tuple(h for h in a.query_ids if h not in pruned.get(layer, []))
        parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep)
    cut_heads(model, resolve(Plan(unit=Unit.HEAD, attentions=parts), model))
    model.save_pretrained(folder)
    (folder / "modeling_headprune.py").unlink()
    tiny.tokenizer().save_pretrained(folder)
    old = {**config, "pruned_heads": {str(layer): heads for layer, heads in pruned.items()}}
    old["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(old, default=str))
    return folder


PRUNED = {0: [1, 4], 2: [0, 1, 2]}


@pytest.mark.parametrize("case", ["bert-mlm", "gpt2", "distilbert", "vit"])
def test_a_folder_of_transformers_4_loads_and_migrates(case, tmp_path):
    model = tiny.model(case)
    folder = old_folder(model, tmp_path / "old", PRUNED)
    inputs = probes.probe_inputs(model)
    wanted = probes.probe(model, inputs)
    loaded = headprune.from_pretrained(folder)
    assert equivalence.difference(wanted, probes.probe(loaded, inputs)) == 0
    provenance = CommandProvenance(command="migrate", options={})
    migrated = migrate(folder, tmp_path / "new", context=Context(provenance=provenance))
    assert (migrated.manifest.done, migrated.manifest.provenance) == (Migration(), provenance)
    out = migrated.output
    assert "rewritten for transformers 5" in (out / "README.md").read_text()
    assert verify(out).passed
    assert "pruned_heads" not in json.loads((out / "config.json").read_text())
    again = headprune.from_pretrained(out)
    assert equivalence.difference(wanted, probes.probe(again, inputs)) == 0
    assert [a.query_ids for a in attention_of(again)][:3] == [
        (0, 2, 3, 5),
        (0, 1, 2, 3, 4, 5),
        (3, 4, 5),
    ]
    # the corrupted sibling: the same weights under other heads do not fit, or compute otherwise
    edit(folder / "config.json", lambda c: c.update(pruned_heads={"1": [1, 4], "2": [0, 1, 2]}))
    with pytest.raises(CheckpointError):
        headprune.from_pretrained(folder)


def test_old_folders_that_make_no_sense(tmp_path, llama_folder):
    folder = old_folder(tiny.model("gpt2"), tmp_path / "old", {1: [2]})
    for pruned, message in (({"9": [0]}, "layer 9"), ({"0": [11]}, "head 11 of layer 0")):
        edit(folder / "config.json", lambda c, p=pruned: c.update(pruned_heads=p))
        with pytest.raises(CheckpointError, match=message):
            headprune.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="needs no migration"):
        migrate(llama_folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


LAYER_1 = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (of("config.json", lambda c: c["headprune"].update(schema_version=2)), "Upgrade headprune"),
        (of("config.json", lambda c: c["headprune"].pop("layout")), "('headprune') is damaged"),
        (of("config.json", lambda c: c.update(headprune="x")), "('headprune') is damaged"),
        (
            of("model.safetensors", lambda t: t.pop(LAYER_1)),
            "lacks 1 of the tensors of a LlamaForCausalLM",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 99_000), "model.safetensors' is damaged: "),
        (
            of("model.safetensors", lambda t: t.update({LAYER_1: t[LAYER_1][:-10].clone()})),
            "does not load as LlamaForCausalLM",
        ),
    ],
    ids=["schema", "no layout", "no description", "tensor", "truncated", "shapes"],
)
def test_a_damaged_folder_is_refused_in_a_sentence(damage, message, result):
    headprune.from_pretrained(result)  # it was fine before
    damage(result)
    with pytest.raises(HeadpruneError) as error:
        headprune.from_pretrained(result)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not verify(result).passed


def test_an_edited_runtime_runs_when_allowed(result):
    with (result / "modeling_headprune.py").open("a") as file:
        file.write("# edited\n")
    verification = verify(result)
    assert verification.not_run is not None and "--trust-remote-code" in verification.not_run
    assert failed(verification) == ["hashes"]
    assert failed(verify(result, trust_remote_code=True)) == ["hashes"]


def test_code_that_is_not_ours_is_not_run(result):
    (result / "foreign.py").write_text(f"open({str(result / 'ran')!r}, 'w').close()\n")
    named = {"AutoModelForCausalLM": "foreign.LlamaForCausalLM"}
    edit(result / "config.json", lambda c: c["auto_map"].update(named))
    verification = verify(result)
    assert "was not tried" in str(verification.not_run)
    assert not (result / "ran").exists()


def test_code_beside_a_result_is_not_run(result, tmp_path, monkeypatch):
    """With code allowed, transformers runs custom_generate/generate.py of a folder as well."""
    monkeypatch.chdir(tmp_path)
    code = result / "custom_generate"
    code.mkdir()
    (code / "requirements.txt").touch()
    (code / "generate.py").write_text("open('ran', 'w').close()\ngenerate = None\n")
    verification = verify(result)
    assert not (tmp_path / "ran").exists()
    assert failed(verification) == ["hashes"]
    assert verification.checks[-1].name.endswith("trust_remote_code=True")  # and it was tried
    assert "custom_generate/generate.py is not in headprune.json" in verification.checks[0].found


def test_a_copy_that_is_loaded_holds_what_was_hashed(result, monkeypatch):
    seen = []
    original = transformers.AutoModelForCausalLM.from_pretrained

    def load(folder, **kwargs):
        seen.append({file.name: file.is_symlink() for file in folder.iterdir()})
        return original(folder, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    assert verify(result).passed
    runtime = {"config.json": False, "model.safetensors": True, "modeling_headprune.py": False}
    assert seen == [runtime]
    in_shards(result)
    verify(result)
    assert len(seen) == 2
    assert "model.safetensors.index.json" in seen[1]


def forget(name):
    return lambda manifest: manifest["files"].pop(name)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda f: (f / "notes.txt").write_text("x"), "notes.txt is not in headprune.json"),
        (lambda f: (f / "x.safetensors").write_text("x"), "x.safetensors is not in"),
        (of("headprune.json", forget("model.safetensors")), "model.safetensors is not in"),
        (of("headprune.json", forget("config.json")), "config.json is not in"),
        (lambda f: (f / "plan.json").unlink(), "plan.json is missing"),
        (
            of("headprune.json", lambda m: m["files"].update({"x" * 5_000: "0" * 64})),
            "xxx is missing",
        ),
    ],
    ids=["file", "weights", "no weights", "no config", "missing", "name"],
)
def test_files_and_their_record_agree(damage, found, result):
    damage(result)
    hashes = verify(result).checks[0]
    assert not hashes.passed
    assert found in hashes.found


def test_cards_and_hidden_files_are_the_users_own(result):
    (result / "README.md").write_text("mine")
    (result / ".gitattributes").touch()
    for name in (".git", ".cache"):
        (result / name).mkdir()
        (result / name / "config").touch()
    assert verify(result).passed


def test_the_tolerance_is_not_the_manifests(result, llama_folder):
    def change(manifest):
        manifest["proof"]["tolerance"] = 1e9
        stored = manifest["probe"]["outputs"]["logits"]
        stored["values"] = [value + 0.01 * stored["largest"] for value in stored["values"]]

    edit(result / "headprune.json", change)
    verification = verify(result, against=llama_folder)
    assert len(failed(verification)) == 3
    assert "it allows 1e+09, a proof 2e-05" in verification.checks[0].found
    assert "2e-05 allowed" in verification.checks[1].found
    assert verification.checks[-1].passed  # the folder itself is as it was


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"tolerance": 1e9}, "it allows 1e+09, a proof 2e-05"),
        ({"tolerance": 6e-2, "dtype": "bfloat16"}, "it allows 6e-02, a proof 2e-05"),
        ({"gated_vs_reloaded": 1e-3}, "a proof that failed: 1.0e-03, and 2e-05 is allowed"),
        ({"gated_vs_reloaded": 1e-3, "tolerance": 1e9}, "a proof that failed"),
        ({"rounding": 1e3, "tolerance": 4e3}, "a proof that shows nothing"),
    ],
)
def test_the_recorded_proof_is_judged_anew(recorded, told, result):
    assert verify(result).passed
    edit(result / "headprune.json", lambda manifest: manifest["proof"].update(recorded))
    verification = verify(result)
    assert failed(verification) == ["hashes"]
    assert told in verification.checks[0].found


def test_a_recorded_half_precision_loosens_nothing(result):
    def change(manifest):
        manifest["proof"]["dtype"] = "bfloat16"
        stored = manifest["probe"]["outputs"]["logits"]
        stored["values"] = [value + 0.01 * stored["largest"] for value in stored["values"]]

    edit(result / "headprune.json", change)
    checks = verify(result).checks
    assert not checks[1].passed and "2e-05 allowed" in checks[1].found


def test_what_rounding_explains_is_measured_where_it_matters(monkeypatch):
    model = tiny.model("llama-gqa")
    inputs = probes.probe_inputs(model)
    outputs = probes.probe(model, inputs)
    least = equivalence.TOLERANCE[torch.float32]
    monkeypatch.setattr(equivalence, "probe_rounding", lambda *args: equivalence.Rounding(1e-3))
    assert equivalence.allowed(model, inputs, outputs, least / 2) == least
    assert (
        equivalence.allowed(model, inputs, outputs, 2 * least) == equivalence.AMPLIFICATION * 1e-3
    )
    assert equivalence.allowed(model, inputs, outputs, float("nan")) == least
    monkeypatch.undo()
    assert 0 < equivalence.allowed(model, inputs, outputs, 1.0) < 1e-3


def test_a_converted_result_says_why_it_is_compared_with_nothing(llama_folder, tmp_path):
    config = ConvertConfig(kv_heads=1)
    folder = convert_gqa(llama_folder, tmp_path / "mqa", config).pruned.output
    verification = verify(folder, against=llama_folder)
    assert verification.passed
    assert "its KV heads were merged" in str(verification.not_run)
    assert verification.checks[-1].name == f"what stays of {llama_folder}"


def test_ids_stay_those_of_the_original_after_a_plain_cut(llama_folder, tmp_path):
    def keep(folder, heads, output):
        parts = {
            a.path: AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=heads)
            for a in attention_of(headprune.from_pretrained(folder))
        }
        return prune(
            folder, output, CutRequest(plan=Plan(unit=Unit.KV_GROUP, attentions=parts))
        ).output

    once = keep(llama_folder, (2, 3, 4, 5), tmp_path / "once")
    assert "headprune" not in json.loads((once / "config.json").read_text())
    twice = keep(once, (4, 5), tmp_path / "twice")
    direct = keep(llama_folder, (4, 5), tmp_path / "direct")
    outputs = []
    for folder in (twice, direct):
        model = headprune.from_pretrained(folder)
        assert {a.query_ids for a in attention_of(model)} == {(4, 5)}
        outputs.append(probes.probe(model, probes.probe_inputs(model)))
    assert equivalence.difference(*outputs) == 0
    with pytest.raises(PlanError, match="head 0 "):
        keep(once, (0, 1), tmp_path / "gone")


def test_only_what_belongs_to_a_tokenizer_goes_with_a_result(llama_folder, tmp_path):
    (llama_folder / "secrets.json").write_text("{}")
    (llama_folder / "checkpoint-5").mkdir()
    (llama_folder / "checkpoint-5" / "config.json").write_text("{}")
    plan = uneven_plan(headprune.from_pretrained(llama_folder))
    names = {
        f.name
        for f in prune(llama_folder, tmp_path / "out", CutRequest(plan=plan)).output.rglob("*")
    }
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not {"secrets.json", "checkpoint-5"} & names


def test_from_pretrained_takes_the_usual_arguments(llama_folder, tmp_path):
    load = headprune.from_pretrained
    assert load(llama_folder, torch_dtype=torch.bfloat16).dtype is torch.bfloat16
    assert load(llama_folder, output_attentions=True).config.output_attentions is True
    assert load(llama_folder, use_safetensors=True).dtype is torch.float32
    assert load(tmp_path, subfolder="llama").config.model_type == "llama"
    model, info = load(llama_folder, output_loading_info=True)
    assert model.config.model_type == "llama"
    assert not info["missing_keys"]
    heads = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 3}
    assert load(llama_folder, **heads).config.num_labels == 3
    with pytest.raises(CheckpointError, match="did you mean|Did you mean"):
        load(llama_folder, auto_class="AutoModelForCausal")
