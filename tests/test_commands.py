"""Every command is one typed function: the command line, the Python API and the reference."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub.utils.tqdm import are_progress_bars_disabled as downloads_hidden
from transformers.utils import logging

import headprune
from headprune import command_line
from headprune.commands.command import _recorded, all_commands, named
from headprune.config import stages
from headprune.config.base import Settings, flag
from headprune.context import Context
from headprune.errors import HeadpruneError
from tests import tiny
from tests.test_cli import refuses, run, succeeds

pytestmark = pytest.mark.quick
COMMANDS = all_commands()
ALL = list(COMMANDS)


def at_the_command_line(name):
    command = command_line.at_the_command_line(COMMANDS[name])
    return {parameter.name: parameter for parameter in command.params}


def test_there_are_few_commands_and_few_options():
    counts = {
        name: sum(p.param_type_name == "option" for p in at_the_command_line(name).values()) - 1
        if "help" in at_the_command_line(name)
        else sum(p.param_type_name == "option" for p in at_the_command_line(name).values())
        for name in ALL
    }
    assert len(counts) == 19
    assert max(counts.values()) <= 20, counts
    assert sum(counts.values()) <= 173, counts


@pytest.mark.parametrize("name", ALL)
def test_a_command_is_its_function(name):
    command, words = COMMANDS[name], at_the_command_line(name)
    assert getattr(headprune, name.replace("-", "_")) is command.run
    described = {flag(option) for option in command.options()}
    spelt = [o for p in words.values() if p.param_type_name == "option" for o in p.opts]
    assert len(spelt) == len(set(spelt))
    assert set(spelt) - {"--json", "--config", "--help"} == {d for d in described if d[0] == "-"}
    for option, (parameter, info) in command.options().items():
        default = parameter.default
        if default is inspect.Parameter.empty:
            assert words[option].required, option
        else:
            shown = words[option].default
            shown = tuple(shown or ()) if isinstance(default, tuple) else shown
            assert shown == default or str(shown) == str(default), option
        assert (info.help or "").endswith((".", ")")), option
    assert inspect.getdoc(command.run)


SETTINGS = {
    "score": stages.ScoreConfig,
    "train-gates": stages.TrainGatesConfig,
    "convert-gqa": stages.ConvertConfig,
    "convert-mla": stages.LatentConfig,
    "convert-swa": stages.SwaConfig,
    "compress": stages.CompressConfig,
    "heal": stages.HealConfig,
    "evaluate": stages.EvaluateConfig,
    "roles": stages.RolesConfig,
    "check": stages.CheckConfig,
    "export": stages.ExportConfig,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_command_has_the_defaults_of_its_settings(name):
    fields = SETTINGS[name].model_fields
    shared = COMMANDS[name].parameters().keys() & fields.keys()
    assert len(shared) >= 4
    of_form = {"calibration_tokens", "seq_len"} if name == "score" else set()
    for setting in shared - {"criterion"} - of_form:
        default, info = COMMANDS[name].parameters()[setting].default, fields[setting]
        if not info.is_required() and default != ():
            assert default == getattr(info.default, "value", info.default), setting


def kinds(of=Settings):
    ours = [each for each in of.__subclasses__() if each.__module__.startswith("headprune.")]
    return [each for kind in ours for each in (kind, *kinds(kind))]


# commands that are not in the table above; a split is written behind the place of data: DATA@SPLIT
OTHERS = {
    "PlanConfig": ("prune", "compress"),
    "WindowConfig": ("score",),
    "CutRequest": ("prune", "compress"),
    "Writing": ("prune",),
    "CalibrationConfig": ("prune",),
    "ExportConfig": ("export", "pad"),
    "Resuming": ("heal", "train-gates"),
    "NeedleConfig": ("evaluate", "check"),
    "DataConfig": ("heal", "train-gates"),
    "Domain": ("heal", "train-gates"),
}
WITHIN_DATA = {"DataConfig": {"source", "split"}, "Domain": {"name", "source", "split"}}


@pytest.mark.parametrize("kind", [each for each in kinds() if each.__name__[0] != "_"])
def test_every_setting_is_reachable_from_its_command(kind):
    named = [name for name, each in SETTINGS.items() if each is kind]
    commands = [COMMANDS[name] for name in OTHERS.get(kind.__name__, named)]
    assert commands, f"no command is known for {kind.__name__}"
    reached = {name for command in commands for name in command.parameters()}
    fields = kind.model_fields.keys() - WITHIN_DATA.get(kind.__name__, set())
    assert fields <= reached
    assert not {*fields, "another"} <= reached


class Built(Exception):
    """Carries what a command makes settings of."""


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, each) for name in sorted(SETTINGS) for each in SETTINGS[name].model_fields],
)
def test_every_setting_reaches_its_field(name, setting, monkeypatch):
    command = COMMANDS[name]
    if setting not in command.parameters():  # of another command as well
        assert (name, setting) == ("export", "multiple_of")
        return
    function = inspect.unwrap(command.run)

    def spy(kind, call=None, **values):
        values = {n: v for n, v in (call or {}).items() if n in kind.model_fields} | values
        if kind is SETTINGS[name]:
            raise Built(values)
        return kind.model_construct(**values)

    monkeypatch.setitem(function.__globals__, "build", spy)
    value = object()
    if setting in ("keep", "targets", "calibration_tokens", "held_out_tokens", "heal_steps"):
        value = {"keep": (0.5,), "targets": ("vllm",)}.get(setting, 77)
    given = {n: "x" for n, p in command.parameters().items() if p.default is p.empty}
    given |= {"to": "gguf"} if name == "export" else {}
    with pytest.raises(Built) as built:
        function(**{"output": "x", **given, setting: value})
    (values,) = built.value.args
    assert values[setting] == (value[0] if setting == "keep" else value)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("evaluate", "speed", False),
        ("evaluate", "last_words", 0),
        ("evaluate", "decode_batches", ()),
        ("train-gates", "sinks", 0),
        ("heal", "bf16", False),
        ("prune", "seed", 0),
        ("prune", "keep", 0),
    ],
)
def test_what_was_switched_off_is_recorded(name, setting, value):
    command = COMMANDS[name]
    required = {n: "x" for n, p in command.parameters().items() if p.default is p.empty}
    required |= {"steps": 3} if name == "heal" else {}
    values = command.arguments(required) | {setting: value}
    recorded = _recorded(command, values)
    assert setting in recorded and not recorded[setting]
    assert type(recorded[setting]) is (list if value == () else type(value))
    assert "trust_remote_code" not in recorded  # by default


WRONG = """
import headprune

headprune.prune("m", nonsense=3)
headprune.prune("m", "o", layout="uniformly")
headprune.score("m", "o", criterion=3)
headprune.score("m")
headprune.train_gates("m", "o", data="d", steps="many")
headprune.heal("m", "o", data="d", steps=3)
headprune.compress("m", "o", keep=[None])
headprune.evaluate("m", data=3)
headprune.verify("f", "g")
headprune.export("m", "o", to="gguf", out_dtype="int3")
"""


@pytest.mark.process
def test_a_type_checker_refuses_wrong_calls_and_no_right_ones(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(WRONG + 'headprune.prune("m", "o", gates="g", keep=0.5)\n')
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", file.name]
    source = Path(headprune.__file__).parents[1]
    done = subprocess.run(
        [*words, "--follow-imports=silent", "--ignore-missing-imports"],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": "", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"^calls\.py:(\d+): error", done.stdout, re.MULTILINE)
    wanted = [n for n, line in enumerate(WRONG.splitlines(), 1) if line.startswith("headprune.")]
    assert sorted({int(line) for line in lines}) == wanted, done.stdout


def test_a_file_has_settings_and_the_command_line_wins(tmp_path, capsys):
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    file = tmp_path / "settings.yaml"
    file.write_text(f"{{model: {model}, criterion: random, output: {tmp_path}/a, seed: 4}}")
    line = f"score --config {file} --criterion magnitude --config seed=3 --json"
    out = succeeds(capsys, *line.split())
    found = json.loads(out)
    assert (list(found["scores"]), found["calibration"]["seed"]) == (["magnitude"], 3)
    for text, message in (
        ("criterio: random", "score has no option 'criterio'. Did you mean 'criterion'"),
        ("trust_remote_code: true", "A file cannot allow code"),
        ("seq_len: true", "--seq-len: give a number, not true or false"),
        ("batch_size: true", "batch_size: Value error, give a number"),
        ("just text", "holds no options"),
    ):
        file.write_text(text)
        said = message.replace("Value error, ", "")
        refuses(capsys, said, "score", "m", tmp_path / "b", "--config", file)
    refuses(capsys, "there is no file", "score", "m", "o", "--config", tmp_path / "none.yaml")
    long = f"criterion={'x' * 300}"
    refuses(capsys, "'xxx", "score", model, tmp_path / "b", "--config", long)
    near = "compress has no option 'heal'. Did you mean 'heal_steps'?"
    refuses(capsys, near, "compress", "m", tmp_path / "b", "--config", "heal=3")
    near = "compress has no option 'for'. Did you mean 'targets'?"
    refuses(capsys, near, "compress", "m", tmp_path / "b", "--config", "for=anywhere")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *[("2", 2), ("4,4,2", (4, 4, 2)), ("[4, 2]", (4, 2)), ([4, 2], (4, 2))],
        ("16, " * 99 + "8", (*[16] * 99, 8)),  # longer than the name of any file
    ],
)
def test_a_value_is_the_same_as_text_and_as_itself(given, wanted):
    command = COMMANDS["convert-gqa"]
    for value in (given, [given] if isinstance(given, str) else given):
        read = command.arguments({"model": "m", "kv_heads": value})["kv_heads"]
        assert (tuple(read) if isinstance(read, list) else read) == wanted
    with pytest.raises(HeadpruneError, match="--kv-heads: "):
        headprune.convert_gqa("m", Path("o"), kv_heads="4,x")


def test_wrong_values_from_python_are_told_in_a_sentence():
    with pytest.raises(HeadpruneError, match="--layout: Input should be 'per-layer', "):
        headprune.prune(".", Path("o"), layout="x")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(HeadpruneError, match="exactly one of --target-heads and --l0-penalty"):
        headprune.train_gates(".", Path("o"), data="d")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        headprune.inspect(".", nonsense=1)  # type: ignore[call-arg]  # on purpose


def test_errors_name_settings_as_the_command_takes_them():
    said = "{}, a smaller {} or --keep 0.5; see 'headprune score M --seq-len 8'."
    elsewhere = said.format("Give --text-column SOURCE,TARGET", "--seq-len")
    here = said.format("Give --config text_column=SOURCE,TARGET", "seq_len")
    assert named("compress").respell(elsewhere) == here
    assert named("score").respell(elsewhere) == elsewhere


def test_python_is_told_what_happens(tmp_path):
    stages = []
    (tmp_path / "text.txt").write_text(tiny.text(100))
    with pytest.raises(HeadpruneError):
        headprune.evaluate(
            tmp_path, data=tmp_path / "text.txt", context=Context(stage=stages.append)
        )
    assert stages == ["evaluating"]


def test_bars_of_transformers_are_hidden_and_come_back(tmp_path):
    tiny.save(tiny.model("llama-mha"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(2_000))
    hidden = []
    logging.enable_progress_bar()
    try:

        def stage(what):
            hidden.append(not logging.is_progress_bar_enabled() and not downloads_hidden())

        context = Context(stage=stage)
        settings = {"data": tmp_path / "text.txt", "seq_len": 16, "calibration_tokens": 256}
        headprune.score(tmp_path / "model", tmp_path / "scores", context=context, **settings)
        assert hidden and all(hidden) and logging.is_progress_bar_enabled()
    finally:
        logging.disable_progress_bar()


NEEDS = [
    pytest.param(name, setting, others, id=f"{name}-{setting}")
    for name, command in COMMANDS.items()
    for setting, others in sorted((command.needs or {}).items())
]
VALUES = {"keep": 0.5, "criterion": "fisher", "learning_rate": 1e-3}
VALUES |= {
    "roles": "r",
    "train": "lora",
    "bf16": False,
    "keep_roles": ["induction"],
    "needle_lengths": [64],
}
VALUES |= {
    "data": "d",
    "device": "cpu",
    "decode_batches": [2],
    "save_plan": "p",
    "text_column": "t",
    "label_column": "l",
    "criterion": "fisher",
    "attention": "self",
}


@pytest.mark.parametrize(("name", "setting", "others"), NEEDS)
def test_an_option_without_effect_is_refused(name, setting, others):
    command = COMMANDS[name]
    parameters = command.parameters()
    required = {n: "7" for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    flags = {"latent", "dry_run", "needle", "update_baseline"}
    value = VALUES.get(setting, setting in flags or 7)
    value = "all" if (name, setting) == ("train-gates", "train") else value
    unset = {"speed": {"speed": False}, "form=removed": {"form": "window"}}
    idle = required | {setting: value} | unset.get(others, {})
    with pytest.raises(HeadpruneError, match=f"{setting}|{flag(setting)}.* has no effect without"):
        command.arguments(idle)
    for other in others.split("|"):
        option, _, named = other.partition("=")
        given = {option: named or (True if other in flags | {"speed"} else "7")}
        given |= {"scores": "s"} if other == "keep_roles" else {}
        given |= {"calibrate": "text.txt", "data": "d"} if other == "heal_steps" else {}
        given |= {"data": "d"} if other == "latent" else {}
        command.arguments(required | {setting: value} | given)


@pytest.mark.parametrize("name", ALL)
def test_help_brackets_only_what_may_be_left_out(name, capsys):
    code, out, _ = run(capsys, name, "--help")
    usage = re.search(rf"Usage: .*{name} \[OPTIONS\](.*)", out)
    assert code == 0 and usage is not None
    optional = name in ("prune", "convert-gqa", "compress", "evaluate", "check")
    assert ("[OUTPUT]" in usage[1]) == optional
    assert "{" not in usage[1]


@pytest.mark.process
@pytest.mark.parametrize("words", [["--help"], ["prune", "--help"]])
def test_help_that_nobody_reads_to_its_end_is_no_error(words):
    shown = subprocess.Popen(
        [sys.executable, "-m", "headprune", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert shown.stdout is not None and shown.stderr is not None
    shown.stdout.close()
    err = shown.stderr.read()
    shown.stderr.close()
    assert (shown.wait(), err) == (0, b"")


def test_the_reference_shows_every_option(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts" / "docs")
    import command_pages

    for command in COMMANDS.values():
        page = command_pages.page(command.name)
        for name, parameter in command.parameters().items():
            default = parameter.default
            if name in command.options() and flag(name)[0] == "-":
                assert f"`{flag(name)}`{{ .option }}" in page, name
            if default not in (None, (), False, inspect.Parameter.empty):
                assert str(default if not isinstance(default, tuple) else default[0]) in page, name


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_file_of_configs_has_options_of_the_command_that_it_names(file):
    text = file.read_text(encoding="utf-8")
    (name,) = set(re.findall(rf"headprune ([a-z-]+) .*--config configs/{file.name}", text))
    command = COMMANDS[name]
    settings = command_line.settings_in(file, command)
    assert settings == yaml.safe_load(text)
    required = {
        n: "x" for n, p in command.parameters().items() if p.default is inspect.Parameter.empty
    }
    command.arguments({**required, "calibrate": "x", "data": "x", **settings})
