"""Fewer KV heads, a quantised cache, or both: quality by bytes per token, in llama.cpp.

    python scripts/bench_kv_cache.py --model FOLDER --texts TEXTS --work WORK --row ROW

The original, and rows of configs/bench/smollm2-kv.yaml, are exported in float32. They read windows
of 2,048 tokens of WikiText-2 test and passages of Brown with a cache in F16, Q8_0 and Q4_0. Texts
are the protocol's, and numbers go to its results.json, as table ``kv-cache``; what is there is not
measured again.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import headprune
import llama_cpp_graph
from headprune import from_pretrained
from headprune.data.passages import passages
from headprune.evaluation.probes import last_words
from headprune.formats.run import MODEL, run_by_engine
from headprune.formats.source import built
from headprune.model.answers import answered
from headprune.model.cost import KVCache
from headprune.model.loading import load_config
from protocol import CONFIGS, LONG, Bench, ProtocolError, Result, Results, read_config

BYTES = {"F16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}  # a number; blocks of 32 share a scale
ORIGINAL, TABLE, WINDOWS, WORDS = "original", "kv-cache", 10, 100

console = Console(highlight=False)


def main(
    model: Annotated[str, typer.Option(help="Folder of the model.")],
    texts: Annotated[Path, typer.Option(help="Folder of the texts.")],
    work: Annotated[Path, typer.Option(help="Folder for intermediate files.")],
    row: Annotated[list[str] | None, typer.Option(help="A cut, as named in the config.")] = None,
) -> None:
    """Measure the original and cuts with each type of cache."""
    config = read_config(CONFIGS / "smollm2-kv.yaml")
    bench = Bench(config, model, texts, work)
    given = last_words(passages(bench.brown.splitlines(), WORDS), bench.tokenizer, LONG)
    prompts = [word.row for word in given]
    cuts = {name: config.named(name) for name in row or ()}
    for name in (ORIGINAL, *cuts):
        measured = Results.read()
        todo = [kind for kind in BYTES if measured.get(TABLE, f"{name}, {kind}", 0) is None]
        if not todo:
            continue
        folder = Path(model)
        if name != ORIGINAL:
            known = measured.get("smollm2-kv", name, 0)
            if known is None or cuts[name].method != "convert_gqa":
                raise ProtocolError(f"'{name}' is no row of KV heads that was measured.")
            folder = bench.by_command(cuts[name], cuts[name].chosen_of(known), 0)
        place = work / "gguf"
        headprune.export(
            folder, place, to="gguf", out_dtype="float32", prove="read-back", overwrite=True
        )
        elements = KVCache.of(from_pretrained(folder)).elements(1)
        for kind in todo:
            began = time.monotonic()
            graph = llama_cpp_graph.load(place / "model.gguf", kind)
            net = run_by_engine(built(load_config(place)), {MODEL: graph})
            loss = bench.nll(net, bench.wikitext, LONG, WINDOWS)
            words = float(answered(net, prompts, 1).mean())
            numbers = {"wikitext2": round(math.exp(loss), 5), "last_word": words}
            console.print(f"{name}, {kind} {numbers}")
            Results.read().write_with(
                Result(
                    table=TABLE,
                    row=f"{name}, {kind}",
                    sample=0,
                    settings={"bytes": elements * BYTES[kind], "windows": WINDOWS, "words": WORDS},
                    seconds=round(time.monotonic() - began, 1),
                    numbers=numbers,
                    headprune=headprune.__version__,
                    model_sha256=config.sha256,
                )
            )


if __name__ == "__main__":
    typer.run(main)
