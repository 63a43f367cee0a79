"""Pickled weights come over bit by bit, and nothing of a pickle runs."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import headprune
from headprune.errors import CheckpointError
from headprune.io.markup import sentence
from headprune.model import probes
from headprune.pickles import import_pickle as pipeline
from headprune.pickles import seccomp, unpickling
from headprune.pickles.import_pickle import check_written, import_pickle
from headprune.pickles.sandbox import converse
from headprune.proof import equivalence
from tests import tiny
from tests.test_cli import run

needs_seccomp = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in seccomp.MACHINES,
    reason="there is no seccomp filter for this platform",
)


def pickled(model: PreTrainedModel, folder: Path, weights: Any = None, **how: Any) -> Path:
    """A model folder as it was before safetensors."""
    tiny.save(model, folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict() if weights is None else weights, folder / BIN, **how)
    return folder


BIN = "pytorch_model.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny GPT-2, whose lm_head shares the storage of its embeddings."""
    return pickled(tiny.model("gpt2"), tmp_path / "model")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reader without a process of its own, where the process is not what is tested."""

    def converse(module: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        importlib.import_module(module).main(json.loads(json.dumps(job)), told.append)
        yield from told

    monkeypatch.setattr(unpickling, "confine", lambda cpu_s: [])
    monkeypatch.setattr(pipeline, "converse", converse)


def put(folder: Path, content: Any, **how: Any) -> Path:
    torch.save(content, folder / BIN, **how)
    return folder


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.clone().contiguous().reshape(-1).view(torch.uint8).numpy())


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {shlex.quote(str(self.file))}",)


# ---- what comes over


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("llama-gqa", {}),
        ("gpt2", {"_use_new_zipfile_serialization": False}),
        ("bert-mlm", {"wrapper": "state_dict"}),
        ("gpt2", {"location": "cuda:0"}),
        ("llama-mha", {"location": "cuda:0", "_use_new_zipfile_serialization": False}),
    ],
)
def test_the_import_computes_what_was_pickled(
    case: str,
    how: dict[str, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how:  # the process that reads is the same for all
        request.getfixturevalue("in_process")
    model, how = tiny.model(case), dict(how)
    weights: Any = model.state_dict()
    location, wrapper = how.pop("location", None), how.pop("wrapper", None)
    if wrapper:
        weights = {"epoch": 3, "optimizer": {"state": {}}, wrapper: weights}
    with monkeypatch.context() as patch:
        if location:  # as if the tensors lay on a GPU
            patch.setattr(torch.serialization, "location_tag", lambda storage: location)
        folder = pickled(model, tmp_path / "old", weights, **how)
    if location and not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):  # why map_location is needed
            torch.load(folder / BIN, weights_only=True)
    done = import_pickle(folder, tmp_path / "new")

    assert (done.files, done.wrapper) == ({BIN: "model.safetensors"}, wrapper)
    loaded, info = headprune.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    inputs = probes.probe_inputs(model)
    wanted = probes.probe(model, inputs)
    assert equivalence.difference(wanted, probes.probe(aligned(loaded), inputs)) == 0
    with torch.no_grad():  # the corrupted sibling: one row of the last weights
        model.get_output_embeddings().weight[5] += 0.1
    assert equivalence.difference(probes.probe(model, inputs), probes.probe(loaded, inputs)) > 1e-3


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The same numbers in memory of their own: where they lie in a file, kernels round otherwise.

    3e-7 of the outputs, for the folder of ``save_pretrained`` as well.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.usefixtures("in_process")
def test_every_kind_of_tensor_keeps_its_bits(folder: Path, tmp_path: Path) -> None:
    base = torch.arange(-60.0, 60.0)
    weights: dict[str, Tensor] = {
        **{
            str(dtype): base.to(dtype) for dtype in unpickling.DTYPES if not dtype.is_floating_point
        },
        **{str(dtype): base.to(dtype) for dtype in unpickling.DTYPES if dtype.is_floating_point},
        "transposed": base.view(10, 12).t(),
        "every second": base[::2],
        "view of more": torch.randn(100_000)[7:10],
        "expanded": torch.arange(5).expand(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
        "parameter": torch.nn.Parameter(base[:4]),
        "encoder.LayerNorm.gamma": base[:3].bfloat16(),
        "one byte before floats": torch.tensor([True]),
    }
    done = import_pickle(put(folder, weights), tmp_path / "new")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor.detach()), name
    assert done.tensors == len(weights)
    assert done.weight_bytes == sum(len(raw(tensor.detach())) for tensor in weights.values())
    assert done.dtypes["bfloat16"] == 2
    size = (tmp_path / "new" / "model.safetensors").stat().st_size
    assert size < done.weight_bytes + 10_000  # nothing of the larger storage
    with safe_open(tmp_path / "new" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.usefixtures("in_process")
def test_a_tied_name_is_left_out_only_if_loading_brings_it_back(tmp_path: Path) -> None:
    model = tiny.model("gpt2")
    head, embeddings = "lm_head.weight", "transformer.wte.weight"
    state = OrderedDict(model.state_dict())
    copies = {**state, head: state[head].clone()}
    other = {**state, head: state[head] + 1}

    for name, weights in (("shared", state), ("copies", copies)):
        done = import_pickle(pickled(model, tmp_path / name, weights), tmp_path / f"{name}-new")
        assert done.tied == {head: embeddings}
        assert head not in load_file(tmp_path / f"{name}-new" / "model.safetensors")
        loaded = headprune.from_pretrained(tmp_path / f"{name}-new")
        torch.testing.assert_close(loaded.lm_head.weight, state[head], rtol=0, atol=0)
    # not the same numbers, whatever the config says
    done = import_pickle(pickled(model, tmp_path / "other", other), tmp_path / "other-new")
    written = load_file(tmp_path / "other-new" / "model.safetensors")
    assert done.tied == {}
    torch.testing.assert_close(written[head], written[embeddings] + 1, rtol=0, atol=0)


@pytest.mark.usefixtures("in_process")
def test_names_that_no_class_ties_keep_copies(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for settings in ({"tie_word_embeddings": False}, {"model_type": "never-heard-of"}):
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        done = import_pickle(folder, tmp_path / "new", overwrite=True)
        written = load_file(tmp_path / "new" / "model.safetensors")
        assert done.tied == {}
        assert raw(written["lm_head.weight"]) == raw(written["transformer.wte.weight"])


def shards(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Spreads the weights over two files; returns the index."""
    (folder / BIN).unlink(missing_ok=True)
    names = sorted(weights)
    where = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{BIN}.index.json").write_text(json.dumps(index))
    return index


def test_shards_stay_shards(folder: Path, tmp_path: Path) -> None:
    model = tiny.model("gpt2")
    index = shards(folder, dict(model.state_dict()))
    done = import_pickle(folder, tmp_path / "new")
    new = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert sorted(set(new["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    # lm_head, in the first shard, is tied to a name of the second
    assert new["weight_map"].keys() | {"lm_head.weight"} == index["weight_map"].keys()
    assert done.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert new["metadata"]["total_size"] == done.weight_bytes
    inputs = probes.probe_inputs(model)
    loaded = aligned(headprune.from_pretrained(tmp_path / "new"))
    assert equivalence.difference(probes.probe(model, inputs), probes.probe(loaded, inputs)) == 0


@pytest.mark.usefixtures("in_process")
def test_broken_shards(folder: Path, tmp_path: Path) -> None:
    weights = dict(tiny.model("gpt2").state_dict())
    index = shards(folder, weights)
    where, file = index["weight_map"], folder / f"{BIN}.index.json"
    first, second = sorted(set(where.values()))
    for content, message in (
        ({"weight_map": {**where, "more": first}}, "lack 1 tensors of their index, 'more'"),
        ({"weight_map": {**where, "x": "../x.bin"}}, r"names '\.\./x\.bin'"),
        ({"weight_map": {**where, "x": "x.bin"}}, "lacks 'x.bin'"),
        ({"weight_map": {}}, "must name pickles of its own folder"),
        ([], "is damaged"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            import_pickle(folder, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    file.write_text(json.dumps(index))
    twice = next(name for name, shard in where.items() if shard == first)
    part = {name: weights[name] for name, shard in where.items() if shard == second}
    torch.save({**part, twice: weights[twice]}, folder / second)
    with pytest.raises(CheckpointError, match=f"'{twice}' is in '{second}' and in another"):
        import_pickle(folder, tmp_path / "new")


@pytest.mark.usefixtures("in_process")
def test_what_belongs_to_a_model_comes_along(folder: Path, tmp_path: Path) -> None:
    left_out = [
        *("modeling_own.py", "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "tf_model.h5"),
        "training_args.bin",
    ]
    kept = ("LICENSE", "README.md", "vocab.txt", "modules.json", "1_Pooling/config.json")
    (folder / "1_Pooling").mkdir()
    (folder / "2_Dense").mkdir()
    (folder / "runs").mkdir()
    for name in (*left_out, *kept, "2_Dense/config.json", "runs/events", ".gitattributes"):
        (folder / name).write_text(name)
    dense = {"linear.weight": torch.randn(3, 3)}
    torch.save(dense, folder / "2_Dense" / BIN)
    done = import_pickle(folder, tmp_path / "new")
    assert (done.left_out, done.modules) == (tuple(left_out), ("2_Dense",))
    for name in kept:
        assert (tmp_path / "new" / name).read_text() == name
    written = load_file(tmp_path / "new" / "2_Dense" / "model.safetensors")
    torch.testing.assert_close(written, dense, rtol=0, atol=0)
    files = {f.relative_to(tmp_path / "new").as_posix() for f in (tmp_path / "new").rglob("*.*")}
    assert files == {
        *(name for name in kept if "." in name),
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors", "2_Dense/config.json", "2_Dense/model.safetensors"),
        "import.json",
    }


@pytest.mark.usefixtures("in_process")
def test_another_name_for_the_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / BIN).rename(folder / "model[red].ckpt")  # at a terminal, no markup
    code, out, err = run(capsys, "import-pickle", folder, tmp_path / "new", "--json")
    assert (code, json.loads(out)["files"]) == (0, {"model[red].ckpt": "model.safetensors"})
    assert "reading model[red].ckpt ..." in err
    assert headprune.from_pretrained(tmp_path / "new").config.model_type == "gpt2"


@pytest.mark.usefixtures("in_process")
def test_a_snapshot_of_the_hub_cache(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_pickle(snapshot, tmp_path / "new")
    assert not any(file.is_symlink() for file in (tmp_path / "new").iterdir())
    put(snapshot, [1])
    with pytest.raises(CheckpointError, match="'pytorch_model.bin' holds a list"):  # not '5'
        import_pickle(snapshot, tmp_path / "other")


@pytest.mark.usefixtures("in_process")
def test_an_id_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--org--old"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    shutil.copytree(folder, cache / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(CheckpointError, match="headprune import-pickle org/old OUT$"):
        headprune.from_pretrained("org/old", cache_dir=tmp_path / "hub")
    import_pickle("org/old", tmp_path / "new")
    assert headprune.from_pretrained(tmp_path / "new").config.model_type == "gpt2"
    with pytest.raises(CheckpointError, match="'org/new' is no folder, and the hub did not give"):
        import_pickle("org/new", tmp_path / "other")


# ---- what does not


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json' is damaged"),
        (lambda f: (f / "model.safetensors").touch(), "there is nothing to import"),
        (lambda f: (f / BIN).unlink(), "has no pickled weights, such as pytorch_model.bin."),
        (lambda f: (f / BIN).rename(f / "optimizer.pt"), "optimizer.pt hold the state of a train"),
        (lambda f: [(f / BIN).rename(f / "a.pt"), (f / "b.pth").touch()], "2 pickles .* a.pt, b.p"),
        (lambda f: (f / "vocab.json").symlink_to("/etc/passwd"), "leads out of the model folder"),
    ],
)
def test_folders_without_anything_to_import(
    change: Any, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "converse", None)  # nothing is unpickled
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        import_pickle(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_original_is_never_the_output(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        import_pickle(tmp_path / "missing", tmp_path / "new")
    for output in (folder, folder / "new", tmp_path):
        with pytest.raises(CheckpointError, match="(is|holds|lies in) the input"):
            import_pickle(folder, output, overwrite=True)
    assert (folder / BIN).exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list, and a state dict"),
        ({"a": torch.zeros(1), "step": 3, 4: None}, "1 tensors and beside them 'step', int"),
        ({"model": {"a": torch.zeros(1)}, "ema": {"a": torch.zeros(1)}}, "2 dicts .* 'model', 'em"),
        ({"epoch": 3, "model": {"a": 1}}, "no dicts of tensors, .* 'epoch', 'model'"),
        ({}, "no dicts of tensors"),
        ({"a": torch.zeros(3).to_sparse()}, "'a' .* cannot hold: torch.sparse_coo"),
        ({"a": torch.zeros(3, dtype=torch.complex128)}, "cannot hold: .* torch.complex128"),
        ({"a": torch.zeros(3, device="meta")}, "cannot hold: .* on meta"),
        ({"a": torch.zeros(1).expand(10_000_000)}, "would unpack to 40,000,000"),
        ({"\x1b[2J": 1}, r"'\\x1b\[2J'"),
        (tiny.model("gpt2"), "asks for 'transformers.models.gpt2"),
    ],
)
def test_pickles_that_hold_other_things(
    content: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        import_pickle(put(folder, content), tmp_path / "new")
    assert "\x1b" not in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_damaged_pickles(tmp_path: Path) -> None:
    file = tmp_path / BIN
    weights = {"a": torch.arange(1000.0)}
    for how in (True, False):
        torch.save(weights, file, _use_new_zipfile_serialization=how)
        whole = file.read_bytes()
        for cut in (0, 1, 100, len(whole) // 2, len(whole) - 100):
            file.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError, match="could not be read|asks for"):
                unpickling.read(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")
    with pytest.raises(CheckpointError, match="could not be read"):
        unpickling.read(file)
    torch.save(weights, file)
    whole, numbers = file.read_bytes(), raw(weights["a"])
    at = whole.index(numbers) + 77
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
    assert not torch.equal(torch.load(file, weights_only=True)["a"], weights["a"])  # unnoticed
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        unpickling.read(file)


def test_zips_of_other_makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, packed = tmp_path / BIN, tmp_path / "packed.bin"
    weights = {"a": torch.arange(1000.0)}
    torch.save(weights, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    assert torch.equal(unpickling.read(packed)["a"], weights["a"])
    torch.serialization.set_crc32_options(False)
    torch.save(weights, file)
    torch.serialization.set_crc32_options(True)
    assert torch.equal(unpickling.read(file)["a"], weights["a"])
    torch.save({"a": torch.zeros(10_000_000)}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    with pytest.raises(CheckpointError, match="no weights are packed like that"):
        unpickling.read(packed)


def test_a_written_file_is_held_to_what_was_read(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"a": torch.arange(8.0), "b": torch.ones(2, 2)}
    with file.open("wb") as stream:
        facts = unpickling.write(weights, stream)
    check_written(file, facts)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="'b' is not in 'model.safetensors' as it was"):
        check_written(file, facts)
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="does not load"):
        check_written(file, facts)
    file.write_bytes(whole)
    for other in ({**facts, "c": facts["b"]}, {"a": facts["a"]}):
        with pytest.raises(CheckpointError, match="is not in"):
            check_written(file, other)


# ---- the process without privileges


@pytest.mark.parametrize("legacy", [False, True])
def test_a_malicious_pickle_runs_nothing(
    legacy: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen"
    evil = OrderedDict(a=torch.zeros(1), b=Malicious(seen))
    put(folder, evil, _use_new_zipfile_serialization=not legacy)
    code, _, err = run(capsys, "import-pickle", folder, tmp_path / "new")
    assert (code, "asks for 'posix.system'" in err, "Traceback" in err) == (2, True, False), err
    assert not seen.exists()
    assert not (tmp_path / "new").exists()
    torch.load(folder / BIN, weights_only=False)  # it would have
    assert seen.exists()


ATTEMPTS = """\
import os, socket, subprocess, threading
from pathlib import Path
from headprune.pickles.sandbox import confine

def child():
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)

def main(job, say):
    place = Path(job["place"])
    opened = (place / "opened").open("w")
    attempts = {
        "write": lambda: (place / "new").write_text("x"),
        "append": lambda: (place / "old").open("a"),
        "read and write": lambda: os.open(place / "old", os.O_RDWR),
        "truncate": lambda: os.truncate(place / "old", 0),
        "chmod": lambda: (place / "old").chmod(0o777),
        "times": lambda: os.utime(place / "old"),
        "link": lambda: os.link(place / "old", place / "linked"),
        "symlink": lambda: (place / "pointer").symlink_to(place / "old"),
        "mkdir": lambda: (place / "made").mkdir(),
        "rename": lambda: (place / "old").rename(place / "renamed"),
        "unlink": lambda: next(place.glob("*named")).unlink(),
        "socket": lambda: socket.socket().close(),
        "socket pair": socket.socketpair,
        "fork": child,
        "spawn": lambda: os.waitpid(os.posix_spawn(job["true"], ["true"], {}), 0),
        "program": lambda: subprocess.run([job["true"]], check=True),
        "signal": lambda: os.kill(os.getppid(), 0),
    }
    if job["confined"]:
        say({"on": confine(60)})
    results = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            results[name] = "done"
        except OSError as error:
            results[name] = type(error).__name__
        except StopIteration:  # nothing was renamed
            results[name] = "done"
    say({"results": results, "read": (place / "read").read_text()})
    opened.write("still open")
    opened.close()
    try:
        os.execv(job["true"], ["true"])
    except OSError as error:
        say({"exec": type(error).__name__})
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the child can import."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "attempts.py").write_text(ATTEMPTS)
    for name in ("old", "read"):
        (tmp_path / name).write_text(name)
    return tmp_path


def heard(module: str, **job: Any) -> dict[str, Any]:
    return {key: value for m in converse(module, job) for key, value in m.items()}


@needs_seccomp
def test_a_confined_process_changes_nothing_and_reaches_nobody(place: Path) -> None:
    told = heard("attempts", place=str(place), true=shutil.which("true"), confined=True)
    assert told["on"] == ["no new privileges", "resource limits", "seccomp"]
    done = {name for name, result in told["results"].items() if result != "PermissionError"}
    assert done == {"unlink"}  # there was nothing to remove
    assert (told["read"], told["exec"]) == ("read", "PermissionError")
    assert (place / "opened").read_text() == "still open"
    assert {f.name for f in place.iterdir()} == {"attempts.py", "old", "opened", "read"}


def test_the_same_process_unconfined_does_it_all(place: Path) -> None:
    told = heard("attempts", place=str(place), true=shutil.which("true"), confined=False)
    assert set(told["results"].values()) == {"done"}
    assert "exec" not in told  # it became another program


@needs_seccomp
def test_each_wall_holds_without_the_other(place: Path, folder: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    put(folder, {"a": Malicious(seen)})
    (place / "careless.py").write_text(
        "import torch\nfrom headprune.pickles.sandbox import confine\n"
        "def main(job, say):\n"
        "    confine(60)\n"
        "    say({'a': torch.load(job['file'], weights_only=False)['a']})\n"
    )
    # the code runs, as weights_only was off: system() finds that it may not start a shell
    assert heard("careless", file=str(folder / BIN))["a"] != 0
    assert not seen.exists()


def test_without_seccomp_the_command_still_works(
    place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "elsewhere.py").write_text(
        "import platform\nplatform.machine = lambda: 'riscv64'\n"
        "from headprune.pickles.unpickling import main\n"
    )
    monkeypatch.setattr(pipeline, "READER", "elsewhere")
    code, out, err = run(capsys, "import-pickle", folder, place / "new")
    out = " ".join(out.split())
    assert code == 0, err
    assert "weights_only, process of its own, no new privileges, resource limits. note:" in out
    assert headprune.from_pretrained(place / "new").config.model_type == "gpt2"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("raise ValueError('so \\x1b[2J')", r"ValueError: so \\x1b\[2J"),
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("from headprune.pickles.sandbox import confine; confine(0)\n while True: pass", "XCPU"),
    ],
)
def test_a_process_that_dies(body: str, message: str, place: Path) -> None:
    (place / "dies.py").write_text(f"def main(job, say):\n {body}\n")
    with pytest.raises(CheckpointError, match=message):
        heard("dies")
    assert len(sentence("a" * 999)) == 400


def test_a_process_that_lies_is_not_believed(
    place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = place / "precious"
    precious.touch()
    (place / "liar.py").write_text(
        "def main(job, say):\n"
        "    say({'protections': [], 'tied': {}, 'wrapper': None, 'written': job['tied'] and {\n"
        "        '../precious': {}, 'model.safetensors': {}}})\n"
    )
    monkeypatch.setattr(pipeline, "READER", "liar")
    with pytest.raises(CheckpointError, match="said nothing of its weights"):
        import_pickle(folder, place / "new")
    assert precious.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_is_said(folder: Path) -> None:
    files = [[str(folder / BIN), "/dev/full"]]
    with pytest.raises(CheckpointError, match="Could not write 'OUT': the disk is full"):
        heard("headprune.pickles.unpickling", files=files, tied={}, output="OUT")


def answer(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would do with a call: a small interpreter of the filter."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code, at, word = seccomp.program(machine), 0, 0
    while True:
        kind, yes, no, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if kind == 0x06:
            return k
        if kind == 0x20:
            (word,) = struct.unpack_from("=I", data, k)
            continue
        holds = {0x15: word == k, 0x35: word >= k, 0x45: bool(word & k)}[kind]
        at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "openat", "clone", "execve", "read"),
    [("x86_64", 257, 56, 59, 0), ("aarch64", 56, 220, 221, 63)],
)
def test_the_filter(machine: str, openat: int, clone: int, execve: int, read: int) -> None:
    own = seccomp.MACHINES[machine][1]
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    thread, process = 0x3D0F00, 0x1200011  # what pthread_create and fork ask for
    for call, expected in (
        ((read,), allow),
        ((execve,), refuse),
        ((openat, 0, 0, os.O_RDONLY | 0o2000000), allow),
        ((openat, 0, 0, os.O_WRONLY), refuse),
        ((openat, 0, 0, os.O_RDONLY | os.O_CREAT), refuse),
        ((clone, thread), allow),
        ((clone, process), refuse),
        ((435,), absent),  # clone3
        ((463,), absent),
        ((0x40000000 + 1,), absent),  # x32
    ):
        assert answer(machine, own, *call) == expected, call
    assert answer(machine, own ^ 1, read) == kill


# ---- the command


def test_the_advice_and_what_comes_next_work(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder.rename(tmp_path / "a [red] folder")
    code, _, err = run(capsys, "inspect", folder)
    assert code == 2
    advice = shlex.split(err.partition("without running any: headprune ")[2])
    assert advice == ["import-pickle", str(folder), "OUT"]
    code, out, err = run(capsys, *advice)
    assert code == 0, err
    assert "52 tensors of 409,744 bytes (52 float32), from pytorch_model.bin" in " ".join(
        out.split()
    )
    assert "left out: lm_head.weight, which loading ties to transformer.wte.weight" in out
    assert "reading pytorch_model.bin ..." in err
    following = shlex.split(out.partition("Next:")[2])
    assert following == ["headprune", "inspect", "OUT"]
    assert run(capsys, *following[1:])[0] == 0

    code, _, err = run(capsys, *advice)
    assert (code, "already exists" in err) == (2, True)
    code, out, err = run(capsys, *advice, "--overwrite", "--json")
    told = json.loads(out)
    assert (code, told["output"], told["tensors"]) == (0, "OUT", 52)
    assert told["protections"][:2] == ["weights_only", "process of its own"]
