"""Results load without headprune: every family, uneven layers, a first layer without heads."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headprune
from headprune.errors import CheckpointError
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.planning.choose import CutRequest
from headprune.result.prune import prune
from headprune.surgery.cut import resolve
from tests import load_routes, tiny
from tests.cutting import uneven_plan

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "deploy.md"
AUTO = {
    "llama-gqa": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "gpt_neox": "AutoModelForCausalLM",  # whose tensors have other names on disk
    "bert-mlm": "AutoModelForMaskedLM",
}
TITLES = {"llama-gqa": "Llama, GQA", "gpt2": "GPT-2", "gpt_neox": "Pythia", "bert-mlm": "BERT"}
WRONG = ", other outputs"
ENCODERS_ONLY, DECODERS_ONLY = {"sentence-transformers"}, {"lm-eval"}


def routes_for(case):
    decoder = case != "bert-mlm"
    left_out = ENCODERS_ONLY if decoder else DECODERS_ONLY
    return [
        name
        for name in load_routes.ROUTES
        if name not in left_out and (decoder or not name.startswith("generate"))
    ]


def run_routes(folders, routes):
    """Runs routes in processes in which headprune cannot be imported."""
    autos = {case: AUTO[case.removesuffix(WRONG)] for case in folders}
    jobs = [json.dumps([str(folder), autos[c], routes[c]]) for c, folder in folders.items()]
    command = [sys.executable, load_routes.__file__, *jobs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"route"')]
    return {
        case: {line["route"]: line["failure"] for line in lines if line["folder"] == str(folder)}
        for case, folder in folders.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Cut models, uneven and with a first layer that has no heads, and what they must compute."""
    made = {}
    for case in AUTO:
        root, model = tmp_path_factory.mktemp(case), tiny.model(case)
        plan, source = uneven_plan(model, 0), tiny.save(model, root / "model")
        cuts, ids = resolve(plan, model), torch.randint(5, tiny.VOCAB, (2, 9))
        gates = fixed([cut.gate() for cut in cuts])
        with gated([cut.attention for cut in cuts], gates), torch.no_grad():
            expected = {"ids": ids, "logits": model(ids).logits}
            if case != "bert-mlm":
                tokens = model.generate(ids[:1], max_new_tokens=12, do_sample=False)
                expected["tokens"] = tokens
        made[case] = prune(source, root / "out", CutRequest(plan=plan)).output
        save_file(expected, root / "expected.safetensors")
    return made


@pytest.fixture(scope="module")
def wrong(folders):
    """The same folders, which now must compute something else."""
    return {case: other_outputs(folder) for case, folder in folders.items()}


def other_outputs(folder):
    wrong = folder.parent / "wrong"
    wrong.mkdir()
    shutil.copytree(folder, wrong / "out")
    expected = load_file(folder.parent / "expected.safetensors")
    expected["logits"] = expected["logits"].roll(1, 0)
    if "tokens" in expected:
        expected["tokens"] = expected["tokens"] + 1
    save_file(expected, wrong / "expected.safetensors")
    return wrong / "out"


# what needs no library beside torch and transformers, which take longer to import than to use
SOME = ["AutoModel*.from_pretrained", "save_pretrained and back", "pickle of the model object"]
SOME += ["generate, dynamic cache", "generate, static cache"]


@pytest.mark.process
def test_some_routes_work_without_headprune_and_notice_another_model(folders, wrong):
    case, other = "llama-gqa", f"llama-gqa{WRONG}"
    places = {case: folders[case], other: wrong[case]}
    found = run_routes(places, dict.fromkeys(places, SOME))
    assert found[case] == dict.fromkeys(SOME)
    assert found[other].keys() == {*SOME} and all(found[other].values())


@pytest.fixture(scope="module")
def matrix(folders):
    """What became of every route."""
    return run_routes(folders, {case: routes_for(case) for case in AUTO})


def comparing(case):
    """Routes that compare numbers."""
    routes = ["AutoModel*.from_pretrained", "deepcopy", 'accelerate device_map="auto"']
    return [*routes, *(["generate, dynamic cache", "lm-eval"] if case != "bert-mlm" else [])]


@pytest.fixture(scope="module")
def noticed(wrong):
    """What became of those that compare, with folders that compute something else."""
    return run_routes(wrong, {case: comparing(case) for case in AUTO})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), [(c, name) for c in AUTO for name in routes_for(c)])
def test_a_result_works_where_headprune_is_not_installed(case, name, matrix):
    assert matrix[case][name] is None, matrix[case][name]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("case", AUTO)
def test_the_routes_notice_another_model(case, noticed):
    assert noticed[case].keys() == {*comparing(case)}
    assert all(noticed[case].values()), noticed[case]


@pytest.mark.process
@pytest.mark.slow
def test_the_load_matrix_of_the_docs_is_current(matrix):
    """``make load-matrix`` writes it; versions may differ from those it was written with."""
    rows = [("route", *TITLES.values()), ("---",) * (1 + len(AUTO))]
    for name in load_routes.ROUTES:
        cells = ("-" if name not in matrix[c] else matrix[c][name] is None for c in AUTO)
        rows.append((name, *("yes" if cell is True else str(cell) for cell in cells)))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- load matrix -->\n\n")
    shown, end, after = rest.partition("\n\n<!-- end of load matrix -->")
    assert start and end
    if os.environ.get("HEADPRUNE_WRITE_DOCS"):
        packages = ("torch", "transformers", "accelerate", "peft", "lm_eval")
        packages += ("sentence-transformers",)
        versions = ", ".join(f"{p} {version(p)}" for p in packages)
        text = f"{table}\n\nTested with {versions}."
        PAGE.write_text(before + start + text + end + after, encoding="utf-8")
        return
    assert shown.partition("\n\n")[0] == table


@pytest.mark.parametrize("auto", ["AutoModelForSequenceClassification", "AutoModel"])
def test_another_head_on_a_cut_encoder(auto, tmp_path):
    model = tiny.model("bert-mlm")
    prune(
        tiny.save(model, tmp_path / "model"),
        tmp_path / "out",
        CutRequest(plan=uneven_plan(model, 0)),
    )
    other = headprune.from_pretrained(tmp_path / "out", auto_class=auto)
    counts = [a.query_heads for a in attention_of(other)]
    assert counts == [0, 4, 3, 2]


def test_from_pretrained_takes_the_usual_arguments(folders, tmp_path):
    folder = folders["llama-gqa"]
    half = headprune.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    assert half.dtype is torch.bfloat16
    assert half.config._attn_implementation == "eager"
    placed = headprune.from_pretrained(folder, device_map="auto")
    assert placed.device.type == "cpu"
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(tiny.LAYERS)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    offloaded = headprune.from_pretrained(
        folder, device_map={**layers, **rest}, offload_folder=str(tmp_path)
    )
    expected = load_file(folder.parent / "expected.safetensors")
    with torch.no_grad():
        for model in (placed, offloaded):
            torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])
    with pytest.raises(CheckpointError, match="no AutoModelForSeq2SeqLM for model type 'llama'"):
        headprune.from_pretrained(folder, auto_class="AutoModelForSeq2SeqLM")
