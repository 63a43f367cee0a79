"""What the cases damage, interrupt and replace: tiny models and everything made of them, once."""

from unittest import mock

from filelock import FileLock

from tests import gguf_words, tiny
from tests.campaign.watched import command, watched

# settings that make a command short
REFITTING = "--config calibration_tokens=64 --config seq_len=16"
SCORING = f"{REFITTING} --config batch_size=2"
TRAINING = "--steps 6 --config batch_size=2 --config save_every=2 --config seq_len=16"
MEASURING = "--config max_windows=12 --config seq_len=16 --config batch_size=2"
TELLING = "--config sequences=4 --config seq_len=16 --config batch_size=2 --config resamples=20"

GATES = f"train-gates llama --data text.txt --target-heads 0.5 {TRAINING}"
ROLES = f"roles llama --data text.txt {TELLING}"
HEAL = f"heal gqa --teacher mha --data text.txt {TRAINING}"
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")


def make(place):
    """Makes everything, unless it is there."""
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / ".lock"):
        if not (place / ".complete").exists():
            # forked: a process that has trained can fork none that train
            done = watched(lambda: _models(place), place, limit_s=300)
            if done.code:
                raise RuntimeError(f"The originals cannot be made: {done.out}{done.err}")
            _commands(place)
            (place / ".complete").touch()
    return place


def small(case):
    """A tiny model of two layers."""
    with mock.patch.dict(tiny.SIZES, dict.fromkeys(_LAYERS, 2)):
        return tiny.model(case)


def _models(place):
    for name, case in (("llama", "llama-gqa"), ("mha", "llama-mha")):
        tiny.save(small(case), place / name)
    _speaking(place / "speaking")
    _legacy(place / "legacy")
    (place / "text.txt").write_text(tiny.text(1_000))
    (place / "short.json").write_text('{"model.layers.0.self_attn": [0, 1]}')


def _speaking(folder):
    """A model whose tokenizer llama.cpp has."""
    model = small("llama-gqa")
    model.resize_token_embeddings(gguf_words.SIZE)
    model.save_pretrained(folder)
    gguf_words.words().save_pretrained(folder)


def _legacy(folder):
    """A folder as transformers 4 left it after prune_heads."""
    from tests.test_verify import old_folder

    old_folder(small("gpt2"), folder, {0: [1, 4]})


def _commands(place):
    """What headprune makes of them."""
    scored = f"--data text.txt --criterion magnitude {SCORING}"
    for line in (
        f"score llama --criterion fisher {scored} scores",
        "prune llama --scores scores --criterion fisher --keep 0.5 --dry-run --save-plan plan.json",
        "prune llama --plan plan.json result",
        "convert-gqa mha --kv-heads 2 gqa",
        f"{GATES} --train attention gates",
        f"{HEAL} healed",
        f"evaluate result --data text.txt --against llama --no-speed {MEASURING} report.json",
    ):
        well(line, place)


def well(line, place):
    """Runs a command that must succeed; what it wrote to stdout."""
    done = command(line, place, limit_s=300)
    if done.code:
        raise RuntimeError(f"headprune {line}: {done.out}{done.err}")
    return done.out
