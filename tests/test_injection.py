"""What stands in files is never a command: to a terminal, to a CI runner, to a page."""

import io
import json
import re
import shutil
import sys
import warnings

import pytest
from rich.markup import escape

from headprune import terminal
from headprune.commands.command import COMMANDS
from headprune.config import CheckConfig, DataConfig, EvaluateConfig, ScoreConfig, TrainGatesConfig
from headprune.errors import HeadpruneError
from headprune.evaluation.evaluate import evaluate
from headprune.evidence.score import score
from headprune.gates.train_gates import train_gates
from headprune.io.markup import inert, json_safe, printable, sentence, xml_safe
from headprune.planning.choose import CutRequest
from headprune.regression.check import CheckReport, check, update_baseline
from headprune.render.report import report
from headprune.result.card import rewrite_card
from headprune.result.prune import prune
from tests import tiny
from tests.test_cli import printed

# a title, a cleared screen, colours by a C1 control, a line of its own, commands to GitHub Actions
EVIL = "\n::error::x\r\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\n \t::add-mask::x ##[error][/red]`<pwn>|"
START = "::stop-commands::x" + EVIL  # where nothing stands before it
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
MEANT = "::error title=headprune check::"


def assert_inert(text, *meant):
    assert not CONTROLS.search(text), ascii(text)
    for line in text.split("\n"):
        if line not in meant:
            assert not line.lstrip().startswith("::") and "##[" not in line, ascii(text)


def run(capsys, *arguments):
    """As the executable does, with lines as they are."""
    try:
        return printed(capsys, *arguments)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    captured = capsys.readouterr()
    return 1, captured.out, captured.err


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, gates, a cut with its evaluation and its check, scores, a baseline."""
    home = tmp_path_factory.mktemp("place")
    text = home / "text.txt"
    text.write_text(tiny.text(600))
    data = DataConfig(source=str(text))
    base = str(tiny.save(tiny.model("llama-gqa"), home / "base"))
    run = home / "run"
    gates = TrainGatesConfig(target_heads=0.5, steps=2, batch_size=2, seq_len=16)
    train_gates(base, data, run / "gates", gates)
    prune(base, run / "small", CutRequest(gates=run / "gates"))
    measure = EvaluateConfig(seq_len=16, max_windows=8, speed=False)
    evaluate(str(run / "small"), data, measure, against=base).write(run / "report.json")
    score(base, home / "scores", ScoreConfig(criterion=["random"]), None)
    settings = CheckConfig(
        model=base,
        data=str(text),
        limits=("perplexity <= 1", "query_heads == 24"),
        baseline=str(home / "b.json"),
        seq_len=16,
        max_windows=12,
        resamples=1000,
    )
    update_baseline(settings)
    limits = ("perplexity <= 1", "query_heads == 12")
    of_cut = settings.model_copy(update={"model": str(run / "small"), "limits": limits})
    (run / "check.json").write_text(check(of_cut).model_dump_json())
    return home


def poisoned(content, how, keys=()):
    """The content, each time with other texts in it replaced: all below one key, or all keys."""
    for key in keys or content:
        yield {**content, key: _all(content[key], how)}
    yield _keys(content, how)


def _all(content, how):
    if isinstance(content, dict):  # beside a damaged id, no other text would be shown
        return {k: value if k == "id" else _all(value, how) for k, value in content.items()}
    if isinstance(content, list):
        return [_all(value, how) for value in content]
    return f"{how}{content}" if isinstance(content, str) else content


def _keys(content, how):
    if isinstance(content, dict):
        return {f"{how}{key}": _keys(value, how) for key, value in content.items()}
    return content


FILES = {
    "report": ("run/report.json", lambda h: ("report", h / "run", h / "o.html")),
    "manifest": ("run/small/headprune.json", lambda h: ("report", h / "run", h / "o.html")),
    "config": ("base/config.json", lambda h: ("inspect", h / "base")),
    "plan": (
        "run/small/plan.json",
        lambda h: ("prune", h / "base", "--plan", h / "run/small/plan.json", "--dry-run"),
    ),
    "gates": (
        "run/gates/gates.json",
        lambda h: ("prune", h / "base", "--gates", h / "run/gates", "--dry-run"),
    ),
    "checked": ("run/check.json", lambda h: ("report", h / "run", h / "o.html")),
    "baseline": (
        "b.json",
        lambda h: (
            *("check", h / "base", "--data", h / "text.txt", "--baseline", h / "b.json"),
            *(
                "--limit",
                "perplexity <= +2 %",
                "--config",
                "seq_len=16",
                "--config",
                "max_windows=12",
            ),
            *("--config", "resamples=1000"),
        ),
    ),
}
# of what takes long to run
SOME = {"baseline": ("subject", "data", "samples")}


@pytest.mark.parametrize("kind", FILES)
def test_no_text_of_a_file_is_a_command(kind, place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.chdir(tmp_path)
    home = shutil.copytree(place, tmp_path / "home")
    file, arguments = FILES[kind]
    good = json.loads((home / file).read_text())
    said = 0
    for bad in poisoned(good, START, SOME.get(kind, ())):
        (home / file).write_text(json.dumps(bad))
        code, out, err = run(capsys, *arguments(home))
        assert code in (0, 1, 2)
        assert_inert(out + err)
        said += "stop-commands" in out + err
        page = home / "o.html"
        if page.exists():
            said += "stop-commands" in page.read_text()
            assert not CONTROLS.search(page.read_text().replace("\t", " "))
            assert "<pwn" not in page.read_text()
            page.unlink()
    assert said


# --- warnings and bugs


def test_a_warning_is_no_command(capsys):
    def command():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(START, stacklevel=1)

    terminal.run(command)
    captured = capsys.readouterr()
    assert_inert(captured.err)
    assert "warning: ::stop-commands::x ::error::x" in captured.err


def test_a_bug_is_shown_and_is_no_command(place, capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError(START)

    monkeypatch.setattr("headprune.regression.check.check", broken)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, err = run(capsys, *FILES["baseline"][1](place))
    assert (code, out) == (2, "")  # 1 is for broken limits
    meant = [line for line in err.split("\n") if line.startswith(MEANT)]
    assert len(meant) == 1 and "RuntimeError" in meant[0]
    assert "Traceback" in err and "in broken" in err
    assert_inert(err, *meant)
    monkeypatch.setattr("headprune.render.checks.annotation", broken)
    code, _, err = run(capsys, *FILES["baseline"][1](place))  # nothing is left to catch that
    assert code == 1 and "RuntimeError" in err
    assert_inert(err)


def test_on_a_terminal_only_styles_are_left(monkeypatch):
    shown = io.StringIO()
    console = terminal._Console(file=shown, force_terminal=True, width=30)
    console.print(f"[bold]{escape(START)}[/] {escape(EVIL)}")
    console.print("[bold]:[/]:error::x", "#[red]#[/][error]")
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert "\x1b" in shown.getvalue()
    assert_inert(text)
    monkeypatch.setattr(terminal, "err", terminal._Console(file=shown, force_terminal=True))
    with terminal.bar() as bar:
        bar.stage(START)
        bar.step(1, 2, "loss")
    with terminal.context() as running:
        running.stage(START)
        running.line(START)
    for payload in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e"):
        assert payload not in shown.getvalue()


# --- what is written for others


def test_summaries_and_annotations_hold_no_controls(place, tmp_path, capsys, monkeypatch):
    from headprune.commands.check import _notify, _show, _write

    found = CheckReport.model_validate_json((place / "run/check.json").read_text())
    limits = tuple(one.model_copy(update={"limit": START}) for one in found.limits)
    bad = found.model_copy(update={"model": START, "baseline": START, "limits": limits})
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    _write(bad, None, tmp_path / "junit.xml")
    for json_ in (False, True):
        if json_:
            terminal.show_json(COMMANDS["check"].as_json(bad))
        else:
            _show(terminal.out, bad, {})
        _notify(bad, {}, terminal.show_command)
        captured = capsys.readouterr()
        meant = [line for line in captured.err.split("\n") if line.startswith(MEANT)]
        assert len(meant) == 1  # perplexity is above its limit, the heads are as they should be
        assert_inert(captured.err, *meant)
        assert_inert(captured.out)
        assert not CONTROLS.search(meant[0]) and "##[" not in meant[0]
    assert json.loads(captured.out)["model"] == START
    for written in ("summary.md", "junit.xml"):
        text = (tmp_path / written).read_text()
        assert not CONTROLS.search(text.replace("\t", " ")) and "<pwn" not in text


# --- the pieces


def test_json_says_the_same_and_is_safe():
    text = json.dumps({"a": [START, "ä■\U0001f600", "\u2028\ue000"]}, indent=2, ensure_ascii=False)
    assert json.loads(json_safe(text)) == json.loads(text)
    assert_inert(json_safe(text))
    assert "ä■\U0001f600" in json_safe(text)


@pytest.mark.parametrize("text", [EVIL, START, "", "a" * 1_000, "::::", "##[##[", " \n ::x"])
def test_pieces_of_text(text):
    assert_inert(inert(text))
    assert inert(inert(text)) == inert(text)
    assert "\n" not in printable(text)
    assert len(sentence(text)) <= 400 and "\n" not in sentence(text)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", xml_safe(text))


def test_a_refusal_is_one_line(capsys, tmp_path):
    def refuse():
        raise HeadpruneError("asked\n" + "x" * 5_000 + "\ndo this")

    with pytest.raises(SystemExit):
        terminal.run(refuse)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) <= 408 and "asked x" in err and "do this" in err
    path = tmp_path / "r.yaml"
    for content in (b"a: [\n\n\n", b"\xff" * 50_000, b"a: {b: {c: " + b"x" * 9_000):
        path.write_bytes(content)
        code, _, err = run(capsys, "check", "--config", path)
        assert code == 2 and err.count("\n") == 1 and len(err) < 420, err


def test_a_page_holds_no_controls_and_a_card_stays_in_its_blocks(place, tmp_path):
    home = shutil.copytree(place / "run", tmp_path / "run")
    path = home / "small/plan.json"
    plan = json.loads(path.read_text())
    fence = f"\n```\n<script>{EVIL}\ud800"[:-1]
    plan["attentions"] = {f"```{fence}{n}": part for n, part in plan["attentions"].items()}
    path.write_text(json.dumps(plan))
    page = report([home], tmp_path / "page.html").output.read_text()
    rewrite_card(home / "small")
    card = (home / "small" / "README.md").read_text()
    for text in (page, card):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    block = re.search(r"^```text\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    assert block is not None and len(block[1].splitlines()) == len(plan["attentions"])
