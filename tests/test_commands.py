"""What every command promises: one declaration, the same through every door."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import headprune
from headprune.cli import app as cli
from headprune.cli.adapter import values_of
from headprune.cli.settings import read_settings
from headprune.context import Context
from headprune.declaration import COMMANDS, Command, Door, Panel, appearance, build, flags
from headprune.errors import HeadpruneError
from tests import tiny
from tests.test_cli import run

pytestmark = pytest.mark.quick
ALL = list(COMMANDS)


def at_the_command_line(name: str) -> dict[str, Any]:
    (info,) = (c for c in cli.app.registered_commands if c.name == name)
    command = typer.main.get_command_from_info(
        info, pretty_exceptions_short=True, rich_markup_mode=None
    )
    return {parameter.name: parameter for parameter in command.params}


@pytest.mark.parametrize("name", ALL)
def test_defaults_are_the_same_through_every_door(name: str) -> None:
    command, words = COMMANDS[name], at_the_command_line(name)
    parameters = command.signature().parameters
    for setting, info in command.options.model_fields.items():
        by_python = parameters[setting].default
        if info.is_required():
            assert by_python is inspect.Parameter.empty, setting
            continue
        assert by_python == info.default, setting
        shown = words[setting].default
        if isinstance(info.default, tuple):
            shown = tuple(shown or ()) if isinstance(shown, list) or not shown else shown
            if appearance(info).as_text:
                shown = build(command.options, {**needed(command), setting: shown})
                shown = getattr(shown, setting)
        assert shown == info.default, setting


def needed(command: Command[Any, Any]) -> dict[str, Any]:
    """Values without which a command cannot be asked for."""
    usual = {"steps": 1, "runs": ["run"], "kv_heads": 1, "target_heads": 0.5, "max_params": 1}
    fields = command.options.model_fields
    given = {name: "x" for name, info in fields.items() if info.is_required()}
    return {**given, **{name: value for name, value in usual.items() if name in fields}}


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_described_and_has_its_own_flag(name: str) -> None:
    fields = COMMANDS[name].options.model_fields
    spelt = [flag for setting, info in fields.items() for flag in flags(setting, info)]
    assert len(spelt) == len(set(spelt))
    assert all(
        (info.description or "").rstrip("\"'").endswith((".", ")")) for info in fields.values()
    )
    shown_first = [info for info in fields.values() if appearance(info).panel is Panel.MAIN]
    assert len(shown_first) <= 10
    assert inspect.getdoc(COMMANDS[name].options)


@pytest.mark.parametrize("name", ALL)
def test_a_misspelt_setting_is_named_through_every_door(name: str, tmp_path: Path) -> None:
    command = COMMANDS[name]
    setting = next(iter(command.options.model_fields))
    wrong = setting + "x"
    message = f"no setting '{wrong}'. Did you mean"
    with pytest.raises(HeadpruneError, match=message):
        getattr(headprune, command.section)(**{**needed(command), wrong: 1})
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: {{{wrong}: 1}}")
    with pytest.raises(HeadpruneError, match=message):
        read_settings(file, command)


def test_a_file_has_settings_and_the_command_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    file = tmp_path / "settings.yaml"
    file.write_text(f"score: {{model: {tmp_path}/model, criterion: random, output: {tmp_path}/a}}")
    code, out, err = run(
        capsys, "score", "--config", file, "--criterion", "magnitude", "--seed", 3, "--json"
    )
    assert code == 0, err
    assert list(json.loads(out)["scores"]) == ["magnitude"]
    file.write_text("score: {model: [1]}")
    code, _, err = run(capsys, "score", "--config", file)
    assert (code, "MODEL]: Input should be a valid string (got [1])" in err) == (2, True), err


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_file_of_configs_has_settings_of_the_commands_that_it_names(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    named = re.findall(
        rf"^#   headprune ([a-z-]+) --config configs/{file.name}", text, re.MULTILINE
    )
    sections = yaml.safe_load(text)
    assert list(sections) == list(dict.fromkeys(COMMANDS[name].section for name in named))
    for name in named:
        COMMANDS[name].asked(read_settings(file, COMMANDS[name]), Door.OPTION)
    file_with_a_mistake = {**sections[COMMANDS[named[0]].section], "no_such_setting": 1}
    with pytest.raises(HeadpruneError, match="no_such_setting"):
        COMMANDS[named[0]].asked(file_with_a_mistake, Door.OPTION)


@pytest.mark.parametrize(
    ("setting", "given", "read"),
    [
        ("kv_heads", "2", 2),
        ("kv_heads", "4,4,2", (4, 4, 2)),
        ("kv_heads", "[4, 2]", (4, 2)),
        ("kv_heads", [4, 2], (4, 2)),
    ],
)
def test_a_value_is_the_same_as_text_and_as_itself(setting: str, given: Any, read: Any) -> None:
    options = COMMANDS["convert-gqa"].options
    made = build(options, {"model": "m", "output": Path("o"), setting: given})
    assert getattr(made, setting) == read
    with pytest.raises(HeadpruneError, match="--kv-heads: "):
        build(options, {"model": "m", "output": "o", setting: "4,x"})


@pytest.mark.parametrize("name", ALL)
def test_true_is_no_number(name: str) -> None:
    command = COMMANDS[name]
    for setting, info in command.options.model_fields.items():
        if info.annotation is not bool:
            with pytest.raises(HeadpruneError, match=f"^{setting}: "):
                build(command.options, {**needed(command), setting: True}, Door.KEY)


def test_an_error_names_the_setting_as_its_door_calls_it() -> None:
    options = COMMANDS["prune"].options
    said = "cut with --refit DATA, or --keep less; --nothing is meant by --other"
    assert Door.OPTION.translate(said, options) == said
    for door in (Door.KEY, Door.ARGUMENT):
        told = door.translate(said, options)
        assert told == "cut with refit DATA, or keep less; --nothing is meant by --other"


def test_a_flag_that_is_no_name_leads_to_the_setting() -> None:
    with pytest.raises(HeadpruneError, match="no setting 'heal'. It is called 'heal_steps'"):
        headprune.convert_gqa("m", "o", heal=2)


def test_what_is_required_may_come_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"inspect: {{model: {tmp_path}/none}}")
    code, _, err = run(capsys, "inspect", "--config", file)
    assert (code, f"There is no folder '{tmp_path}/none'" in err) == (2, True), err
    code, _, err = run(capsys, "inspect")
    assert (code, "MODEL is missing: give it, or 'model' in the file of --config" in err) == (
        2,
        True,
    )


def test_python_is_told_what_happens(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(HeadpruneError):
        headprune.verify(tmp_path / "nowhere", context=Context(stage=stages.append))
    with pytest.raises(HeadpruneError, match="3 arguments without a name"):
        headprune.verify("a", "b", "c")


def test_a_file_cannot_allow_code(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("prune: {trust_remote_code: true}")
    with pytest.raises(HeadpruneError, match="A file cannot allow code"):
        read_settings(file, COMMANDS["prune"])


NEEDS = [
    pytest.param(name, setting, conditions, id=f"{name}-{setting}")
    for name, command in COMMANDS.items()
    for setting, conditions in sorted(command.needs.items())
]
INSTEAD = {"target_heads": {"l0_penalty": "1"}}  # one of both is needed


def some_value(command: Command[Any, Any], setting: str) -> str:
    info = command.options.model_fields[setting]
    for text in (*values_of(info)[::-1], "16", "0.5", str(not info.default).lower()):
        with suppress(HeadpruneError):
            build(command.options, {**needed(command), setting: text})
            return text
    raise AssertionError(setting)


def set_to(command: Command[Any, Any], values: dict[str, Any], condition: str, hold: bool) -> None:
    """Changes values so that a condition of ``needs`` holds, or does not."""
    name, _, wanted = condition.removeprefix("!").partition("=")
    info = command.options.model_fields[name]
    if hold != condition.startswith("!"):
        if info.annotation is bool and info.default:
            values.pop(name, None)
        elif name not in values or wanted:
            values[name] = wanted or some_value(command, name)
            for clause in filter(None, command.needs.get(name, "").split(" & ")):
                set_to(command, values, clause.split(" | ")[0], hold=True)
    elif wanted and str(getattr(info.default, "value", info.default)) == wanted:
        others = [value for value in values_of(info) if value != wanted]
        values[name] = others[0] if others else "16"
    elif not wanted and info.annotation is bool and info.default:
        values[name] = "false"
    elif not info.is_required():
        values.pop(name, None)
        values.update(INSTEAD.get(name, {}))


def words_of(command: Command[Any, Any], values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        info = command.options.model_fields[name]
        if appearance(info).positional:
            words += value if isinstance(value, list) else [str(value)]
        elif info.annotation is bool:
            words.append(flags(name, info)[-1 if str(value).lower() == "false" else 0])
        else:
            words += [flags(name, info)[0], str(value)]
    return words


@pytest.mark.parametrize(("name", "setting", "conditions"), NEEDS)
def test_an_option_without_effect_is_refused(
    name: str,
    setting: str,
    conditions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a refused check writes the JUnit file of its name
    command = COMMANDS[name]
    value = some_value(command, setting)
    spelt = Door.OPTION.spell(setting, command.options)
    clauses = [clause.split(" | ") for clause in conditions.split(" & ")]
    for broken in clauses:
        values = needed(command) | {setting: value}
        for clause in clauses:
            for one in clause if clause is broken else clause[-1:]:
                set_to(command, values, one, hold=clause is not broken)
        code, out, err = run(capsys, name, *words_of(command, values))
        assert code == 2 and not out, err
        assert f"error: {spelt}" in err or f"and {spelt} have" in err, err
        assert "no effect with" in err and "leave" in err, err
    for turn in range(max(map(len, clauses))):
        values = needed(command) | {setting: value}
        for clause in clauses:
            set_to(command, values, clause[turn % len(clause)], hold=True)
        command.asked(values, Door.ARGUMENT)


def test_what_was_not_set_needs_nothing() -> None:
    evaluate = COMMANDS["evaluate"]
    base = {"model": "m", "data": "d"}
    evaluate.asked({**base, "needle": False, "needle_lengths": ()}, Door.ARGUMENT)
    message = "needle_lengths and needle_trials have no effect without needle: give that too"
    with pytest.raises(HeadpruneError, match=message):
        evaluate.asked({**base, "needle_lengths": (16,), "needle_trials": 4}, Door.ARGUMENT)


def test_an_argument_is_given_once() -> None:
    with pytest.raises(HeadpruneError, match="inspect: model was given twice"):
        headprune.inspect("a", model="/other")


@pytest.mark.parametrize("name", ALL)
def test_help_brackets_only_what_may_be_left_out(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = COMMANDS[name].options.model_fields.values()
    arguments = [str(appearance(info).metavar) for info in fields if appearance(info).positional]
    code, out, _ = run(capsys, name, "--help")
    usage = re.search(rf"Usage: .*{name} (.*)", out)
    assert code == 0 and usage is not None
    assert sorted(usage[1].split()) == sorted(["[OPTIONS]", *arguments])
    optional = [metavar for metavar in arguments if metavar.startswith("[")]
    assert optional == (["[MODEL]"] if name == "score" else [])


@pytest.mark.process
@pytest.mark.parametrize("words", [["--help"], ["prune", "--help"]])
def test_help_that_nobody_reads_to_its_end_is_no_error(words: list[str]) -> None:
    shown = subprocess.Popen(
        [sys.executable, "-m", "headprune", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert shown.stdout is not None and shown.stderr is not None
    shown.stdout.close()
    err = shown.stderr.read()
    shown.stderr.close()
    assert (shown.wait(), err) == (0, b"")
