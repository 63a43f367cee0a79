"""Inspections, families and evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headprune.family import FAMILIES
from headprune.render import records
from headprune.render.blocks import Block, Paragraph, Table, at_context, byte_size, percent
from headprune.render.markdown import table
from headprune.render.terminal import folded, show

if TYPE_CHECKING:
    from headprune.evaluation.report import ModelReport, Report
    from headprune.evaluation.speed import Speed
    from headprune.family.capabilities import Capability
    from headprune.model.inspection import Inspection

_PREFILL, _DECODED = "prefill tokens/s", "decoded tokens/s, batch {}"
_LEGEND = (
    "All of them: cuts with other counts in every layer, layers without heads. native: a "
    "plain config that loads anywhere. runtime: modeling_headprune.py lies beside the weights, "
    "which asks for trust_remote_code=True, or for headprune.from_pretrained. Model types without "
    "a row are recognised by structure; headprune inspect MODEL shows how."
)


def inspection(console: Console, report: Inspection) -> None:
    """Print a model's attention by module, and the savings of cuts."""
    several = len({a.kind for a in report.attentions}) > 1
    windowed = report.window is not None
    rows = {}
    for a in report.attentions:
        heads = (a.query_heads, a.kv_heads, *[a.window_heads] * windowed)
        numbers = (*heads, a.head_dim, f"{a.parameters:,}")
        rows[a.path] = (*[a.kind] * several, *map(str, numbers))
    kinds = ("query heads", "KV heads", *["with a window"] * windowed)
    columns = (*["kind"] * several, *kinds, "head_dim", "parameters")
    page: list[Block] = [
        Paragraph(
            f"{report.architecture} (family {report.family}"
            f"{'' if report.family in FAMILIES else ', recognised by structure'}, "
            f"{report.task}, {report.dtype}): "
            f"{report.parameters:,} parameters, "
            f"{percent(report.attention_parameters, report.parameters)} of them in attention"
        ),
        Table(("attention module", *columns), folded(rows), names=1 + several, modules=True),
    ]
    if report.window is not None:
        total = sum(a.kv_heads for a in report.attentions)
        near = sum(a.window_heads for a in report.attentions)
        page.append(records.window_words(near, total, report.window))
    page += _caches(report)
    savings = (
        f"{percent(one.parameters, report.parameters)} with {one.heads_removed:.0%} of them"
        for one in report.savings
    )
    unit = f"Default unit: {report.unit.value} ({report.units} of them)."
    page.append(Paragraph(f"Parameters that go with heads: {', '.join(savings)}. {unit}"))
    if report.latents:
        prices = [
            (
                f"{price.kv_cache_bytes_per_token:,}",
                str(price.rank),
                str(price.rope_dim),
                f"{price.lost:.1%}",
                f"{price.perplexity_ratio:.3f} x",
            )
            for price in report.latents
        ]
        columns = ("KV bytes/token, latent", "rank", "rotary", "variance lost", "perplexity")
        page.append(Table(columns, prices))
        ranks = ", ".join(map(str, report.joint_ranks.values()))
        page.append(Paragraph(f"Rank of keys and values that holds 99 %, by layer: {ranks}."))
    show(console, [*page, *(Paragraph(note, "note") for note in report.notes)])


def _caches(report: Inspection) -> list[Block]:
    """Return the KV caches of a model and of its offers, by context."""
    if not report.caches:
        return []
    names = ["KV cache, bytes"]
    for cache in report.caches[1:]:
        fewer = f"{cache.kv_heads:.0%} of the KV heads"
        names.append(f"{cache.windowed:.0%} with a window" if cache.windowed else fewer)
    pairs = zip(names, report.caches, strict=True)
    rows = [(name, *(f"{count:,}" for count in cache.bytes.values())) for name, cache in pairs]
    columns = [f"{tokens:,} tokens" for tokens in report.caches[0].bytes]
    page: list[Block] = [Table((f"in {report.dtype}", *columns), rows)]
    if (window := report.offered_window) is not None:
        page.append(Paragraph(f"A window: {window} (convert-swa). Fewer KV heads: convert-gqa."))
    return page


def families(console: Console, rows: list[Capability]) -> None:
    """Print the capabilities of families."""
    grid, notes = _families(rows)
    show(console, [grid, *map(Paragraph, (*notes, _LEGEND))])


def families_markdown(rows: list[Capability]) -> str:
    """Return the same as Markdown, for the documentation."""
    grid, notes = _families(rows)
    return "\n\n".join([table(grid), "<br>\n".join(notes), _LEGEND])


def _families(rows: list[Capability]) -> tuple[Table, list[str]]:
    notes: list[str] = []

    def note(reason: str) -> str:
        if reason not in notes:
            notes.append(reason)
        return f"({notes.index(reason) + 1})"

    cells = []
    for row in rows:
        fewer = row.fewer_kv_heads
        if fewer not in ("native", "runtime"):
            fewer = f"no {note(fewer)}"
        refused = ", ".join(f"{name} {note(reason)}" for name, reason in row.refused.items())
        name = f"{row.family} (transformers {row.since})" if row.since else row.family
        gates = "yes" if row.gates else "no"
        cells.append((name, ", ".join(row.attention), gates, row.even, row.uneven, fewer, refused))
    columns = (
        "family",
        "attention",
        "gates",
        "even cut",
        "uneven cut",
        "fewer KV heads",
        "refused",
    )
    numbered = [f"({number}) {reason}." for number, reason in enumerate(notes, 1)]
    return Table(columns, cells, names=len(columns)), numbered


def evaluation(console: Console, report: Report) -> None:
    """Print quality, size and speed, beside the base if any."""
    show(console, evaluated(report))


def evaluated(report: Report, base: str | None = None) -> list[Block]:
    """Return quality, size and speed as blocks; ``base`` replaces the base's name."""
    names = _names([report.model, *([report.against] if report.against else [])])
    if base is not None and report.against is not None:
        names[1] = base
    errors = {one.name: one.stderr for one in report.model.metrics}
    from headprune.evaluation.metrics import label  # late: inspect needs none of its imports

    stderr = {label(name): f" ± {error:.4f}" for name, error in errors.items() if error}
    bounds = {one.name: one.bounds.replace(" to ", ", ") for one in report.differences}
    changes = {label(one.name): f"{one.change} [{bounds[one.name]}]" for one in report.differences}
    rows: list[Sequence[str]] = [
        (name, f"{value}{stderr.get(name, '')}", of_base, changes.get(name, "-"))
        for name, of_base, value, _ in report.rows()
    ]
    # names in the title: as heads of columns they leave the numbers no room
    columns, title = ["", "model", "original", "change"], " against ".join(names)
    for one in report.differences[:1]:
        title += f"; changes with {100 * one.interval.confidence:g} % intervals"
    ours, theirs = _sizes(report.model), _sizes(report.against) if report.against else {}
    ranges = _speed_ranges(report)
    for name, number in ours.items():
        of_base = theirs.get(name)
        ratio = f"{number / of_base:.3f} x{ranges.get(name, '')}" if of_base else "-"
        rows.append((name, _shown(name, number), _shown(name, of_base), ratio))
    if report.against is not None and report.against.dtype != report.model.dtype:
        rows.append(("computed in", report.model.dtype, report.against.dtype, "-"))
    if report.against is None:
        columns, rows = columns[:2], [row[:2] for row in rows]
    page: list[Block] = [Table(columns, rows, title)]
    depths, needles = report.needle()
    if needles:
        beside = " (of the base in brackets)" if report.against is not None else ""
        page.append(Table(depths, needles, f"Needles, by context and depth{beside}"))
    if later := _speed_at(report):
        columns = ["after a prompt of", *_rates(report.model.speed_at[0])]
        page.append(Table(columns, later))
    return page


def _names(models: Iterable[ModelReport]) -> list[str]:
    whole = [model.name for model in models]
    short = [Path(name).name for name in whole]
    return short if all(short) and len({*short}) == len(short) else whole


def _sizes(model: ModelReport) -> dict[str, float]:
    cost, speed = model.cost, model.speed
    sizes: dict[str, float] = {
        "query heads": cost.query_heads,
        "KV heads": cost.kv_heads,
        "parameters": cost.parameters,
        "attention parameters": cost.attention_parameters,
    }
    if cost.kv_cache_bytes:  # an encoder has no cache
        # without windows, the cache per token tells all of them
        several = cost.kv_cache_bytes_at if cost.kv_cache_tokens > 1 else {}
        cached = several or {cost.kv_cache_tokens: cost.kv_cache_bytes}
        sizes |= {f"KV bytes {at_context(tokens)}": size for tokens, size in cached.items()}
    if model.longest_context is not None:
        sizes["longest context, tokens"] = model.longest_context
    if speed is not None and speed.peak_memory_bytes is not None:
        return sizes | speeds(model) | {"peak memory": speed.peak_memory_bytes}
    return sizes | speeds(model)


def speeds(model: ModelReport) -> dict[str, float]:
    """Return tokens per second: prefill, and decoding by batch size."""
    return _rates(model.speed) if model.speed is not None else {}


def _rates(speed: Speed) -> dict[str, float]:
    batches = sorted(speed.decode_by_batch.items())
    decoding = {_DECODED.format(size): rate for size, rate in batches}
    return {_PREFILL: speed.prefill_tokens_per_s, **decoding}


def _speed_at(report: Report) -> list[list[str]]:
    """Return a row per stated context; ratios to the base in brackets."""
    base = report.against.speed_at if report.against else ()
    rows = []
    for index, speed in enumerate(report.model.speed_at):
        theirs = _rates(base[index]) if base else {}
        ratios = {name: f" ({n / theirs[name]:.2f} x)" for name, n in _rates(speed).items() if base}
        rates = (f"{n:,.1f}{ratios.get(name, '')}" for name, n in _rates(speed).items())
        rows.append([f"{speed.prompt_tokens:,} tokens", *rates])
    return rows


def _speed_ranges(report: Report) -> dict[str, str]:
    """Return the smallest and largest ratio of runs timed one after the other."""
    model, base = report.model.speed, report.against.speed if report.against else None
    if model is None or base is None:
        return {}
    pairs = {_PREFILL: (model.prefills_s, base.prefills_s)}
    pairs |= {_DECODED.format(n): (s, base.decodes_s[n]) for n, s in model.decodes_s.items()}
    ranges = {}
    for name, times in pairs.items():
        faster = [theirs / ours for ours, theirs in zip(*times, strict=True)]
        ranges[name] = f" [{min(faster):.3f}, {max(faster):.3f}]"
    return ranges


def _shown(name: str, number: float | None) -> str:
    if number is None:
        return "-"
    if name == "peak memory":
        return byte_size(number)
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"
