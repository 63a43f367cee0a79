"""export --to onnx and openvino: models as graphs, and the engines that run them."""

import json
from importlib.util import find_spec

import pytest
import torch

import headprune
from headprune import packages
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.formats.export import FORMATS
from headprune.formats.graphs import compare, graphs_of, write_graphs
from headprune.formats.run import LoadedGraph, run_by_engine
from headprune.formats.source import open_source
from headprune.model.probes import probe, probe_inputs
from headprune.model.skeleton import without_weights
from headprune.proof.equivalence import difference
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_cli import succeeds

ENGINES = {"onnx": "onnxruntime", "openvino": "openvino"}
CASES = ("llama-gqa", "gpt2", "gemma2", "opt", "bert-mlm", "bert-base", "distilbert", "t5", "bart")


def in_torch(graph):
    """A graph before an exporter takes it."""

    @torch.no_grad()
    def run(inputs):
        results = graph.module(*(inputs[name] for name in graph.inputs))
        return dict(zip(graph.module.outputs, results, strict=True))

    shapes = {
        name: tuple(None if i in graph.dims[name] else size for i, size in enumerate(one.shape))
        for name, one in graph.inputs.items()
    }
    return LoadedGraph(shapes, run)


def cut(case, *empty):
    model = tiny.model(case)
    cut_heads(model, resolve(uneven_plan(model, *empty), model))
    return model


@pytest.mark.parametrize("case", tiny.present(*CASES))
def test_graphs_compute_as_the_model_does(case):
    model = cut(case, 0, 2)
    graphs = {graph.name: in_torch(graph) for graph in graphs_of(model)}
    net = run_by_engine(without_weights(type(model), model.config), graphs)
    inputs = probe_inputs(model)
    wanted = probe(model, inputs)
    assert difference(wanted, probe(net, inputs)) < 2e-6
    with torch.no_grad():
        max(model.parameters(), key=torch.numel).mul_(1.01)
    assert difference(wanted, probe(net, inputs)) > 1e-4


def test_a_cache_is_named_as_optimum_does_and_has_each_layers_size():
    (graph,) = graphs_of(cut("llama-gqa", 0))
    names = [f"past_key_values.{i}.{part}" for i in (1, 2, 3) for part in ("key", "value")]
    assert list(graph.inputs) == ["input_ids", "attention_mask", "position_ids", *names]
    presents = [name.replace("past_key_values", "present") for name in names]
    assert graph.module.outputs == ["logits", *presents]
    assert [graph.inputs[name].shape[1] for name in names[::2]] == [1, 1, 1]
    (whole,) = graphs_of(tiny.model("llama-gqa"))
    assert whole.inputs["past_key_values.0.key"].shape[1] == 3


def engine(form):
    name = ENGINES[form]
    why = f"the engine {name} is not installed: pip install '.[{form}]'"
    return pytest.param(form, marks=pytest.mark.skipif(find_spec(name) is None, reason=why))


@pytest.mark.slow  # make test runs a model in ONNX Runtime in test_demo.py
@pytest.mark.parametrize("form", [*map(engine, ENGINES)])
def test_a_cut_decoder_is_proven_in_its_engine(form, tmp_path, monkeypatch, capsys):
    """With a layer without heads; the proof fails on changed weights."""
    monkeypatch.setitem(tiny.SIZES, "num_hidden_layers", 2)
    model = cut("llama-gqa", 1)
    folder, out = tiny.save(model, tmp_path / "model"), tmp_path / "out"
    shown = succeeds(capsys, "export", folder, "--to", form, out, "--json")
    proof = json.loads(shown)["proof"]
    assert proof["how"] == "engine" and 0 < proof["difference"] < 2e-6
    assert "decoded with cache" in proof["compared"]
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[0, 0] += 0.1
    changed = open_source(tiny.save(model, tmp_path / "changed"))
    config = headprune.export.options(model=folder, output=out, to=form)
    assert not FORMATS[form].prove(changed, out, config).passed


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bert-base", "t5", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("form", [*map(engine, ENGINES)])
def test_encoders_encoder_decoders_and_experts_are_proven_in_their_engine(form, case, tmp_path):
    folder = tiny.save(cut(case, 1), tmp_path / "model")
    result = headprune.export(folder, tmp_path / "out", to=form)
    assert result.record.proof.difference < 2e-6


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("no\nkernel"),
    ],
)
def test_a_machine_that_gives_out_is_no_limit_of_an_exporter_or_engine(error, tmp_path):
    def fails(*_):
        raise error

    limit = isinstance(error, RuntimeError) and "kernel" in str(error)
    message = r"\(no kernel\)" if limit else None
    source = open_source(tiny.save(tiny.model("llama-gqa"), tmp_path / "model"))
    with pytest.raises(PlanError if limit else type(error), match=message):
        write_graphs(source, fails)
    with pytest.raises(ProofError if limit else type(error), match=message):
        compare(source, fails, "openvino")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ENGINES)
def test_models_of_images_and_missing_engines_are_refused(form, tmp_path, monkeypatch):
    tiny.model("vit").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    with pytest.raises(PlanError, match="takes pixel_values; models of text alone fit"):
        headprune.export(tmp_path / "model", tmp_path / "out", to=form)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match=f"^--to {form} needs .*{ENGINES[form]}"):
        headprune.export(tmp_path / "model", tmp_path / "out", to=form)
    assert not (tmp_path / "out").exists()
