"""Strange numbers: in weights, in text, in settings. Refused, or right; never a silent NaN."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny
from tests.campaign.cases import Case, Result
from tests.campaign.originals import MEASURING, REFITTING, SCORING, small
from tests.campaign.watched import command, flaw, watched

PART = "numeric"
WHOLE, SHORT = 110, 14  # cases of a seed, beside the settings

# ---- strange models

Change = Callable[[dict[str, Tensor]], None]


def _set(pattern: str, value: float) -> Change:
    """Sets the first number of the tensors whose names match."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in _matching(tensors, pattern):
            tensors[name].view(-1)[0] = value

    return change


def _times(pattern: str, factor: float, dtype: torch.dtype | None = None) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in _matching(tensors, pattern):
            tensors[name] = tensors[name] * factor
        for name in tensors if dtype else ():
            tensors[name] = tensors[name].to(dtype)

    return change


def _matching(tensors: dict[str, Tensor], pattern: str) -> list[str]:
    return [name for name in tensors if re.search(pattern, name)]


CHANGES: dict[str, Change] = {
    "NaN in a projection": _set(r"0.*(q_proj|query|c_attn).*weight", float("nan")),
    "NaN in the output projection": _set(r"1.*(o_proj|output.dense|c_proj).*weight", float("nan")),
    "infinity in the embedding": _set(r"embed|wte", float("inf")),
    "infinity in the values": _set(r"0.*(v_proj|value|c_attn).*weight", float("inf")),
    "NaN in a norm": _set(r"norm|ln_", float("nan")),
    "a layer of zeros": _times(r"(layers|layer|h)\.0\.", 0.0),
    "attention of zeros": _times(r"attn|attention", 0.0),
    "keys of zeros": _times(r"k_proj|key", 0.0),
    "everything zero": _times("", 0.0),
    "beyond float16": _times(r"proj|dense|c_", 3e4, torch.float16),
    "nearly beyond float16": _times(r"proj|dense|c_", 100.0, torch.float16),
    "tiny numbers": _times(r"proj|dense|c_", 1e-30),
    "subnormal float16": _times(r"proj|dense|c_", 1e-6, torch.float16),
    "huge numbers": _times(r"proj|dense|c_", 1e18),
    "bfloat16": _times("", 1.0, torch.bfloat16),
    "float64": _times("", 1.0, torch.float64),
}
# sizes that are rarely met
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
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
TEXTS: dict[str, str] = {
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
_D = "--data text.txt"
_TRAIN = "--steps 3 --config batch_size=2 --seq-len 16"
COMMANDS: tuple[str, ...] = (
    *(
        f"score m {_D} --criterion {name} {SCORING} out"
        for name in ("compensated", "gradient", "fisher", "fluctuation", "wanda", "reconstruction")
    ),
    "score m --criterion magnitude out",
    f"prune m --plan plan.json --refit text.txt {REFITTING} out",
    "prune m --plan plan.json out",
    *(
        f"convert-gqa m --kv-heads 1 --merge {name} --calibrate text.txt {REFITTING} out"
        for name in ("lowrank", "procrustes", "mean")
    ),
    "convert-gqa m --kv-heads 1 --merge mean out",
    f"convert-gqa m --kv-budget 0.5 --config grouping=similar --calibrate text.txt {REFITTING} out",
    f"train-gates m {_D} --target-heads 0.5 {_TRAIN} out",
    f"train-gates m {_D} --target-heads 0.5 {_TRAIN} --train attention out",
    f"train-gates m {_D} --target-heads 0.5 {_TRAIN} --method refit out",
    f"train-gates m {_D} --config l0_penalty=0.1 {_TRAIN} --config objective=distill out",
    f"heal m --teacher m {_D} {_TRAIN} out",
    f"heal m --teacher m {_D} {_TRAIN} --train all --config bf16=true out",
    f"evaluate m {_D} --no-speed {MEASURING} out.json",
    f"evaluate m {_D} --against m --no-speed {MEASURING} out.json",
    f"check m {_D} {MEASURING} --against m --limit 'perplexity recovery >= 98 %'",
    f"check m {_D} {MEASURING} --limit 'perplexity <= 1e6' --baseline out.json --update-baseline",
    f"compress m {_D} --keep 0.5 --config calibration_tokens=256 --config seq_len=16 out",
)

# ---- strange settings

_NUMBERS = ("0", "-1", "1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "0.5", "1e-320")
_OPTIONS: dict[str, tuple[str, ...]] = {
    f"train-gates m {_D} --target-heads 0.5 {_TRAIN} out": (
        *("target_heads", "gate_lr", "scale_lr", "temperature", "init_log_alpha"),
        *("finetune_fraction", "sparsity_warmup"),
        *("seed", "save_every", "batch_size"),
    ),
    f"train-gates m {_D} --target-heads 0.5 --config batch_size=2 --seq-len 16 --steps 2 "
    "--train all out": ("weight_lr", "seq_len"),
    f"train-gates m {_D} --config batch_size=2 --seq-len 16 --steps 2 out": ("l0_penalty",),
    f"heal m --teacher m {_D} {_TRAIN} out": ("learning_rate", "seed", "batch_size"),
    f"score m {_D} --criterion fisher {SCORING} out": ("calibration_tokens", "seed"),
    "convert-gqa m out": ("kv_heads",),
    f"convert-gqa m --calibrate text.txt {REFITTING} out": ("kv_budget",),
    "prune m --scores scores --criterion fisher --dry-run --save-plan out.json": (
        *("keep", "max_params", "max_kv_bytes"),
    ),
    f"evaluate m {_D} --no-speed {MEASURING} out.json": (
        *("confidence", "seed", "batch_size", "memory", "max_windows", "seq_len"),
    ),
    f"check m {_D} {MEASURING} --limit 'perplexity <= 1e6'": (
        *("confidence", "resamples", "seed"),
    ),
}
SETTINGS = [
    f"{line} --config {option}={number}{'GiB' if option == 'memory' else ''}"
    for line, options in _OPTIONS.items()
    for option in options
    for number in _NUMBERS
]


def cases(seed: int, short: bool) -> list[Case]:
    """The cases of a seed; strange settings are the same at every seed but for their share."""
    settings = range(seed % 9, len(SETTINGS), 90 if short else 9)
    return [
        *(Case(PART, seed, "models", at) for at in range(SHORT if short else WHOLE)),
        *(Case(PART, seed, "settings", at) for at in settings),
    ]


def act(case: Case, place: Path, originals: Path) -> Result:
    """Makes a model and a text, and runs a command on them."""
    draw = case.random()
    for name in ("plan.json", "scores"):
        (place / name).symlink_to(originals / name)
    text, family, changed = "sound", "llama", "nothing"
    if case.group == "settings":
        line = SETTINGS[case.number]
        (place / "m").symlink_to(originals / "llama")
    else:
        line = COMMANDS[case.number % len(COMMANDS)]
        kind = draw.choice(("weights", "weights", "sizes", "text"))
        family = draw.choice(("llama", "llama", "llama", "gpt2", "bert"))
        text = draw.choice(list(TEXTS)) if kind == "text" else "sound"
        if kind == "sizes":
            changed = draw.choice(list(SIZES))
            family, sizes = SIZES[changed]
            _other_sizes(place, family, sizes)
        else:
            changed = draw.choice(list(CHANGES)) if kind == "weights" else "nothing"
            _changed(originals / family, place, CHANGES.get(changed))
    (place / "text.txt").write_text(TEXTS[text])
    done = command(line, place)
    broken = flaw(done)
    if not broken and done.code == 0:
        broken = _silent(place, done.out)
    told = f"{family}, {changed}, text: {text}, {line}: ended with {done.code}"
    told = f"{told}\n{done.out}{done.err}"
    ending = "broken" if broken else "refused" if done.code else "computed"
    return Result(case, ending, broken and f"{broken} [{family}, {changed}, {text}, {line}]", told)


def _changed(model: Path, place: Path, change: Change | None) -> None:
    (place / "m").mkdir()
    for file in model.iterdir():
        if change is None or file.name != "model.safetensors":
            (place / "m" / file.name).write_bytes(file.read_bytes())
    if change is not None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "m" / "model.safetensors", {"format": "pt"})


def _other_sizes(place: Path, case: str, sizes: dict[str, Any]) -> None:
    """A model of such sizes, made in a process of its own."""

    def make() -> None:
        usual = small(case)
        for name, value in sizes.items():
            setattr(usual.config, name, value)
        tiny.save(type(usual)(usual.config), place / "m")

    done = watched(make, place)
    if done.code:
        raise RuntimeError(done.err)


# ---- what is silent

_SAID = re.compile(r"(?<![\w.-])[-+]?(nan|inf)(?![\w-])", re.IGNORECASE)
# numbers that may well be missing
_MAY_BE_NULL = {
    *("against", "memory", "speed", "longest_context", "max_windows", "label_column", "baseline"),
    *(
        "text_column",
        "commit",
        "unit",
        "steps",
        "save_every",
        "scale",
        "groups",
    ),
    *("refit", "data", "l0_penalty", "target_heads", "dtype", "auto_class", "made_by", "parent"),
    *("evidence", "criterion", "keep", "teacher_id", "id", "measured", "scores", "seed"),
    *("choice", "data_sha256", "domains", "layers", "refit_left_out", "ways"),
    *("tensor_proof", "gated_vs_cut", "stderr", "needle", "longest_context"),
    *("kv_budget", "kv_heads", "merge", "merges", "rope", "weight_bytes", "peak_memory_bytes"),
}


def _silent(place: Path, said: str) -> str:
    """Where a command that ended well wrote or said a number that is none."""
    if found := _SAID.search(said):
        return f"it ends with 0 and says {found[0]!r}: {said[max(0, found.start() - 60) :][:90]!r}"
    for file in sorted(place.glob("out*/**/*")) + sorted(place.glob("out*")):
        if file.suffix in (".json", ".jsonl") and file.name in _OURS | {file.name} - _MODELS:
            for row in file.read_text().splitlines() if file.suffix == ".jsonl" else [None]:
                tree = json.loads(file.read_text() if row is None else row)
                if strange := next(_strange(tree), ""):
                    return f"it ends with 0, and {file.name} has no number at {strange}"
        elif file.suffix == ".safetensors" and (name := _not_finite(file, place / "m")):
            return f"it ends with 0, and {name} in {file.name} is not finite"
    return ""


_OURS = {"headprune.json", "gates.json", "scores.json"}
_MODELS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def _strange(tree: Any, above: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            # of a refit, no ridge where W_O stays as it is
            if not (value is None and key in _MAY_BE_NULL):
                yield from _strange(value, f"{above}.{key}")
    elif isinstance(tree, list):
        for value in tree:
            yield from _strange(value, f"{above}[]")
    elif tree is None or (isinstance(tree, float) and not abs(tree) < float("inf")):
        yield above.lstrip(".")


def _not_finite(file: Path, model: Path) -> str:
    """The first tensor with numbers that are none, where the model had none such."""
    before = load_file(model / "model.safetensors")
    if not all(bool(tensor.isfinite().all()) for tensor in before.values()):
        return ""
    try:
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it has no iterator)
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    return str(name)
    except SafetensorError as error:
        return f"everything ({error})"
    return ""
