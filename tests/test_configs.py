"""Every file of configs runs as it is, on a tiny stand-in for its model.

``voita.yaml`` does in test_reproduce_voita.py.
"""

from pathlib import Path

from tests import tiny
from tests.test_cli import succeeds

CONFIGS = Path(__file__).parents[1] / "configs"
# in an order in which each finds what it reads, with smaller numbers
SMALLER = {
    "score": ["seq_len=16", "calibration_tokens=256"],
    "prune": [],
    "train-gates": ["steps=3", "seq_len=16"],
    "convert-gqa": ["seq_len=16", "calibration_tokens=256"],
    "heal": ["steps=3", "seq_len=16", "batch_size=2"],
    "evaluate": ["seq_len=16", "speed=false", "max_windows=8", "resamples=50"],
    "check": ["seq_len=16", "max_windows=16"],
    "compress": ["seq_len=16", "calibration_tokens=256", "held_out_tokens=64", "heal_steps=2"],
    "export": ["to=vllm", "out_dtype=auto"],
}


def test_every_job_runs(tmp_path, monkeypatch, capsys):
    assert sorted([*SMALLER, "voita"]) == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa"), tmp_path / "HuggingFaceTB/SmolLM2-135M")
    for name in ("text.txt", "test.txt", "brown.txt"):
        Path(name).write_text(tiny.text(2_000))
    for name, smaller in SMALLER.items():
        words = [word for each in smaller for word in ("--config", each)]
        succeeds(capsys, name, "--config", CONFIGS / f"{name}.yaml", *words)
    assert {"smollm2-pruned", "smollm2-gguf", "smollm2-small"} <= {
        p.name for p in tmp_path.iterdir()
    }
