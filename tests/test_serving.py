"""The commands that serve a result: printed, on its card, and for its shape."""

from __future__ import annotations

from pathlib import Path

import pytest

import headprune
from headprune import packages
from headprune.engines.targets import EMPTY, EVEN, RAGGED, SHAPES, TARGETS
from headprune.errors import PlanError
from headprune.exporting.engines import serving, shapes_in
from headprune.schemas.manifest import read_manifest
from tests import gguf_words, tiny
from tests.cutting import ragged_plan, uneven_plan
from tests.test_cli import run


def pruned(folder: Path, shape: str) -> Path:
    model = tiny.model("llama-gqa")
    tiny.save(model, folder / "m")
    given = headprune.from_pretrained(folder / "m")
    plan = {
        RAGGED: ragged_plan,
        EMPTY: lambda m: uneven_plan(m, 1),
        EVEN: lambda m: uneven_plan(m).model_copy(update={"attentions": even(m)}),
    }[shape](given)
    plan = plan.model_copy(update={"model": None})
    layout = "ragged" if shape == RAGGED else "per-layer"
    headprune.prune(folder / "m", folder / "out put", plan=plan, layout=layout)
    return folder / "out put"


def even(model: object) -> object:
    parts = uneven_plan(model).attentions  # type: ignore[arg-type]
    keep = {"keep": (0, 1, 2, 3, 4, 5), "scale": None}
    return {path: part.model_copy(update=keep) for path, part in parts.items()}


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (EVEN, "vllm serve 'out put'"),
        (RAGGED, "headprune export 'out put' --to vllm 'out put-vllm' && vllm serve"),
        (EMPTY, "headprune export 'out put' --to vllm 'out put-vllm' && vllm serve"),
    ],
)
def test_the_card_names_the_command_for_the_shape(shape: str, line: str, tmp_path: Path) -> None:
    out = pruned(tmp_path, shape)
    manifest = read_manifest(out)
    assert shape in shapes_in(manifest)
    card = (out / "README.md").read_text()
    assert line in card and ("transformers --trust-remote-code" in card) == (shape != EVEN)
    assert "headprune export 'out put' --to gguf" in card
    said = [
        line for _, lines in serving(manifest, out, Path(out.name)) for line in lines.split("\n")
    ]
    assert set(said) <= set(card.split("\n"))


def test_the_command_ends_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    line = ("convert-gqa", model, "--kv-heads", "1", tmp_path / "out")
    code, out, err = run(capsys, *line)
    assert code == 0, err
    assert f"vLLM:\n  vllm serve {tmp_path / 'out'}\n" in out and "--to gguf" in out


def test_what_is_printed_next_works_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny.save(tiny.model("llama-gqa"), tmp_path / "m"), tmp_path / "out"
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    code, said, err = run(capsys, "convert-gqa", model, "--kv-heads", "1", out)
    assert code == 0, err
    assert "vllm serve" in said and "--to gguf" not in said
    assert "--to gguf" in (out / "README.md").read_text()  # it may be read elsewhere
    lines = [line for line in said.splitlines() if line.startswith("  headprune ")]
    assert lines == [f"  headprune evaluate {out} --data TEXT --against {model}"]
    (tmp_path / "TEXT.txt").write_text(tiny.text(300))
    words = lines[0].replace("TEXT", str(tmp_path / "TEXT.txt")).split()[1:]
    quick = [
        "--no-speed",
        "--config",
        "seq_len=16",
        "--config",
        "copying=0",
        "--config",
        "last_words=0",
    ]
    code, said, err = run(capsys, *words, *quick)
    assert code == 0 and "perplexity" in said, err


def test_what_changes_nothing_is_said(tmp_path: Path) -> None:
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    same = headprune.convert_gqa(model, output=tmp_path / "same", kv_heads=3, merge="mean").pruned
    assert same.warnings == (
        "Nothing was removed or merged: the result has all heads of its source.",
    )
    fewer = headprune.convert_gqa(model, output=tmp_path / "out", kv_heads=1, merge="mean").pruned
    assert fewer.warnings == ()


def test_a_model_without_any_head_is_no_result(tmp_path: Path) -> None:
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    plan = uneven_plan(headprune.from_pretrained(model), *range(tiny.LAYERS))
    plan = plan.model_copy(update={"model": None})
    with pytest.raises(PlanError, match="None of the 24 query heads would stay"):
        headprune.prune(model, tmp_path / "empty", plan=plan)
    assert not (tmp_path / "empty").exists()


def test_what_generates_no_text_is_served_by_none(tmp_path: Path) -> None:
    tiny.save(tiny.model("bert-mlm"), tmp_path / "m")
    model = headprune.from_pretrained(tmp_path / "m")
    plan = uneven_plan(model, 1).model_copy(update={"model": None})
    headprune.prune(tmp_path / "m", tmp_path / "out", plan=plan)
    assert [*serving(read_manifest(tmp_path / "out"), tmp_path / "out", Path("out"))] == []
    assert "Serve it" not in (tmp_path / "out" / "README.md").read_text()


def test_a_tokenizer_that_is_not_known_is_taken_from_the_original(tmp_path: Path) -> None:
    model = tiny.model("llama-gqa")
    model.resize_token_embeddings(gguf_words.SIZE)
    tiny.save(model, tmp_path / "known")
    headprune.convert_gqa(tmp_path / "known", tmp_path / "out", kv_heads=1)
    lines = dict(serving(read_manifest(tmp_path / "out"), tmp_path / "out", Path("out")))
    assert "--like ORIGINAL.gguf && llama-server" in lines["llama.cpp"]
    gguf_words.words("GPT-2").save_pretrained(tmp_path / "out")
    lines = dict(serving(read_manifest(tmp_path / "out"), tmp_path / "out", Path("out")))
    assert "out-gguf && llama-server" in lines["llama.cpp"]


def test_other_counts_than_llama_cpp_holds_are_not_served_there(tmp_path: Path) -> None:
    model = tiny.model("qwen3")
    model.config.update({"attention_bias": False})
    for name in dict(model.named_parameters()):
        if "self_attn" in name and name.endswith("proj.bias"):
            model.get_submodule(name.rpartition(".")[0]).bias = None
    tiny.save(model, tmp_path / "m")
    headprune.convert_gqa(tmp_path / "m", tmp_path / "out", kv_heads=(3, 1, 3, 1))
    lines = dict(serving(read_manifest(tmp_path / "out"), tmp_path / "out", Path("out")))
    assert list(lines) == ["vLLM"]  # its embeddings are not tied
    headprune.convert_gqa(tmp_path / "m", tmp_path / "even", kv_heads=1)
    lines = dict(serving(read_manifest(tmp_path / "even"), tmp_path / "even", Path("even")))
    assert list(lines) == ["llama.cpp", "vLLM"]


def test_every_cell_of_the_table_is_filled() -> None:
    for engine in TARGETS.values():
        assert set(engine.cells) == set(SHAPES) and all(engine.cells.values())
