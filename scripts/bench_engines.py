"""Pruned models in the engines that serve them: the same numbers, and at what speed.

    python scripts/bench_engines.py --minilm FOLDER --smollm FOLDER --pairs STSB_TEST.csv.gz \
        --sentences STSB_TRAIN.csv.gz --text WIKITEXT_TEST docs/benchmarks/engines.md

Needs the extras onnx, openvino and llama-cpp. Differences are those of one run in the engine and
one of the same folder in torch. Speed is timed in turn with the original in torch (A B A B ...).
"""

from __future__ import annotations

import csv
import gzip
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

import headprune
import llama_cpp_graph
from headprune.config import DataConfig, EvaluateConfig
from headprune.data.read import read_examples
from headprune.data.sequences import packed_sequences
from headprune.evaluation.evaluate import run as evaluated
from headprune.evaluation.loaded import load
from headprune.evaluation.report import Report
from headprune.formats import onnx, openvino
from headprune.formats.run import MODEL, open_graphs, run_by_engine
from headprune.formats.source import built
from headprune.model.attention import attention_of, identity
from headprune.model.cost import model_cost
from headprune.model.loading import load_config, load_tokenizer
from headprune.model.units import default_unit
from headprune.schemas.plan import AttentionPlan, Plan

FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}
GREEDY, CONTEXT = 64, 2048
COLUMNS = {
    "minilm": ("Spearman", "cosine", "prefill", "ratio"),
    "smollm": ("greedy tokens equal", "perplexity", "prefill", "ratio", "decode", "ratio"),
}
PAGE = """# Engines

Pruned models in the engines that serve them, on one thread of a shared machine, float32.
"difference" is the largest difference from the same folder in torch, over the largest value: of the
last hidden states of 32 padded sentences, or of the logits of two windows of 256 tokens. Speed is
in tokens per second, timed in turn with the original in torch; the ratio is to that.

The ratio of the original in torch to itself is the noise of the run: a smaller
difference tells nothing. Rates of different rows were timed minutes apart, and do not compare.

```bash
python scripts/bench_engines.py --minilm FOLDER --smollm FOLDER --pairs STSB_TEST \\
    --sentences STSB_TRAIN --text WIKITEXT_TEST docs/benchmarks/engines.md
```

Versions: {versions}.

## all-MiniLM-L6-v2

Heads chosen by `headprune score` on STSb train and cut with a refit; Spearman on 400 pairs of STSb
test, and the mean cosine of embeddings with those of the original.

{minilm}

## SmolLM2-135M-Instruct

A test of shapes and not of quality. In one result, a KV group in six is cut at random: counts
differ by layer, and one layer has no heads. In the other, `lowrank` merges the KV heads of a layer
into one, on 4,096 tokens of the text that measures it. Greedy tokens are {greedy} after a prompt of
64; perplexity is of four windows of 256 tokens.

{smollm}

## SmolLM2-135M-Instruct in llama.cpp

Numbers of float32 files: differences as above, of llama.cpp's hidden states with the output matrix
of the file, and 64 greedy tokens. "q8_0": perplexity of the file in q8_0 over that of the file in
float32, on sixteen windows of 256 tokens. Speed and KV cache are those at {context:,} tokens, of a
process that serves the file as `llama-server` does, with a cache in float16; "ideal" is the
speed-up if a token took as long as reading weights and cache. Models are timed one after the other.

{llama}
"""


def relative(wanted: Tensor, found: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((wanted - found).abs().max() / wanted.abs().max())


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    """The tokens that follow a prompt, one after the other through the cache."""
    result = model(input_ids=prompt, use_cache=True)
    found: list[int] = []
    while len(found) < GREEDY:
        best = result.logits[:, -1:].argmax(-1)
        found.append(int(best))
        result = model(input_ids=best, past_key_values=result.past_key_values, use_cache=True)
    return found


def table(columns: Sequence[str], rows: list[list[str]]) -> str:
    """Markdown."""
    head = ["model", "heads", "run by", "difference", *columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def heads(folder: Path) -> str:
    """Query heads of all layers."""
    return str(sum(a.query_heads for a in attention_of(headprune.from_pretrained(folder))))


def per_second(report: Report, name: str) -> list[str]:
    """A rate, and its ratio to that of the original."""
    assert report.against is not None
    rate, base = (getattr(one.speed, name) for one in (report.model, report.against))
    return [f"{rate:,.0f}", f"{rate / base:.2f}"]


def open_exported(folder: Path, engine: str) -> PreTrainedModel:
    """Load an exported model into an engine, to be called as its class in transformers is."""
    form = {"onnxruntime": onnx, "openvino": openvino}[engine]
    return run_by_engine(built(load_config(folder)), open_graphs(folder, form.FILE, form.load))


def in_llama_cpp(folder: Path) -> PreTrainedModel:
    """A GGUF file that is called as its class in transformers is."""
    graph = llama_cpp_graph.load(folder / "model.gguf")
    return run_by_engine(built(load_config(folder)), {MODEL: graph})


def measured_as(
    net: PreTrainedModel | None,
    folder: Path,
    data: DataConfig,
    against: Path | None = None,
    **settings: object,
) -> Report:
    """Evaluate a folder in torch, or what an engine has loaded of it."""
    config = EvaluateConfig(**settings)
    loaded = load(folder, data, config, against)
    nets = loaded.nets if net is None else (net, *loaded.nets[1:])
    return evaluated(replace(loaded, nets=nets), config).report


def with_header(source: Path, target: Path, count: int) -> Path:
    """The first rows of an STSb file, under a header."""
    with gzip.open(source, "rt", encoding="utf-8") as stream:
        rows = list(islice(csv.reader(stream), count))
    with target.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([["first", "second", "score"], *rows])
    return target


def exported(folder: Path, engine: str, work: Path) -> Path:
    """A folder as an engine takes it; in torch, the folder itself."""
    if engine == "torch":
        return folder
    place = work / f"{folder.name}-{engine}"
    headprune.export(folder, place, to=FORMATS[engine])
    return place


def minilm_rows(model: Path, pairs: Path, sentences: Path, work: Path) -> list[list[str]]:
    """Original and cuts, in torch and in each engine."""
    headprune.score(model, data=sentences, text_column="first", output=work / "scores")
    cuts = {"original": model}
    for share in (25, 50):
        cut = cuts[f"{share} % cut"] = work / f"minilm-{share}"
        headprune.prune(model, scores=work / "scores", keep=1 - share / 100, output=cut)
    tokenizer, rows = load_tokenizer(model), []
    with sentences.open(encoding="utf-8") as stream:
        texts = [row["first"] for row in islice(csv.DictReader(stream), 32)]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    mask = batch["attention_mask"][..., None]
    for name, folder in cuts.items():
        with torch.no_grad():
            wanted = headprune.from_pretrained(folder)(**batch).last_hidden_state
        for engine in ("torch", *FORMATS):
            place, gap = exported(folder, engine, work), "-"
            if engine != "torch":
                found = open_exported(place, engine)(**batch).last_hidden_state
                gap = f"{relative(wanted * mask, found * mask):.1e}"
            columns = {"text_column": "first,second", "label_column": "score"}
            net = None if engine == "torch" else open_exported(place, engine)
            report = measured_as(
                net, folder, DataConfig(source=str(pairs), **columns), model, batch_size=16
            )
            metrics = {one.name: one.value for one in report.model.metrics}
            quality = [f"{metrics['spearman']:.3f}", f"{metrics['mean_cosine']:.3f}"]
            speed = per_second(report, "prefill_tokens_per_s")
            rows.append([name, heads(folder), engine, gap, *quality, *speed])
            print(*rows[-1], flush=True)
    return rows


def unevenly_cut(model: Path, output: Path) -> Path:
    """One KV group less in every other layer, chosen at random; none in one layer."""
    net = headprune.from_pretrained(model, dtype=torch.float32)
    attentions, generator = attention_of(net), torch.Generator().manual_seed(0)
    parts = {}
    for layer, one in enumerate(attentions):
        size = one.query_heads // one.kv_heads
        count = 0 if layer == len(attentions) // 3 else one.kv_heads - layer % 2
        groups = torch.randperm(one.kv_heads, generator=generator)[:count].tolist()
        keep = tuple(g * size + j for g in sorted(groups) for j in range(size))
        parts[one.path] = AttentionPlan(
            query_heads=one.query_heads, kv_heads=one.kv_heads, keep=keep
        )
    plan = Plan(unit=default_unit(attentions), model=identity(net, model), attentions=parts)
    headprune.prune(model, plan=plan, output=output)
    return output


def smollm_rows(models: dict[str, Path], text: Path, work: Path) -> list[list[str]]:
    """Original, an uneven cut and one KV head, in torch and in each engine."""
    model = models["original"]
    probe, rows = two_windows(model, text), []
    for name, folder in models.items():
        net = headprune.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            wanted = net(input_ids=probe).logits
        continuation = greedy(net, probe[:1, :64])
        for engine in ("torch", *FORMATS):
            place, gap, equal = exported(folder, engine, work), "-", "-"
            if engine != "torch":
                run = open_exported(place, engine)
                gap = f"{relative(wanted, run(input_ids=probe).logits):.1e}"
                pairs = zip(continuation, greedy(run, probe[:1, :64]), strict=True)
                equal = f"{sum(a == b for a, b in pairs)} of {GREEDY}"
            report = measured_as(
                None if engine == "torch" else open_exported(place, engine),
                folder,
                DataConfig(source=str(text)),
                model,
                **{"seq_len": 256, "max_windows": 4, "dtype": "float32"},
                **{"last_words": 0, "decode_batches": (1,)},
            )
            quality = f"{report.model.metrics[0].value:,.2f}"
            rates = ("prefill_tokens_per_s", "decode_tokens_per_s")
            speed = [cell for rate in rates for cell in per_second(report, rate)]
            rows.append([name, heads(folder), engine, gap, equal, quality, *speed])
            print(*rows[-1], flush=True)
    return rows


def half_of_groups(model: Path, output: Path) -> Path:
    """One and two of three KV groups, layer by layer in turn, which is half of them."""
    net = headprune.from_pretrained(model, dtype=torch.float32)
    parts = {}
    for layer, one in enumerate(attention_of(net)):
        size = one.query_heads // one.kv_heads
        keep = tuple(range(size * (1 + layer % 2)))
        parts[one.path] = AttentionPlan(
            query_heads=one.query_heads, kv_heads=one.kv_heads, keep=keep
        )
    unit = default_unit(attention_of(net))
    plan = Plan(unit=unit, model=identity(net, model), attentions=parts)
    headprune.prune(model, plan=plan, output=output, proof="tensors")
    return output


LlamaDtype = Literal["float32", "q8_0"]


def one_kv_head(model: Path, text: Path, output: Path) -> Path:
    """The KV heads of every layer merged into one."""
    headprune.convert_gqa(model, kv_heads=1, calibrate=text, calibration_tokens=4096, output=output)
    return output


def llama_perplexity(folder: Path, dtype: LlamaDtype, text: Path, work: Path) -> float:
    """Of a file with such an element type, in llama.cpp."""
    place = work / "measured-gguf"
    headprune.export(folder, place, to="gguf", out_dtype=dtype, prove="read-back", overwrite=True)
    report = measured_as(
        in_llama_cpp(place),
        folder,
        DataConfig(source=str(text)),
        None,
        **{"seq_len": 256, "max_windows": 16, "speed": False, "last_words": 0},
    )
    return float(report.model.metrics[0].value)


def two_windows(model: Path, text: Path) -> Tensor:
    """The first tokens of a text, shape (2, 256)."""
    examples = read_examples(DataConfig(source=str(text)))
    return torch.tensor(
        packed_sequences(examples, load_tokenizer(model), 256, need=2)[:2]["input_ids"]
    )


def llama_rows(models: dict[str, Path], text: Path, work: Path) -> list[list[str]]:
    """Original and cuts in llama.cpp: the same numbers, and speed and cache at a long context."""
    rows: list[list[str]] = []
    probe = two_windows(models["original"], text)
    first: tuple[float, int] | None = None
    for name, folder in models.items():
        place = work / "timed-gguf"
        done = headprune.export(folder, place, to="gguf", out_dtype="float32", overwrite=True)
        proof = done.record.proof
        with torch.no_grad():
            wanted = headprune.from_pretrained(folder, dtype=torch.float32)(input_ids=probe).logits
        found = in_llama_cpp(place)(input_ids=probe).logits
        file = place / "model.gguf"
        ids = torch.randint(0, 49_152, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
        once = min(
            (llama_cpp_graph.times(file, ids, 32) for _ in range(2)), key=lambda one: one.decode
        )
        cost = model_cost(in_llama_cpp(place))
        predicted = cost.kv_heads * 2 * 64 * 2  # K and V of 64 numbers in float16
        rate, read = 32 / once.decode, 4 * cost.parameters + CONTEXT * predicted
        first = first or (rate, read)
        whole = llama_perplexity(folder, "float32", text, work)
        q8_0 = llama_perplexity(folder, "q8_0", text, work)
        measured = once.cache_bytes_per_token
        rows.append(
            [
                *(name, heads(folder), f"{relative(wanted, found):.1e}"),
                f"{int(proof.details['greedy tokens equal'])} of {GREEDY}",
                f"{q8_0 / whole:.4f}",
                f"{measured * CONTEXT / 2**20:.2f}",
                f"{measured / predicted:.2f}",
                *(f"{CONTEXT / once.prefill:,.0f}", f"{rate:.1f}"),
                *(f"{rate / first[0]:.2f}", f"{first[1] / read:.2f}"),
            ]
        )
        print(*rows[-1], flush=True)
    return rows


def llama_table(rows: list[list[str]]) -> str:
    """Markdown."""
    head = ["model", "heads", "difference", "greedy tokens equal", "q8_0", "KV cache, MiB"]
    head += ["measured / predicted", "prefill", "decode", "speed-up", "ideal"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main(
    minilm: Annotated[Path, typer.Option(help="Folder of all-MiniLM-L6-v2.")],
    smollm: Annotated[Path, typer.Option(help="Folder of SmolLM2-135M-Instruct.")],
    pairs: Annotated[Path, typer.Option(help="STSb test (.csv.gz).")],
    sentences: Annotated[Path, typer.Option(help="STSb train (.csv.gz).")],
    text: Annotated[Path, typer.Option(help="WikiText-2 raw test.")],
    output: Annotated[Path | None, typer.Option(help="Write the page.")] = None,
) -> None:
    """Measure, and optionally write."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        sts = with_header(pairs, work / "pairs.csv", 400)
        of_train = with_header(sentences, work / "sentences.csv", 2000)
        models = {"original": smollm, "cut, a layer empty": unevenly_cut(smollm, work / "uneven")}
        models["one KV head"] = one_kv_head(smollm, text, work / "one-kv-head")
        more = {"half of the KV groups": half_of_groups(smollm, work / "half")}
        tables = {
            "minilm": table(COLUMNS["minilm"], minilm_rows(minilm, sts, of_train, work)),
            "smollm": table(COLUMNS["smollm"], smollm_rows(models, text, work)),
            "llama": llama_table(llama_rows(models | more, text, work)),
        }
    packages = ("torch", "transformers", *FORMATS, "xllamacpp")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    page = PAGE.format(versions=versions, greedy=GREEDY, context=CONTEXT, **tables)
    print(page)
    if output is not None:
        output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
