"""The command line: lean start, good runs, and one sentence for every mistake."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM

from headprune import app as cli
from headprune._version import __version__
from headprune.model.attention import attention_of
from tests import forked, tiny
from tests.dying import state, write

TRAIN = ["--steps", "4", "--config", "batch_size=2", "--config", "seq_len=16"]


def headprune(*arguments):
    return [sys.executable, "-m", "headprune", *map(str, arguments)]


def printed(capsys, *arguments):
    """Runs a command in this process, as main() does; returns exit code, stdout, stderr."""
    before = sys.argv
    sys.argv = ["headprune", *map(str, arguments)]
    capsys.readouterr()
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    else:
        code = 0
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run(capsys, *arguments):
    """The same, with stderr in one line, wherever the terminal breaks it."""
    code, out, err = printed(capsys, *arguments)
    return code, out, " ".join(err.split())


def succeeds(capsys, *arguments):
    """Runs a command that ends well; what it wrote to stdout."""
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def refuses(capsys, message, *arguments):
    """Runs a command that is refused in a sentence with a message; the sentence."""
    code, _, err = run(capsys, *arguments)
    assert (code, message in err) == (2, True), err
    return err


@pytest.mark.quick
@pytest.mark.process
def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['headprune', '--help']\n"
        "from headprune.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train-gates" in done.stdout


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    """Gates of the tiny Llama without a refit, by a process of its own; nobody changes them."""
    home = tmp_path_factory.mktemp("trained")
    model, text = tiny.save(tiny.model("llama-gqa"), home / "llama"), home / "text.txt"
    text.write_text(tiny.text(2_000))
    folder = home / "gates"
    command = ["train-gates", model, "--data", text, folder]
    done = forked.headprune(
        *command, "--target-heads", "0.5", "--config", "calibration_tokens=16", *TRAIN
    )
    assert done.returncode == 0, done.stderr
    assert "12 of 24" in done.stdout
    return folder


@pytest.mark.process
def test_the_main_job_end_to_end(llama_folder, gates, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    text = succeeds(capsys, "prune", llama_folder, "--gates", gates, "--dry-run")
    assert "model.layers.0.self_attn" in text
    assert "■■" in text
    assert not out.exists()
    text = succeeds(capsys, "prune", llama_folder, "--gates", gates, out)
    assert "verified" in text
    report = tmp_path / "report.json"
    line = f"evaluate {out} --data {text_file} --against {llama_folder} --config seq_len=16"
    text = succeeds(capsys, *line.split(), report, "--json")
    assert json.loads(text) == json.loads(report.read_text())
    text = succeeds(capsys, "inspect", out, "--json")
    assert sum(a["query_heads"] for a in json.loads(text)["attentions"]) == 12
    succeeds(capsys, "inspect", out)


def test_keep_overrides_the_trained_count(llama_folder, gates, capsys):
    base = ("prune", llama_folder, "--gates", gates, "--dry-run", "--json")
    for keep, heads in (("0.75", 18), ("4", 4)):
        text = succeeds(capsys, *base, "--keep", keep)
        assert json.loads(text)["query_heads"] == [24, heads]
    for keep in ("0", "0.0"):
        refuses(capsys, "None of the 24 query heads would stay", *base, "--keep", keep)


def test_shapes_are_weighed_in_the_dry_run_and_hit(llama_folder, gates, tmp_path, capsys):
    base = ("prune", llama_folder, "--gates", gates)
    text = succeeds(capsys, *base, "--dry-run", "--json")
    costs = {cost["shape"]: cost for cost in json.loads(text)["shapes"]}
    assert costs["uniform"]["stored"] == "native"
    assert costs["uniform"]["heads"] == 4 * 4 or costs["uniform"]["heads"] == 4 * 2
    assert list(costs) == ["per-layer", "uniform"] and 0 < costs["per-layer"]["evidence"] <= 1
    best = costs["per-layer"]["evidence"] / costs["per-layer"]["heads"]
    assert costs["uniform"]["evidence"] / costs["uniform"]["heads"] <= best * 1.01
    assert "kept evidence" in succeeds(capsys, *base, "--dry-run")
    out = tmp_path / "native"
    text = succeeds(capsys, *base, "--layout", "uniform", out)
    assert "Plain config" in text
    assert not list(out.glob("*.py"))


def test_a_native_shape_that_cannot_be_is_refused(llama_folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.1.self_attn": [0, 1]}))
    out = tmp_path / "out"
    base = ("prune", llama_folder, "--plan", plan, out)
    refuses(capsys, "does not fit a plain config", *base, "--layout", "uniform")
    plan.write_text(json.dumps({"model.layers.1.self_attn": [0, 2]}))
    refuses(capsys, "ask for them with --layout ragged", *base)
    assert not out.exists()
    succeeds(capsys, *base, "--layout", "ragged")
    assert run(capsys, "verify", out)[0] == 0


def test_prune_again_keeps_the_ids_and_the_lineage(
    llama_folder, gates, text_file, tmp_path, capsys
):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(capsys, "prune", llama_folder, "--gates", gates, first)[0] == 0
    command = ["train-gates", first, "--data", text_file, tmp_path / "again"]
    succeeds(capsys, *command, "--target-heads", "8", *TRAIN)
    succeeds(capsys, "prune", first, "--gates", tmp_path / "again", second, "--json")
    once, twice = (
        {path: part["keep"] for path, part in read_json(folder / "plan.json")["attentions"].items()}
        for folder in (first, second)
    )
    assert sum(map(len, twice.values())) == 8
    assert all(set(twice[path]) <= set(once[path]) for path in once)
    manifest = read_json(second / "headprune.json")
    assert manifest["query_heads"] == [12, 8]
    (earlier,) = manifest["lineage"]
    assert earlier["query_heads"] == [24, 12]
    assert earlier["source"]["fingerprint"] != manifest["source"]["fingerprint"]
    assert run(capsys, "verify", second, "--against", first)[0] == 0
    # the gates belong to the first cut, not to the original
    wrong = ("prune", llama_folder, "--gates", tmp_path / "again", "--dry-run")
    assert run(capsys, *wrong)[0] == 2


def read_json(path):
    return json.loads(path.read_text())


def test_a_plain_load_without_our_code_fails_loudly(llama_folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.1.self_attn": [0, 1, 2, 3, 4, 5]}))
    out = tmp_path / "out"
    assert run(capsys, "prune", llama_folder, "--plan", plan, out)[0] == 0
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        AutoModelForCausalLM.from_pretrained(out)


MODULE = "model.layers.0.self_attn"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"model.layers.9.self_attn": [0]}, "does not have. Did you mean 'model.layers"),
        ({MODULE: [6]}, f"names head 6 of '{MODULE}', which has the 6 heads 0 to 5"),
        ({MODULE: "0"}, "is no plan"),
        ([1, 2], "is no plan"),
        ({MODULE: [0]}, "1, 2, 2 query heads each"),
        ({"schema_version": 2, "attentions": {}}, "Upgrade headprune"),
        ({"schema_version": 1, "unit": "heads", "attentions": {}}, "not valid: unit"),
        ({"schema_version": 1, "unit": "head", "attentions": {}}, f"says nothing of '{MODULE}'"),
    ],
)
def test_bad_plans(plan, message, llama_folder, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    out = tmp_path / "out"
    code, _, err = run(capsys, "prune", llama_folder, "--plan", path, out)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not out.exists()


def test_bad_targets(llama_folder, text_file, tmp_path, capsys):
    base = ["train-gates", llama_folder, "--data", text_file, tmp_path / "g", *TRAIN]
    for options, message in (
        (["--target-heads", "1.5"], "between 0 and 1, not 1.5"),
        (["--target-heads", "25"], "has 24 query heads; 25 cannot be kept"),
        (["--target-heads", "7"], "A count of 7 cannot be kept exactly"),
        (["--target-heads", "7"], "nearest counts are 6 and 8"),
        (["--target-heads", "many"], "give a share such as 0.75"),
        ([], "exactly one of --target-heads and l0_penalty"),
        (["--target-heads", "0.5", "--config", "l0_penalty=1"], "exactly one of"),
        (
            ["--target-heads", "0.5", "--config", "temperature=0"],
            "temperature: Input should be greater",
        ),
        (["--target-heads", "0.5", "--window", "8"], "--window has no effect without --form"),
        (["--form", "window", "--target-heads", "1"], "--target-heads has no effect without"),
        (["--form", "window", "--unit", "head"], "a window is of whole KV heads"),
    ):
        refuses(capsys, message, *base, *options, "--overwrite")
        assert not (tmp_path / "g" / "gates.json").exists()


def test_bad_data(llama_folder, tmp_path, capsys):
    files = {"short.txt": "w1 w2 w3", "rows.jsonl": '{"body": "w1 w2", "title": "w3"}\n'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "nothing").mkdir()
    for source, options, message in (
        ("short.txt", [], "has 3 tokens, which makes 0 sequences of 16; at least 2 are needed"),
        ("rows.jsonl", [], "has the columns body, title: name the text with --text-column"),
        ("rows.jsonl", ["--config", "text_column=bdy"], "no such column. Did you mean 'body'?"),
        (
            "rows.jsonl",
            ["--config", "text_column=body", "--config", "label_column=l"],
            "--label-column l",
        ),
        ("nothing", [], "has no file with one of the endings"),
        (llama_folder.absolute(), [], "is the folder of a model, not text"),
        ("missing.txt", [], "There is no file"),
    ):
        base = ["train-gates", llama_folder, "--data", tmp_path / source, *TRAIN]
        command = [*base, "--target-heads", "0.5", tmp_path / "g", "--overwrite"]
        refuses(capsys, message, *command, *options)


def test_bad_models(tmp_path, capsys):
    bare = tiny.save(tiny.model("gpt2"), tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    unknown = tmp_path / "unknown"
    sizes = {"vocab_size": 65, "hidden_size": 16, "num_hidden_layers": 1}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(unknown)
    (tmp_path / "none").mkdir()
    for folder, message in (
        (bare, "no *.safetensors weights"),
        (unknown, "Model type 'mamba' is not in headprune's table"),
        (tmp_path / "none", "has no config.json"),
        (tmp_path / "missing", "is neither a folder nor a hub id"),
        (
            shutil.copytree(unknown, tmp_path / "\udcff"),
            "is no UTF-8, and safetensors opens no such",
        ),
    ):
        refuses(capsys, message, "inspect", folder)


@pytest.mark.parametrize("given", ["folder", "file", "shards"])
def test_a_pickle_is_refused_with_the_lines_that_convert_it(given, tmp_path, monkeypatch, capsys):
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "m")
    weights = tiny.model("gpt2").state_dict()  # its output shares the embeddings
    name, parts = "pytorch_model.bin", [weights]
    if given == "file":
        name = "all.pt"
    elif given == "shards":
        name = "pytorch_model-00001-of-00002.bin"
        some = list(weights)[:9]
        parts = [{k: weights[k] for k in some}, {k: weights[k] for k in weights if k not in some}]
    for number, part in enumerate(parts, 1):
        torch.save(part, folder / name.replace("-00001", f"-{number:05}"))
    torch.save({}, folder / "args.bin")  # of a training
    wanted = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named = folder / name if given == "file" else folder
    err = refuses(capsys, f"'{folder / name}' is a pickle", "inspect", named)
    monkeypatch.chdir(folder)
    exec(err.partition("in its folder: ")[2], {})
    assert run(capsys, "inspect", folder)[0] == 0
    converted = load_file(folder / "model.safetensors")
    assert all(torch.equal(converted[key], wanted[key]) for key in wanted)


def test_gates_of_another_model(gates, tmp_path, capsys):
    model = tiny.model("llama-gqa")
    with torch.no_grad():
        attention_of(model)[0].output_projection.get_parameter("weight").mul_(-1)
    other = tiny.save(model, tmp_path / "other")
    refuses(capsys, "are of 'llama'", "prune", other, "--gates", gates, tmp_path / "o")
    refuses(capsys, "is no gates folder", "prune", other, "--gates", tmp_path, tmp_path / "o")
    refuses(capsys, "Give one of --gates", "prune", other, tmp_path / "o")


def test_an_existing_output_is_kept_unless_overwritten(llama_folder, gates, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    command = ["prune", llama_folder, "--gates", gates, out]
    code, _, err = run(capsys, *command)
    assert (code, "already exists" in err, (out / "precious").exists()) == (2, True, True)
    code, _, err = run(capsys, *command, "--overwrite")
    assert (code, "'precious' in" in err, (out / "precious").exists()) == (2, True, True), err
    (out / "precious").unlink()
    write(out, 1)
    code, _, err = run(capsys, *command)
    assert (code, "already exists" in err, state(out)) == (2, True, 1)
    code, _, err = run(capsys, *command, "--overwrite")
    assert (code, (out / "headprune.json").exists()) == (0, True), err
    refuses(capsys, "is a file", *command[:-1], gates / "gates.json")


def test_a_failed_proof_leaves_nothing_and_exits_with_1(
    llama_folder, gates, tmp_path, capsys, monkeypatch
):
    from headprune.result import write as streamed

    write = streamed.write_shards

    def corrupted(pieces, folder, *others):
        write(pieces, folder, *others)
        file = Path(folder) / "model.safetensors"
        weights = load_file(file)
        name = next(n for n in weights if n.endswith("o_proj.weight") and weights[n].numel())
        weights[name] = weights[name].roll(1, dims=1)
        save_file(weights, file, metadata={"format": "pt"})

    monkeypatch.setattr(streamed, "write_shards", corrupted)
    before = sorted(tmp_path.iterdir())
    code, _, err = run(capsys, "prune", llama_folder, "--gates", gates, tmp_path / "o")
    assert (code, "proof failed" in err) == (1, True), err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.process
def test_ctrl_c_stops_with_130_and_resume_goes_on(llama_folder, text_file, tmp_path):
    base = f"train-gates {llama_folder} --data {text_file} {tmp_path / 'g'} --target-heads 0.5"
    sizes = f"{base} --steps 200 --config batch_size=2 --config save_every=5 --config seq_len=16"
    running = forked.Process(sizes.split())
    checkpoints = tmp_path / "g-checkpoints" / "checkpoints"
    while running.running() and not list(checkpoints.glob("checkpoint-*")):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    stopped = running.finish()
    assert stopped.returncode == 130, stopped.stderr
    assert "Continue with the same command and --resume" in " ".join(stopped.stderr.split())
    assert "Traceback" not in stopped.stderr
    done = forked.headprune(*sizes.split(), "--resume")
    assert done.returncode == 0, done.stderr
    history = tmp_path / "g" / "history.jsonl"
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps == list(range(1, 201))


def test_ctrl_c_is_told_whatever_runs(monkeypatch, capsys, llama_folder):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("headprune.model.inspection.inspect", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = run(capsys, "inspect", llama_folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130 and "stopped by Ctrl-C; nothing half-written was left" in err


def test_the_version_is_told(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()) == (0, ["headprune", __version__])


def test_convert_heals_and_says_so(text_file, llama_folder, tmp_path, capsys):
    command = ["convert-gqa", llama_folder, "--kv-heads", "1", "--calibrate", text_file]
    small = ["--config", "seq_len=32", "--heal", "2", tmp_path / "out"]
    write(tmp_path / "out", 1)
    refuses(capsys, "already exists", *command, *small)
    code, out, err = run(capsys, *command, *small, "--overwrite")
    assert code == 0, err
    assert "KV heads (lowrank), verified" in err
    assert "of 2 steps" in out
    assert not (tmp_path / "out-unhealed").exists()
    for wrong, message in (
        (["--kv-heads", "many"], "give a number such as 2"),
        (["--kv-heads", "1", "--merge", "meen"], "Did you mean 'mean'"),
        (["--kv-heads", "1", "--heal", "3"], "--calibrate"),
        ([], "exactly one of --kv-heads and --kv-budget"),
    ):
        refuses(capsys, message, "convert-gqa", llama_folder, tmp_path / "no", *wrong)
    assert not (tmp_path / "no").exists()


def test_memory_and_batches_are_reported(text_file, llama_folder, capsys):
    line = f"evaluate {llama_folder} --data {text_file} --config"
    words = f"{line} memory=1MiB --config seq_len=16 --config decode_batches=1,2 --json".split()
    out = succeeds(capsys, *words)
    model = json.loads(out)["model"]
    room = 2**20 - 4 * model["cost"]["parameters"]
    assert model["longest_context"] == room // model["cost"]["kv_cache_bytes"] > 0
    assert set(model["speed"]["decode_by_batch"]) == {"1", "2"}
    refuses(capsys, "such as 24GiB", *f"{line} memory=lots".split())


@pytest.mark.process
def test_the_progress_bar_is_drawn_at_a_terminal():
    screen, stream = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "headprune", "families"],
        stdout=subprocess.DEVNULL,
        stderr=stream,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(stream)
    drawn = os.read(screen, 1 << 16)
    os.close(screen)
    assert done.returncode == 0, drawn
    assert b"\x1b[" in drawn and b"starting" in drawn
    assert rb"\x1b" not in drawn  # a command to the terminal, and not shown as text
