"""What headprune takes on one GPU: ``python scripts/bench_gpu.py``, and docs/benchmarks/gpu.md.

Models have the shapes of 1B, 7B and 13B Llamas and random weights, made on the device. Nothing is
begun after ``--minutes``, and what does not fit is told as such. ``--size tiny`` tries everything
out, also on a CPU, and prints the page.
"""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench_scale import cut as stream
from bench_speed import forward_flops, gate_steps
from headprune import devices
from headprune.config import ConvertConfig, HealConfig, ScoreConfig
from headprune.data.text import Sequences
from headprune.distillation.trainer import HealedModel, trainable
from headprune.evidence.score import gather, scores_of
from headprune.model import speed
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.cost import model_cost
from headprune.model.heads import HeadWeights
from headprune.model.open import read_model
from headprune.model.units import default_unit, head_budget, unit_sizes
from headprune.placements import Placement, placing
from headprune.planning.from_scores import plan_from_scores
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import Plan
from headprune.surgery.conversion import convert_in_sequence
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.merges import MergeContext
from headprune.surgery.merges.merger import Merger
from headprune.surgery.refit import refit

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "gpu.md"
TOP = """# GPU

One data-centre GPU, Llama shapes with random weights made on the device, within ten minutes:

```bash
python scripts/bench_gpu.py
```

Seconds of steps and forward passes are medians, the others of one run; peaks are the most memory
that the device held, weights included. The cut keeps half of the KV groups, drawn at random, other
numbers in every layer.

"""
NOT_YET = "Not measured yet. The script writes this page.\n"
BIG = ["1B", "7B", "13B"]


@dataclass(frozen=True)
class Size:
    """A shape, and how much it is given to do."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    trained: int = 2048  # tokens of a training step
    calibrated: int = 8192
    length: int = 512
    prompt: int = 2048
    decoded: int = 32
    batch: int = 16

    def build(self, device: torch.device) -> PreTrainedModel:
        """The model, in bfloat16; the same weights every time."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        )
        with torch.device(device):
            net: PreTrainedModel = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        return net.eval()


SIZES = {
    "1B": Size(2048, 8192, 16, 32, 8, 128_256),
    "7B": Size(4096, 11_008, 32, 32, 32, 32_000),
    "13B": Size(5120, 13_824, 40, 40, 40, 32_000),
    "tiny": Size(64, 96, 4, 4, 2, 128, 32, 256, 32, 24, 4, 2),
}


@dataclass
class Table:
    """What was measured of one size."""

    name: str
    deadline: float
    device: torch.device
    rows: list[str] = field(default_factory=list)

    def row(self, what: str, seconds: float | None, peak: int | None, note: str = "") -> None:
        """Adds a row, and prints it."""
        told = "" if seconds is None else f"{seconds:.3g}"
        held = "" if peak is None else f"{peak / 1e9:.2f}"
        self.rows.append(f"| {what} | {told} | {held} | {note} |")
        print(self.name, self.rows[-1], flush=True)

    def measure(self, what: str, work: Callable[[], object], repeats: int = 0) -> float | None:
        """Does it once, or once and so many times more for the median of these; adds a row.

        A text that ``work`` returns is the row's note.

        Returns:
            Seconds; None where it was not done.
        """
        if time.perf_counter() > self.deadline:
            self.row(what, None, None, "not begun: out of time")
            return None
        gc.collect()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        times: list[float] = []
        note: object = ""
        try:
            for _ in range(repeats + 1):
                start = time.perf_counter()
                note = work()
                if on_gpu:
                    torch.cuda.synchronize(self.device)
                times.append(time.perf_counter() - start)
        except Exception as error:  # the other rows are still to be had
            full = devices.out_of_memory(error)
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else ""
            self.row(what, None, None, "out of memory" if full else f"failed: {why}")
            return None
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        seconds = median(times[1:] or times)
        self.row(what, seconds, peak, note if isinstance(note, str) else "")
        return seconds


def half_the_groups(net: PreTrainedModel) -> Plan:
    """A plan that keeps half of the units, drawn at random."""
    attentions = attention_of(net)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    return plan_from_scores(attentions, unit, scores, head_budget(0.5, sizes))


def sample_of(size: Size) -> Sequences:
    """Random tokens."""
    draw = torch.Generator().manual_seed(0)
    shape = (size.calibrated // size.length, size.length)
    rows = Dataset.from_dict(
        {"input_ids": torch.randint(0, size.vocabulary, shape, generator=draw).tolist()}
    )

    def collate(features: list[dict[str, Any]]) -> Batch:
        ids = torch.tensor([feature["input_ids"] for feature in features])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return Sequences(rows, collate, batch_size=4)


def training(table: Table, size: Size, net: PreTrainedModel) -> None:
    """A step of gate training, and one of healing."""
    ids = torch.randint(0, size.vocabulary, (1, size.trained), device=table.device)
    plain, step = gate_steps(net, ids)
    what = f"of {size.trained:,} tokens, bfloat16"
    before = table.measure(f"plain forward + backward {what}", plain, 5)
    after = table.measure(f"gate step {what}", step, 5)
    if before is not None and after is not None:
        table.row("gate step / plain", None, None, f"{after / before:.3f} times the seconds")

    def heal() -> Callable[[], None]:
        student = copy.deepcopy(net).float()
        trained = trainable(student, attention_of(student), HealConfig(steps=1))
        model = HealedModel(trained, net, bf16=True).train()
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def one() -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return one

    table.measure(
        f"heal step of {size.trained:,} tokens: --train attention --bf16, and its set-up",
        Lazily(heal),
        3,
    )


@dataclass
class Lazily:
    """Work that is set up when it is first done."""

    make: Callable[[], Callable[[], object]]
    made: Callable[[], object] | None = None

    def __call__(self) -> object:
        """Does it."""
        self.made = self.made or self.make()
        return self.made()


def serving(table: Table, size: Size, net: PreTrainedModel) -> None:
    """Prefill and decoding before and after the cut, and torch.compile of the result."""
    less = size.build(table.device)
    cut_heads(less, resolve(half_the_groups(less), less))
    ways = (net, less)
    found: list[speed.Speed] = []

    def both() -> None:
        batches = [1, size.batch]
        found[:] = speed.measure(ways, size.prompt, size.decoded, repeats=3, batches=batches)

    table.measure("prefill and decoding of both models in turn, 4 times", both)
    if not found:
        return
    flops = [forward_flops(way, size.prompt)[1] for way in ways]
    before, after = found
    ratio = after.prefill_tokens_per_s / before.prefill_tokens_per_s
    told = f"{before.prefill_tokens_per_s:,.0f} to {after.prefill_tokens_per_s:,.0f} tokens/s"
    predicted = f"times; by FLOPs {flops[0] / flops[1]:.2f}"
    what = f"prefill of {size.prompt:,} tokens, whole to cut"
    table.row(what, None, None, f"{told}: {ratio:.2f} {predicted}")
    for batch in (1, size.batch):
        rates = [one.decode_by_batch[batch] for one in found]
        read = [bytes_read(way, batch, size.prompt) for way in ways]
        told = f"{rates[0]:,.0f} to {rates[1]:,.0f} tokens/s"
        predicted = f"times; by bytes read {read[0] / read[1]:.2f}"
        what = f"decoding {size.decoded} tokens, batch of {batch}, whole to cut"
        table.row(what, None, None, f"{told}: {rates[1] / rates[0]:.2f} {predicted}")


def bytes_read(net: PreTrainedModel, batch: int, context: int) -> int:
    """What one step of decoding reads: all weights but the embeddings, and the KV cache."""
    cost, embeddings = model_cost(net, context), net.get_input_embeddings().weight.numel()
    weights = (cost.parameters - embeddings) * net.dtype.itemsize
    return int(weights + batch * cost.kv_cache_bytes)


@torch.no_grad()
def compiled(table: Table, size: Size) -> None:
    """Forward passes of a result with uneven heads: as it is, compiled, and by CUDA graphs."""
    net = size.build(table.device)
    cut_heads(net, resolve(half_the_groups(net), net))
    ways: dict[str, dict[str, Any] | None] = {"as it is": None, "torch.compile": {}}
    if table.device.type == "cuda":
        ways["torch.compile, CUDA graphs"] = {"mode": "reduce-overhead"}
    else:
        ways["torch.compile"] = {"backend": "eager"}  # a CPU need not have a compiler
    for length in (16, size.prompt):
        ids = torch.randint(0, size.vocabulary, (1, length), device=table.device)
        wanted = net(ids, use_cache=False).logits
        for way, how in ways.items():
            torch.compiler.reset()
            run = net if how is None else torch.compile(net, dynamic=False, **how)

            def forward(run: Any = run, ids: Tensor = ids, wanted: Tensor = wanted) -> str:
                apart = (run(ids, use_cache=False).logits - wanted).abs().max()
                return f"logits {float(apart / wanted.abs().max()):.0e} apart"

            table.measure(f"forward of {length:,} tokens, cut model, {way}", forward, 10)


def statistics(table: Table, size: Size) -> None:
    """Scores and refits with weights in float32 and in bfloat16: what they take and differ."""
    found: dict[str, list[Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name, sample = str(dtype).removeprefix("torch."), sample_of(size)
        Statistics(size.build(table.device).to(dtype), sample, found).run(table, name)


@dataclass
class Statistics:
    """Those of one model."""

    net: PreTrainedModel
    sample: Sequences
    found: dict[str, list[Tensor]]

    def run(self, table: Table, name: str) -> None:
        """Measures them."""
        tokens = f"{self.sample.tokens:,} tokens"
        for criterion in ("fisher", "compensated"):
            what = f"score --criterion {criterion}, {tokens}, {name}"
            table.measure(what, partial(self.score, criterion))
        table.measure(f"prune --refit, {tokens}, {name}", self.refit)

    def score(self, criterion: str) -> str:
        """Scores all units."""
        attentions = attention_of(self.net)
        unit = default_unit(attentions)
        config = ScoreConfig(criterion=criterion, unit=unit)
        evidence = gather(self.net, attentions, config, self.sample)
        found = self.found.setdefault(criterion, [])
        found.append(scores_of(criterion, evidence, attentions, unit))
        if len(found) < 2:
            return ""
        apart = (found[1] - found[0]).abs().max() / found[0].abs().max()
        return f"scores {float(apart):.1e} of the largest from those in float32"

    def refit(self) -> str:
        """Refits every W_O for half of the groups."""
        cuts = resolve(half_the_groups(self.net), self.net)
        cuts = [cut for cut in cuts if cut.attention.query_heads]
        attentions, gates = [cut.attention for cut in cuts], [cut.gate() for cut in cuts]
        modules = refit(self.net, attentions, gates, self.sample.whole())
        after = sum(module.after for module in modules) / max(len(modules), 1)
        return f"mean relative error {after:.4g}"


def from_disk(table: Table, size: Size, home: Path) -> None:
    """Lowrank merging, whole and layer by layer, and the cut from file to file."""
    folder, plan, out = home / "model", home / "plan.json", home / "out"
    net = size.build(table.device)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    if shutil.disk_usage(home).free < 2.5 * weights:
        table.row("lowrank, streaming cut", None, None, f"no room in {home.parent}; set TMPDIR")
        return
    net.save_pretrained(folder, max_shard_size="2GB")
    half_the_groups(net).write(plan)
    del net
    merger = Merger.of(ConvertConfig(kv_heads=1), calibrated=True)
    sample = sample_of(size)

    def converted(attention: Attention, heads: HeadWeights, setting: MergeContext) -> HeadWeights:
        groups = merger.groups(heads, setting, max(1, attention.kv_heads // 2))
        return merger.merged(heads, setting, groups)

    for placement in (Placement.WHOLE, Placement.LAYERS):

        def convert(placement: Placement = placement) -> None:
            with placing(placement):
                loaded = read_model(folder, torch.float32).weighted()
            loaded = loaded if placement is Placement.LAYERS else loaded.to(table.device)
            whole = sample.whole()
            convert_in_sequence(loaded, attention_of(loaded), whole, converted)

        what = f"convert-gqa --merge lowrank, half of the KV heads, {sample.tokens:,} tokens"
        table.measure(f"{what}, --config placement={placement.value}, with loading", convert)
    table.measure(
        "prune, half of the KV groups, file to file",
        lambda: f"{weights / stream(folder, plan, out) / 1e9:.2f} GB/s of the source",
    )


def page(tables: Sequence[Table], machine: str) -> str:
    """The page of the docs."""
    parts = [TOP, machine] if tables else [TOP, NOT_YET]
    for table in tables:
        head = "| | seconds | peak, GB | |\n|---|---|---|---|"
        parts.append("\n".join([f"\n## {table.name}\n", head, *table.rows, ""]))
    return "".join(parts)


def main(
    size: Annotated[list[str], typer.Option(help=f"Of {', '.join(SIZES)}.")] = BIG,
    minutes: Annotated[float, typer.Option(help="After which nothing is begun.")] = 8.0,
    output: Annotated[Path | None, typer.Option(help="The page; tiny is printed alone.")] = None,
) -> None:
    """Measures every size, and writes the page after each of them."""
    deadline = time.perf_counter() + 60 * minutes
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if there == "cpu" and size != ["tiny"]:
        raise SystemExit("There is no CUDA GPU here; --size tiny tries the script out on a CPU.")
    where = output or (None if "tiny" in size else PAGE)
    tables: list[Table] = []
    with devices.running_on(there), tempfile.TemporaryDirectory(prefix="headprune-gpu-") as home:
        device = devices.chosen()
        for name in size:
            table = Table(name, deadline, device)
            tables.append(table)
            net = SIZES[name].build(device)
            training(table, SIZES[name], net)
            serving(table, SIZES[name], net)
            del net
            statistics(table, SIZES[name])
            folder = Path(home, name)
            folder.mkdir()
            from_disk(table, SIZES[name], folder)
            shutil.rmtree(folder)
            if where is not None:
                where.write_text(page(tables, machine_of(device)), encoding="utf-8")
        compiled(tables[0], SIZES[size[0]])  # last, as it may take as long as all of the others
        if where is not None:
            where.write_text(page(tables, machine_of(device)), encoding="utf-8")
    if where is None:
        print(page(tables, machine_of(device)))


def machine_of(device: torch.device) -> str:
    """What it was measured on."""
    name = "A CPU"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        name = f"{torch.cuda.get_device_name(device)} with {memory / 2**30:.0f} GiB"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}.\n"


if __name__ == "__main__":
    typer.run(main)
