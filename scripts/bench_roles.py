"""What ``headprune roles`` finds on a model, what it takes, and whether it finds it again.

    python scripts/bench_roles.py --model FOLDER --data TEXT [--trees UD.conllu.gz]

Time is that of all stages together, against one plain forward pass of the model's body over the
same sequences of text in eager attention, in seconds of processors: what else runs on the machine
does not count. What the loss says of a head is timed on 1,024 tokens and one head of every fourth
layer, against a forward pass with logits over the same tokens.

Memory is the largest resident size of the process, the plain pass first: what is added is that of
the roles, beside one layer's attention. MALLOC_MMAP_THRESHOLD_=65536 in the environment has glibc
give back what is freed: without it, holes of the heap count as held, of both. Labels are compared
between the two halves of the text, of all heads and of those with a role in either.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.console import Console

from headprune.config import DataConfig, Dtype, RolesConfig
from headprune.context import Context
from headprune.data.read import read_examples
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.loading import load_tokenizer
from headprune.model.open import load
from headprune.model.passes import eager_attention, run_model
from headprune.role.ablation import Out, head_means, rises
from headprune.role.inputs import loss_batches, text_input
from headprune.role.measure import roles
from headprune.schemas.roles import RolesRecord

console = Console()
Labels = dict[tuple[str, int], str | None]


def peak() -> int:
    """Largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(model: str, data: DataConfig, config: RolesConfig) -> tuple[float, int]:
    """Seconds of a plain pass in eager attention, and bytes of one layer's attention."""
    net, _ = load(model, Dtype.AUTO)
    given, _ = text_input(net, load_tokenizer(model), data, config)
    heads = max(attention.query_heads for attention in attention_of(net))
    with torch.no_grad(), eager_attention(net):
        run_model(net, given.batches[0])  # warm
        begun = time.process_time()
        for batch in given.batches:
            run_model(net, batch)
    seconds = time.process_time() - begun
    return seconds, max(heads * 4 * ids.numel() * ids.shape[1] for ids in inputs(given.batches))


def inputs(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """The token ids of batches."""
    return [batch["input_ids"] for batch in batches]


def timed(
    model: str, data: DataConfig, config: RolesConfig
) -> tuple[RolesRecord, dict[str, float]]:
    """The record, and the seconds of every stage."""
    stages: list[tuple[str, float]] = []

    def stage(name: str) -> None:
        stages.append((name, time.process_time()))

    with TemporaryDirectory() as folder:
        record = roles(model, Path(folder) / "roles", data, config, context=Context(stage=stage))
    stage("end")
    ends = [at for _, at in stages[1:]]
    spent = {name: end - at for (name, at), end in zip(stages, ends, strict=False)}
    return record, {name: seconds for name, seconds in spent.items() if "loading" not in name}


def per_head(model: str, data: DataConfig) -> float:
    """Forward passes that it takes to set one head to zero, and to its mean."""
    net, _ = load(model, Dtype.AUTO)
    attentions, config = attention_of(net), RolesConfig(ablation_tokens=1024)
    batches = loss_batches(net, load_tokenizer(model), data, config)
    means = head_means(net, attentions, batches)
    # evenly, so that about as many layers run again as in the mean of all heads
    layers = range(1, len(attentions), 4)
    asked = [(Out(layer, (0,), by_mean),) for layer in layers for by_mean in (False, True)]

    def spent(run: Callable[[], object]) -> float:
        begun = time.process_time()
        run()
        return time.process_time() - begun

    def forward() -> None:
        for batch in batches:
            run_model(net, batch, head=True)

    with torch.no_grad():
        forward()  # warm
        once = spent(forward)
        whole = spent(lambda: rises(net, attentions, batches, means, []))
        every = spent(lambda: rises(net, attentions, batches, means, asked))
    return (every - whole) / once / len(layers)


def best(record: RolesRecord) -> dict[str, dict[str, object]]:
    """By role, how many heads are at or over its threshold, and the best one."""
    found: dict[str, dict[str, object]] = {}
    for name, facts in record.roles.items():
        scored = [
            (head.scores[name], f"{layer}.{head.head}")
            for layer, module in enumerate(record.modules)
            for head in module.heads
            if name in head.scores
        ]
        if scored:
            score, head = max(scored, key=lambda one: one[0].score)
            scores = [s.score - (s.control or 0) * facts.beyond for s, _ in scored]
            found[name] = {
                "heads": sum(value >= facts.threshold for value in scores),
                "labelled": sum(s.state == "over" for s, _ in scored),
                "best": head,
                "score": round(score.score, 3),
                "variant": score.variant,
            }
    return found


def labels(record: RolesRecord) -> Labels:
    """The role of every head."""
    return {(m.path, head.head): head.role for m in record.modules for head in m.heads}


def agreement(first: Labels, second: Labels) -> dict[str, float]:
    """The share of equal labels: of all heads, and of those that one of the two gives a role."""
    either = [head for head in first if first[head] or second[head]]
    same = [head for head in first if first[head] == second[head]]
    return {
        "all heads": len(same) / len(first),
        "heads with a role": sum(h in either for h in same) / max(len(either), 1),
        "heads that have one": len(either),
    }


def main(
    model: Annotated[str, typer.Option()],
    data: Annotated[Path, typer.Option(help="A text file.")],
    trees: Annotated[Path | None, typer.Option()] = None,
    sequences: Annotated[int, typer.Option()] = 64,
    seq_len: Annotated[int, typer.Option()] = 512,
    output: Annotated[Path | None, typer.Option(help="Also as JSON.")] = None,
) -> None:
    """Measures a model."""
    place = None if trees is None else str(trees)
    config = RolesConfig(sequences=sequences, seq_len=seq_len, trees=place)
    source = DataConfig(source=str(data))
    seconds, layer = plain(model, source, config)
    before = peak()
    record, stages = timed(model, source, config)
    after, total = peak(), sum(stages.values())
    text = "".join("".join(pieces) for pieces in read_examples(source).documents())
    halves = []
    with TemporaryDirectory() as folder:
        for number, part in enumerate((text[: len(text) // 2], text[len(text) // 2 :])):
            half = Path(folder) / f"{number}.txt"
            half.write_text(part, encoding="utf-8")
            # another seed draws other random tokens
            again = config.model_copy(update={"seed": number, "trees": None})
            halves.append(labels(timed(model, DataConfig(source=str(half)), again)[0]))
    found = {
        "forwards_per_head": per_head(model, source),
        "sequences": sequences,
        "seq_len": seq_len,
        "roles": best(record),
        "plain_seconds": seconds,
        "stages": stages,
        "times_plain": total / seconds,
        "peak_bytes": {"plain": before, "roles": after, "one layer's attention": layer},
        "labels_equal": agreement(*halves),
    }
    console.print_json(json.dumps(found))
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
