"""Outputs: nothing lost, nobody else's replaced, nothing left behind."""

import errno
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from headprune.errors import CheckpointError
from headprune.io import ownership, writing
from headprune.io.figures import curve, save
from headprune.io.outputs import claimed, claimed_file, refuse_foreign, whole_folder
from headprune.io.writing import abandoned, beside, reserved, work_folder, write_whole
from tests import tiny
from tests.dying import FILES, state, write
from tests.marks import slow_unless
from tests.test_cli import refuses, run, succeeds


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------- death


@pytest.mark.process
@pytest.mark.parametrize("how", ["exchange", "journal"])
def test_killed_at_any_moment_the_old_or_the_new_output_is_there(how, tmp_path):
    if how == "exchange" and not _exchanges(tmp_path):
        pytest.skip("this file system cannot exchange two folders")
    home = tmp_path / "home"
    command = [sys.executable, "-m", "tests.dying", str(home), how]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    deaths = json.loads(done.stdout)
    assert len(deaths) > 40  # the writer has so many moments to die at
    assert {left for left, *_ in deaths} == ({1, 2} if how == "exchange" else {1, 2, "nothing"})
    assert sum(left == "nothing" for left, *_ in deaths) <= 1  # between two moves
    for left, taken_up, others, at_last, entries in deaths:
        assert taken_up == (1 if left == "nothing" else left)
        assert (others, at_last, entries) == ([], 3, 1)


def _exchanges(folder):
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    try:
        return writing._exchanged(one, other)
    finally:
        one.rmdir()
        other.rmdir()


def break_moves(monkeypatch, of):
    """Nothing can be exchanged, and some things not be moved."""
    rename = Path.rename

    def moved(self, target):
        if of(self):
            raise OSError(5, "the disk is broken")
        return rename(self, target)

    monkeypatch.setattr(writing, "_exchanged", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", moved)


def test_a_move_that_fails_half_way_is_taken_back(tmp_path, monkeypatch):
    write(tmp_path / "out", 1)
    break_moves(monkeypatch, lambda path: path.parent.name == "new")
    with pytest.raises(CheckpointError, match="the disk is broken"):
        write(tmp_path / "out", 2)
    assert (state(tmp_path / "out"), names(tmp_path)) == (1, ["out"])


def test_what_cannot_be_taken_back_waits_for_the_next_run(tmp_path, monkeypatch):
    write(tmp_path / "out", 1)
    with monkeypatch.context() as broken:
        break_moves(broken, lambda path: path.name == "old" or path.parent.name == "new")
        with pytest.raises(CheckpointError, match="is broken"):
            write(tmp_path / "out", 2)
    assert names(tmp_path) == [".out.partial"]
    with reserved(tmp_path / "out"):
        assert state(tmp_path / "out") == 1
    assert names(tmp_path) == ["out"]


def test_a_folder_in_which_a_run_died_before_it_wrote_anything_is_empty(tmp_path):
    out = tmp_path / "out"
    work = out / ".config.yaml.partial"
    (work / "new").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="already exists"), claimed(out, overwrite=False):
        pass  # nothing says that it is of headprune
    (work / "headprune-at-work").touch()
    with claimed(out, overwrite=False):
        write_whole(out / "config.yaml", "x")
        assert names(out) == ["config.yaml"]
    (out / "config.yaml").rename(out / "notes")
    with pytest.raises(CheckpointError, match="already exists"), claimed(out, overwrite=False):
        pass


@pytest.mark.parametrize("moment", ["_locked", "_emptied", "_release"])
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_while_a_place_is_made_or_cleared_leaves_nothing(
    late, moment, tmp_path, monkeypatch
):
    do, interrupts = getattr(writing, moment), [None]

    def interrupted(*about):
        done = do(*about) if late else None
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return done if late else do(*about)

    monkeypatch.setattr(writing, moment, interrupted)
    with pytest.raises(KeyboardInterrupt), reserved(tmp_path / "a" / "out") as new:
        new.write_text("half")
    assert (names(tmp_path), writing._held) == ([], set())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "full"), CheckpointError("no")])
def test_a_failed_command_leaves_nothing_behind(error, tmp_path):
    out = tmp_path / "a" / "b" / "out"

    def command():
        with claimed(out, overwrite=False), whole_folder(out) as new:
            (new / "half").write_text("x")
            raise error

    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        command()
    assert names(tmp_path) == []


def test_files_are_replaced_in_one_step(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    write_whole(file, "old")
    seen = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda a, b: (seen.append(file.read_text()), replace(a, b))[1]
    )
    write_whole(file, "new \udc80")  # a lone surrogate is written as JSON does
    assert (seen, file.read_text(), names(tmp_path)) == (["old"], "new \\udc80", ["config.yaml"])


# -------------------------------------------------------------- two writers


@contextmanager
def another_process(output):
    """A process that has claimed an output."""
    code = (
        "import sys; from pathlib import Path\n"
        "from headprune.io.outputs import claimed, whole_folder\n"
        "with claimed(Path(sys.argv[1]), True), whole_folder(Path(sys.argv[1])) as new:\n"
        "    (new / 'half').write_text('x'); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(output)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "ready\n"
            yield other
        finally:
            with suppress(ProcessLookupError):
                other.kill()


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
def test_of_two_writers_one_is_refused_until_the_other_ends(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "link").symlink_to(tmp_path)
    with another_process(out) as other:
        for name in (out, tmp_path / "link" / "out"):  # the same by whatever name
            with pytest.raises(CheckpointError, match="Another process is writing"):
                write(name, 1)
        assert not abandoned(tmp_path / ".out.partial")
        other.kill()
        other.wait()
        assert abandoned(tmp_path / ".out.partial")
        write(out, 1)
    assert (state(out), names(tmp_path)) == (1, ["link", "out"])


def test_a_claim_is_claimed_again_within(tmp_path):
    with claimed(tmp_path / "out", overwrite=False):
        write(tmp_path / "out", 1)
        with claimed(tmp_path / "out", overwrite=False):
            write(tmp_path / "out", 2)
        assert names(tmp_path) == [".out.partial", "out"]
    assert (state(tmp_path / "out"), names(tmp_path)) == (2, ["out"])


@pytest.mark.parametrize("inside", ["notes.txt", "new/notes.txt", "old/notes.txt"])
def test_what_others_put_where_it_would_be_made_is_not_touched(inside, tmp_path):
    mine = tmp_path / ".out.partial" / inside
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(CheckpointError, match=r"headprune did not make it. Move it away"):
        write(tmp_path / "out", 1)
    assert mine.read_text() == "mine" and names(tmp_path) == [".out.partial"]
    (tmp_path / ".out.partial").rename(tmp_path / "moved")
    write(tmp_path / "out", 1)
    assert names(tmp_path) == ["moved", "out"]


# ------------------------------------------------------------- names and links


@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127, "n" * 246])
def test_the_longest_names_will_do(name, tmp_path):
    write(tmp_path / name, 1)
    write(tmp_path / name, 2)
    write_whole(tmp_path / "sub" / name, "x")
    assert (state(tmp_path / name), names(tmp_path)) == (2, sorted([name, "sub"]))
    twins = [work_folder(tmp_path / (name[:-1] + last)) for last in "ab"]
    assert twins[0] != twins[1]
    assert all(len(os.fsencode(twin.name)) <= 255 for twin in twins)
    assert len(os.fsencode(beside(tmp_path / name, "{}-checkpoints").name)) <= 255


def test_too_long_a_name_is_refused_at_once(tmp_path):
    for claim in (
        claimed(tmp_path / ("n" * 256), False),
        claimed_file(tmp_path / ("n" * 256), ownership.PLAN, False),
    ):
        with pytest.raises(CheckpointError, match="too long"), claim:
            pass


@pytest.mark.parametrize("to", ["out", "file", "empty", "gone", "link"])
def test_nothing_is_written_through_a_link(to, tmp_path):
    write(tmp_path / "out", 1)
    (tmp_path / "file").write_text('{"unit": "head", "attentions": {}}')  # a plan's
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to(to)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path != link}
    for claim in (claimed(link, True), claimed_file(link, ownership.PLAN, True)):
        with (
            pytest.raises(CheckpointError, match=f"a link to '{to}', and nothing is written"),
            claim,
        ):
            pass
    assert link.readlink() == Path(to)
    if to in ("file", "gone"):  # a file of a folder, such as a card, takes the place of a link
        write_whole(link, "new")
        assert (link.is_symlink(), link.read_text()) == (False, "new")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p != link} == before


@pytest.mark.parametrize("name", ["", "new", "old", "headprune-at-work"])
def test_a_work_folder_with_links_is_none(name, tmp_path):
    work, mine = tmp_path / ".out.partial", tmp_path / "mine"
    mine.mkdir()
    (mine / "headprune-at-work").write_text("mine")
    if name:
        work.mkdir()
        (work / "headprune-at-work").touch()
        (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(mine / name if name == "headprune-at-work" else mine)
    with pytest.raises(CheckpointError, match="headprune did not make it"):
        write(tmp_path / "out", 1)
    assert names(mine) == ["headprune-at-work"]
    assert (mine / "headprune-at-work").read_text() == "mine" and (work / name).is_symlink()


def test_on_a_full_disk_an_old_file_stays(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "old")

    def half(path, content):
        with path.open("wb") as stream:
            stream.write(content[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(CheckpointError, match="the disk is full"):
        write_whole(tmp_path / "file", "anew")
    assert (tmp_path / "file").read_text() == "old" and names(tmp_path) == ["file"]


# ----------------------------------------------------------------- ownership


def record(folder, name):
    """Makes a folder into one that headprune wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "headprune.json": {
            **dict.fromkeys(("source", "shape", "proof"), ""),
            "lineage": [],
            "files": {"model.safetensors": "0", "sub/[x].json": "0"},
        },
        "gates.json": dict.fromkeys(
            ("headprune_version", "model", "unit", "modules", "kept_heads"), ""
        ),
        "scores.json": dict.fromkeys(("versions", "model", "unit", "modules", "criteria"), ""),
    }
    (folder / name).write_text(json.dumps(found[name]))


OURS = {
    "headprune.json": ["model.safetensors", "sub/[x].json", "README.md", ".DS_Store"],
    "gates.json": ["gates.safetensors", "history.jsonl", "checkpoints/checkpoint-2/optimizer.pt"],
    "scores.json": ["scores.safetensors"],
}


STRANGERS = ["notes.txt", ".git/HEAD", "sub/x.json", "checkpoints.txt", "a/headprune.json"]
STRANGERS += ["my-thesis.partial/chapter.txt", "x.partial", ".my.partial/new/a.txt", "tmpab/a.txt"]


def put(folder, name):
    """Put a file into a folder."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
    return folder / name


@pytest.mark.parametrize("name", OURS)
def test_what_headprune_wrote_is_known_by_its_record(name, tmp_path):
    out = tmp_path / "out"
    record(out, name)
    for file in OURS[name]:
        put(out, file)
    refuse_foreign(out)
    for stranger in STRANGERS:
        put(out, stranger)
        with pytest.raises(CheckpointError, match=f"'{stranger}' in .* is no part"):
            refuse_foreign(out)
        (out / stranger).unlink()
    (out / name).write_text("{}")  # by content, not by name
    with pytest.raises(CheckpointError, match="is no part of what headprune wrote"):
        write(out, 2)
    assert (out / OURS[name][0]).read_text() == "x"


def test_reports_may_lie_among_what_headprune_wrote(tmp_path):
    write(tmp_path / "out", 1)
    report = json.dumps({"provenance": {}, "model": {}, "differences": []})
    (tmp_path / "out" / "quality.json").write_text(report)
    refuse_foreign(tmp_path / "out")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "quality.json").write_text(report)
    with pytest.raises(CheckpointError, match="'quality.json' in"):
        refuse_foreign(tmp_path / "others")


def test_strangers_that_come_while_a_command_runs_are_kept(tmp_path):
    write(tmp_path / "out", 1)
    with (
        pytest.raises(CheckpointError, match="'late.txt' in"),
        claimed(tmp_path / "out", overwrite=True),
        whole_folder(tmp_path / "out"),
    ):
        (tmp_path / "out" / "late.txt").write_text("x")
    assert names(tmp_path / "out") == sorted([*FILES, "inside", "late.txt"])


@pytest.mark.parametrize("missing", ["a", "a/b"])
def test_an_output_that_cannot_be_is_refused_before_any_work(missing, tmp_path):
    (tmp_path / "a").write_text("a file")
    with pytest.raises(CheckpointError), claimed(tmp_path / missing, overwrite=True):
        pytest.fail("there was work")
    assert (tmp_path / "a").read_text() == "a file"


def test_the_folder_the_user_is_in_stays(tmp_path, monkeypatch):
    inside = tmp_path / "out" / "inside"
    write(tmp_path / "out", 1)
    monkeypatch.chdir(inside)
    for output in (Path(), Path(".."), inside, tmp_path / "out"):
        with pytest.raises(CheckpointError, match="the folder you are in, or holds it"):
            write(output, 2)
    assert state(tmp_path / "out") == 1


# ------------------------------------------------------- inputs, by every command


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A model that cannot be loaded, a text, and all that commands read, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("zoo/model").mkdir(parents=True)
    Path("zoo/model/config.json").write_text('{"model_type": "llama"}')
    Path("zoo/model/model.safetensors").write_bytes(b"weights")
    Path("zoo/text.txt").write_text(tiny.text(50))
    record(Path("zoo/scores"), "scores.json")
    record(Path("zoo/gates"), "gates.json")
    Path("zoo/plan.json").write_text('{"unit": "head", "attentions": {}}')
    return tmp_path


M, TEXT = "zoo/model", "--data zoo/text.txt"
FOLDERS = [
    f"prune {M} --plan zoo/plan.json OUT --overwrite",
    f"prune {M} --gates zoo/gates OUT --overwrite",
    f"prune {M} --scores zoo/scores --keep 0.5 --refit zoo/text.txt OUT --overwrite",
    f"convert-gqa {M} --kv-heads 1 --calibrate zoo/text.txt OUT --overwrite",
    f"convert-gqa {M} --kv-heads 1 --calibrate zoo/text.txt --heal 3 OUT --overwrite",
    f"convert-swa {M} {TEXT} --scores zoo/scores --heal 3 OUT --overwrite",
    f"score {M} {TEXT} OUT --overwrite",
    f"migrate {M} OUT --overwrite",
    f"train-gates {M} {TEXT} --steps 1 --target-heads 0.5 OUT --overwrite",
    f"heal {M} --teacher {M} {TEXT} --steps 1 OUT --overwrite",
]


def everything(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("line", FOLDERS)
def test_no_command_replaces_what_it_reads(line, home, capsys):
    (home / "text.txt").write_text("elsewhere")
    record(home / "foreign", "scores.json")
    put(home / "foreign", ".my.partial/new/a.txt")
    before = everything(home)
    inputs = [M] + [part for part in ("zoo/gates", "zoo/scores") if part in line]
    for output, found in (
        *((place, "is the input") for place in inputs),
        *((f"{place}/new", "lies in the input") for place in inputs),
        ("zoo", "holds the input"),
        ("foreign", "'.my.partial/new/a.txt' in 'foreign' is no part"),
    ):
        refuses(capsys, found, *line.replace("OUT", output).split())
        assert everything(home) == before


def test_the_data_of_a_command_is_an_input(home, capsys):
    write(home / "data", 1)
    (home / "data" / "inside" / "text.txt").write_text("precious")
    for command in (f"score {M} data --overwrite", f"roles {M} data"):
        words = [*command.split(), "--data", "data/inside/text.txt"]
        refuses(capsys, "holds the input 'data/inside/text.txt'", *words)


FILE_OUTPUTS = [
    f"evaluate {M} {TEXT} OUT",
    f"check {M} {TEXT} --limit perplexity<=9 --junit OUT",
    f"check {M} {TEXT} --update-baseline --baseline OUT",
    f"prune {M} --scores zoo/scores --keep 0.5 --dry-run --save-plan OUT --overwrite",
]


@pytest.mark.parametrize("line", FILE_OUTPUTS)
def test_no_command_writes_a_file_over_an_input_or_a_strangers(line, home, capsys):
    (home / "mine.txt").write_text("precious")
    (home / "folder").mkdir()
    before = everything(home)
    for output, found in {
        "zoo/text.txt": "is, or belongs to, the input" if "--data" in line else "did not write it",
        f"{M}/config.json": "headprune did not write it",
        "mine.txt": "headprune did not write it",
        "folder": "is no file",
        "mine.txt/report": "cannot be made",
    }.items():
        refuses(capsys, found, *line.replace("OUT", output).split())
        assert everything(home) == before


def test_a_part_of_an_input_is_not_replaced_by_its_like(tmp_path):
    record(tmp_path, "headprune.json")
    part = put(tmp_path, "sub/[x].json")
    part.write_text('{"unit": "head", "attentions": {}}')
    assert ownership.PLAN(part)
    claim = claimed_file(part, ownership.PLAN, True, [tmp_path])
    with pytest.raises(CheckpointError, match="belongs to, the input"), claim:
        pytest.fail("there was work")


def test_of_two_writers_of_a_file_one_is_refused(home, capsys):
    with another_process(home / "report.json"):
        code, _, err = run(capsys, *f"evaluate {M} {TEXT} report.json".split())
    assert (code, "Another process is writing" in err) == (2, True), err


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_figures_are_known_by_their_maker(suffix, tmp_path):
    figure, file = curve([], "Heads", "size", "loss"), tmp_path / f"heads{suffix}"
    save(figure, file)
    assert ownership.FIGURE(file)
    figure.savefig(file)  # the same, by matplotlib alone
    with (
        pytest.raises(CheckpointError, match="did not write it"),
        claimed_file(file, ownership.FIGURE, overwrite=True),
    ):
        pytest.fail("there was work")


def test_a_users_files_beside_an_output_are_kept(tmp_path, monkeypatch, capsys):
    """Also among the checkpoints of an interrupted run, which goes."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(400))
    record(tmp_path / "out", "scores.json")
    work = tmp_path / "out-checkpoints"
    settings = {"model": "model", "data": {"source": "text.txt"}, "train_gates": {}}
    (work / "checkpoints/checkpoint-1").mkdir(parents=True)
    (work / "config.yaml").write_text(yaml.safe_dump(settings))
    mine = [put(folder, name) for folder in (tmp_path, work) for name in STRANGERS]
    mine.append(put(work / "checkpoints", "my-thesis.partial/chapter.txt"))
    line = "train-gates model --data text.txt --target-heads 0.5 --steps 1 --config batch_size=2"
    succeeds(capsys, *line.split(), "--config", "seq_len=16", "out", "--overwrite")
    assert all(path.read_text() == "x" for path in mine)
    assert not (work / "checkpoints/checkpoint-1").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_an_output_folder_that_safetensors_cannot_open_is_refused_at_once(tmp_path):
    strange = tmp_path / "\udcff"
    with pytest.raises(CheckpointError, match="is no UTF-8"), claimed(strange, overwrite=False):
        strange.mkdir()
    assert not strange.exists()
    with claimed(tmp_path / "é", overwrite=False):
        pass


READERS = [["model"], ["model", "--json"], ["no"]]


def inspected(home, words, out, err):
    tiny.save(tiny.model("llama-gqa"), home / "model")
    command = [sys.executable, "-m", "headprune", "inspect", *words]
    return subprocess.run(command, stdout=out, stderr=err, text=True, cwd=home, check=False)


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
@pytest.mark.parametrize("both", slow_unless(lambda both: not both, [False, True]))
@pytest.mark.parametrize("words", slow_unless(lambda words: words == ["model"], READERS))
def test_output_to_a_full_disk_is_an_error(tmp_path, words, both):
    """Shown by the exit code alone where errors go there as well."""
    with Path("/dev/full").open("w") as full:
        ended = inspected(tmp_path, words, full, full if both else subprocess.PIPE)
    assert ended.returncode == 2
    if not both:
        why = "a disk is full" if "model" in words else "there is no such folder"
        assert why in " ".join(ended.stderr.split())
        assert not re.search("Traceback|Exception ignored", ended.stderr)


@pytest.mark.process
@pytest.mark.parametrize("both", slow_unless(lambda both: both, [False, True]))
@pytest.mark.parametrize("words", slow_unless(lambda words: words == ["no"], READERS))
def test_who_reads_may_go(tmp_path, words, both):
    """As in ``| head -1``, also of errors: the exit code is that of the command."""
    reads, writes = os.pipe()
    os.close(reads)
    ended = inspected(tmp_path, words, writes, writes if both else subprocess.PIPE)
    os.close(writes)
    assert ended.returncode == (0 if "model" in words else 2)
    if not both:
        assert (ended.stderr == "") is (ended.returncode == 0)
