"""Models as graphs, and what runs them instead of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headprune
from headprune import packages
from headprune.engines.model import open_exported, run_by_engine
from headprune.errors import CheckpointError, HeadpruneError, PlanError, ProofError
from headprune.exporting.formats.graph import prove, write_graphs
from headprune.exporting.graphs import Graph, graphs_of
from headprune.exporting.source import open_source
from headprune.model.probes import probe, probe_inputs
from headprune.model.skeleton import without_weights
from headprune.proof.equivalence import difference
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_cli import run

ENGINES = {"onnx": "onnxruntime", "openvino": "openvino"}
CASES = ("llama-gqa", "gpt2", "gemma2", "opt", "bert-mlm", "bert-base", "distilbert", "t5", "bart")


class InTorch:
    """A graph that nothing was made of yet."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = {
            name: tuple(None if i in graph.dims[name] else size for i, size in enumerate(one.shape))
            for name, one in graph.inputs.items()
        }

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = (inputs[name] for name in self.graph.inputs)
        return dict(zip(self.graph.outputs, self.graph.module(*given), strict=True))


def cut(case: str, *empty: int) -> torch.nn.Module:
    model = tiny.model(case)
    cut_heads(model, resolve(uneven_plan(model, *empty), model))
    return model


@pytest.mark.parametrize("case", tiny.present(*CASES))
def test_graphs_compute_what_the_model_does(case: str) -> None:
    model = cut(case, 0, 2)
    graphs = graphs_of(model)
    loaded = {graph.name: InTorch(graph) for graph in graphs}
    net = run_by_engine(without_weights(type(model), model.config), loaded)
    inputs = probe_inputs(model)
    wanted = probe(model, inputs)
    assert difference(wanted, probe(net, inputs)) < 2e-6
    with torch.no_grad():
        max(model.parameters(), key=torch.numel).mul_(1.01)
    assert difference(wanted, probe(net, inputs)) > 1e-4


def test_a_cache_is_named_as_optimum_does_and_has_each_layers_size() -> None:
    (graph,) = graphs_of(cut("llama-gqa", 0))
    names = [f"past_key_values.{i}.{part}" for i in (1, 2, 3) for part in ("key", "value")]
    assert list(graph.inputs) == ["input_ids", "attention_mask", "position_ids", *names]
    assert graph.outputs == ["logits", *(n.replace("past_key_values", "present") for n in names)]
    assert [graph.inputs[name].shape[1] for name in names[::2]] == [1, 1, 1]
    (whole,) = graphs_of(tiny.model("llama-gqa"))
    assert whole.inputs["past_key_values.0.key"].shape[1] == 3


def engine(form: str) -> pytest.ParameterSet:
    """A format that is tested where its engine is installed."""
    name = ENGINES[form]
    why = f"the engine {name} is not installed: pip install '.[{form}]'"
    return pytest.param(form, marks=pytest.mark.skipif(find_spec(name) is None, reason=why))


@pytest.mark.slow  # make test runs a model in ONNX Runtime in test_demo.py
@pytest.mark.parametrize("form", [*map(engine, ENGINES)])
def test_a_cut_decoder_is_proven_in_its_engine(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a layer without heads; the proof fails on weights that were changed."""
    monkeypatch.setitem(tiny.SIZES, "num_hidden_layers", 2)
    model = cut("llama-gqa", 1)
    folder, out = tiny.save(model, tmp_path / "model"), tmp_path / "out"
    code, said, err = run(capsys, "export", folder, "--to", form, out, "--json")
    assert code == 0, err
    proof = json.loads(said)["proof"]
    assert proof["how"] == "engine" and 0 < proof["difference"] < 2e-6
    assert "decoded with cache" in proof["compared"]
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[0, 0] += 0.1
    other = tiny.save(model, tmp_path / "other")
    assert not prove(open_source(other), out, ENGINES[form]).passed


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bert-base", "t5", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("form", [engine("onnx"), engine("openvino")])
def test_encoders_encoder_decoders_and_experts_are_proven_in_their_engine(
    form: str, case: str, tmp_path: Path
) -> None:
    folder = tiny.save(cut(case, 1), tmp_path / "model")
    result = headprune.export(folder, tmp_path / "out", to=form)
    assert result.record.proof.difference < 2e-6


def test_an_engine_that_stops_at_a_graph_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(folder: Path, engine: str) -> None:
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr("headprune.exporting.formats.graph.open_exported", stops)
    monkeypatch.setattr("headprune.exporting.formats.graph.write_graphs", lambda *_: ())
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    folder, out = tiny.save(tiny.model("llama-gqa"), tmp_path / "model"), tmp_path / "out"
    code, _, err = run(capsys, "export", folder, "--to", "openvino", out)
    assert code == 1 and not out.exists()
    assert f"openvino cannot run what was written of '{folder}' (no kernel)" in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
    ],
)
def test_a_machine_that_gives_out_is_no_limit_of_an_exporter_or_engine(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise error

    def fails(*arguments: object) -> None:
        raise RuntimeError("no kernel")  # which is one

    source = open_source(tiny.save(tiny.model("llama-gqa"), tmp_path / "model"))
    for save, told in ((full, type(error)), (fails, PlanError)):
        with pytest.raises(told):
            write_graphs(source, tmp_path / "out", save, lambda *_: None)
    for opened, told in ((full, type(error)), (fails, ProofError)):
        monkeypatch.setattr("headprune.exporting.formats.graph.open_exported", opened)
        with pytest.raises(told):
            prove(source, tmp_path / "out", "openvino")


def test_what_cannot_be_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds no model.onnx, so onnxruntime cannot run it"):
        open_exported(folder, "onnxruntime")
    (folder / "model.onnx").touch()
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match="needs onnxruntime: pip install onnxruntime"):
        open_exported(folder, "onnxruntime")


@pytest.mark.parametrize("form", ENGINES)
def test_models_of_images_are_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    tiny.model("vit").save_pretrained(tmp_path / "model")
    with pytest.raises(PlanError, match="takes pixel_values; models of text alone fit"):
        headprune.export(tmp_path / "model", tmp_path / "out", to=form)
    assert not (tmp_path / "out").exists()
