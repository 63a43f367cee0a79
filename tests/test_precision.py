"""Half precision, from checkpoint to result: computed in float32, written as it was."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

import headprune
from headprune import devices
from headprune.config import (
    CalibrationConfig,
    CheckConfig,
    ConvertConfig,
    DataConfig,
    Dtype,
    EvaluateConfig,
    ExportConfig,
    HealConfig,
    LayoutOption,
    ScoreConfig,
    TrainGatesConfig,
    Writing,
)
from headprune.context import Allowed, Context
from headprune.distillation.heal import heal
from headprune.errors import CheckpointError, HeadpruneError, ProofError
from headprune.evaluation.evaluate import evaluate
from headprune.evidence.score import score
from headprune.formats.export import export
from headprune.gates.train_gates import train_gates
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.model.inspection import inspect
from headprune.model.open import open_model
from headprune.model.precision import refuse_missing_dtype, to_float32
from headprune.model.stored import StoredDtypes, stored_dtypes, stored_tensors
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.regression.check import check
from headprune.result import prune as pruning
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.plan import Plan
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.merges import MERGES
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import uneven_plan
from tests.marks import slow_unless

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16 = Writing(out_dtype=Dtype.FLOAT16)
SMALL = CalibrationConfig(calibration_tokens=600, seq_len=16)
CONVERT = ConvertConfig(kv_heads=1, calibration_tokens=600, seq_len=16)


@pytest.fixture(params=HALVES)
def half(request):
    return HALVES[request.param]


@pytest.fixture
def data(text_file):
    return DataConfig(source=str(text_file))


def saved(case, dtype, folder):
    return tiny.save(tiny.model(case, dtype), folder)


def dtypes_on_disk(folder):
    tensors = load_file(folder / "model.safetensors").values()
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def sound(result, dtype, base=None):
    """What every result in half precision must be."""
    found = result.manifest.proof
    assert found.dtype == "float32"
    assert found.gated_vs_reloaded <= found.tolerance < 1e-3
    assert found.control > 1e2 * found.tolerance
    assert dtypes_on_disk(result.output) == {dtype}
    assert json.loads((result.output / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert result.manifest.weight_bytes is not None
    before, after = result.manifest.weight_bytes
    assert after <= before
    assert after == sum(t.bytes for t in stored_tensors(result.output).values())
    checked = verify(result.output, against=base)
    assert checked.passed, checked
    assert len(checked.checks) == 3 + 2 * (base is not None)
    loaded = headprune.from_pretrained(result.output)
    assert loaded.dtype is dtype


@pytest.mark.parametrize(
    ("case", "half"),
    slow_unless(
        lambda case, half: case == "llama-gqa" or half == "bfloat16",
        product(["llama-gqa", "gpt2", "bert-mlm", "t5"], HALVES),
    ),
    indirect=["half"],
)
def test_a_plan_with_gate_values(case, half, tmp_path):
    base = saved(case, half, tmp_path / "model")
    plan = uneven_plan(headprune.from_pretrained(base))
    result = prune(base, tmp_path / "out", CutRequest(plan=plan))
    sound(result, half, base)
    assert 1e-6 < result.manifest.proof.cast < 0.1  # the gate values that W_O took up
    bare = plan.model_copy(
        update={
            "attentions": {
                p: a.model_copy(update={"scale": None}) for p, a in plan.attentions.items()
            }
        }
    )
    assert prune(base, tmp_path / "bare", CutRequest(plan=bare)).manifest.proof.cast == 0.0


def test_trained_gates(half, data, tmp_path):
    base = saved("llama-gqa", half, tmp_path / "model")
    settings = TrainGatesConfig(target_heads=0.5, unit=Unit.HEAD, steps=4, batch_size=2, seq_len=16)
    train_gates(base, data, tmp_path / "gates", settings)
    out = tmp_path / "out"
    sound(
        prune(base, out, CutRequest(gates=tmp_path / "gates", layout=LayoutOption.RAGGED)),
        half,
    )


def test_scores_and_a_refit(half, data, tmp_path):
    base = saved("llama-gqa", half, tmp_path / "model")
    score(
        base,
        tmp_path / "scores",
        SMALL.part(ScoreConfig, criterion=["compensated", "fisher"], unit=Unit.HEAD),
        data,
    )
    result = prune(
        base,
        tmp_path / "out",
        CutRequest(
            scores=tmp_path / "scores",
            criterion="compensated",
            keep=0.5,
            layout=LayoutOption.RAGGED,
        ),
        refit=data,
        calibration=SMALL.model_copy(update={"dtype": Dtype.FLOAT32}),  # rounded at the end
    )
    sound(result, half)
    assert result.manifest.proof.cast > 1e-6


def test_a_refit_is_that_of_the_float32_copy(half, data, tmp_path):
    base = saved("llama-gqa", half, tmp_path / "half")
    model = headprune.from_pretrained(base, dtype=torch.float32)
    wide, plan = tiny.save(model, tmp_path / "wide"), uneven_plan(model)
    exact = SMALL.model_copy(update={"dtype": Dtype.FLOAT32})
    prune(base, tmp_path / "a", CutRequest(plan=plan), data, exact)
    prune(wide, tmp_path / "b", CutRequest(plan=plan), data, SMALL)
    ours = load_file(tmp_path / "a" / "model.safetensors")
    theirs = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name].to(half)) for name in theirs)
    computing = SMALL.model_copy(update={"dtype": Dtype(str(half)[6:])})
    prune(base, tmp_path / "c", CutRequest(plan=plan), data, computing)
    others = load_file(tmp_path / "c" / "model.safetensors")
    assert any(not torch.equal(others[name], ours[name]) for name in ours)


def test_calibration_keeps_bfloat16_where_the_device_multiplies_it(data, tmp_path, monkeypatch):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    request = CutRequest(plan=uneven_plan(headprune.from_pretrained(base)))
    files = {}
    for able in (True, False):
        monkeypatch.setattr(devices, "computes_bfloat16", lambda able=able: able)
        opened = open_model(base, calibrates=True)
        assert opened.net.dtype is (torch.bfloat16 if able else torch.float32)
        assert open_model(base).net.dtype is torch.float32  # nothing but a proof
        result = prune(base, tmp_path / f"{able}", request, data, SMALL)
        sound(result, torch.bfloat16)
        files[able] = load_file(result.output / "model.safetensors")
    exact = {name: tensor.float() for name, tensor in files[False].items()}
    apart = {n: float((files[True][n].float() - x).norm() / x.norm()) for n, x in exact.items()}
    assert 0 < max(apart.values()) < 0.05


@pytest.mark.parametrize("merge", list(MERGES))
@pytest.mark.parametrize(
    ("case", "half"),
    slow_unless(
        lambda case, half: (case, half) == ("llama-gqa", "bfloat16"),
        product(["llama-gqa", "bert-mlm"], HALVES),
    ),
    indirect=["half"],
)
def test_every_merge(case, merge, half, data, tmp_path):
    base = saved(case, half, tmp_path / "model")
    config = CONVERT.model_copy(update={"merge": merge})
    calibrate = data if merge == "lowrank" else None
    result = convert_gqa(base, tmp_path / "out", config, calibrate)
    sound(result.pruned, half)


def test_evaluation_is_in_what_the_checkpoint_holds(half, data, tmp_path):
    base = saved("llama-gqa", half, tmp_path / "model")
    out = prune(
        base, tmp_path / "out", CutRequest(plan=uneven_plan(headprune.from_pretrained(base)))
    ).output
    report = evaluate(out, data, EvaluateConfig(seq_len=16, speed=False), against=base)
    assert report.model.dtype == str(half)[6:]
    limits = ("perplexity <= 1000", "query_heads <= 100 %")
    settings = {"model": str(out), "data": data.source, "against": str(base), "limits": limits}
    checked = check(CheckConfig(**settings, seq_len=16))
    assert checked.passed
    assert checked.metrics[0].value == report.model.metrics[0].value
    again = prune(
        out, tmp_path / "again", CutRequest(plan=uneven_plan(headprune.from_pretrained(out)))
    )
    sound(again, half, out)


def test_a_wrong_cut_fails_in_bfloat16_as_well(tmp_path):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    net = headprune.from_pretrained(base, dtype=torch.float32)
    expected = equivalence.expect(net, resolve(uneven_plan(net), net))
    shifted = {
        path: part.model_copy(update={"scale": part.scale and part.scale[::-1]})
        for path, part in uneven_plan(net).attentions.items()
    }
    cut_heads(net, resolve(Plan(unit=Unit.KV_GROUP, attentions=shifted), net))
    outputs = probes.probe(net, expected.inputs)
    with pytest.raises(ProofError, match="differ by"):
        equivalence.conclude(expected, outputs)


@pytest.mark.parametrize("case", tiny.present("gemma3_text", "llama-gqa", "gpt2", "falcon-alibi"))
def test_widened_is_what_loading_in_float32_gives(case, tmp_path):
    base = saved(case, torch.bfloat16, tmp_path / "model")
    loaded = headprune.from_pretrained(base, dtype=torch.float32)
    half = headprune.from_pretrained(base)
    inputs = probes.probe_inputs(loaded)
    wanted = probes.probe(loaded, inputs)
    rounded = equivalence.difference(wanted, probes.probe(half, inputs))
    assert rounded > 1e-3
    assert equivalence.difference(wanted, probes.probe(to_float32(half), inputs)) == 0.0


def test_another_type_is_written_when_it_is_asked_for(tmp_path):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    plan = uneven_plan(headprune.from_pretrained(base))
    result = prune(
        base, tmp_path / "wide", CutRequest(plan=plan), writing=Writing(out_dtype=Dtype.FLOAT32)
    )
    assert dtypes_on_disk(result.output) == {torch.float32}
    assert result.manifest.proof.cast == 0.0
    assert result.manifest.weight_bytes is not None
    before, after = result.manifest.weight_bytes
    assert after > before
    assert any("written in float32" in warning for warning in result.warnings)
    # what is computed in is not what is written
    same = prune(
        base,
        tmp_path / "same",
        CutRequest(plan=plan),
        calibration=CalibrationConfig(dtype=Dtype.FLOAT64),
    )
    assert dtypes_on_disk(same.output) == {torch.bfloat16}
    assert same.manifest.proof.dtype == "float64"


def test_a_mixed_checkpoint_is_kept_tensor_by_tensor(data, tmp_path):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    wide = {n for n in weights if "norm" in n} | {"model.layers.1.self_attn.o_proj.weight"}
    mixed = {n: t.float() + 1e-4 if n in wide else t for n, t in weights.items()}
    save_file(mixed, base / "model.safetensors", metadata={"format": "pt"})
    net = headprune.from_pretrained(base, dtype=torch.float32)
    plan = uneven_plan(net)
    out = prune(base, tmp_path / "out", CutRequest(plan=plan), refit=data, calibration=SMALL)
    written = load_file(out.output / "model.safetensors")
    assert {n for n, t in written.items() if t.dtype is torch.float32} == wide
    assert out.manifest.dtype == "bfloat16, float32"
    assert json.loads((out.output / "config.json").read_text())["dtype"] == "bfloat16"
    untouched = "model.layers.0.input_layernorm.weight"
    assert torch.equal(written[untouched], mixed[untouched])  # to the last bit of float32
    assert verify(out.output).passed


def test_a_tied_embedding_of_another_type_is_kept(tmp_path):
    model = tiny.model("gpt2", torch.bfloat16)
    base = tiny.save(model, tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    name = "transformer.wte.weight"  # the first weight, and that of the head as well
    assert "lm_head.weight" not in weights
    weights[name] = weights[name].float() + 1e-5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    plan = uneven_plan(headprune.from_pretrained(base))
    result = prune(base, tmp_path / "out", CutRequest(plan=plan))
    written = load_file(result.output / "model.safetensors")
    assert torch.equal(written[name], weights[name])
    assert {t.dtype for n, t in written.items() if n != name} == {torch.bfloat16}
    assert json.loads((result.output / "config.json").read_text())["dtype"] == "bfloat16"
    assert verify(result.output).passed


@pytest.mark.parametrize("case", tiny.present("qwen3_moe", "gpt_neox", "vit"))
def test_types_are_found_under_the_names_on_disk(case, tmp_path):
    base = saved(case, torch.bfloat16, tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    # the output projections, whatever they are called there
    wide = {
        n
        for n in weights
        if any(
            part in n
            for part in ("o_proj.weight", "attention.dense.weight", "attention.output.dense.weight")
        )
    }
    assert wide
    mixed = {n: t.float() if n in wide else t for n, t in weights.items()}
    save_file(mixed, base / "model.safetensors", metadata={"format": "pt"})
    net = headprune.from_pretrained(base, dtype=torch.float32)
    stored = stored_dtypes(net, stored_tensors(base))
    assert stored.default is torch.bfloat16
    assert len(stored.exceptions) == len(wide)
    stored.cast(net)
    net.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {n: t.dtype for n, t in again.items()} == {n: t.dtype for n, t in mixed.items()}


def test_rounding_says_whether_it_changed_anything():
    net = tiny.model("llama-gqa")
    assert StoredDtypes(torch.bfloat16).round(net)
    assert not StoredDtypes(torch.bfloat16).round(net)
    assert not StoredDtypes(torch.float32).narrows(net)


def overflowing(tmp_path, weight):
    model = tiny.model("llama-gqa")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(weight)
        model.model.layers[2].mlp.up_proj.weight.fill_(weight)
    return tiny.save(model.to(torch.bfloat16), tmp_path / "model")


COMMANDS = {
    "score": lambda m, d, o, t: score(
        m, o, SMALL.model_copy(update={"dtype": t}).part(ScoreConfig, criterion=["fisher"]), d
    ),
    "train-gates": lambda m, d, o, t: train_gates(
        m, d, o, TrainGatesConfig(target_heads=0.5, steps=2, seq_len=16, dtype=t)
    ),
    "convert-gqa": lambda m, d, o, t: convert_gqa(m, o, CONVERT.model_copy(update={"dtype": t}), d),
    "evaluate": lambda m, d, o, t: evaluate(m, d, EvaluateConfig(seq_len=16, speed=False, dtype=t)),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_overflow_is_refused_before_any_work(command, data, tmp_path):
    base = overflowing(tmp_path, 300.0)
    refusal = "overflows in float16: its outputs are not finite.*dtype=float32"
    with pytest.raises(CheckpointError, match=refusal):
        COMMANDS[command](base, data, tmp_path / "out", Dtype.FLOAT16)
    assert not (tmp_path / "out").exists()
    COMMANDS[command](base, data, tmp_path / "out", Dtype.AUTO)


def test_a_result_that_would_overflow_is_refused_before_any_work(tmp_path):
    base = overflowing(tmp_path, 300.0)
    plan = uneven_plan(headprune.from_pretrained(base))
    with pytest.raises(CheckpointError, match="not finite.*--config out_dtype=bfloat16"):
        prune(base, tmp_path / "out", CutRequest(plan=plan), writing=FLOAT16)
    base = overflowing(tmp_path, 70_000.0)
    with pytest.raises(CheckpointError, match=r"holds 7.01e\+04, and float16 ends at 65,504"):
        prune(base, tmp_path / "out", CutRequest(plan=plan), writing=FLOAT16)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_named(data, tmp_path):
    model = tiny.model("llama-gqa", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    base = tiny.save(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight'.*holds NaN"):
        score(base, tmp_path / "scores", SMALL.part(ScoreConfig, criterion=["fisher"]), data)


def test_a_type_that_the_device_lacks_is_refused():
    refuse_missing_dtype(torch.bfloat16, "cpu")
    with pytest.raises(HeadpruneError, match="'cpu' cannot compute in float8_e4m3fn"):
        refuse_missing_dtype(torch.float8_e4m3fn, "cpu")


def test_quantised_checkpoints_are_refused_by_name(data, tmp_path):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    packed = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (base / "config.json").write_text(json.dumps(packed))
    with pytest.raises(CheckpointError, match=r"quantised \(gptq\).*Give the unquantised model"):
        score(base, tmp_path / "scores", SMALL.part(ScoreConfig, criterion=["fisher"]), data)
    with pytest.raises(CheckpointError, match=r"quantised \(gptq\).*Give the unquantised model"):
        export(base, tmp_path / "exported", ExportConfig(to="gguf"))
    with pytest.raises(CheckpointError, match=r"quantised \(gptq\) and does not load: .*optimum"):
        inspect(base)
    readable = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (base / "config.json").write_text(json.dumps(readable))
    assert "It is quantised (mxfp4)" in inspect(base).notes[0]
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"'{name}' is stored in F8_E4M3"):
        score(base, tmp_path / "scores", SMALL.part(ScoreConfig, criterion=["fisher"]), data)


def test_a_proof_that_would_show_nothing_is_refused_before_the_work(data, tmp_path, monkeypatch):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    monkeypatch.setattr(equivalence, "probe_rounding", lambda *_: equivalence.Rounding(0.5))

    def worked(*_, **__):
        raise AssertionError("it went to work")

    monkeypatch.setattr(pruning, "judged_refit", worked)
    monkeypatch.setattr("headprune.result.convert_gqa.convert_in_sequence", worked)
    plan = uneven_plan(headprune.from_pretrained(base))
    with pytest.raises(ProofError, match="would show nothing"):
        prune(base, tmp_path / "out", CutRequest(plan=plan), refit=data, calibration=SMALL)
    with pytest.raises(ProofError, match="would show nothing"):
        convert_gqa(base, tmp_path / "out", CONVERT, data)
    mqa = saved("llama-mqa", torch.bfloat16, tmp_path / "mqa")
    with pytest.raises(ProofError, match="would show nothing"):
        heal(mqa, base, data, tmp_path / "out", HealConfig(steps=3, seq_len=16))
    assert not (tmp_path / "out").exists()


# --- nothing is thrown away -----------------------------------------------------------------


@pytest.mark.parametrize("case", ["bert-mlm", "bert-classifier", "gpt2"])
@pytest.mark.parametrize("named", [None, "BertForSomethingElse"])
def test_tensors_without_a_place_are_refused(case, named, tmp_path):
    base = tiny.save(tiny.untied(tiny.model(case)), tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    cls = config["architectures"][0]
    (base / "config.json").write_text(json.dumps({**config, "architectures": named and [named]}))
    with pytest.raises(CheckpointError, match='"architectures" in config.json') as refused:
        headprune.from_pretrained(base)
    assert len(str(refused.value)) <= 400 + len(str(base))
    headprune.from_pretrained(base, drop_unexpected=True)
    (base / "config.json").write_text(json.dumps({**config, "architectures": [cls]}))
    plan = uneven_plan(headprune.from_pretrained(base))
    out = prune(base, tmp_path / "out", CutRequest(plan=plan)).output
    assert set(stored_tensors(out)) == set(stored_tensors(base))


def test_tensors_of_no_class_are_refused(tmp_path):
    base = saved("llama-gqa", torch.bfloat16, tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    weights["adapter.up.weight"] = torch.ones(3, 3)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    plan = uneven_plan(headprune.from_pretrained(base, drop_unexpected=True))
    with pytest.raises(CheckpointError, match=r"'adapter.up.weight'.*drop_unexpected=True"):
        prune(base, tmp_path / "out", CutRequest(plan=plan))
    dropping = Context(allowed=Allowed(drop_unexpected=True))
    result = prune(base, tmp_path / "out", CutRequest(plan=plan), context=dropping)
    assert set(stored_tensors(base)) - set(stored_tensors(result.output)) == {"adapter.up.weight"}
    assert verify(result.output, against=base).passed


@pytest.mark.parametrize("case", tiny.present("gpt2", "gpt_neo", "gptj"))
def test_masks_of_old_checkpoints_are_no_weights(case, tmp_path):
    base = saved(case, torch.float32, tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    inside = "attn.attention" if case == "gpt_neo" else "attn"
    masks = {f"transformer.h.0.{inside}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    masks[f"transformer.h.0.{inside}.masked_bias"] = torch.tensor(-1e9)
    save_file({**weights, **masks}, base / "model.safetensors", metadata={"format": "pt"})
    headprune.from_pretrained(base)
    real = {
        "transformer.h.9.attn.bias": torch.ones(4),
        "transformer.h.9.attn.weight": torch.ones(4),
    }
    save_file({**weights, **real}, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="holds . tensors"):
        headprune.from_pretrained(base)


@pytest.mark.parametrize(
    "case", slow_unless(tiny.one_per_row(tiny.FAMILY_CASES).__contains__, tiny.FAMILY_CASES)
)
def test_a_result_has_every_tensor_of_its_original(case, tmp_path):
    base = tiny.save(tiny.model(case), tmp_path / "model")
    net = headprune.from_pretrained(base)
    cut_heads(net, resolve(uneven_plan(net, 0), net))
    net.save_pretrained(tmp_path / "out")
    per_head = {
        name
        for name in set(stored_tensors(base)) - set(stored_tensors(tmp_path / "out"))
        if "layernorm.norms" in name  # one norm per head, which goes with its head
    }
    assert set(stored_tensors(base)) - per_head == set(stored_tensors(tmp_path / "out"))
    assert attention_of(net)
