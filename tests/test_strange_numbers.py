"""Strange numbers in weights, text and settings: refused, or right; never a NaN and exit 0."""

import json
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.campaign.originals import MEASURING, REFITTING, SCORING, small
from tests.campaign.watched import Outcome, flaw
from tests.marks import tried
from tests.test_cli import printed

pytestmark = pytest.mark.filterwarnings("ignore")  # NumPy warns of what is refused


def first(pattern, value):
    """Set the first number of the tensors whose names match."""

    def change(tensors):
        for name in [name for name in tensors if re.search(pattern, name)]:
            tensors[name].view(-1)[0] = value

    return change


def times(pattern, factor, dtype=None):
    """Multiply the tensors whose names match; all get a type."""

    def change(tensors):
        for name, tensor in [*tensors.items()]:
            scaled = tensor * factor if re.search(pattern, name) else tensor
            tensors[name] = scaled.to(dtype or tensor.dtype)

    return change


WEIGHTS = {
    "NaN in a projection": first(r"0.*(q_proj|query|c_attn).*weight", float("nan")),
    "NaN in the output projection": first(r"1.*(o_proj|output.dense|c_proj).*weight", float("nan")),
    "infinity in the embedding": first(r"embed|wte", float("inf")),
    "infinity in the values": first(r"0.*(v_proj|value|c_attn).*weight", float("inf")),
    "NaN in a norm": first(r"norm|ln_", float("nan")),
    "a layer of zeros": times(r"(layers|layer|h)\.0\.", 0.0),
    "attention of zeros": times(r"attn|attention", 0.0),
    "keys of zeros": times(r"k_proj|key", 0.0),
    "everything zero": times("", 0.0),
    "beyond float16": times(r"proj|dense|c_", 3e4, torch.float16),
    "nearly beyond float16": times(r"proj|dense|c_", 100.0, torch.float16),
    "tiny numbers": times(r"proj|dense|c_", 1e-30),
    "subnormal float16": times(r"proj|dense|c_", 1e-6, torch.float16),
    "huge numbers": times(r"proj|dense|c_", 1e18),
    "bfloat16": times("", 1.0, torch.bfloat16),
    "float64": times("", 1.0, torch.float64),
}
SIZES = {
    "one layer": ("llama-gqa", {"num_hidden_layers": 1}),
    "no layers": ("llama-gqa", {"num_hidden_layers": 0}),
    "one head": ("llama-gqa", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "head_dim 2": ("llama-gqa", {"head_dim": 2}),
    "one hidden unit per head": ("llama-gqa", {"hidden_size": 6, "head_dim": 2}),
    "many heads": (
        "llama-gqa",
        {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 2},
    ),
    "odd head_dim": ("bert-mlm", {"hidden_size": 42}),
    "head_dim 1": ("bert-mlm", {"hidden_size": 6}),
    "odd head_dim in one projection": ("gpt2", {"n_embd": 42}),
}
TEXTS = {
    "sound": tiny.text(600),
    "constant": "w7 " * 600,
    "two words": "w1 w2",
    "one word": "w1",
    "unknown words": "zzz " * 400,
    "blank": " \n" * 50,
    "empty": "",
    "one window": tiny.text(17),
    "pads": "<pad> " * 400,
    "masks": "<mask> <s> </s> " * 200,
}
D = "--data text.txt"
STEPS = "--steps 3 --config batch_size=2 --config seq_len=16"
CRITERIA = ("compensated", "gradient", "fisher", "fluctuation", "wanda", "reconstruction")
MERGES = ("lowrank", "procrustes", "mean")
COMMANDS = [
    *(f"score m {D} --criterion {name} {SCORING} out" for name in CRITERIA),
    "score m --criterion magnitude out",
    f"prune m --plan plan.json --refit text.txt {REFITTING} out",
    "prune m --plan plan.json out",
    *(
        f"convert-gqa m --kv-heads 1 --merge {name} --calibrate text.txt {REFITTING} out"
        for name in MERGES
    ),
    "convert-gqa m --kv-heads 1 --merge mean out",
    f"convert-gqa m --kv-budget 0.5 --config grouping=similar --calibrate text.txt {REFITTING} out",
    f"train-gates m {D} --target-heads 0.5 {STEPS} out",
    f"train-gates m {D} --target-heads 0.5 {STEPS} --train attention out",
    f"train-gates m {D} --target-heads 0.5 {STEPS} --config gate_lr=0.5 out",
    f"train-gates m {D} --form window --window 4 --context 16 {STEPS} out",
    f"train-gates m {D} --config l0_penalty=0.1 {STEPS} out",
    f"heal m --teacher m {D} {STEPS} out",
    f"heal m --teacher m {D} {STEPS} --train all --config bf16=true out",
    f"evaluate m {D} --no-speed {MEASURING} out.json",
    f"evaluate m {D} --against m --no-speed {MEASURING} out.json",
    f"check m {D} {MEASURING} --against m --limit perplexity>=98%",
    f"check m {D} {MEASURING} --limit perplexity<=1e6 --baseline out.json --update-baseline",
    f"compress m {D} --keep 0.5 --config calibration_tokens=256 --config seq_len=16 out",
]
NUMBERS = ("0", "-1", "1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "0.5", "1e-320")
GATED = "target_heads gate_lr temperature calibration_tokens seed save_every"
OPTIONS = {
    f"train-gates m {D} --target-heads 0.5 {STEPS} out": f"{GATED} batch_size",
    f"train-gates m {D} --target-heads 0.5 {STEPS} --train all out": "weight_lr seq_len",
    f"train-gates m {D} {STEPS} out": "l0_penalty",
    f"train-gates m {D} {STEPS} --config l0_penalty=0.1 out": "init_log_alpha",
    f"train-gates m {D} {STEPS} --form window --context 16 out": "window keep_full sinks",
    f"heal m --teacher m {D} {STEPS} out": "learning_rate seed batch_size",
    f"score m {D} --criterion fisher {SCORING} out": "calibration_tokens seed",
    "convert-gqa m out": "kv_heads",
    f"convert-gqa m --calibrate text.txt {REFITTING} out": "kv_budget",
    "prune m --scores scores --dry-run --save-plan out.json": "keep max_params max_kv_bytes",
    f"evaluate m {D} --no-speed {MEASURING} out.json": (
        "confidence seed batch_size memory max_windows seq_len"
    ),
    f"check m {D} {MEASURING} --limit perplexity<=1e6": "confidence resamples seed",
}
SETTINGS = [
    f"{line} --config {option}={{}}{'GiB' if option == 'memory' else ''}"
    for line, options in OPTIONS.items()
    for option in options.split()
]
# numbers that may well be missing
MAY_BE_NULL = {
    *("against", "memory", "speed", "longest_context", "max_windows", "label_column", "baseline"),
    *("text_column", "commit", "unit", "steps", "save_every", "scale", "groups", "ways", "layers"),
    *("refit", "data", "l0_penalty", "target_heads", "dtype", "auto_class", "provenance", "parent"),
    *("evidence", "criterion", "keep", "teacher_id", "id", "measured", "scores", "seed", "choice"),
    *("data_sha256", "domains", "refit_left_out", "tensor_proof", "gated_vs_cut", "stderr"),
    *("kv_budget", "kv_heads", "merge", "merges", "rope", "weight_bytes", "peak_memory_bytes"),
    *("needle", "needle_window", "window", "offered_window", "judgement"),
}
OF_MODELS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """What the commands read, but for the model and the text; the current folder."""
    monkeypatch.chdir(tmp_path)
    for case in ("llama-gqa", "gpt2", "bert-mlm"):
        tiny.save(small(case), tmp_path / case)
    (tmp_path / "plan.json").write_text('{"model.layers.0.self_attn": [0, 1]}')
    assert printed(capsys, *["score", "llama-gqa", "--criterion", "magnitude", "scores"])[0] == 0
    return tmp_path


def judge(place, capsys, line):
    """Run a command; it ends as one should, and every number of its output is one."""
    code, out, err = printed(capsys, *line.split())
    assert flaw(Outcome(code, out, err, 0, 0)) == "", (line, err)
    if code == 0:
        assert not re.search(r"(?<![\w.-])[-+]?(nan|inf)(?![\w-])", out, re.IGNORECASE), line
        before = load_file(place / "m/model.safetensors").values()
        sound = all(bool(tensor.isfinite().all()) for tensor in before)
        for file in [*place.glob("out*/**/*"), *place.glob("out*")]:
            if file.suffix == ".jsonl":
                trees = [json.loads(row) for row in file.read_text().splitlines()]
                assert not [*strange(trees)], (line, file)
            elif file.suffix == ".json" and file.name not in OF_MODELS:
                assert not [*strange(json.loads(file.read_text()))], (line, file)
            elif file.suffix == ".safetensors" and sound:
                assert all(bool(t.isfinite().all()) for t in load_file(file).values()), (line, file)


def strange(tree, above=""):
    """Places of JSON in which a number is missing or none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not (value is None and key in MAY_BE_NULL):
                yield from strange(value, f"{above}.{key}")
    elif isinstance(tree, list):
        for value in tree:
            yield from strange(value, f"{above}[]")
    elif tree is None or (isinstance(tree, float) and not abs(tree) < float("inf")):
        yield above


def emptied(place):
    for path in [place / "m", *place.glob("out*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_a_number_that_is_none_is_seen():
    assert [*strange({"a": [1.0, float("nan")], "id": None, "loss": None})] == [".a[]", ".loss"]


@tried(12)
@given(
    line=st.sampled_from(COMMANDS),
    case=st.sampled_from(["llama-gqa", "llama-gqa", "gpt2", "bert-mlm"]),
    changed=st.sampled_from([*WEIGHTS, *SIZES, *TEXTS]),
)
def test_a_strange_model_or_text_is_refused_or_computed(line, case, changed, place, capsys):
    emptied(place)
    if changed in SIZES:
        case, sizes = SIZES[changed]
        usual = small(case)
        for name, value in sizes.items():
            setattr(usual.config, name, value)
        tiny.save(type(usual)(usual.config), place / "m")
    else:
        shutil.copytree(place / case, place / "m")
    if changed in WEIGHTS:
        tensors = load_file(place / "m/model.safetensors")
        WEIGHTS[changed](tensors)
        save_file(tensors, place / "m/model.safetensors", {"format": "pt"})
    (place / "text.txt").write_text(TEXTS.get(changed, TEXTS["sound"]))
    judge(place, capsys, line)


@tried(12)
@given(line=st.sampled_from(SETTINGS), number=st.sampled_from(NUMBERS))
def test_a_strange_setting_is_refused_or_kept_to(line, number, place, capsys):
    emptied(place)
    shutil.copytree(place / "llama-gqa", place / "m")
    (place / "text.txt").write_text(TEXTS["sound"])
    judge(place, capsys, line.format(number))
