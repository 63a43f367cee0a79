"""Trainings that stop: by a kill, a full disk, damage, numbers that are not finite; and go on."""

import json
import os
import resource
import shutil
from contextlib import ExitStack, contextmanager

import pytest
import torch
import yaml
from filelock import FileLock
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from headprune.config import (
    DataConfig,
    Form,
    HealConfig,
    HealOptimizer,
    Resuming,
    Train,
    TrainGatesConfig,
)
from headprune.context import Context
from headprune.distillation import heal as healing
from headprune.distillation.heal import heal
from headprune.errors import CheckpointError, DataError, TrainingError
from headprune.gates import train_gates as training
from headprune.gates.train_gates import train_gates
from headprune.io.writing import work_folder
from headprune.resuming import CONFIG, STATE, Run
from headprune.training import WEIGHTS, first_infinite
from tests import tiny
from tests.marks import slow_unless
from tests.test_cli import run

SIZES = {"steps": 9, "batch_size": 4, "seq_len": 16, "save_every": 3}


class Killed(BaseException):
    pass


def kill_at(last):
    def kill(step, total, *numbers):
        if numbers and step == last:  # of a training, and not of its scores
            raise Killed

    return kill


def noting(steps):
    """Notes the steps of a training, and not those of its scores."""
    return lambda step, total, *numbers: steps.append(step) if numbers else None


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("resume")
    tiny.save(tiny.model("llama-gqa"), home / "model")
    (home / "text.txt").write_text(tiny.text(2_000))
    return home


def running(settings):
    """What is taken out of settings that are not those of the training."""
    rerun, told = (
        {name: settings.pop(name) for name in names if name in settings}
        for names in (("resume", "overwrite"), ("step", "stage"))
    )
    return Resuming(**rerun), Context(**told)


def gates(home, output, **settings):
    rerun, context = running(settings)
    config = TrainGatesConfig(**{"target_heads": 0.5, **SIZES, **settings})
    return train_gates(
        home / "model", DataConfig(source=str(home / "text.txt")), output, config, rerun, context
    )


def healed(home, output, **settings):
    rerun, context = running(settings)
    config = HealConfig(**{"learning_rate": 5e-3, **SIZES, **settings})
    model, data = home / "model", DataConfig(source=str(home / "text.txt"))
    return heal(model, model, data, output, config, rerun, context)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def whole(home):
    """What an unbroken training of gates writes."""
    gates(home, home / "whole", train=Train.ATTENTION)
    return files(home / "whole")


@pytest.fixture(scope="module")
def _stopped(home):
    with pytest.raises(Killed):
        gates(home, home / "stopped", train=Train.ATTENTION, step=kill_at(8))
    return home / "stopped-checkpoints"


@pytest.fixture
def stopped(_stopped, tmp_path):
    """The folder of a training that was killed after step 8 of 9."""
    return shutil.copytree(_stopped, tmp_path / "g-checkpoints")


def go_on(home, tmp_path, **others):
    gates(home, tmp_path / "g", train=Train.ATTENTION, resume=True, **others)
    return files(tmp_path / "g")


# after the last step


@pytest.mark.parametrize("train", [Train.ATTENTION, Train.GATES])
def test_gates_killed_after_the_last_step_are_those_of_an_unbroken_run(
    train, home, tmp_path, monkeypatch
):
    settings = {"train": train}
    gates(home, tmp_path / "whole", **settings)

    def dead(*arguments):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(training, "_finish", dead)
        with pytest.raises(Killed):
            gates(home, tmp_path / "broken", **settings)
    steps = []
    gates(home, tmp_path / "broken", resume=True, step=noting(steps), **settings)
    assert not steps
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "whole"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("train", slow_unless("attention".__eq__, ["attention", "lora"]))
def test_a_healing_killed_after_the_last_step_is_an_unbroken_one(
    train, home, tmp_path, monkeypatch
):
    if train == "lora":
        pytest.importorskip("peft")
    whole = healed(home, tmp_path / "whole" / "h", train=train)

    def dead(*arguments, **options):
        raise Killed

    torch.manual_seed(1)  # what was drawn before must not matter
    with monkeypatch.context() as patched:
        patched.setattr(healing, "write", dead)
        with pytest.raises(Killed):
            healed(home, tmp_path / "broken" / "h", train=train)
    steps = []
    resumed = healed(
        home,
        tmp_path / "broken" / "h",
        train=train,
        resume=True,
        step=lambda done, of, *_: steps.append((done, of)),
    )
    assert 9 not in [of for _, of in steps]  # those of the writer are others
    assert (resumed.before, resumed.after, resumed.steps) == (whole.before, whole.after, 9)
    for name in ("model.safetensors", "heal.jsonl"):
        assert files(tmp_path / "broken" / "h")[name] == files(tmp_path / "whole" / "h")[name]


# checkpoints


def test_a_killed_training_is_resumed_to_the_same_end(home, tmp_path, whole, stopped):
    names = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    assert names == ["checkpoint-3", "checkpoint-6"]
    assert go_on(home, tmp_path) == whole
    gates(home, tmp_path / "other", train=Train.ATTENTION, seed=1)
    assert files(tmp_path / "other") != whole


@pytest.mark.parametrize("train", slow_unless(Train.ALL.__eq__, [Train.GATES, Train.ALL]))
def test_whatever_is_trained_is_resumed(train, home, tmp_path):
    gates(home, tmp_path / "whole", train=train)
    with pytest.raises(Killed):
        gates(home, tmp_path / "g", train=train, step=kill_at(8))
    gates(home, tmp_path / "g", train=train, resume=True)
    assert files(tmp_path / "g") == files(tmp_path / "whole")


def test_checkpoints_of_gates_are_as_small_as_gates(home, tmp_path):
    with pytest.raises(Killed):
        gates(home, tmp_path / "g", step=kill_at(4))
    checkpoint = tmp_path / "g-checkpoints" / "checkpoints" / "checkpoint-3"
    assert {name.split(".")[0] for name in load_file(checkpoint / WEIGHTS)} == {"gates"}
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    whole = (home / "model" / "model.safetensors").stat().st_size
    assert sizes[WEIGHTS] + sizes["optimizer.pt"] < whole / 10


@pytest.mark.parametrize(
    "optimizer", slow_unless(HealOptimizer.MUON.__eq__, [HealOptimizer.MUON, HealOptimizer.ADAMW])
)
def test_a_healing_goes_on_to_the_same_end(optimizer, home, tmp_path):
    settings = {"optimizer": optimizer, "bf16": False}
    healed(home, tmp_path / "whole" / "h", **settings)
    with pytest.raises(Killed):
        healed(home, tmp_path / "h", step=kill_at(8), **settings)
    healed(home, tmp_path / "h", resume=True, **settings)
    weights = [
        files(folder / "h")["model.safetensors"] for folder in (tmp_path, tmp_path / "whole")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("step", [2, 8])  # before the first checkpoint, and after two
@pytest.mark.parametrize("form", list(Form))
def test_gates_of_either_form_go_on_to_the_same_end(form, step, home, tmp_path):
    windows = {"form": form, "target_heads": None, "window": 4, "context_tokens": 16}
    settings = {"gate_lr": 0.5} | (windows if form is Form.WINDOW else {})
    gates(home, tmp_path / "whole", **settings)
    with pytest.raises(Killed):
        gates(home, tmp_path / "g", step=kill_at(step), **settings)
    gates(home, tmp_path / "g", resume=True, **settings)
    assert files(tmp_path / "g") == files(tmp_path / "whole")
    gates(home, tmp_path / "other", **settings, seed=1)
    assert files(tmp_path / "other") != files(tmp_path / "whole")


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.place),)


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(checkpoint, **changes):
    tensors = {**load_file(checkpoint / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, checkpoint / WEIGHTS)


def change_saved(file, alter):
    """Alters what torch.save wrote."""
    content = torch.load(file, weights_only=False)
    torch.save(alter(content) or content, file)


def squeeze(moments):
    for moment in moments["state"].values():
        moment.update({n: t.new_ones(3, 7) for n, t in moment.items() if getattr(t, "ndim", 0)})


def renamed(content):
    return {f"{name}_": value for name, value in content.items()}


SAVED = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
LOG_ALPHA = "gates.log_alpha"
DAMAGES = {
    "a tensor is missing": lambda path: change(path, **{LOG_ALPHA: None}),
    "a foreign tensor": lambda path: change(path, other=torch.ones(2)),
    "another shape": lambda path: change(path, **{LOG_ALPHA: torch.ones(5)}),
    "a shape that spreads": lambda path: change(path, **{LOG_ALPHA: torch.ones(1)}),
    "half of the weights": lambda path: halve(path / WEIGHTS),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "moments of another model": lambda path: torch.save(
        {"state": {}, "param_groups": []}, path / "optimizer.pt"
    ),
    "moments of another shape": lambda path: change_saved(path / "optimizer.pt", squeeze),
    "a step that is no number": lambda path: change_saved(
        path / "scheduler.pt", lambda content: {**content, "last_epoch": "six"}
    ),
    **{f"code in {n}": lambda path, n=n: torch.save(Bomb(path / "ran"), path / n) for n in SAVED},
    **{f"no {name}": lambda path, name=name: (path / name).unlink() for name in SAVED},
    **{f"empty {n}": lambda path, n=n: (path / n).write_bytes(b"") for n in (*SAVED, WEIGHTS)},
    **{f"half of {name}": lambda path, name=name: halve(path / name) for name in SAVED},
    **{
        f"text in {n}": lambda path, n=n: (path / n).write_text("x" * 99) for n in (*SAVED, WEIGHTS)
    },
    **{f"{n} with other names": lambda path, n=n: change_saved(path / n, renamed) for n in SAVED},
    **{f"a list in {n}": lambda path, n=n: torch.save([1, 2], path / n) for n in SAVED},
}


# what nothing reads before the next step
STEPPING = ("moments of another shape", "a step that is no number")


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused(what, home, tmp_path, stopped):
    checkpoint = stopped / "checkpoints" / "checkpoint-6"
    DAMAGES[what](checkpoint)
    file = rf"/({'|'.join(SAVED)}|{WEIGHTS})" if what not in STEPPING else ""
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-6{file}' is damaged.*Remove that checkpoint .*--overwrite",
    ) as told:
        go_on(home, tmp_path)
    assert told.value.exit_code == 2 and "\n" not in str(told.value)
    assert not (checkpoint / "ran").exists() and not (tmp_path / "g").exists()


WRONG = {
    **dict.fromkeys(("epoch", "global_step", "max_steps", "total_flos", "best_metric"), "six"),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "num_train_epochs"), "all"),
    **dict.fromkeys(("train_batch_size", "num_input_tokens_seen", "best_global_step"), 0.5),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero"), "yes"),
    **{
        "is_hyper_param_search": 2,
        "trial_name": 3,
        "trial_params": [4],
        "best_model_checkpoint": 5,
    },
    **{"log_history": "none", "stateful_callbacks": {}},
}


def _state_with(checkpoint, alter):
    state = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps(alter(state) or state))


STATES = {
    **{f"{n} of a wrong type": lambda state, n=n: state.update({n: WRONG[n]}) for n in WRONG},
    **{f"no {n}": lambda state, n=n: {k: v for k, v in state.items() if k != n} for n in WRONG},
    "other names": renamed,
    "a list": lambda state: [1],
    "a number": lambda state: 1,
    "a text": lambda state: "text",
    "nothing more": lambda state: {"global_step": 6},
    "a later step": lambda state: state.update(global_step=9),
    "an earlier step": lambda state: state.update(global_step=3),
    "more steps": lambda state: state.update(max_steps=10**9),
    "no history": lambda state: state.update(log_history=[]),
    "half a history": lambda state: state.update(log_history=state["log_history"][:3]),
    "a history of texts": lambda state: state.update(log_history=["a"] * 6),
    "a loss that is none": lambda state: state["log_history"][2].update(loss="low"),
    "a record without its step": lambda state: state["log_history"][2].pop("step"),
    "no control": lambda state: state.update(stateful_callbacks={"Other": {}}),
    "a control of a wrong type": lambda state: state.update(
        stateful_callbacks={"TrainerControl": 1}
    ),
}


def test_every_entry_of_a_state_is_tried(stopped):
    checkpoint = stopped / "checkpoints" / "checkpoint-6"
    assert WRONG.keys() == json.loads((checkpoint / STATE).read_text()).keys()


@pytest.mark.parametrize("what", slow_unless(lambda what: what[:3] != "no ", STATES))
def test_a_damaged_state_is_refused(what, home, tmp_path, stopped):
    _state_with(stopped / "checkpoints" / "checkpoint-6", STATES[what])
    said = rf"checkpoint-6/{STATE}' is damaged.*Remove that checkpoint .*--overwrite"
    with pytest.raises(CheckpointError, match=said) as told:
        go_on(home, tmp_path)
    assert told.value.exit_code == 2 and "\n" not in str(told.value)


def test_half_a_checkpoint_is_not_resumed_from(home, tmp_path, whole, stopped):
    """The file that says how far it is comes last."""
    halve(stopped / "checkpoints" / "checkpoint-6" / STATE)
    (stopped / "checkpoints" / "checkpoint-9").mkdir()
    steps = []
    assert go_on(home, tmp_path, step=noting(steps)) == whole
    assert steps == [4, 5, 6, 7, 8, 9]


# the folder of a run


def test_a_folder_without_settings_is_no_run(home, tmp_path, whole, stopped):
    (stopped / CONFIG).unlink()
    (stopped / ".config.yaml.partial" / "new").mkdir(parents=True)
    (stopped / ".config.yaml.partial" / "headprune-at-work").touch()
    with pytest.raises(CheckpointError, match="no run in .*; leave out --resume"):
        go_on(home, tmp_path)
    gates(home, tmp_path / "g", train=Train.ATTENTION)
    assert files(tmp_path / "g") == whole
    assert not stopped.exists()


@pytest.mark.parametrize("content", ["lr: 1", "train_gates: {", "- 1", "\x00"])
def test_foreign_or_damaged_settings_are_left_alone(content, home, tmp_path, stopped):
    (stopped / CONFIG).write_text(content)
    before = sorted(stopped.rglob("*"))
    for how in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(CheckpointError, match="config.yaml'") as told:
            gates(home, tmp_path / "g", **how)
        assert "\n" not in str(told.value)
    assert sorted(stopped.rglob("*")) == before


def test_a_folder_of_someone_else_is_left_alone(home, tmp_path):
    path = tmp_path / "g-checkpoints" / "notes.txt"
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="holds 'notes.txt'"):
        gates(home, tmp_path / "g", overwrite=True)
    assert path.read_text() == "mine"


def test_a_training_is_resumed_with_the_same_settings(home, tmp_path, stopped, monkeypatch):
    before = sorted(stopped.rglob("*"))
    with pytest.raises(CheckpointError, match="train_gates.gate_lr: 0.08 then, 0.25 now") as told:
        go_on(home, tmp_path, gate_lr=0.25)
    assert told.value.exit_code == 2
    with pytest.raises(CheckpointError, match=r"other settings \(of train-gates\)"):
        healed(home, tmp_path / "g", resume=True)
    shutil.copytree(home / "model", tmp_path / "model")
    shutil.copy(home / "text.txt", tmp_path)
    with pytest.raises(CheckpointError, match=r"\(model: .* then, .* now, data.source"):
        go_on(tmp_path, tmp_path)
    text = (home / "text.txt").read_text()
    (home / "text.txt").write_text(f"{text} one word more")
    with pytest.raises(CheckpointError, match=r"\(data_sha256: .* then, .* now\)"):
        go_on(home, tmp_path)
    (home / "text.txt").write_text(text)
    monkeypatch.setenv("WORLD_SIZE", "4")
    again = Run(stopped, yaml.safe_load((stopped / CONFIG).read_text()) | {"processes": 4})
    with pytest.raises(CheckpointError, match=r"\(processes: 1 then, 4 now\)"):
        again.check(Resuming(resume=True))
    config = TrainGatesConfig(target_heads=0.5)
    assert Run.of(tmp_path / "g", "train_gates", config).settings["processes"] == 4
    assert sorted(stopped.rglob("*")) == before


@pytest.mark.parametrize("train", [gates, healed])
def test_the_old_output_stays_until_the_new_one_is_complete(train, home, tmp_path):
    train(home, tmp_path / "o", steps=2)
    old = files(tmp_path / "o")
    with pytest.raises(CheckpointError, match="already exists"):
        train(home, tmp_path / "o")
    with pytest.raises(Killed):
        train(home, tmp_path / "o", overwrite=True, step=kill_at(5))
    assert files(tmp_path / "o") == old
    train(home, tmp_path / "o", overwrite=True, resume=True)
    new = files(tmp_path / "o")
    assert new.keys() == old.keys() and new != old
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


@contextmanager
def claimed_by_another(output):
    """As if another process wrote an output: locks belong to whoever opened the file."""
    folder = work_folder(output)
    folder.mkdir()
    with FileLock(folder / "headprune-at-work"):
        yield


@pytest.mark.parametrize("train", [gates, healed])
def test_two_trainings_do_not_share_an_output(train, home, tmp_path):
    with (
        claimed_by_another(tmp_path / "o"),
        pytest.raises(CheckpointError, match="Another process"),
    ):
        train(home, tmp_path / "o")
    assert not (tmp_path / "o-checkpoints").exists()
    train(home, tmp_path / "o", steps=1)


def test_a_long_name_has_a_folder(tmp_path):
    config = HealConfig(steps=1)
    one, other = (Run.of(tmp_path / ("n" * 254 + end), "heal", config).folder for end in "ab")
    one.mkdir()
    assert one != other and one.name.endswith("-checkpoints")


# numbers that are not finite


def of_nan_after(step, group, patched):
    """Lets an optimiser come to NaN in one of its groups: gates or weights."""
    plain, made = torch.optim.AdamW.step, [0]

    def breaking(self, closure=None):
        plain(self, closure)
        made[0] += 1
        if made[0] == step:
            self.param_groups[group]["params"][0].data.fill_(torch.nan)

    patched.setattr(torch.optim.AdamW, "step", breaking)


@pytest.mark.parametrize(
    ("step", "group", "message"),
    [
        (1, 0, "the gates are not finite after step 1 of 9"),
        (4, 1, "the loss is nan at step 5 of 9"),
        (9, 1, "proj.weight' is not finite after step 9 of 9"),  # no loss shows it any more
    ],
)
def test_a_training_that_breaks_down_writes_nothing(
    step, group, message, home, tmp_path, monkeypatch
):
    of_nan_after(step, group, monkeypatch)
    with pytest.raises(TrainingError, match="Training broke down: .*Lower gate_lr") as told:
        gates(home, tmp_path / "g", train=Train.ATTENTION, save_every=9)
    assert message in str(told.value)
    assert told.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_a_learning_rate_that_is_too_large_is_named(home, tmp_path, capsys):
    line = f"train-gates {home / 'model'} --data {home / 'text.txt'} --steps 9 --train all"
    command = f"{line} --config seq_len=16 --config weight_lr=1e9".split()
    code, _, err = run(capsys, *command, "--target-heads", "0.5", tmp_path / "g")
    assert code == 1
    assert "Lower gate_lr or weight_lr, and start anew" in err
    assert not (tmp_path / "g").exists()


def test_text_without_anything_to_mask_is_said(tmp_path):
    tiny.save(tiny.model("bert-mlm"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(f"{tiny.text(400)} {'unknown ' * 350}")
    with pytest.raises(DataError, match="no token to mask in a whole batch.*Give other text"):
        gates(tmp_path, tmp_path / "g", batch_size=1, target_heads=None, l0_penalty=0.1)
    assert not (tmp_path / "g").exists()


def test_a_healing_that_breaks_down_keeps_its_last_good_checkpoint(home, tmp_path):
    with pytest.raises(TrainingError, match="Lower --learning-rate"):
        healed(home, tmp_path / "h", learning_rate=1e9, save_every=1)
    assert not (tmp_path / "h").exists()
    for checkpoint in (tmp_path / "h-checkpoints" / "checkpoints").glob("checkpoint-*"):
        assert first_infinite(load_file(checkpoint / WEIGHTS)) is None


# settings


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (TrainGatesConfig, {"target_heads": 0.5, "gate_lr": float("inf")}),
        (TrainGatesConfig, {"target_heads": 0.5, "init_log_alpha": float("nan")}),
        (TrainGatesConfig, {"target_heads": 0.5, "init_log_alpha": 1e30}),
        (TrainGatesConfig, {"target_heads": 0.5, "seed": 2**32}),
        (TrainGatesConfig, {"target_heads": 0.5, "batch_size": 10**12}),
        (TrainGatesConfig, {"l0_penalty": float("inf")}),
        (TrainGatesConfig, {"target_heads": 0.5, "l0_penalty": 0.1}),
        (TrainGatesConfig, {}),
        (HealConfig, {"steps": 10**10}),
        (HealConfig, {"steps": 1, "learning_rate": float("inf")}),
        (HealConfig, {"steps": 1, "save_every": 10**30}),
    ],
)
def test_settings_that_no_run_could_have_are_refused(kind, settings):
    with pytest.raises(ValidationError):
        kind(**settings)


# a full disk


@contextmanager
def no_file_larger_than(size):
    """A disk that is full in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", slow_unless((50, 120_000).__contains__, [50, 900, 5_000, 120_000]))
def test_a_full_disk_is_said_and_the_training_goes_on(size, home, tmp_path, whole):
    with ExitStack() as full:

        def begin(stage):  # tokens and settings are written by then
            if stage == "training":
                full.enter_context(no_file_larger_than(size))

        with pytest.raises(CheckpointError, match="Could not write .*[Ff]ree some space") as told:
            gates(home, tmp_path / "g", stage=begin, train=Train.ATTENTION)
    assert told.value.exit_code == 2
    assert not (tmp_path / "g").exists()
    begun = (tmp_path / "g-checkpoints" / CONFIG).exists()
    gates(home, tmp_path / "g", train=Train.ATTENTION, resume=begun)
    assert files(tmp_path / "g") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["g"]
