"""What a cut shard by shard takes: ``python scripts/bench_scale.py [LAYERS ...]``.

Makes Llamas in bfloat16 with random weights in a temporary folder (TMPDIR), of 12 and of 40 layers:
1.5 GB and 4.4 GB. Half of the heads are cut, with gate values folded in, beside ``cp -r`` of the
model, in turns; then the commands run, each as a process of its own, export in turns with ``cp`` of
the file that it wrote. Prints tables: the most resident memory of each process (VmHWM) and seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES = (12, 40)  # layers
ROUNDS = 3
SHARD = "480MB"
HEADS = 16


def make(folder: Path, layers: int, width: int = 2048) -> None:
    """Writes a Llama with random weights, a shard in memory at a time."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=width // HEADS,
        vocab_size=32_000,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        state = LlamaForCausalLM(config).bfloat16().state_dict()
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    config.save_pretrained(folder)
    for file, names in split.filename_to_tensors.items():
        shard = {name: torch.randn(state[name].shape).mul_(0.02).bfloat16() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    known = sorted(pre_tokenizers.ByteLevel.alphabet())  # a file for llama.cpp needs a tokenizer
    words = Tokenizer(models.BPE({piece: at for at, piece in enumerate(known)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def plan(folder: Path, file: Path) -> None:
    """Writes a plan that keeps every other head, at other gate values."""
    from headprune import from_pretrained
    from headprune.model.attention import attention_of
    from headprune.schemas.plan import AttentionPlan, Plan
    from headprune.tensors.units import Unit

    keep = tuple(range(0, HEADS, 2))
    scale = tuple(0.5 + head / HEADS for head in keep)
    part = AttentionPlan(query_heads=HEADS, kv_heads=HEADS, keep=keep, scale=scale)
    modules = attention_of(from_pretrained(folder, weights=False))
    Plan(unit=Unit.HEAD, attentions={a.path: part for a in modules}).write(file)


def cut(folder: Path, file: Path, out: Path) -> float:
    """Cuts, from headers to the last byte; seconds."""
    from headprune import from_pretrained
    from headprune.io.shards import write_shards
    from headprune.model.stored import stored_dtypes, stored_tensors
    from headprune.schemas.plan import read_plan
    from headprune.surgery.cut import resolve
    from headprune.surgery.streamed import cut_pieces

    start = time.perf_counter()
    tensors = stored_tensors(folder)
    net = from_pretrained(folder, dtype="float32", weights=False)
    cuts = resolve(read_plan(file, {}), net)
    stored = stored_dtypes(net, tensors)
    pieces, _ = cut_pieces(net, cuts, stored, tensors)
    out.mkdir()
    stored.save(net, out, folder)
    write_shards(pieces, out, net.num_parameters(), SHARD)
    return time.perf_counter() - start


def command(*arguments: str) -> float:
    """Runs a command of headprune; seconds."""
    from headprune.app import main

    start, sys.argv = time.perf_counter(), ["headprune", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    return time.perf_counter() - start


def imports() -> None:
    """Imports what a cut imports."""
    importlib.import_module("headprune.result.prune")


def child(name: str, *arguments: object) -> tuple[float, float]:
    """Runs a function of this file in a process of its own: seconds, and its peak in MB."""
    words = [sys.executable, __file__, "--child", name, *map(str, arguments)]
    done = subprocess.run(words, check=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    measured = json.loads(done.stderr.splitlines()[-1])
    return measured["seconds"], measured["peak"]


def in_child(name: str, *arguments: str) -> None:
    """Runs one and says what it took."""
    functions: dict[str, Callable[..., float | None]] = {
        "make": lambda folder, *sizes: make(Path(folder), *map(int, sizes)),
        "plan": lambda *paths: plan(*map(Path, paths)),
        "cut": lambda *paths: cut(*map(Path, paths)),
        "command": command,
        "imports": imports,
    }
    seconds = functions[name](*arguments)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"seconds": seconds or 0.0, "peak": peak}), file=sys.stderr)


def copied(folder: Path, out: Path) -> float:
    """Seconds of ``cp -r``."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", folder, out], check=True)
    return time.perf_counter() - start


def measured(layers: int, home: Path) -> tuple[str, list[str]]:
    """The row of a size, and what its commands take."""
    model, file, out = home / "model", home / "plan.json", home / "out"
    model.mkdir()
    child("make", model, layers)
    child("plan", model, file)
    shards = list(model.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    if shutil.disk_usage(home).free < 3 * size:
        raise SystemExit(f"{home} has no room for {3 * size / 1e9:.0f} GB more; set TMPDIR")
    cuts, copies, peaks = [], [], []
    for _ in range(ROUNDS):
        os.sync()  # what one writes does not wait for what the other wrote
        seconds, peak = child("cut", model, file, out)
        cuts.append(seconds)
        peaks.append(peak)
        shutil.rmtree(out)
        os.sync()
        copies.append(copied(model, out))
        shutil.rmtree(out)
    ratio = statistics.median(cuts) / statistics.median(copies)
    row = (
        f"| {layers} | {size / 1e9:.2f} GB in {len(shards)} | {max(peaks):.0f} MB | "
        f"{_spread(cuts)} | {_spread(copies)} | {ratio:.2f} |"
    )
    what = f"{size / 1e9:.2f} GB"
    dry = ("prune", str(model), "--plan", str(file))
    exported = ("export", str(model), "--to", "gguf", "--config", "prove=read-back", str(out))
    commands = {
        "inspect": ("inspect", str(model)),
        "prune --dry-run": (*dry, "--dry-run"),
        "prune --config proof=tensors": (*dry, "--config", "proof=tensors", str(out)),
        "export --to gguf --config prove=read-back": exported,
    }
    rows, of_file, copy = [], [], home / "copy"
    for name, arguments in commands.items():
        taken, most = [], 0.0
        for _ in range(ROUNDS):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            seconds, peak = child("command", *arguments)
            taken.append(seconds)
            most = max(most, peak)
            if name.startswith("export"):
                os.sync()
                of_file.append(copied(out / "model.gguf", copy))
                copy.unlink()
        rows.append(f"| {what} | `{name}` | {most:.0f} MB | {_spread(taken)} |")
    rows.append(f"| {what} | `cp` of that file | - | {_spread(of_file)} |")
    return row, rows


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def main() -> None:
    """Measures every size."""
    rows, commands = [], []
    for layers in map(int, sys.argv[1:] or SIZES):
        with tempfile.TemporaryDirectory(prefix="headprune-scale-") as home:
            row, more = measured(layers, Path(home))
        rows.append(row)
        commands += more
    print("| layers | weights, files | peak of the cut | seconds of the cut | of `cp -r` | ratio |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")
    print(f"\nImports alone: {child('imports')[1]:.0f} MB.\n")
    print("| weights | command | peak | seconds |", "|---|---|---|---|", *commands, sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        in_child(*sys.argv[2:])
    else:
        main()
