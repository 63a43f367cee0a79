"""The commands that serve a result: printed, on its card, and for its shape."""

from pathlib import Path

import pytest

import headprune
from headprune import packages
from headprune.errors import PlanError
from headprune.planning.targets import EMPTY, EVEN, RAGGED
from headprune.result.engines import serving, shapes_in
from headprune.schemas.manifest import read_manifest
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan
from tests.test_cli import run, succeeds


def lines_of(folder):
    return dict(serving(read_manifest(folder), Path(folder.name)))


def even(model):
    plan = uneven_plan(model)  # type: ignore[arg-type]
    keep = {"keep": (0, 1, 2, 3, 4, 5), "scale": None}
    parts = {path: part.model_copy(update=keep) for path, part in plan.attentions.items()}
    return plan.model_copy(update={"attentions": parts})


@pytest.mark.parametrize(
    ("shape", "plan", "line"),
    [
        (EVEN, even, "vllm serve 'out put'"),
        (RAGGED, ragged_plan, "headprune export 'out put' 'out put-vllm' --to vllm && vllm serve"),
        (
            EMPTY,
            lambda model: uneven_plan(model, 1),
            "headprune export 'out put' 'out put-vllm' --to vllm && vllm serve",
        ),
    ],
)
def test_the_card_names_the_command_for_the_shape(shape, plan, line, tmp_path):
    model, out = tiny.save(tiny.model("llama-gqa"), tmp_path / "m"), tmp_path / "out put"
    given = plan(headprune.from_pretrained(model))  # type: ignore[operator]
    given = given.model_copy(update={"model": None})
    layout = "ragged" if shape == RAGGED else "per-layer"
    headprune.prune(model, out, plan=given, layout=layout)
    assert shape in shapes_in((manifest := read_manifest(out)).layout, manifest.shape)
    card = (out / "README.md").read_text()
    assert line in card and ("transformers --trust-remote-code" in card) == (shape != EVEN)
    assert "headprune export 'out put' 'out put-gguf' --to gguf && llama-server" in card
    assert {*lines_of(out).values()} <= {*card.split("\n")}


def test_the_printed_commands_work_here(tmp_path, capsys, monkeypatch):
    model, out = tiny.save(tiny.model("llama-gqa"), tmp_path / "m"), tmp_path / "out"
    line = ("convert-gqa", model, "--kv-heads", "1")
    shown = succeeds(capsys, *line, out)
    assert f"vLLM:\n  vllm serve {out}\n" in shown and "--to gguf" in shown
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    shown = succeeds(capsys, *line, tmp_path / "bare")
    assert "vllm serve" in shown and "--to gguf" not in shown
    assert "--to gguf" in (tmp_path / "bare" / "README.md").read_text()  # it may be read elsewhere
    lines = [line for line in shown.splitlines() if line.startswith("  headprune ")]
    assert lines == [f"  headprune evaluate {tmp_path / 'bare'} --data TEXT --against {model}"]
    (tmp_path / "TEXT.txt").write_text(tiny.text(300))
    words = lines[0].replace("TEXT", str(tmp_path / "TEXT.txt")).split()[1:]
    quick = ["--no-speed", *(f"--config={one}" for one in ("seq_len=16", "last_words=0"))]
    code, shown, err = run(capsys, *words, *quick)
    assert code == 0 and "perplexity" in shown, err


def test_a_result_without_changes_warns(tmp_path):
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    same = headprune.convert_gqa(model, output=tmp_path / "same", kv_heads=3, merge="mean").pruned
    assert same.warnings == (
        "Nothing was removed or merged: the result has all heads of its source.",
    )
    fewer = headprune.convert_gqa(model, output=tmp_path / "out", kv_heads=1, merge="mean").pruned
    assert fewer.warnings == ()


def test_a_model_without_any_head_is_no_result(tmp_path):
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    plan = uneven_plan(headprune.from_pretrained(model), *range(tiny.LAYERS))
    plan = plan.model_copy(update={"model": None})
    with pytest.raises(PlanError, match="None of the 24 query heads would stay"):
        headprune.prune(model, tmp_path / "empty", plan=plan)
    assert not (tmp_path / "empty").exists()


def test_a_model_that_generates_no_text_is_not_served(tmp_path):
    tiny.save(tiny.model("bert-mlm"), tmp_path / "m")
    plan = uneven_plan(headprune.from_pretrained(tmp_path / "m"), 1)
    plan = plan.model_copy(update={"model": None})
    headprune.prune(tmp_path / "m", tmp_path / "out", plan=plan)
    assert lines_of(tmp_path / "out") == {}
    assert "Serve it" not in (tmp_path / "out" / "README.md").read_text()


def test_counts_that_llama_cpp_does_not_hold_are_not_served_there(tmp_path):
    model = tiny.model("qwen3")
    model.config.update({"attention_bias": False})
    for name in dict(model.named_parameters()):
        if "self_attn" in name and name.endswith("proj.bias"):
            model.get_submodule(name.rpartition(".")[0]).bias = None
    tiny.save(model, tmp_path / "m")
    headprune.convert_gqa(tmp_path / "m", tmp_path / "out", kv_heads=(3, 1, 3, 1))
    assert [*lines_of(tmp_path / "out")] == ["vLLM"]  # its embeddings are not tied
    headprune.convert_gqa(tmp_path / "m", tmp_path / "even", kv_heads=1)
    assert [*lines_of(tmp_path / "even")] == ["llama.cpp", "vLLM"]
