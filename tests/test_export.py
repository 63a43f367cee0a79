"""headprune export: the promises of every format."""

import json
from dataclasses import replace

import pytest

import headprune
from headprune import packages
from headprune.commands import command
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.formats import export as exporting
from headprune.formats.export import FORMATS
from headprune.formats.format import read_export
from headprune.registry import Registry
from tests import tiny
from tests.test_cli import refuses, run, succeeds

pytest.importorskip("gguf")


@pytest.fixture
def folder(tmp_path):
    tiny.model("llama-gqa").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_help_names_every_format():
    _, shown = command.all_commands()["export"].options()["to"]
    assert all(name in str(shown.help) for name in FORMATS)


def test_an_export_is_recorded_and_replaced_only_where_it_is_ours(folder, tmp_path, capsys):
    out = tmp_path / "out"
    line = ("export", folder, "--to", "gguf", out)
    text = succeeds(capsys, *line, "--json")
    record = read_export(out)
    assert json.loads(text)["files"] == record.files
    assert record.proof.passed and record.format == "gguf"
    assert set(record.files) == {file.name for file in out.iterdir()} - {"export.json"}
    refuses(capsys, "already exists", *line)
    assert run(capsys, *line, "--overwrite")[0] == 0
    (out / "mine.txt").write_text("x")
    refuses(capsys, "mine.txt", *line, "--overwrite")


def test_a_proof_that_fails_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    right = FORMATS["gguf"]

    def nan(*given):
        proof = right.prove(*given)  # type: ignore[arg-type]
        return proof.model_copy(update={"difference": float("nan")})

    registry = Registry("format", PlanError)
    registry.add("gguf", replace(right, prove=nan))  # type: ignore[arg-type]
    monkeypatch.setattr(exporting, "FORMATS", registry)
    with pytest.raises(ProofError, match=r"compute something else.*nan apart"):
        headprune.export(folder, tmp_path / "out", to="gguf")
    code, _, err = run(capsys, "export", folder, "--to", "gguf", tmp_path / "out")
    assert code == 1 and "Nothing was left there" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "guf"}, "No format named 'guf'. Did you mean 'gguf'"),
        ({"to": "gguf", "model": "nope"}, "There is no folder 'nope'"),
        ({"to": "gguf", "out_dtype": "q4"}, "--out-dtype: .*q8_0"),
        ({"to": "vllm", "out_dtype": "q8_0"}, "no weights in q8_0"),
        ({"to": "vllm", "like": "any.gguf"}, "--like has no effect without --to gguf"),
        ({"to": "vllm", "prove": "engine"}, "no engine ran .* as vLLM is not run here"),
        ({"to": "gguf", "prove": "engine"}, "as llama.cpp runs no file without a tokenizer"),
    ],
)
def test_wrong_settings_are_refused(settings, message, folder, tmp_path):
    given = {"model": str(folder), "output": tmp_path / "out", **settings}
    with pytest.raises(HeadpruneError, match=message):
        headprune.export(**given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_a_rope_that_follows_the_length_has_no_graph(to, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    folder = tiny.save(tiny.model("llama-gqa", rope_parameters=rope), tmp_path / "m")
    with pytest.raises(HeadpruneError, match="its rope changes with the length of a text"):
        headprune.export(folder, tmp_path / "out", to=to)


def test_a_missing_package_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match=r"^--to gguf needs gguf: pip install gguf\.$"):
        headprune.export(folder, tmp_path / "out", to="gguf")


def test_an_export_is_no_model_to_measure(folder, text_file, tmp_path):
    headprune.export(folder, tmp_path / "out", to="vllm")
    for given in ((tmp_path / "out", None), (folder, tmp_path / "out")):
        with pytest.raises(HeadpruneError, match="exported as vllm, .*the model that it was made"):
            headprune.evaluate(given[0], data=text_file, against=given[1])
