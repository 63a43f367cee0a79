"""What is said at the terminal is true, and soon: results, missing folders, the hub, warnings."""

import io
import logging
import re
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

import headprune
from headprune import terminal
from headprune.config import CalibrationConfig, DataConfig
from headprune.context import Context
from headprune.data.read import read_examples
from headprune.errors import CheckpointError, DataError, PlanError
from headprune.io import hub
from headprune.model.attention import attention_of
from headprune.model.loading import load_config
from headprune.planning.choose import CutRequest
from headprune.render import records
from headprune.render import terminal as shown
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_cli import refuses, run, succeeds

UNEVEN, EVEN = "Uneven heads: loads with", "Heads that the stock class has no setting for: loads"


def even_plan(folder, removed):
    parts = {}
    for a in attention_of(headprune.from_pretrained(folder)):
        keep = tuple(head for head in a.query_ids if head not in removed)
        parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep)
    return Plan(unit=Unit.HEAD, attentions=parts)


@pytest.mark.parametrize(("uneven", "said"), [(False, EVEN), (True, UNEVEN)])
def test_even_heads_are_not_called_uneven(uneven, said, tmp_path, capsys):
    """GPT-2 has no setting for heads of a size of their own, however even they are."""
    model = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    plan = uneven_plan(headprune.from_pretrained(model), 0) if uneven else even_plan(model, (1,))
    plan.write(tmp_path / "plan.json")
    base = ("prune", model, "--plan", tmp_path / "plan.json")
    for options in ([tmp_path / "out"], ["--dry-run"]):
        out = succeeds(capsys, *base, *options)
        assert said in " ".join(out.split())
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("Uneven heads" in card) == uneven


def test_an_even_conversion_is_not_called_uneven(tmp_path, capsys):
    model = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    line = ("convert-gqa", model, "--kv-heads", 2, tmp_path / "out")
    out = succeeds(capsys, *line)
    assert EVEN in " ".join(out.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify nope", "There is no folder 'nope'. Give one that headprune wrote."),
        ("report nope page.html", "There is no run at 'nope'"),
        ("evaluate ./nope --data text.txt", "'./nope' is neither a folder nor a hub id"),
        ("check ./nope --data text.txt --limit perplexity<=9", "'./nope' is neither a folder"),
        ("inspect a/b/c", "'a/b/c' is neither a folder nor a hub id. Give a model folder"),
        ("inspect text.txt", "'text.txt' is a file. Give a model folder"),
        ("inspect nope", "'nope': there is no such folder, and none of that name in the cache"),
    ],
)
def test_a_path_that_is_not_there(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(tiny.text(200))
    refuses(capsys, message, *line.split())


@pytest.mark.parametrize(("case", "auto"), [("t5", "Seq2SeqLM"), ("bart", "Seq2SeqLM")])
def test_the_auto_class_is_the_one_of_the_task(case, auto, tmp_path):
    model = tiny.save(tiny.model(case), tmp_path / "model")
    plan = uneven_plan(headprune.from_pretrained(model))
    pruned = prune(model, tmp_path / "out", CutRequest(plan=plan))
    assert pruned.manifest.auto_class == f"AutoModelFor{auto}"
    route = f"AutoModelFor{auto}.from_pretrained, trust_remote_code=True"
    assert verify(pruned.output).checks[-1].name == route


def test_a_model_of_two_steps_is_compared_with_the_last(llama_folder, tmp_path):
    first = prune(
        llama_folder, tmp_path / "first", CutRequest(plan=even_plan(llama_folder, (0, 1)))
    ).output
    second = prune(first, tmp_path / "second", CutRequest(plan=even_plan(first, (2, 3)))).output
    assert verify(second, against=first).passed
    message = r"goes back to this model by several .'llama' -> 'first' -> 'second'.*against 'first'"
    with pytest.raises(PlanError, match=message.replace("several ", "several steps ")):
        verify(second, against=llama_folder)
    other = tiny.model("llama-gqa")
    other.model.layers[0].self_attn.o_proj.weight.data.neg_()
    with pytest.raises(PlanError, match="Give the model it was made for"):
        verify(second, against=tiny.save(other, tmp_path / "other"))


@pytest.fixture
def dead_end(monkeypatch):
    """A hub that nobody answers at, and no time to wait for it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def no_time(seconds):
        raise AssertionError(f"waits {seconds} s to try again")

    monkeypatch.setattr(time, "sleep", no_time)
    monkeypatch.setattr(hub, "REMEMBERED_S", 1e9)
    hub._why_not.cache_clear()


@pytest.mark.usefixtures("dead_end")
def test_a_hub_that_is_not_reached_is_asked_once():
    cannot = re.escape("(http://127.0.0.1:9 cannot be reached: ")
    with pytest.raises(CheckpointError, match=f"'a/b': there is no such folder.*{cannot}"):
        load_config("a/b")
    with pytest.raises(DataError, match=f"'a/c:d' is no file, folder.*{cannot}"):
        read_examples(DataConfig(source="a/c:d"))
    assert hub._why_not.cache_info().misses == 1
    assert constants.HF_HUB_OFFLINE is False  # as it was


@pytest.mark.usefixtures("dead_end")
def test_folders_ask_no_hub(llama_folder):
    headprune.from_pretrained(llama_folder)
    assert hub._why_not.cache_info().misses == 0


def test_uneven_heads_load_without_a_warning_of_transformers(llama_folder, tmp_path):
    told = []

    class Kept(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logger, handler = transformers_logging.get_logger("transformers"), Kept()
    plan = uneven_plan(headprune.from_pretrained(llama_folder))
    transformers_logging.set_verbosity_warning()
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        out = prune(llama_folder, tmp_path / "out", CutRequest(plan=plan)).output
        config = headprune.from_pretrained(out).config
        assert not told
        transformers_logging.warning_once.cache_clear()
        assert config.num_attention_heads == 6  # whoever reads it besides is told
        assert len(told) == 1
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        ("score {model} --data {text} out", ["loading the model ...", "scoring ..."]),
        ("prune {model} --plan {plan} out --refit {text}", ["refitting W_O ..."]),
        ("convert-gqa {model} --kv-heads 1 out", ["merging KV heads (mean) ..."]),
        ("evaluate {model} --data {text} --no-speed", ["evaluating ..."]),
        ("heal {model} --teacher {model} --data {text} --steps 1 out", ["healing ..."]),
        (
            "train-gates {model} --data {text} --target-heads 0.5 --steps 1 out",
            ["reading the data ...", "training ..."],
        ),
    ],
)
def test_a_pipe_gets_a_line_per_stage_and_no_bars(
    line, stages, llama_folder, text_file, monkeypatch, capsys
):
    monkeypatch.chdir(text_file.parent)
    Path("plan.json").write_text('{"model.layers.1.self_attn": [0, 1]}')
    names = {"model": llama_folder, "text": text_file, "plan": "plan.json"}
    words = [word.format(**names) for word in line.split()]
    words += [] if "convert" in line else ["--config", "seq_len=16"]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert all(stage in err for stage in stages), err
    assert "eta" not in err and "/?" not in err and "━" not in err


def test_a_bar_starts_anew_with_every_stage(monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(
        terminal, "err", Console(file=drawn, force_terminal=True, width=120, color_system=None)
    )
    with terminal.bar() as bar:
        bar.stage("merging")
        bar.step(30, 30, "loss 3")
        drawn.truncate(0)
        bar.stage("proving")
    assert "proving" in drawn.getvalue() and "0 s" in drawn.getvalue()
    assert "/?" not in drawn.getvalue() and "100%" not in drawn.getvalue()
    assert not {"30/30", "loss 3", "merging"} & set(
        re.findall(r"30/30|loss 3|merging", drawn.getvalue())
    )


def test_without_a_terminal_a_line_says_how_far_it_is(monkeypatch):
    printed, heard = io.StringIO(), threading.Event()

    class Heard(Console):
        def print(self, *text, **how):
            super().print(*text, **how)
            heard.set()

    monkeypatch.setattr(terminal, "err", Heard(file=printed, width=120))
    monkeypatch.setattr(terminal, "_SILENCE", 0.01)
    with terminal.context() as running:
        running.stage("scoring")
        running.whole(1, 4)
        running.step(3, 40, "loss 2")
        printed.truncate(0)
        heard.clear()
        assert heard.wait(10)  # nothing is done, and yet it speaks
    count = threading.active_count()
    assert "scoring: 3/40, 0 s, about 0 s left here, loss 2" in (printed.getvalue())
    with terminal.context():
        assert threading.active_count() == count + 1


@pytest.mark.parametrize(
    ("step", "parts", "said"),
    [
        ((0, 0), None, "2 min"),
        ((0, 8), None, "0/8, 2 min"),
        ((2, 8), None, "2/8, 2 min, about 6 min left here"),
        ((8, 8), None, "8/8, 2 min"),  # and never that nothing is left, as more may come
        ((8, 8), (0, 5), "8/8, 2 min"),
        ((2, 8), (1, 5), "2/8, 2 min, about 6 min left here, about 58 min left in all"),
    ],
)
def test_what_is_left_is_said_where_it_is_known(step, parts, said, monkeypatch):
    now = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    far = terminal._Far()
    if parts is not None:
        far.whole(0, parts[1])
    now = 900.0
    far.stage("scoring")
    far.step(*step)
    if parts is not None:
        far.whole(*parts)
    now = 1020.0
    assert far.said() == said


def test_a_refit_tells_how_far_it_is(llama_folder, text_file, tmp_path):
    told = []
    prune(
        llama_folder,
        tmp_path / "out",
        CutRequest(plan=uneven_plan(headprune.from_pretrained(llama_folder))),
        refit=DataConfig(source=str(text_file)),
        calibration=CalibrationConfig(seq_len=16, calibration_tokens=512),
        context=Context(step=lambda done, total: told.append((done, total))),
    )
    tensors = len(load_file(tmp_path / "out" / "model.safetensors"))
    # modules to refit, sequences to choose and to report by, tensors to write and to compare
    totals = (tiny.LAYERS, 4, 4, tensors, tensors)
    assert told == [(done, total) for total in totals for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("paths", "names", "pattern"),
    [
        (["m.layers.0.attn", "m.layers.10.attn"], ["0", "10"], "m.layers.*.attn"),
        (
            ["model.encoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"],
            ["encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"],
            "model.*",
        ),
        (["h.0.attn", "h.0.attn.more"], ["attn", "attn.more"], "h.0.*"),
        (["a.b.attn"], ["attn"], "a.b.*"),
        (["attn"], ["attn"], ""),
        (["x.attn", "y.self"], ["x.attn", "y.self"], ""),
        ([], [], ""),
    ],
)
def test_paths_are_shortened_by_what_they_share(paths, names, pattern):
    assert shown.shortened(paths) == (names, pattern)
    if pattern:
        assert [pattern.replace("*", name) for name in names] == paths


@pytest.mark.parametrize(("heads", "short"), [(6, False), (48, True)])
def test_names_of_modules_do_not_break(heads, short):
    paths = [f"vit.encoder.layer.{i}.attention.attention" for i in range(12)]
    part = AttentionPlan(query_heads=heads, kv_heads=heads, keep=tuple(range(heads)))
    drawn = io.StringIO()
    console = Console(file=drawn, width=80)
    shown.show(
        console, records.heads(Plan(unit=Unit.HEAD, attentions=dict.fromkeys(paths, part)), {})
    )
    lines = [line.strip() for line in drawn.getvalue().splitlines() if line.strip()]
    row = f"{11 if short else paths[-1]} +{'■' * heads} +{heads}/{heads}"
    assert sum(re.fullmatch(row, line) is not None for line in lines) == 1, drawn.getvalue()
    assert len(lines) == 2 + 12 + short + 1 and lines[-1] == "■ stays."
    assert ("attention modules: vit.encoder.layer.*.attention.attention" in lines) == short
