"""Records as blocks for terminal, model card and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from headprune.io.markup import printable
from headprune.render.blocks import (
    GONE,
    KEPT,
    MERGED,
    WINDOW,
    ZERO,
    Block,
    Code,
    Paragraph,
    Signs,
    Table,
    at_context,
    before_after,
    percent,
)
from headprune.render.markdown import line_of_code
from headprune.schemas.manifest import LineageStep, Manifest
from headprune.schemas.plan import AttentionPlan, Plan, Shape
from headprune.schemas.records import (
    Contender,
    Evidence,
    Heads,
    Healing,
    Merging,
    Migration,
    ModelChoice,
    Window,
    Windowing,
)
from headprune.schemas.roles import RolesRecord

_NATIVE = "Plain config: loads anywhere, without extra code."
_LAYER_WINDOWS = "Plain config of transformers 5: loads without extra code."
_OWN_CODE = (
    "Loads with the code of its original: AutoModel*.from_pretrained(..., trust_remote_code=True)."
)
_SIGNS = {
    KEPT: "stays",
    WINDOW: "sees a window",
    MERGED: "shares merged keys and values",
    GONE: "is gone",
    ZERO: "is a zero head, which computes nothing",
}
_RUNTIME = (
    "{why}: loads with headprune.from_pretrained, or with "
    "AutoModel*.from_pretrained(..., trust_remote_code=True)."
)


def short_name(source: str) -> str:
    """Return the last part of a path or hub id."""
    return Path(source).name or source


def done(step: LineageStep) -> str:
    """Return a step's work in a few words."""
    work = step.done
    if isinstance(work, Healing):
        moved = f"loss {work.before:.4g} to {work.after:.4g}"
        if work.own_share:
            moved += f", {work.own_share:.0%} of it the model's own"
        if work.sink_logits:
            moved += f", with sink logits for {work.sink_logits} query heads"
        return f"healed for {work.steps} steps to match {short_name(work.teacher)} ({moved})"
    if isinstance(work, Migration):
        return "rewritten for transformers 5"
    if isinstance(work, Merging):
        before, after = step.kv_heads
        tokens = work.calibration_tokens
        text = f", calibrated on {tokens:,} tokens" if tokens else ""
        if work.sharpness > 1:
            text += f", scores on shared keys x {work.sharpness:g}"
        return f"{before} KV heads merged into {after} ({work.merge}, {work.grouping}{text})"
    if isinstance(work, Windowing):
        total = sum(len(heads.kv_heads) for heads in step.layout.values())
        return (
            f"a window for {work.heads} of {total} KV heads, chosen by {chosen_by(work.evidence)}"
        )
    before, after = step.query_heads
    refit = f", W_O refitted on {short_name(step.refit.data)}" if step.refit is not None else ""
    share = percent(after, before)
    return (
        f"cut to {after} of {before} heads ({share}), chosen by {chosen_by(work.evidence)}{refit}"
    )


def what(manifest: Manifest) -> str:
    """Return all steps from the original to the result."""
    steps = "; then ".join(map(done, manifest.steps))
    name, version = manifest.steps[0].source.name, manifest.versions["headprune"]
    return f"{name}, {steps}. Made by headprune {version}."


def chosen_by(evidence: Evidence) -> str:
    """Return the evidence for heads in a few words."""
    name = f"{evidence.kind} {evidence.id[:12]}"
    return name if evidence.criterion is None else f"{evidence.criterion} ({name})"


def size_rows(steps: Sequence[LineageStep]) -> list[tuple[str, int, int]]:
    """Return counts before the first step and after the last."""

    def counts(step: LineageStep) -> dict[str, tuple[int, int]]:
        shown = {
            "query heads": step.query_heads,
            "KV heads": step.kv_heads,
            "parameters": step.parameters,
            f"bytes of weights ({step.dtype})": step.weight_bytes,
        }
        cache = f"KV cache bytes {at_context(step.kv_cache_tokens)} ({step.dtype})"
        return shown if steps[-1].window is None else {**shown, cache: step.kv_cache_bytes}

    first, last = counts(steps[0]), counts(steps[-1])
    # bytes of weights are of one element type
    return [(name, first[name][0], after) for name, (_, after) in last.items() if name in first]


def sizes(steps: Sequence[LineageStep]) -> Table:
    """Return the same as a table."""
    return before_after(size_rows(steps))


def windows(manifest: Manifest) -> list[Paragraph]:
    """Return the loss by windows, in a sentence; nothing without any."""
    if manifest.window is None:
        return []
    heads = manifest.layout.values()
    counts = sum(len(one.near) for one in heads), sum(len(one.kv_heads) for one in heads)
    return [window_words(*counts, manifest.window)]


def window_words(near: int, kv_heads: int, window: Window) -> Paragraph:
    """Return the loss of a number of KV heads with a window."""
    others = "only heads with a whole past" if near < kv_heads else "no head"
    return Paragraph(
        f"{near} of {kv_heads} KV heads see only {window}: what lies between is lost to them, and "
        f"{others} can recall it."
    )


def refit(manifest: Manifest) -> list[Block]:
    """Return the gain of the refit of W_O; nothing without one."""
    if manifest.refit is None:
        return []
    fit = manifest.refit
    words = (
        f"W_O refitted in {fit.modules} modules on {fit.tokens:,} tokens: error of the "
        f"outputs {fit.error_before:.1%} -> {fit.error_after:.1%}."
    )
    if (worth := fit.held_out) is not None:
        words += (
            f" On {worth.tokens:,} held-out tokens: {worth.measure} {worth.without:.4g} without "
            f"-> {worth.refitted:.4g} with it."
        )
    return [Paragraph(words)]


def proof(manifest: Manifest) -> list[Block]:
    """Return the compared differences and the negative control."""
    measured, tensors = manifest.proof, manifest.tensor_proof
    if measured is None:
        assert tensors is not None
        rows = [
            ("tensors equal to the original's", f"{tensors.tensors:,}"),
            ("of them without some heads", f"{tensors.cut:,}"),
            ("bytes compared", f"{tensors.bytes:,}"),
        ]
        words = "every tensor holds slices of the original, to the bit; no outputs were compared."
        return [Paragraph(words, "verified"), Table(("", "count"), rows)]
    originals = {
        Healing: "healed model",
        Merging: "merged original",
        Windowing: "original with a mask per head",
    }
    original = originals.get(type(manifest.done), "gated original")
    rows = [
        (f"{original} - reloaded from disk", f"{measured.gated_vs_reloaded:.1e}"),
        ("gates moved by one bit: rounding alone", f"{measured.rounding:.1e}"),
        (f"allowed in {measured.dtype}", f"{measured.tolerance:.0e}"),
    ]
    if measured.control is not None:
        rows.append(("negative control: one head misplaced", f"{measured.control:.1e}"))
    rows += [(f"negative control: {name}", f"{gap:.1e}") for name, gap in measured.windows.items()]
    if measured.cast:
        rows.append((f"cost of writing {manifest.dtype}", f"{measured.cast:.1e}"))
    words = "outputs match; differences are relative to the largest output."
    if measured.unreached:
        words += f" Not run: {'; '.join(measured.unreached)}. Settings and tensors are equal there."
    return [Paragraph(words, "verified"), Table(("", "difference"), rows)]


def load_code(manifest: Manifest, folder: str) -> Code:
    """Return Python that loads the result."""
    needs_code = manifest.brings_code or manifest.shape is Shape.RUNTIME
    quoted = '"' + printable(folder.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    remote = ", trust_remote_code=True" if needs_code else ""
    auto = manifest.auto_class
    text = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained({quoted}{remote})"
    return Code(text, "python")


def how_stored(manifest: Manifest) -> str:
    """Return how a result loads, in a sentence."""
    if manifest.shape is Shape.NATIVE and manifest.brings_code:
        return _OWN_CODE
    windows = any(heads.window_heads for heads in manifest.layout.values())
    if manifest.shape is Shape.NATIVE and windows:
        return _LAYER_WINDOWS
    return stored(manifest.shape, manifest.uneven)


def stored(shape: Shape, uneven: bool) -> str:
    """Return how a result of a shape loads, in a sentence."""
    if shape is Shape.NATIVE:
        return _NATIVE
    why = "Uneven heads" if uneven else "Heads that the stock class has no setting for"
    return _RUNTIME.format(why=why)


def heads_line(part: AttentionPlan, left: Heads | None = None) -> Signs:
    """Return a layer's heads by id, with a gap between KV groups: ``■■■ ··· ◧◧◧``.

    Args:
        part: The plan of the layer.
        left: The heads after it, which know of windows; None to leave these out.
    """
    forms = dict.fromkeys(part.keep, KEPT)
    if left is not None:
        merged = [group[0] for group in part.groups or () if len(group) > 1]
        forms |= dict.fromkeys(left.queries(merged), MERGED)
        forms |= dict.fromkeys(left.queries(left.near), WINDOW)
    zero = (head for head, gate in zip(part.keep, part.scale or (), strict=False) if not gate)
    forms |= dict.fromkeys(zero, ZERO)
    group = max(1, part.query_heads // max(1, part.kv_heads))
    # ids are those of the model before any cut, so they can lie above the present count
    count = max([part.query_heads, *(head + 1 for head in forms)])
    signs = [forms.get(head, GONE) for head in range(count)]
    if group == 1:
        return Signs("".join(signs))
    return Signs(" ".join("".join(signs[at : at + group]) for at in range(0, count, group)))


def heads(plan: Plan, layout: Mapping[str, Heads]) -> list[Block]:
    """Return a plan, a line per layer, with a key; ``layout`` holds the heads after it."""
    rows = [
        (path, heads_line(part, layout.get(path)), f"{len(part.keep)}/{part.query_heads}")
        for path, part in plan.attentions.items()
    ]
    table = Table(("attention module", "heads", "kept"), rows, names=2, modules=True)
    return [table, _key(signs for _, signs, _ in rows)]


def heads_drawn(plan: Plan, layout: Mapping[str, Heads]) -> list[Block]:
    """Return the same as lines of text."""
    parts = plan.attentions.items()
    lines = [(line_of_code(path), heads_line(part, layout.get(path))) for path, part in parts]
    width = max((len(path) for path, _ in lines), default=0)
    drawn = "\n".join(f"{path:<{width}}  {signs}" for path, signs in lines)
    return [_key(signs for _, signs in lines), Code(drawn, "text")]


def _key(lines: Iterable[str]) -> Paragraph:
    """Return the meaning of the signs that occur."""
    drawn = "".join(lines)
    words = ", ".join(f"{sign} {meaning}" for sign, meaning in _SIGNS.items() if sign in drawn)
    gap = "; a gap separates the queries of one KV head from the next" if " " in drawn else ""
    return Paragraph(f"{words}{gap}.")


def contenders(choice: ModelChoice) -> Table:
    """Return a row per candidate: quality on the half that chooses, and sizes."""
    every = (choice.original, *choice.contenders)
    names = [f"{'> ' if one is choice.chosen else '  '}{one.name}" for one in every]
    columns = {"": names, choice.measure: [f"{one.chosen_by:.3f}" for one in every]}
    if choice.passage_words[0]:
        columns["words kept"] = [_or_dash(one.passage_words, ".3f") for one in every]
    if choice.original.far_nats is not None:
        columns["nats of far answers"] = [_or_dash(one.far_nats, "+.3f") for one in every]
    columns["parameters"] = [f"{one.parameters:,}" for one in every]
    if choice.original.kv_cache_bytes:
        cached = f"KV bytes {at_context(choice.kv_cache_tokens)}"
        columns[cached] = [f"{one.kv_cache_bytes:,}" for one in every]
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _other_half(one: Contender, measure: str) -> str:
    """Return the quality of a candidate on the half that chose nothing, in a sentence."""
    facts = [f"{measure} {one.held_out:.3f}"]
    if one.held_out_words is not None:
        facts.append(f"words kept {one.held_out_words:.3f}")
    if one.held_out_far_nats is not None:
        facts.append(f"nats of far answers {one.held_out_far_nats:+.3f}")
    return f" On the other half: {', '.join(facts)}."


def chosen(choice: ModelChoice) -> list[Block]:
    """Return the goal, the choice and all candidates."""
    count = len(choice.contenders)
    text = (
        f"Kept: {choice.goal}; {choice.chosen.name}, "
        f"{f'the best of {count}' if count > 1 else 'measured alone'} on one half of "
        f"{choice.held_out_tokens:,} held-out tokens."
    )
    if words := choice.passage_words[0]:
        text += (
            f" Half of the words that only their passage tells, {words}, choose as well: a tenth "
            "of them lost counts as 1 % of perplexity."
        )
    if choice.original.far_nats is not None:
        text += (
            " A tenth of a nat in answers further back than a window counts as 1 % of perplexity."
        )
    if choice.chosen.held_out is not None:
        text += _other_half(choice.chosen, choice.measure)
    reasons = [f"{name} was left out: {why}" for name, why in choice.left_out.items()]
    return [Paragraph(text), contenders(choice), *(Paragraph(why, "note") for why in reasons)]


def roles(record: RolesRecord, kept: Set[tuple[str, int]] | None = None) -> Table | None:
    """Return heads per role, before and after a cut; None where no head has one.

    Args:
        record: Roles of a cut model against its original, or of the original.
        kept: Paths and ids of the heads that a cut of the original left; None for all.
    """
    rows = []
    for name in (name for name, facts in record.roles.items() if not facts.attribute):
        over, change, moved = record.heads(name), record.changes.get(name), "-"
        stay = over if kept is None else over & kept
        counts = len(over), len(stay)
        if change is not None:
            counts = len(change.kept) + len(change.lost), len(change.kept)
            moved = str(len(change.moved))
        lost = change.is_lost if change is not None else bool(over) and not stay
        if counts[0] or moved not in "-0":
            effect = _largest_effect(record, name)
            rows.append((name, *map(str, counts), moved, effect, "lost" if lost else ""))
    columns = ("role", "heads", "kept", "moved", "largest effect", "")
    return Table(columns, rows) if rows else None


def _largest_effect(record: RolesRecord, name: str) -> str:
    """By how much the loss rises without the head of a role that it needs most."""
    rises = [
        head.effect.zero.nats
        for module in record.modules
        for head in module.heads
        if head.has(name) and head.effect is not None
    ]
    return f"{max(rises):+.3f} nats" if rises else "-"
