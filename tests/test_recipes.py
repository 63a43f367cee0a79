"""Recipes: the whole job, cached, resumed, refused; and every recipe that is shipped."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from headprune import from_pretrained
from headprune.config import DataConfig
from headprune.data import sources
from headprune.data.sources import digest_of_data, read_examples
from headprune.declaration import COMMANDS, Context, build
from headprune.errors import FamilyError, HeadpruneError, HeadpruneWarning, RecipeError
from headprune.estimates import Sizes
from headprune.exporting.prune import prune
from headprune.planning.from_evidence import CutRequest
from headprune.recipes import run as recipes_run
from headprune.recipes import sizes
from headprune.recipes.forecast import forecast
from headprune.recipes.init import Answers, init
from headprune.recipes.reading import read_recipe
from headprune.recipes.recipe import options_of
from headprune.recipes.run import look
from headprune.recipes.run import run as run_recipe
from headprune.recipes.steps import kinds
from headprune.schemas import runs
from headprune.schemas.runs import RunRecord
from tests import forked, tiny
from tests.cutting import uneven_plan
from tests.marks import slow_unless
from tests.test_cli import headprune, run

SMALL = {"batch_size": 2, "seq_len": 16}
EVERYTHING = ["train-gates", "prune", "convert-gqa", "heal", "evaluate"]
CI_CHECK = Path("configs/ci-check.yaml")  # the one that is no recipe
CONFIGS = sorted(set(Path("configs").glob("*.yaml")) - {CI_CHECK})
RUN_AT_ONCE = {"demo", "llama2-7b-gqa8"}  # the others by make test-all


def write_job(folder: Path, model: Path, text: Path) -> Path:
    """A recipe of five steps."""
    content = {
        "model": str(model),
        "output": str(folder / "out"),
        "data": {"train": str(text), "test": str(text)},
        "steps": {
            "train-gates": {"target_heads": 0.5, "steps": 4, **SMALL},
            "prune": {"layout": "uniform"},
            "convert-gqa": {"kv_heads": 1, "merge": "mean"},
            "heal": {"steps": 12, "save_every": 2, **SMALL},
            "evaluate": {"speed": False, **SMALL},
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def job(llama_folder: Path, text_file: Path, tmp_path: Path) -> Path:
    """The recipe for a tiny Llama."""
    return write_job(tmp_path, llama_folder, text_file)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of that recipe, made once."""
    folder = tmp_path_factory.mktemp("finished")
    tiny.save(tiny.model("llama-gqa"), folder / "llama")
    (folder / "text.txt").write_text(tiny.text(2_000))
    path = write_job(folder, folder / "llama", folder / "text.txt")
    assert did(path) == EVERYTHING
    return folder / "out"


@pytest.fixture
def done_job(job: Path, finished: Path, tmp_path: Path) -> Path:
    """The recipe when it has run; the same model and text lie elsewhere now, which is no change."""
    shutil.copytree(finished, tmp_path / "out")
    return job


def did(path: Path, *overrides: str) -> list[str]:
    """Runs a recipe; the steps that were not there already."""
    done = run_recipe(read_recipe(path, overrides))
    return [name for name in done.record.steps if name not in done.cached]


@pytest.mark.quick
def test_a_step_has_the_settings_of_its_command() -> None:
    assert set(kinds()) == {name for name, command in COMMANDS.items() if command.step}
    for name, kind in kinds().items():
        ours, theirs = set(kind.model_fields) - {"step"}, set(COMMANDS[name].options.model_fields)
        assert ours < theirs, name  # without what the recipe itself says, such as the output
        assert not ours & {"output", "overwrite", "trust_remote_code", "split"}, name


@pytest.mark.slow
def test_only_what_changed_runs_again(done_job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = json.loads((out / "heal" / "headprune.json").read_text())
    assert [step["query_heads"] for step in manifest["lineage"]] == [[24, 16], [16, 16]]
    report = json.loads((out / "evaluate" / "report.json").read_text())
    assert report["against"]["cost"]["query_heads"] == 24
    assert not (out / ".partial").exists()
    lock = (out / "requirements.lock").read_text().splitlines()
    assert any(line.startswith("torch==") for line in lock)
    assert any(line.startswith("headprune==") for line in lock)

    assert did(done_job) == []
    assert did(out / "recipe.yaml") == []  # all settings, and the same recipe
    assert did(done_job, "steps.evaluate.seq_len=32") == ["evaluate"]
    more = ["steps.heal.steps=3", "steps.evaluate.seq_len=32"]
    assert did(done_job, *more) == ["heal", "evaluate"]
    # other gates of the same settings but one come out the same, so that what stands on them stays
    did(done_job, *more, "steps.train-gates.save_every=1")
    assert did(done_job, *more, "steps.train-gates.save_every=2") == ["train-gates"]
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("w1 ", "w2 "))
    again = did(done_job, *more, "steps.train-gates.save_every=2")
    assert (again[0], again[-2:]) == ("train-gates", ["heal", "evaluate"])


def test_a_changed_or_missing_output_is_noticed(done_job: Path, tmp_path: Path) -> None:
    model = tmp_path / "out" / "prune" / "model.safetensors"
    good, times = model.read_bytes(), model.stat()
    model.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a failing disk leaves it
    outlook = forecast(read_recipe(done_job)).steps[1]
    assert (outlook.cached, outlook.why) == (False, "its output: model.safetensors was changed")
    assert did(done_job) == ["prune"]  # made again, the same, so that the rest still stands
    assert model.read_bytes() == good
    (tmp_path / "out" / "evaluate" / "report.json").unlink()
    assert did(done_job) == ["evaluate"]
    (tmp_path / "out" / "evaluate" / "mine.txt").write_text("x")
    assert "mine.txt was added" in forecast(read_recipe(done_job)).steps[-1].why
    with pytest.raises(HeadpruneError, match=r"'mine\.txt' in"):
        did(done_job)
    assert (tmp_path / "out" / "evaluate" / "mine.txt").read_text() == "x"


def killing(path: Path, step: str, after: int) -> None:
    """Runs a recipe, and dies after so many updates of a training."""
    names: list[str] = []

    def progress(done: int, total: int, numbers: str = "") -> None:
        if names[-1] == step and done == after:
            os.kill(os.getpid(), signal.SIGKILL)

    def stage(what: str) -> None:
        names.append(what.partition(":")[0])

    run_recipe(read_recipe(path), Context(stage=stage, step=progress))


def killed_in(path: Path, step: str, after: int) -> None:
    """Runs a recipe in another process, which is killed."""
    assert forked.call(killing, path, step, after) == -signal.SIGKILL


@pytest.mark.process
def test_a_run_that_is_killed_twice_ends_the_same(
    job: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed_in(job, "train-gates", after=3)
    assert (out / ".partial" / "train-gates-checkpoints" / "checkpoints").is_dir()
    assert not (out / "train-gates").exists()
    killed_in(job, "heal", after=7)
    record = json.loads((out / "run.json").read_text())["steps"]
    assert list(record) == ["train-gates", "prune", "convert-gqa", "heal"]
    assert record["heal"]["seconds"] is None
    assert not (out / "heal").exists()
    assert forecast(read_recipe(job)).steps[3].why == "was interrupted"

    assert did(job) == ["heal", "evaluate"]
    for name, count in (("train-gates/history.jsonl", 4), ("heal/heal.jsonl", 12)):
        steps = [json.loads(line)["step"] for line in (out / name).read_text().splitlines()]
        assert steps == list(range(1, count + 1))
    ours, unbroken = (load_file(f / "heal" / "model.safetensors") for f in (out, finished))
    assert ours.keys() == unbroken.keys()
    assert all(torch.equal(ours[name], unbroken[name]) for name in ours)
    # and they would differ, had it not gone on from where it was
    other = load_file(out / "convert-gqa" / "model.safetensors")
    assert not all(torch.equal(ours[name], other[name]) for name in ours)


def test_an_interrupted_step_with_other_settings_starts_anew(
    done_job: Path, tmp_path: Path
) -> None:
    """What a kill left is of no use to a step with other inputs, and does not stand in its way."""
    out = tmp_path / "out"
    record = json.loads((out / "run.json").read_text())
    record["steps"]["heal"] |= {"seconds": None, "files": {}}
    (out / "run.json").write_text(json.dumps(record))
    left = out / ".partial" / "heal-checkpoints"
    left.mkdir(parents=True)
    (left / "config.yaml").write_text("model: another")
    assert did(done_job, "steps.heal.steps=3") == ["heal", "evaluate"]
    assert not (out / ".partial").exists()


def test_dry_run_counts_and_writes_nothing(
    job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, text, err = run(capsys, "run", job, "--dry-run", "--json")
    assert code == 0, err
    assert not (tmp_path / "out").exists()
    ahead = json.loads(text)
    assert [s["cached"] for s in ahead["steps"]] == [False] * 5
    assert ahead["steps"][1]["why"] == "takes the gates of 'train-gates'"
    built = tiny.model("llama-gqa")
    assert f"{built.num_parameters():,} parameters" in ahead["rule"]
    prune = ahead["steps"][1]["estimate"]
    assert prune["disk_bytes"] == 4 * built.num_parameters()
    assert all(s["estimate"]["seconds"] > 0 for s in ahead["steps"])

    monkeypatch.setattr(sizes, "_flops", lambda device: 1e9)  # whatever this machine reaches

    def seconds(*overrides: str) -> float:
        (gates, *_) = forecast(read_recipe(job, overrides)).steps
        assert gates.estimate.seconds is not None
        return gates.estimate.seconds

    assert seconds("steps.train-gates.steps=400000") > 10 * seconds()

    def evaluating(**settings: int) -> float:
        sets = [f"steps.evaluate.{name}={value}" for name, value in settings.items()]
        evaluate = forecast(read_recipe(job, ["steps.evaluate.max_windows=1", *sets])).steps[-1]
        assert evaluate.estimate.seconds is not None
        return evaluate.estimate.seconds

    neither = evaluating(last_words=0, copying=0)
    assert neither < evaluating(last_words=0, copying=9) < evaluating(last_words=9, copying=9)
    code, text, err = run(capsys, "run", job, "--dry-run")
    assert (code, "Nothing was run" in text) == (0, True), err


def test_a_model_of_images_has_an_estimate(tmp_path: Path) -> None:
    path, folder = tmp_path / "recipe.yaml", tiny.save(tiny.model("vit"), tmp_path / "vit")
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    path.write_text(f"model: {folder}\noutput: out\nsteps: {{prune: {{plan: {plan}}}}}\n")
    found = sizes.sizes_of(read_recipe(path))
    assert (found.vocabulary, found.layers) == (0, tiny.LAYERS)


def test_a_model_cut_before_is_estimated_by_its_own_sizes(tmp_path: Path) -> None:
    whole, cut = tiny.model("llama-gqa"), tmp_path / "cut"
    prune(tiny.save(whole, tmp_path / "base"), cut, CutRequest(plan=uneven_plan(whole)))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {cut}\noutput: out\nsteps: {{convert-gqa: {{kv_heads: 1}}}}\n")
    found = sizes.sizes_of(read_recipe(path)).parameters
    assert found == from_pretrained(cut).num_parameters() < whole.num_parameters()


def test_dry_run_knows_what_is_done(done_job: Path, capsys: Any) -> None:
    assert all(step.cached for step in forecast(read_recipe(done_job)).steps)
    changed = forecast(read_recipe(done_job, ["steps.heal.steps=3"])).steps
    assert [step.cached for step in changed] == [True, True, True, False, False]
    assert changed[3].why == "settings.steps: 12 -> 3"
    code, text, err = run(capsys, "run", done_job, "--json")
    assert code == 0, err
    assert [step["cached"] for step in json.loads(text)["steps"].values()] == [True] * 5


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps.heel.steps=3"], "steps has no 'heel'. Did you mean 'heal'?"),
        (["steps.heal.stepps=3"], "'steps.heal' has no setting 'stepps'. Did you mean 'steps'?"),
        (["outputt=x"], "It has no setting 'outputt'. Did you mean 'output'?"),
        (["data.train.sauce=x"], "'data.train' has no setting 'sauce'. Did you mean 'source'?"),
        (["steps.heal.steps=lots"], "steps.heal.steps: Input should be a valid integer"),
        (["steps.heal.steps=true"], "steps.heal.steps: give a number, not true or false."),
        (["steps.convert-gqa.kv_heads=0"], "steps.convert-gqa.kv_heads: Input should be greater"),
        (["steps.convert-gqa.kv_heads=[4,0]"], "steps.convert-gqa.kv_heads: Input should be"),
        (["steps.evaluate.decode_batches=[1,0]"], "steps.evaluate.decode_batches.1: Input should"),
        (["steps.prune.keep=true"], "steps.prune.keep: give a share such as 0.75, or a count"),
        (["steps.heal.steps"], "give key=value"),
        (["steps.more=3"], "steps are added in the file"),
        (["steps.train-gates.l0_penalty=1"], "give exactly one of target_heads and l0_penalty"),
        (["steps.evaluate.memory=lots"], "such as 24GiB"),
        (["steps.evaluate.data=tset"], "has train, test. Did you mean 'test'?"),
        (["steps.heal.model=evaluate"], "'evaluate', which comes after it: move 'evaluate' up"),
        (["steps.heal.model=heal"], "takes the output of itself: that is circular"),
        (["steps.prune.model=heal", "steps.heal.model=prune"], "that is circular"),
        (["steps.heal.teacher=heel"], "there is no such step. Did you mean 'heal'?"),
        (["steps.heal.teacher=train-gates"], "from 'train-gates', which makes a gates"),
        (["steps.heal.model=original"], "would train 'original' to match itself"),
        (
            ["steps.prune.calibration.tokns=3"],
            "no setting 'tokns'. Did you mean 'calibration_tokens'?",
        ),
        (["steps.prune.plan=heads.json"], "there is no such step or file"),
        (["data.test=nowhere.txt"], "There is no file 'nowhere.txt'"),
        (["model="], "model: Input should be a valid string"),
        (["trust_remote_code=true"], "a file cannot allow. If you trust that code, give --trust"),
        (["trust_remote_code=lots"], "trust_remote_code: Input should be a valid boolean"),
        (["steps.prune.trust_remote_code=true"], "has no setting 'trust_remote_code'"),
        ([f"model={'x' * 300}"], "model: no name is that long"),
        ([f"data.test={'x/' * 3_000}"], "data.test.source: no name is that long"),
        ([f"output={'x' * 300}"], "output: no name is that long"),
        (['output="a\\0b"'], "the value is not readable as YAML"),
        ([f"steps.heal.steps={'9' * 5_000}"], "the value is not readable as YAML"),
        ([f"steps.heal.steps=0x{'f' * 5_000}"], "the value is not readable as YAML"),
        ([f"steps.heal.steps={'[' * 500}{']' * 500}"], "the value is not readable as YAML"),
        (["steps.heal.step=[]"], "'step' is the name of a kind, not []"),
    ],
)
def test_bad_settings(
    overrides: list[str], message: str, job: Path, tmp_path: Path, capsys: Any
) -> None:
    options = [part for override in overrides for part in ("--set", override)]
    code, _, err = run(capsys, "run", job, *options)
    assert (code, message in err, "Traceback" in err) == (2, True, False), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "value"), [("new\nline", "new\nline"), (" a #b ", "a #b"), ("'3'", "3")]
)
def test_a_setting_is_taken_as_it_is_written(text: str, value: str, job: Path) -> None:
    assert read_recipe(job, [f"output={text}"]).output.name == value


GATES = {"target_heads": 0.5}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({}, "It has no steps. There are: plan, roles, score, train-gates"),
        ({"prune": {}}, "needs gates or scores or plan"),
        ({"plan": {"keep": 0.5}, "score": {"criterion": "random"}}, "'score' comes after it"),
        ({"score": {"criterion": "random"}, "prune": {}}, "say how many heads to keep"),
        ({"prune": {"plan": "job.yaml", "keep": 3}}, "its plan says already what stays"),
        ({"report": {}}, "is about the steps before it, and there are none"),
        ({"score": {"criterion": []}}, "Step 'score': Name a criterion"),
        ({"prune": {}, "train-gates": GATES}, "'train-gates' comes after it: move it up"),
        ({"heal": {"steps": 1}}, "put a step that changes the model before it"),
        ({"prun": {}}, "There is no step 'prun'. Did you mean 'prune'?"),
        ({"cut": {"step": "prun"}}, "No kind of step named 'prun'. Did you mean 'prune'?"),
        ({"original": {"step": "prune"}}, "cannot be named 'original'"),
        ({"../x": {"step": "prune"}}, "cannot be named '../x'"),
        ({"prune": 3}, "settings are key: value, not 3"),
        (
            {"train-gates": GATES, "convert-gqa": {"kv_heads": 1}, "prune": {}},
            "would cut 'convert-gqa' by what 'train-gates' found out about 'original'",
        ),
    ],
)
def test_impossible_orders(
    steps: dict[str, Any],
    message: str,
    job: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = {**yaml.safe_load(job.read_text()), "steps": steps}
    job.write_text(yaml.safe_dump(content, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "run", job)
    assert (code, message in err, "Traceback" in err) == (2, True, False), err
    assert not (tmp_path / "out").exists()


def _nested(member: str, last: str) -> str:
    """Aliases of aliases, which stand for 9 ** 9 values."""
    levels = [f"a0: &a0 {last}"]
    for n in range(9):
        levels.append(f"a{n + 1}: &a{n + 1} " + member % ", ".join([f"*a{n}"] * 9))
    return "{" + ", ".join(levels) + "}"


BOMB, MERGES = _nested("[%s]", "[x]"), _nested("{<<: [%s]}", "{x: y}")


def test_files_that_are_no_recipes(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "r.yaml"
    for content, message in (
        ("a: [", "not readable as YAML"),
        ("[1, 2]", "has no section 'steps'"),
        ("model: x", "has no section 'steps'"),
        ("model: x\nsteps:\n  prune:\n  prune:\n", "line 4 has 'prune' for the second time"),
        ("model: x\nsteps:\n  prune: {plan: r}\n", "'output' is missing"),
        ("steps: {1: {step: prune}}", "A step cannot be named 1"),
        ("steps: {? [a] : {step: prune}}", "not readable as YAML"),
        ("steps: !!timestamp x", "a value does not fit its tag"),
        ("steps: !!python/object:os.system {}", "not readable as YAML"),
        ("steps: {a: {step: [prune]}}", "'step' is the name of a kind"),
        ("steps: &a {a: *a}", "nested too deeply"),
        (f"steps: {'[' * 5_000}", "nested too deeply"),
        (f"model: x\noutput: y\nsteps: {{heal: {BOMB}}}", "far too many"),
        (f"steps: {{heal: {MERGES}}}", "far too many keys"),
        ("#" * 1_000_001, "far more than such a file can need"),
    ):
        path.write_text(content)
        code, _, err = run(capsys, "run", path)
        assert (code, message in err) == (2, True), err
    code, _, err = run(capsys, "run", tmp_path)
    assert (code, "is a folder" in err) == (2, True), err
    code, _, err = run(capsys, "run", tmp_path / "none.yaml")
    assert (code, "'headprune init' writes one" in err) == (2, True), err


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig
class Config(LlamaConfig):
    pass
"""


def test_code_of_a_model_runs_only_if_the_command_line_allows_it(
    job: Path, llama_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    mark = tmp_path / "ran"
    (llama_folder / "code.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((llama_folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "mine"}
    (llama_folder / "config.json").write_text(json.dumps(config))
    asking = tmp_path / "asking.yaml"
    asking.write_text("trust_remote_code: true\n" + job.read_text())
    for options in ((), ("--dry-run",)):
        for recipe in ((asking,), (job, "--set", "trust_remote_code=true")):
            code, _, err = run(capsys, "run", *recipe, *options)
            assert code == 2 and "give --trust-remote-code" in err
        assert run(capsys, "run", job, *options)[0] == 2
    with pytest.raises(RecipeError, match="trust_remote_code=True"):
        run_recipe(read_recipe(asking))
    assert not mark.exists()
    _, _, err = run(capsys, "run", job, "--dry-run", "--trust-remote-code")
    assert mark.exists(), err


def test_no_file_of_settings_allows_code(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.yaml"
    for command in ("check", "train-gates"):
        path.write_text(f"{command.replace('-', '_')}: {{trust_remote_code: true}}\n")
        model = () if command == "check" else ("m", "--data", "d", "--output", "o")
        code, _, err = run(capsys, command, *model, "--config", path)
        assert code == 2 and "A file cannot allow code that comes with a model" in err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r | {"schema_version": {}}, "schema_version"),
        (lambda r: r | {"schema_version": 2}, "has schema 2"),
        (lambda r: [r], "holds a list"),
        (lambda r: r | {"steps": {"prune": None}}, "steps.prune"),
        (lambda r: r | {"surprise": 1}, "surprise"),
        (lambda r: _with(r, "prune", seconds=-1), "steps.prune.seconds"),
        (lambda r: _with(r, "prune", files={"a": 1}), "steps.prune.files.a"),
        (lambda r: "[" * 3_000, "nested too deeply"),
        (lambda r: '{"name": ' + "9" * 5_000 + "}", "digits"),
        (lambda r: json.dumps(_with(r, "prune", summary="\ud800")), "no character"),
    ],
)
def test_damaged_records_of_runs(
    damage: Any, message: str, job: Path, finished: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    content = damage(json.loads((finished / "run.json").read_text()))
    text = content if isinstance(content, str) else json.dumps(content)
    (out / "run.json").write_text(text)
    code, _, err = run(capsys, "run", job, "--dry-run")
    assert code == 2 and message in err and f"move '{out}' away; there, every step" in err, err
    assert "Traceback" not in err and len(err) < 600
    out.rename(tmp_path / "away")  # as it advises
    assert run(capsys, "run", job, "--dry-run")[0] == 0


def _with(record: dict[str, Any], step: str, **changed: Any) -> dict[str, Any]:
    return record | {"steps": {**record["steps"], step: {**record["steps"][step], **changed}}}


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_died_between_its_two_moves_is_put_in_its_place(
    whole: bool, done_job: Path, tmp_path: Path
) -> None:
    step, work = tmp_path / "out" / "prune", tmp_path / "out" / ".partial"
    before = {file.name: file.read_bytes() for file in step.iterdir()}
    work.mkdir()
    if whole:
        shutil.copytree(step, work / "prune")
    step.rename(work / "prune.old")
    assert did(done_job) == []
    assert {file.name: file.read_bytes() for file in step.iterdir()} == before
    assert not work.exists()


@pytest.mark.parametrize("file", ["run.json", "recipe.yaml", "requirements.lock"])
def test_a_run_that_died_at_its_first_file_is_no_other_s(
    file: str, job: Path, tmp_path: Path, capsys: Any
) -> None:
    begun = tmp_path / "out" / f".{file}.partial" / "new"
    begun.mkdir(parents=True)
    (begun / file).write_text("half")
    code, _, err = run(capsys, "run", job, "--set", "steps.train-gates.steps=1", "--dry-run")
    assert code == 0, err
    begun.parent.rename(begun.parent.with_name(".thesis.tex.partial"))
    code, _, err = run(capsys, "run", job, "--dry-run")
    assert (code, "holds other files ('.thesis.tex.partial')" in err) == (2, True), err


def test_folders_of_others_are_left_alone(
    job: Path, finished: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    code, _, err = run(capsys, "run", job)
    assert (code, "holds other files ('thesis.tex')" in err) == (2, True), err
    (out / "thesis.tex").unlink()
    other = tmp_path / "other.yaml"
    shutil.copy(job, other)
    shutil.copytree(finished, out, dirs_exist_ok=True)
    code, _, err = run(capsys, "run", other)
    assert (code, "belongs to the recipe 'job', and this one is 'other'" in err) == (2, True), err
    (out / "run.json").write_text("{")
    code, _, err = run(capsys, "run", job)
    assert (code, "is not readable as JSON" in err) == (2, True), err


def test_two_runs_at_once(job: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    out = tmp_path / "out"
    out.mkdir()
    with FileLock(out / ".lock"), pytest.raises(HeadpruneError, match="Another run is at work"):
        did(job)


def test_what_another_run_did_meanwhile_is_done(
    job: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = recipes_run._alone

    def as_another_ends(output: Path) -> Any:
        shutil.copytree(finished, output)
        return begin(output)

    monkeypatch.setattr(recipes_run, "_alone", as_another_ends)
    assert did(job) == []


def test_what_fails_in_a_run_is_not_told_as_its_output(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(recipe: Any) -> str:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(recipes_run, "digest_of_model", fails)
    with pytest.raises(ConnectionResetError):
        did(job)
    (tmp_path / "file").touch()
    with pytest.raises(HeadpruneError, match="Could not write '.*out'"):
        did(job, f"output={tmp_path / 'file' / 'out'}")


@pytest.mark.parametrize(
    ("module", "message"),
    [(sources, r"text\.txt' is not readable"), (runs, "llama' cannot be read through")],
)
def test_inputs_that_cannot_be_read_are_told(
    module: Any, message: str, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(folder: Path, names: Any) -> Any:
        raise PermissionError("denied")

    monkeypatch.setattr(module, "hashes_of", unreadable)
    with pytest.raises(HeadpruneError, match=message):
        forecast(read_recipe(job))


def test_an_output_in_the_home_folder(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_recipe(job, ["output=~/mine"]).output == tmp_path / "mine"
    with pytest.raises(HeadpruneError, match="output: there is no home folder for"):
        read_recipe(job, ["output=~nobody-of-that-name/mine"])


def test_several_processes_are_refused(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(HeadpruneError, match="run by one process, and 4 were started"):
        did(job)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["README.md", "scores.json"])
def test_data_named_like_a_record_is_data(name: str, tmp_path: Path) -> None:
    digests = set()
    for content in ("one", "two"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text(content)
        for place in (tmp_path / "data", tmp_path / "data" / name):
            digests.add(digest_of_data(DataConfig(source=str(place))))
    assert len(digests) == 2  # a folder with one file is that file


def test_a_digest_of_data_is_of_the_files_that_are_read(tmp_path: Path) -> None:
    data = DataConfig(source=str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    for name, text, is_read in (
        (".hidden.txt", "two", True),
        (".hidden/b.txt", "three", True),
        ("picture.png", "four", False),
    ):
        before = digest_of_data(data), read_examples(data).sha256
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        after = digest_of_data(data), read_examples(data).sha256
        assert [old != new for old, new in zip(before, after, strict=True)] == [is_read] * 2


def test_the_files_of_a_task_are_part_of_the_key(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = folder / "mine.yaml"
    task.write_text(
        "include: shared.yaml\ntask: mine\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
        "doc_to_text: !function answers.given\n"
    )
    made_of = [task, *(folder / n for n in ("shared.yaml", "rows.jsonl", "answers.py"))]
    for file in made_of[1:]:
        file.touch()
    (folder / "group.yaml").write_text("group: all\ntask: [mine]\n")
    (folder / "other.yaml").touch()

    def keys() -> list[Any]:
        found = []
        for asked in (task, folder / "group.yaml", folder):
            recipe = read_recipe(job, [f"steps.evaluate.tasks={asked}"])
            record = RunRecord(name="job", versions={})
            found.append(look(recipe, "evaluate", record, "").inputs["tasks"])
        return found

    for file in (*made_of, folder / "other.yaml"):
        before = keys()
        file.write_text(file.read_text() + "# changed\n")
        changed = [old != new for old, new in zip(before, keys(), strict=True)]
        assert changed == ([True] * 3 if file in made_of else [False, False, True])
    before, compiled = keys(), folder / "__pycache__"
    compiled.mkdir()
    (compiled / "answers.pyc").touch()  # as lm-eval leaves it there
    assert keys() == before


def test_a_step_that_fails_says_which_and_keeps_the_others(
    done_job: Path, tmp_path: Path, capsys: Any
) -> None:
    more = ("--set", "steps.heal.batch_size=999")
    code, _, err = run(capsys, "run", done_job, *more)
    assert (code, "Step 'heal': The data has 2,000 tokens, which" in err) == (2, True), err
    assert did(done_job) == ["heal"]  # as it was, so that the evaluation still stands


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"score": {"criterion": "fischer"}}, "Step 'score': No criterion named 'fischer'."),
        ({"convert-gqa": {"kv_heads": 1, "merge": "meen"}}, "Did you mean 'mean'?"),
        ({"check": {"limits": "perplexity 3"}}, "Step 'check': The limit 'perplexity 3' has no"),
        (
            {"check": {"limits": "perplexity <= 3", "confidence": 2}},
            "steps.check.confidence: Input should be",
        ),
        ({"check": {"limits": "perplexity <= +1 %", "baseline": "b.json"}}, "is no file"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(
    steps: dict[str, Any], message: str, job: Path, tmp_path: Path, capsys: Any
) -> None:
    content = {**yaml.safe_load(job.read_text()), "steps": steps}
    job.write_text(yaml.safe_dump(content, sort_keys=False))
    code, _, err = run(capsys, "run", job, "--dry-run")
    assert (code, message in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_scores_to_a_plan_and_a_broken_limit(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = {"calibration_tokens": 512, "seq_len": 16}
    steps = {
        "score": {"criterion": ["fluctuation", "magnitude"], **calibration},
        "plan": {"keep": 0.75, "criterion": "fluctuation"},
        "prune": {"refit": "train", "calibration": calibration},
        "check": {"limits": ["perplexity <= 2", "query_heads == 18"], "seq_len": 16},
        "report": None,
    }
    content = {**yaml.safe_load(job.read_text()), "steps": steps}
    job.write_text(yaml.safe_dump(content, sort_keys=False))
    for cached in (False, True):  # broken once is broken the next time
        code, text, err = run(capsys, "run", job, "--json")
        assert code == 1, err
        found = json.loads(text)
        assert (found["passed"], found["steps"]["check"]["passed"]) == (False, False)
        assert all(step["cached"] == cached for step in found["steps"].values())
        assert found["steps"]["check"]["summary"] == "broken: 1 of 2 limits hold"
    out = tmp_path / "out"
    assert "<html" in (out / "report" / "report.html").read_text()
    assert (out / "check" / "junit.xml").read_text().count("<failure") == 1
    held = ["steps.check.limits=[perplexity <= 2000]"]
    assert did(job, *held) == ["check", "report"]
    code, text, err = run(capsys, "run", job, "--set", held[0])
    assert (code, "1 of 1 limits hold" in text) == (0, True), err


def with_steps(job: Path, steps: dict[str, Any], **others: Any) -> Path:
    """The recipe with other steps."""
    content = {**yaml.safe_load(job.read_text()), "steps": steps, **others}
    job.write_text(yaml.safe_dump(content, sort_keys=False))
    return job


def test_what_the_scores_decide_is_another_thing_than_a_default(job: Path, tmp_path: Path) -> None:
    calibration = {"calibration_tokens": 512, "seq_len": 16}
    steps = {"score": {"criterion": "compensated", **calibration}, "prune": {"keep": 0.5}}
    assert did(with_steps(job, steps)) == ["score", "prune"]

    def refitted(out: str) -> dict[str, Any]:
        manifest = json.loads((tmp_path / out / "prune" / "headprune.json").read_text())
        return {name: manifest["made_by"]["options"][name] for name in calibration}

    assert refitted("out") == calibration
    resolved = tmp_path / "out" / "recipe.yaml"
    assert "layout: per-layer" in resolved.read_text()  # a default like any other
    assert did(resolved) == []
    assert did(resolved, f"output={tmp_path / 'again'}") == ["score", "prune"]
    assert refitted("again") == calibration
    default = kinds()["prune"].model_fields["calibration_tokens"].default
    assert did(job, f"steps.prune.calibration_tokens={default}") == ["prune"]
    assert refitted("out") == {**calibration, "calibration_tokens": default}


def test_what_was_measured_stays_with_a_model_of_the_same_weights(
    job: Path, tmp_path: Path
) -> None:
    """Weights may come out the same for another reason, by which a result has another id."""
    steps = {
        "score": {"criterion": ["random"], **SMALL},
        "prune": {"keep": 0.5, "criterion": "random"},
        "evaluate": {"speed": False, "copying": 0, "last_words": 0, **SMALL},
        "report": None,
    }
    did(with_steps(job, steps))
    again = did(job, "steps.score.criterion=[random, magnitude]")
    assert again == list(steps)
    made, measured = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("prune/headprune.json", "evaluate/report.json")
    )
    assert measured["model"]["id"] == made["id"]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["steps"]["prune"].pop("model_id") == made["id"]  # as of an earlier version
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    assert forecast(read_recipe(job, ["steps.score.criterion=[random, magnitude]"])).steps[1].cached


def test_a_step_that_is_gone_is_no_part_of_the_report(job: Path, tmp_path: Path) -> None:
    score = {"score": {"criterion": "random", **SMALL}}
    some, most = ({"step": "prune", "keep": keep} for keep in (0.75, 0.25))
    did(with_steps(job, {**score, "some": some, "report": None}))
    with_steps(job, {**score, "most": most, "report": None})
    said: list[str] = []
    context = Context(line=lambda line, good=None: said.append(line))
    with pytest.warns(HeadpruneWarning, match="Not in the report: '.*some' is of no step"):
        run_recipe(read_recipe(job), context)
    assert f"'{tmp_path / 'out' / 'some'}' is of a step that the recipe no longer has" in said[0]
    report = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "Cut 18 of 24" in report and "Cut 6 of 24" not in report
    assert did(job) == []


def test_data_without_a_split_is_of_the_split_that_the_command_reads(
    job: Path, tmp_path: Path
) -> None:
    plain = {"source": "org/text"}
    other = {"source": "org/other", "split": "validation", "text_column": "body"}
    several = {"data": ["other", "test"], **SMALL}
    steps = {
        "score": {"criterion": "fisher", "data": "test"},
        "evaluate": several,
        "check": {**several, "limits": "query_heads <= 24"},
        "roles": {"data": "test", "trees": "trees"},
    }
    trees = {"source": "trees.conllu", "split": "dev", "text_column": "form"}
    data = {"test": plain, "other": other, "trees": trees}
    recipe = read_recipe(with_steps(job, steps, data=data))
    (tmp_path / "resolved.yaml").write_text(recipe.as_yaml())
    for read in (recipe, read_recipe(tmp_path / "resolved.yaml")):
        score, evaluate, check, roles = (options_of(read, name, tmp_path) for name in steps)
        assert score.split == "train"
        assert (roles.data, roles.split, roles.text_column) == ("org/text", "train", None)
        for found in (evaluate.domains(evaluate.data), check.domains()):
            assert found["test"] == DataConfig(**plain, split="test")
            assert found["other"] == DataConfig(**other)
    record = RunRecord(name="job", versions={})
    keys = [look(recipe, name, record, "").inputs["data"] for name in ("score", "evaluate")]
    assert [keys[0]["split"], keys[1]["split"]] == ["train", "validation"]
    assert keys[1]["further"]["test"]["sha256"] == "hub:org/text:test"


def test_cuts_that_branch_off_the_same_gates(job: Path) -> None:
    steps = {
        "train-gates": {"target_heads": 0.5, "steps": 2, **SMALL},
        "some": {"step": "prune", "keep": 0.75},
        "most": {"step": "prune", "keep": 0.25, "model": "original"},
        "compare": {"step": "evaluate", "against": "some", "speed": False, **SMALL},
    }
    content = {**yaml.safe_load(job.read_text()), "steps": steps}
    job.write_text(yaml.safe_dump(content, sort_keys=False))
    done = run_recipe(read_recipe(job))
    report = json.loads((done.output / "compare" / "report.json").read_text())
    heads = [report[side]["cost"]["query_heads"] for side in ("against", "model")]
    assert heads == [18, 6]


# what stands in for the models of the shipped recipes, and the data that they name
STAND_INS = {
    "bert-classification": "bert-classifier",
    "gpt2-small": "gpt2",
    "marian-voita": "marian",
    "sentence-encoder": "bert-base",
}


def stand_in(name: str, folder: Path) -> list[str]:
    """Tiny settings for a shipped recipe."""
    recipe = read_recipe(Path("configs") / f"{name}.yaml")
    case = STAND_INS.get(name, "llama-mha" if "llama2" in name else "llama-gqa")
    tiny.save(tiny.model(case), folder / "model")
    overrides = [f"model={folder / 'model'}", f"output={folder / 'out'}"]
    for key, data in recipe.data.items():
        columns = [*(data.text_column or "").split(","), data.label_column or ""]
        rows = ["\t".join(columns)] if data.text_column else []
        texts = (f"{tiny.text(9, i)}\t{tiny.text(8, i)}\t{i % 2}" for i in range(12))
        path = folder / f"{key}{'.tsv' if rows else '.txt'}"
        path.write_text("\n".join([*rows, *texts]) if rows else tiny.text(2_000))
        overrides.append(f"data.{key}.source={path}")
    for step, settings in recipe.steps.items():
        fields = settings.model_dump()
        tiny_values = {"seq_len": 16, "batch_size": 2, "speed": False, "max_windows": None}
        tiny_values |= {"steps": 2, "calibration_tokens": 512, "dtype": "float32", "bf16": False}
        tiny_values |= {"epochs": 0.2, "tokens": 512, "calibration": {"tokens": 512, "seq_len": 16}}
        tiny_values |= {"keep": 18, "limits": ["query_heads <= 24"]}
        tiny_values |= {"kv_heads": 2} if case == "llama-mha" else {}
        for key in fields.keys() & tiny_values.keys():
            if key in ("steps", "keep") and fields[key] is None:
                continue
            overrides.append(f"steps.{step}.{key}={json.dumps(tiny_values[key])}")
    return overrides


@pytest.mark.filterwarnings("ignore:.*Healing brought the model no nearer")  # in two steps
@pytest.mark.filterwarnings("ignore:.*Nothing was removed or merged")  # nor do gates close in two
@pytest.mark.parametrize(
    "path", slow_unless(lambda path: path.stem in RUN_AT_ONCE, CONFIGS), ids=lambda p: p.stem
)
def test_every_shipped_recipe_is_valid_and_runs(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_recipe(path).steps
    options = [part for o in stand_in(path.stem, tmp_path) for part in ("--set", o)]
    code, text, err = run(capsys, "run", path, *options, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(text)["total"]["seconds"] > 0
    code, text, err = run(capsys, "run", path, *options, "--json")
    assert code == 0, err
    assert all(step["seconds"] is not None for step in json.loads(text)["steps"].values())


@pytest.mark.parametrize("goal", ["kv-cache", "heads", "study"])
def test_init_writes_a_recipe_that_runs(
    goal: str, llama_folder: Path, text_file: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "mine.yaml"
    data = ["--data", text_file, "--test-data", text_file]
    answers = ["--model", llama_folder, "--goal", goal, *data, "--hardware", "cpu"]
    out = tmp_path / "mine"
    code, text, err = run(capsys, "init", path, "--yes", *answers, "--output", out)
    assert (code, "--dry-run" in text) == (0, True), err
    assert path.read_text().count(" # ") >= 3
    code, text, err = run(capsys, "run", path, "--dry-run")
    assert (code, "Nothing was run" in text) == (0, True), err
    code, _, err = run(capsys, "init", path, "--yes", *answers)
    assert (code, "replace it with --overwrite" in err) == (2, True), err


@pytest.mark.parametrize(
    ("case", "limit", "column"),
    [
        ("bert-base", "mean_cosine >= 0.9", None),
        ("gpt2-classifier", "accuracy >= 95 %", "label"),
        ("llama-gqa", "perplexity <= 200 %", None),
    ],
)
def test_init_asks_of_a_model_what_it_is_measured_by(
    case: str, limit: str, column: str | None, tmp_path: Path
) -> None:
    small = GPT2Config(n_embd=48, n_layer=2, n_head=6, vocab_size=tiny.VOCAB)
    classifier = case == "gpt2-classifier"
    model = GPT2ForSequenceClassification(small) if classifier else tiny.model(case)
    answers = Answers(model=str(tiny.save(model, tmp_path / "model")), data="org/text")
    recipe = init(tmp_path / "new.yaml", answers)
    assert recipe.steps["check"].limits == (limit,)
    assert {data.label_column for data in recipe.data.values()} == {column}


def test_init_runs_no_code_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = tmp_path / "model", tmp_path / "told"
    folder.mkdir()
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "own.py").write_text(f"open({str(told)!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    init(tmp_path / "new.yaml", Answers(model=str(folder), data="org/text"))
    assert not told.exists()


def test_init_refuses_a_model_that_reads_no_text(tmp_path: Path) -> None:
    answers = Answers(model=str(tiny.save(tiny.model("vit"), tmp_path / "model")))
    with pytest.raises(FamilyError, match=r"takes pixel_values, and a recipe of init reads text"):
        init(tmp_path / "new.yaml", answers)
    assert not (tmp_path / "new.yaml").exists()


def test_a_strange_name_stays_in_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "new\nmodel: evil\u2028'# x.yaml"
    recipe = init(path, Answers(model="org/name", data="org/text"))
    assert recipe.model == "org/name"
    comments = [line for line in path.read_text().split("\n") if "headprune run" in line]
    assert len(comments) == 2 and all(r"'new\nmodel: evil\u2028" in line for line in comments)


@pytest.mark.process
def test_init_asks_and_takes_defaults(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "asked.yaml"
    answers = 'my model: "a"\nheads\n\ncpu\n'
    done = subprocess.run(headprune("init", path), input=answers, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    recipe = read_recipe(path)
    assert recipe.model == 'my model: "a"'  # quoted as YAML needs it
    assert list(recipe.steps) == ["train-gates", "prune", "evaluate", "check", "report"]
    assert recipe.data["test"].split == "test"
    path = tmp_path / "defaults.yaml"
    code, _, err = run(capsys, "init", path, "--yes")
    assert (code, next(iter(read_recipe(path).steps))) == (0, "convert-gqa"), err
    (tmp_path / "text.txt").write_text("some text")
    local = ["--data", tmp_path / "text.txt", "--overwrite"]
    for wrong, message in (
        (["--goal", "smaler"], "--goal: Input should be 'kv-cache', 'heads' or 'study'"),
        (local, "say what to measure on"),
    ):
        code, _, err = run(capsys, "init", path, "--yes", *wrong)
        assert (code, message in err) == (2, True), err


@pytest.mark.process
@pytest.mark.parametrize(("key", "wanted"), [(b"\x03", 130), (b"\x04", 2)])
def test_init_writes_nothing_without_an_answer(key: bytes, wanted: int, tmp_path: Path) -> None:
    asking, answering = pty.openpty()

    def at_a_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which jobs in the background ignore
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    running = subprocess.Popen(
        headprune("init", tmp_path / "asked.yaml"),
        stdin=answering,
        stdout=answering,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=at_a_terminal,
    )
    os.close(answering)
    shown = b""
    while b"Model" not in shown:
        shown += os.read(asking, 1024)
    while running.returncode is None:  # as Ctrl-C and Ctrl-D are typed: again if nothing happens
        os.write(asking, key)
        with suppress(subprocess.TimeoutExpired):
            running.wait(20)
    said = running.communicate()[1]
    os.close(asking)
    assert running.returncode == wanted, said
    assert b"Traceback" not in said and (b"Nobody answers" in said) == (wanted == 2)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_check_runs(
    llama_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--model", llama_folder, "--against", llama_folder, "--data", text_file]
    places += ["--baseline", tmp_path / "baseline.json", "--seq-len", "16"]
    for more in (["--update-baseline"], []):
        code, _, err = run(capsys, "check", "--config", CI_CHECK, *places, *more)
        assert code == 0, err


@pytest.mark.parametrize(
    ("command", "given", "streams"),
    [
        ("score", {"data": "text", "criterion": "compensated"}, 1),
        ("prune", {"plan": "plan", "refit": "text"}, 2),
        ("convert-gqa", {"kv_heads": 1, "calibrate": "text"}, 2),
        ("compress", {"keep": 0.5, "batch_size": 1, "seq_len": 512}, 2),
    ],
)
def test_memory_follows_a_calibration_that_runs_at_once(
    command: str, given: dict[str, Any], streams: int
) -> None:
    facts = {"parameters": 10**9, "attention_parameters": 10**8, "layers": 20, "hidden": 2048}
    model = Sizes(**facts, vocabulary=32_000, causal=True, itemsize=2, flops=1e11)
    declared, step = COMMANDS[command], COMMANDS[command].step
    assert step is not None

    def held(tokens: int, **others: Any) -> int:
        values = {"model": "m", "output": "out", "calibration_tokens": tokens, **given, **others}
        estimate = step.estimate(build(declared.options, values), model)
        assert estimate.layers_bytes is not None
        return estimate.layers_bytes

    assert held(65_536) - held(32_768) == 11 * streams * 32_768 * 2048 * 4
    if command == "prune":
        assert held(65_536, refit=None) == held(32_768, refit=None)
