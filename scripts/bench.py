"""Time, memory, engines, error rates and images: numbers of docs/benchmarks beside the protocol's.

    python scripts/bench.py --help

Every command prints a table in Markdown. Ratios are of things that are timed in turn.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import headprune
from headprune import from_pretrained
from headprune.config import (
    CheckConfig,
    DataConfig,
    Train,
)
from headprune.data.passages import last_words, passages
from headprune.data.read import read_examples
from headprune.data.sequences import all_windows
from headprune.evaluation import speed as speeds
from headprune.evaluation.metrics import Samples, interval_of
from headprune.evidence.losses import example_losses
from headprune.evidence.statistics import Need, collect
from headprune.evidence.windows import far_batches, slopes
from headprune.formats import onnx, openvino
from headprune.formats.run import MODEL, LoadedGraph, open_graphs, run_by_engine
from headprune.formats.source import built
from headprune.gates.forms import Correlation, narrowed, predicted
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation
from headprune.gates.sparsity import HeadTarget
from headprune.gates.trainer import GatedModel, freeze
from headprune.model.answers import answered
from headprune.model.attention import attention_of
from headprune.model.batch import Batch, without_labels
from headprune.model.cost import KVCache, model_cost
from headprune.model.embedding import head_of
from headprune.model.loading import load_config, load_tokenizer, task_of
from headprune.model.losses import divergence
from headprune.model.units import default_unit
from headprune.regression.limits import parse_limit
from headprune.regression.verdicts import Verdict, judge, number_of
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Window
from headprune.tensors.units import Unit
from protocol import CONFIGS, LONG, Bench, Far, ProtocolError, Result, Results, read_config

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
Rows = Sequence[Mapping[str, object]]


def table(rows: Rows) -> str:
    """Return a table in Markdown, whose columns are the keys of the first row."""
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    lines += [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(a: Callable[[], object], b: Callable[[], object], pairs: int) -> float:
    """Return the median of the seconds of ``b`` over those of ``a``, timed in turn."""
    for work in (a, b):
        work()  # warm
    return median(seconds(b) / seconds(a) for _ in range(pairs))


def alternate_half(net: PreTrainedModel) -> Plan:
    """Return a plan of the first half of the KV groups, rounded down and up layer by layer."""
    parts, attentions = {}, attention_of(net)
    for layer, one in enumerate(attentions):
        counts = {"query_heads": one.query_heads, "kv_heads": one.kv_heads}
        left = (one.kv_heads + layer % 2) // 2 * (one.query_heads // one.kv_heads)
        parts[one.path] = AttentionPlan(**counts, keep=tuple(range(left)))
    return Plan(unit=default_unit(attentions), attentions=parts)


@app.command()
def half(model: Path, output: Path) -> None:
    """Write a model without half of its KV groups, for ``engines`` and ``llama-cpp``."""
    plan = alternate_half(from_pretrained(model, weights=False))
    headprune.prune(model, output, plan=plan, layout="ragged", proof="tensors")


# ---- cost.md: a step of gate training


def gate_steps(
    model: PreTrainedModel, ids: Tensor, window: int | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a step of a training with the same teacher, and one of gates.

    Gates remove heads that others make up for, or leave KV heads a window.
    """
    attentions = attention_of(model)
    batch: Batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    freeze(model, attentions, Train.GATES)
    unit = default_unit(attentions) if window is None else Unit.KV_GROUP
    gates = Gates(attentions, unit, 3.0, 2 / 3, by_heads=window is None)
    sparsity = HeadTarget(sum(gates.unit_sizes) * 3 // 4)
    optimizer = torch.optim.AdamW([gates.log_alpha], lr=0.08)
    loss = Distillation(head_of(model))
    trained = GatedModel(model, gates, loss).train()
    if window is None:
        needs: frozenset[Need] = frozenset({"activations", "gram"})
        parts = zip(collect(model, attentions, [batch], needs), attentions, strict=True)
        others = [Correlation.of(part, attention, ids.device) for part, attention in parts]
        gates.draws, acting = 1, partial(predicted, attentions, correlations=others)
    else:
        acting = partial(narrowed, attentions, window=(window, 4))

    def plain() -> None:
        with torch.no_grad():
            wanted = model(**without_labels(batch))
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        got = model(inputs_embeds=embedded, use_cache=False)
        divergence(got, wanted, batch, loss.head).backward()

    def step() -> None:
        with acting(gates.source):
            trained(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsity.after_step(gates)

    return plain, step


def windows_of(model: Path, data: Path, length: int, count: int) -> Tensor:
    """Return the first windows of a text."""
    examples = read_examples(DataConfig(source=str(data)))
    rows = all_windows(examples, load_tokenizer(model), length, need=count)[0]
    return torch.tensor(rows[:count]["input_ids"])


@app.command()
def gate_step(model: Path, data: Path, pairs: int = 7) -> None:
    """Time a step of gate training over a step of a training with the same teacher."""
    net, ids = from_pretrained(model, dtype="float32"), windows_of(model, data, 1024, 1)
    rows = [
        {"gates": name, "times a step": ratio(*gate_steps(net, ids, window), pairs)}
        for name, window in (("removed", None), ("window of 128", 128))
    ]
    print(table(rows))


# ---- cost.md: models larger than memory

_CHILD = """
import sys, time
start = time.perf_counter()
if sys.argv[1:]:
    from headprune.app import main
    try:
        main()
    except SystemExit as end:
        assert not end.code
else:
    import headprune.result.prune
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
print(time.perf_counter() - start, peak, file=sys.stderr)
"""


def child(*arguments: object) -> tuple[float, float]:
    """Run a command, or imports alone, as a process: its seconds, and its peak memory in MB."""
    words = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    done = subprocess.run(words, check=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    taken, peak = done.stderr.split()[-2:]
    return float(taken), int(peak) / 1024


def write_llama(folder: Path, layers: int, width: int) -> float:
    """Write a random Llama of 16 heads in bfloat16, and a plan of half; return its bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32_000,
    )
    net = LlamaForCausalLM(config).bfloat16()
    net.save_pretrained(folder, max_shard_size="480MB")
    alternate_half(net).write(folder / "half.json")
    known = sorted(pre_tokenizers.ByteLevel.alphabet())  # a file for llama.cpp needs a tokenizer
    words = Tokenizer(models.BPE({piece: at for at, piece in enumerate(known)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))


@app.command()
def large(
    layers: Annotated[list[int] | None, typer.Option(help="12 and 40 by default.")] = None,
    width: int = 2048,
    rounds: int = 3,
) -> None:
    """Time commands on models with random weights (in TMPDIR), and take their peak memory."""
    rows = []
    for count in layers or (12, 40):
        with tempfile.TemporaryDirectory() as home:
            model, out = Path(home, "model"), Path(home, "out")
            size = f"{write_llama(model, count, width) / 1e9:.2f} GB"
            commands: dict[str, list[object]] = {
                "inspect": [],
                "prune --config proof=tensors": [out, "--plan", model / "half.json"],
                "export --to gguf --config prove=read-back": [out],
            }
            for name, more in commands.items():
                command, *options = name.split()
                given = [command, model, *more, *options, *(["--overwrite"] if more else [])]
                runs = []
                for _ in range(rounds):
                    os.sync()  # what one writes waits for no other
                    runs.append(child(*given))
                peak = f"{max(peak for _, peak in runs):.0f} MB"
                taken = median(taken for taken, _ in runs)
                rows.append({"weights": size, "command": f"`{name}`", "peak": peak, "s": taken})
    print(table(rows), f"\n\nImports alone: {child()[1]:.0f} MB.")


@app.command()
def layers(text: Path, count: int = 24, width: int = 1024) -> None:
    """Compare ``placement=layers`` with a whole model in memory, above that of the imports."""
    imported, rows = child()[1], []
    with tempfile.TemporaryDirectory() as home:
        model = Path(home, "model")
        write_llama(model, count, width)
        jobs = {
            "half of the heads, refit": ["prune", "--plan", model / "half.json", "--refit", text],
            "16 KV heads to 4, lowrank": ["convert-gqa", "--kv-heads", 4, "--calibrate", text],
        }
        settings = ["calibration_tokens=4096", "seq_len=512", "dtype=float32"]
        for name, (command, *more) in jobs.items():
            runs = {}
            for way in ("whole", "layers"):
                options = [f"--config={value}" for value in (*settings, f"placement={way}")]
                runs[way] = child(command, model, Path(home, way), *more, *options, "--overwrite")
            files = [sorted(Path(home, way).glob("*.safetensors")) for way in runs]
            same = all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
            peaks = {f"{way}, MB": run[1] - imported for way, run in runs.items()}
            times = runs["layers"][0] / runs["whole"][0]
            rows.append({"job": name, **peaks, "times": times, "same weights": same})
    print(table(rows))


# ---- engines.md

FORMATS = {"onnxruntime": ("onnx", onnx), "openvino": ("openvino", openvino)}


def relative(wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((wanted - found).abs().max() / wanted.abs().max())


def query_heads(net: PreTrainedModel) -> int:
    """Return the query heads of all layers."""
    return sum(a.query_heads for a in attention_of(net))


@app.command()
def engines(models: list[Path], data: Path) -> None:
    """Run models in torch and in engines, timed in turn with the first in torch."""
    torch.set_num_threads(1)
    original = from_pretrained(models[0], dtype="float32")
    if task_of(original) == "features":
        lines = [line for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
        tokenizer = load_tokenizer(models[0])
        batch = dict(tokenizer(lines[:32], padding=True, return_tensors="pt"))
        output, mask = "last_hidden_state", batch["attention_mask"][..., None]
    else:
        batch = {"input_ids": windows_of(models[0], data, 256, 2)}
        output, mask = "logits", torch.tensor(1)
    rows = []
    for model, engine in itertools.product(models, ("torch", *FORMATS)):
        net = from_pretrained(model, dtype="float32")
        heads = query_heads(net)
        with torch.no_grad(), tempfile.TemporaryDirectory() as home:
            wanted, difference = net(**batch)[output] * mask, "-"
            if engine != "torch":
                to, form = FORMATS[engine]
                place = Path(home, "exported")
                headprune.export(model, place, to=to)
                net = run_by_engine(
                    built(load_config(place)), open_graphs(place, form.FILE, form.load)
                )
                difference = f"{relative(wanted, net(**batch)[output] * mask):.1e}"
            ours, base = speeds.measure([net, original])
        row = {"model": model.name, "heads": heads, "run by": engine, "difference": difference}
        for part in ("prefill", "decode"):
            rate, of_base = (getattr(s, f"{part}_tokens_per_s") for s in (ours, base))
            if rate is not None:
                row |= {part: f"{rate:,.0f}", f"{part} ratio": rate / of_base}
        rows.append(row)
    print(table(rows))


def _server(file: Path, context: int, **settings: Any) -> Callable[[str, dict[str, Any]], Any]:
    """Start llama.cpp's server in this process; return what answers a question to a path."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = context, 1
    params.n_gpu_layers, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    for name, value in settings.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)

    def ask(path: str, question: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = Request(server.listening_address + path, json.dumps(question).encode(), headers)
        with build_opener(ProxyHandler({})).open(request) as answer:
            return json.load(answer)

    return ask


def in_llama_cpp(folder: Path, cache: str = "F32") -> PreTrainedModel:
    """Return a GGUF file that is called as its class in transformers is.

    llama.cpp gives logits of generated tokens alone. So hidden states are its, in float32, and the
    product with the output matrix is torch's. ``cache`` is the type of keys and values.
    """
    import gguf
    import xllamacpp

    file = folder / "model.gguf"
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    stored = tensors.get("output.weight", tensors["token_embd.weight"])
    numbers = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    output = torch.from_numpy(numbers).view(*map(int, stored.shape[::-1]))
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
    flash = "DISABLED" if cache == "F32" else "ENABLED"  # packed values need it
    servers: dict[int, Any] = {}

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ids = inputs["input_ids"]
        length = ids.shape[1]
        if length not in servers:
            servers.clear()
            servers[length] = _server(
                file,
                length,
                no_extra_bufts=True,
                cache_type_k=kind,
                cache_type_v=kind,
                flash_attn_type=getattr(
                    xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}"
                ),
                embedding=True,
                embd_normalize=-1,
                pooling_type=xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE,
                n_batch=length,
                n_ubatch=length,  # tokens computed in one go
            )
        question = {"input": ids.tolist(), "embd_normalize": -1}
        rows = [row["embedding"] for row in servers[length]("/embeddings", question)]
        return {"logits": torch.tensor(rows) @ output.T}

    graph = LoadedGraph({"input_ids": (None, None)}, run)
    return run_by_engine(built(load_config(folder)), {MODEL: graph})


def served(file: Path, context: int, decoded: int) -> tuple[float, float, float]:
    """Read a random prompt and generate greedily, as llama-server does.

    Returns:
        Seconds of both, and bytes of the cache per token.
    """
    ids = torch.randint(0, 49_152, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    question: dict[str, Any] = {"n_predict": decoded + 1, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:  # the log has the size of the cache
            ask = _server(file, context + decoded + 1, verbosity=4)
            answer = ask("/completion", question | {"prompt": ids, "cache_prompt": False})
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        size = re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells", log.read())
    assert size is not None
    timings = answer["timings"]  # the first token comes of the prompt
    cache = float(size[1]) * 2**20 / int(size[2])
    return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000, cache


@app.command()
def llama_cpp(models: list[Path], data: Path, context: int = LONG, decoded: int = 32) -> None:
    """Run models in llama.cpp, in float32: the same numbers, and speed and cache as served."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    first: tuple[float, int] | None = None
    for model in models:
        with torch.no_grad(), tempfile.TemporaryDirectory() as home:
            place = Path(home, "gguf")
            done = headprune.export(model, place, to="gguf", out_dtype="float32")
            net, ids = from_pretrained(model, dtype="float32"), windows_of(model, data, 256, 2)
            difference = relative(
                net(input_ids=ids).logits, in_llama_cpp(place)(input_ids=ids).logits
            )
            runs = [served(place / "model.gguf", context, decoded) for _ in range(2)]
        once, decoding, held = min(runs, key=lambda run: run[1])
        predicted = 2 * KVCache.of(net).elements(1)  # in float16
        rate, read = decoded / decoding, 4 * model_cost(net).parameters + context * predicted
        first = first or (rate, read)
        rows.append(
            {
                "model": model.name,
                "heads": query_heads(net),
                "difference": f"{difference:.1e}",
                "greedy tokens equal": f"{done.record.proof.details['greedy tokens equal']:.0f}",
                "KV cache, MiB": f"{held * context / 2**20:.2f}",
                "measured / predicted": held / predicted,
                "prefill": f"{context / once:,.0f}",
                "decode": f"{rate:.1f}",
                "speed-up": rate / first[0],
                "ideal": first[1] / read,
            }
        )
    print(table(rows))


# ---- choose.md: fewer KV heads, a quantised cache, or both

Texts = Annotated[Path, typer.Option(help="Folder of the protocol's texts.")]
Work = Annotated[Path, typer.Option(help="Folder for intermediate files.")]
BYTES = {"F16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}  # a number; blocks of 32 share a scale


@app.command()
def cache(
    model: Annotated[str, typer.Option(help="Folder of SmolLM2-135M-Instruct.")],
    texts: Texts,
    work: Work,
    row: Annotated[list[str] | None, typer.Option(help="Rows of smollm2-kv.yaml.")] = None,
    windows: int = 10,
    words: int = 100,
) -> None:
    """Measure the original and cuts in llama.cpp by the type of the cache, into results.json."""
    config = read_config(CONFIGS / "smollm2-kv.yaml")
    bench = Bench(config, model, texts, work)
    given = last_words(passages(bench.brown.splitlines(), words), bench.tokenizer, LONG)

    def measured(net: PreTrainedModel) -> dict[str, float]:
        return {
            "wikitext2": math.exp(bench.nll(net, bench.wikitext, LONG, windows)),
            "last_word": float(answered(net, given, 1).hits.mean()),
        }

    of_table = {"windows": windows, "words": words}
    for name in ("original", *(row or ())):
        folder = Path(model)
        if all(Results.read().get("kv-cache", f"{name}, {kind}", 0) for kind in BYTES):
            continue
        if name != "original":
            cut, known = config.named(name), Results.read().get("smollm2-kv", name, 0)
            if known is None or cut.method != "convert_gqa":
                raise ProtocolError(f"'{name}' is no row of KV heads that was measured.")
            folder = bench.by_command(cut, cut.chosen_of(known), 0)
        _by_cache("kv-cache", name, folder, work, measured, of_table, config.sha256)


@app.command()
def far_cache(
    model: Annotated[str, typer.Option(help="Folder of SmolLM2-135M-Instruct in float32.")],
    texts: Texts,
    work: Work,
    result: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(BYTES)}.")] = None,
    windows: int = 4,
) -> None:
    """Measure long contexts in llama.cpp by the type of the cache, into results.json."""
    config = read_config(CONFIGS / "smollm2-windows-4k.yaml")
    bench = Far(config, model, texts, work)

    def measured(net: PreTrainedModel) -> dict[str, float]:
        return {"wikitext2_far": math.exp(bench.far(net, bench.wikitext, windows))}

    of_table = {"length": config.length, "windows": windows}
    for given in (f"original={model}", *(result or ())):
        name, _, folder = given.partition("=")
        about = (measured, of_table, config.sha256)
        _by_cache("kv-cache-4k", name, Path(folder), work, *about, kind or BYTES)


def _by_cache(
    table: str,
    name: str,
    folder: Path,
    work: Path,
    measured: Callable[[PreTrainedModel], dict[str, float]],
    settings: dict[str, int],
    sha256: str,
    kinds: Iterable[str] = BYTES,
) -> None:
    """Measure a model with types of the cache that results.json lacks."""
    length = settings.get("length", 1)
    for kind in kinds:
        if Results.read().get(table, f"{name}, {kind}", 0) is not None:
            continue
        place, began = work / "gguf", time.monotonic()
        headprune.export(
            folder, place, to="gguf", out_dtype="float32", prove="read-back", overwrite=True
        )
        numbers = measured(in_llama_cpp(place, kind))
        size = KVCache.of(from_pretrained(folder)).elements(length) * BYTES[kind]
        print(f"{name}, {kind} {numbers}")
        Results.read().write_with(
            Result(
                table=table,
                row=f"{name}, {kind}",
                sample=0,
                settings={"bytes": size, **settings},
                seconds=round(time.monotonic() - began, 1),
                numbers={key: round(value, 5) for key, value in numbers.items()},
                headprune=headprune.__version__,
                model_sha256=sha256,
            )
        )


# ---- windows.md: scores, memory and decoding in a long context


@app.command()
def window_score(model: Path, data: Path, window: int = 256, rows: int = 4, pairs: int = 3) -> None:
    """Time scores of windows over a plain forward and backward pass over the same tokens."""
    net, edge = from_pretrained(model, dtype="float32"), (window, 4)
    ids = windows_of(model, data, 4 * window, rows)
    near: list[Batch] = [
        {"input_ids": row[None], "labels": row[None], "use_cache": False} for row in ids
    ]
    known = Window(size=window, sinks=4)
    far = far_batches(ids.tolist(), load_tokenizer(model), known, 0)
    both: list[Batch] = [*near, *far]

    def scored() -> None:
        list(slopes(net, attention_of(net), both, edge))

    def plain() -> None:
        net.requires_grad_(False)
        embedding = net.get_input_embeddings()  # from its output on, all layers pass a gradient
        handle = embedding.register_forward_hook(lambda *call: call[-1].requires_grad_())
        for batch in both:
            example_losses(net, "causal-lm", batch).sum().backward()
        handle.remove()

    count = f"{sum(batch['input_ids'].numel() for batch in both):,}"
    print(table([{"tokens": count, "times a plain pass": ratio(plain, scored, pairs)}]))


@torch.no_grad()
def filled(folder: Path, context: int, batch: int) -> tuple[PreTrainedModel, Any]:
    """Return a model and its cache after a prompt, read once, in chunks, for a whole batch."""
    net = from_pretrained(folder, dtype="float32")
    ids = torch.randint(0, net.config.vocab_size, (1, context))
    kept = DynamicCache(config=net.config)
    for chunk in ids.split(LONG // 2, 1):
        net(input_ids=chunk, past_key_values=kept, use_cache=True, logits_to_keep=1)
    kept.batch_repeat_interleave(batch)
    return net, kept


@torch.no_grad()
def decode(net: PreTrainedModel, kept: Any, batch: int, decoded: int) -> None:
    """Decode some tokens."""
    for _ in range(decoded):
        ids = torch.zeros(batch, 1, dtype=torch.long)
        net(input_ids=ids, past_key_values=kept, use_cache=True)


def _peak(folder: Path, context: int, batch: int, decoded: int) -> int:
    """Return the most memory of this process, which runs one model, in MiB."""
    decode(*filled(folder, context, batch), batch, decoded)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@app.command()
def windows(
    models: list[Path], context: int = 8192, batch: int = 4, decoded: int = 8, repeats: int = 7
) -> None:
    """Time decoding after a long prompt, in turn, and measure the memory of models by themselves.

    The first model is the one that ratios are of.
    """
    how = (context, batch, decoded)
    peaks = []
    for model in models:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            peaks.append(alone.submit(_peak, model, *how).result())
    loaded = [filled(model, context, batch) for model in models]
    times = np.empty((repeats + 1, len(models)))
    for turn, (which, (net, kept)) in itertools.product(range(repeats + 1), enumerate(loaded)):
        times[turn, which] = seconds(partial(decode, net, kept, batch, decoded))
    rates = batch * decoded / times[1:]  # the first turn warms up
    rows: list[dict[str, object]] = []
    for which, model in enumerate(models):
        ratio = rates[:, which] / rates[:, 0]
        net = loaded[which][0]
        rows.append(
            {
                "model": model.name,
                "KV cache, MiB": batch * model_cost(net, context).kv_cache_bytes / 2**20,
                "peak memory, MiB": peaks[which],
                "decoded tokens/s": float(median(rates[:, which])),
                "over the first": f"{median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})",
            }
        )
    print(table(rows))


# ---- check.md

Pairs = Callable[[np.random.Generator, int], tuple[Samples, Samples]]


def labels(gained: float, lost: float, right: float = 0.8) -> Pairs:
    """Return pairs of labels, by the shares that the model gains and loses of all examples."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        base, chance = generator.random(n) < right, generator.random(n)
        model = np.where(base, chance >= lost / right, chance < gained / (1 - right))
        return Samples({"hits": model.astype(float)}), Samples({"hits": base.astype(float)})

    return draw


def losses(change: float, spread: float = 0.03) -> Pairs:
    """Return pairs of losses of windows: those of the model differ by noise and a constant."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        tokens, base = np.full(n, 255.0), generator.normal(3.6, 0.3, n)
        model = base + generator.normal(math.log1p(change), spread, n)
        ours, theirs = ({"nll_nats": tokens * loss, "tokens": tokens} for loss in (model, base))
        return Samples(ours), Samples(theirs)

    return draw


def rare(metric: str, lost: float = 0.05, much: float = 0.8) -> Pairs:
    """Return pairs: most are alike, some differ a little, and a share loses nearly all.

    Examples have 20 to 60 words, of which a share is right; those of summaries count the same.
    """

    def columns(kept: Any, words: Any) -> dict[str, Any]:
        hits = np.rint(kept * words)
        missed, pairs = words - hits, 2 * words
        grams = [np.maximum(words - order, 1) for order in range(4)]
        found = [np.rint(kept ** (order + 1) * of) for order, of in enumerate(grams)]
        flags = np.eye(2)[np.stack([kept > 0.5, words % 2 == 0]).astype(int)]
        said, true = np.where(flags[0, :, 1:] > 0, flags[1], 1 - flags[1]), flags[1]
        made: dict[str, dict[str, Any]] = {
            "rouge1": {"rouge1_scores": kept},
            "tag_accuracy": {"tag_hits": hits, "tags": words},
            "wer": {"word_errors": np.stack([missed, words], axis=1)},
            "entity_f1": {"entity_counts": np.stack([hits, words, words], axis=1)},
            "micro_f1": {"label_hits": hits, "labels": pairs},
            "macro_f1": {"class_counts": np.concatenate([said * true, said, true], axis=1)},
            "bleu": {"bleu_counts": np.stack([words, words, *found, *grams], axis=1)},
            "perplexity": {"nll_nats": words * (3.6 + 1 - kept), "tokens": words},
        }
        return made[metric]

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        words, chance = generator.integers(20, 61, n).astype(float), generator.random(n)
        base = generator.uniform(0.9, 1, n)
        small = np.where(chance < 4 * lost, generator.choice([-0.005, 0.005], n), 0.0)
        model = base + np.where(chance < lost, -much, small)
        return Samples(columns(model, words)), Samples(columns(base, words))

    return draw


def skewed(change: float) -> Pairs:
    """Return pairs of losses, those of the model greater by an exponentially distributed number."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        tokens, base = np.full(n, 255.0), generator.normal(3.6, 0.3, n)
        model = base + generator.exponential(math.log1p(change), n)
        ours, theirs = ({"nll_nats": tokens * loss, "tokens": tokens} for loss in (model, base))
        return Samples(ours), Samples(theirs)

    return draw


SYNTHETIC = (
    ("accuracy >= -0.01", "1 % lost", labels(0, 0.01)),
    ("accuracy >= -0.01", "11 % lost, 10 % gained", labels(0.1, 0.11)),
    ("accuracy >= -0.01", "3 % lost", labels(0, 0.03)),
    ("accuracy >= -0.2", "20 % lost", labels(0, 0.2)),
    ("accuracy >= -0.2", "40 % lost", labels(0, 0.4)),
    ("accuracy >= 98 %", "98 % of the original's", labels(0, 0.016)),
    ("accuracy >= 98 %", "94 % of the original's", labels(0, 0.048)),
    ("perplexity <= +2 %", "2 % worse", losses(0.02)),
    ("perplexity <= +2 %", "4 % worse", losses(0.04)),
)
_FEW = "1 of 20 loses 80 %"
RARE = (
    ("rouge1 >= -0.01", _FEW, rare("rouge1")),
    ("rouge1 >= -0.04", _FEW, rare("rouge1")),
    ("tag_accuracy >= -0.04", _FEW, rare("tag_accuracy")),
    ("wer <= +0.04", _FEW, rare("wer")),
    ("entity_f1 >= -0.04", _FEW, rare("entity_f1")),
    ("micro_f1 >= -0.04", _FEW, rare("micro_f1")),
    ("macro_f1 >= -0.04", "1 of 20 is wrong", rare("macro_f1")),
    ("bleu >= -1", _FEW, rare("bleu")),
    ("perplexity <= +2 %", "exponential, 2 % worse", skewed(0.02)),
    ("perplexity <= +2 %", "1 of 20 loses 0.8 nats", rare("perplexity")),
)


@app.command()
def check(
    sizes: str = "3,30,300", seeds: int = 2000, rarely: bool = False, metrics: str = ""
) -> None:
    """Count verdicts on synthetic pairs at a relative limit or beyond it."""
    how, rows = CheckConfig(model="", data=""), []
    chosen = [row for row in (RARE if rarely else SYNTHETIC) if row[0].startswith(metrics)]
    for (text, truth, draw), n in itertools.product(chosen, map(int, sizes.split(","))):
        limit, counts = parse_limit(text), Counter[Verdict]()
        for seed in range(seeds):
            pair = draw(np.random.default_rng([seed, n]), n)
            interval = interval_of(
                limit.metric, number_of(limit), *pair, how.resamples, how.confidence, seed
            )
            counts[judge(limit, interval).verdict] += 1
        rows.append({"limit": text, "model": truth, "n": n} | {v.value: counts[v] for v in Verdict})
    print(table(rows))


# ---- images.md

_SIDE = 16  # pixels


def write_images(folder: Path) -> None:
    """Write scikit-learn's handwritten digits as folders of images: train, and 400 to judge."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    judging = set(np.random.default_rng(0).permutation(len(digits.images))[:400].tolist())
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("test" if number in judging else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((image * 15.9).astype(np.uint8))
        grey.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(place / f"{number}.png")


def train_vit(folder: Path, seed: int, epochs: int) -> Path:
    """Train a model of 4 layers of 8 heads; return its folder."""
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    processor = ViTImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=128,
        image_size=_SIDE,
        patch_size=4,
        id2label={number: str(number) for number in range(10)},
        label2id={str(number): number for number in range(10)},
    )
    net = ViTForImageClassification(config)
    files = sorted((folder / "train").rglob("*.png"))
    pictures = [Image.open(file).convert("RGB") for file in files]
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    digits = torch.tensor([int(file.parent.name) for file in files])
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    total = epochs * -(-len(files) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=total)
    for _ in range(epochs):
        for rows in torch.randperm(len(files)).split(64):
            optimizer.zero_grad()
            net(pixel_values=pixels[rows], labels=digits[rows]).loss.backward()
            optimizer.step()
            schedule.step()
    output = folder / f"model{seed}"
    net.save_pretrained(output)
    processor.save_pretrained(output)
    return output


@app.command()
def digits(folder: Path, seeds: int = 3, epochs: int = 40, steps: int = 200) -> None:
    """Train small vision transformers, cut them, and judge by accuracy."""
    if not folder.exists():
        write_images(folder)
    data, test = folder / "train", folder / "test"
    found: dict[str, list[float]] = {}

    def accuracy(name: str, model: Path) -> None:
        report = headprune.evaluate(model, data=test, speed=False)
        values = (one.value for one in report.model.metrics if one.name == "accuracy")
        found.setdefault(name, []).append(next(values))

    for seed in range(seeds):
        model = train_vit(folder, seed, epochs)
        accuracy("whole", model)
        for criterion in ("compensated", "random"):
            scores = folder / f"{criterion}{seed}"
            headprune.score(model, scores, criterion=criterion, unit="head", data=data, seed=seed)
        for keep in (0.75, 0.5, 0.25):
            gates = folder / f"gates{keep}-{seed}"
            sizes: dict[str, Any] = {"steps": steps, "batch_size": 32, "seed": seed}
            headprune.train_gates(model, gates, data=data, target_heads=keep, **sizes)
            for name in ("compensated", "random", "gates"):
                cut, how = folder / f"cut-{name}{keep}-{seed}", dict[str, Any](gates=gates)
                if name != "gates":
                    how = {"scores": folder / f"{name}{seed}", "keep": keep, "layout": "ragged"}
                headprune.prune(model, cut, **how)
                accuracy(f"{keep:.0%}, {name}", cut)
    rows = [
        {"heads kept": name, "mean": mean(of), "lowest": min(of), "highest": max(of)}
        for name, of in found.items()
    ]
    print(table(rows))


if __name__ == "__main__":
    app()
