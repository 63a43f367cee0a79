"""What a result says of itself, in words and rows: the model card, and a report, are made of them.

Rows are plain text; whoever writes Markdown or HTML escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headprune.exporting.engines import serving
from headprune.exporting.role_rows import ROLE_COLUMNS, role_rows
from headprune.io import hub
from headprune.io.markup import inert, printable, xml_safe
from headprune.io.parsing import parse_yaml
from headprune.io.writing import write_whole
from headprune.schemas.manifest import CARD, BeforeAfter, LineageStep, Manifest, read_manifest
from headprune.schemas.plan import AttentionPlan, Plan, Shape, read_plan
from headprune.schemas.records import Evidence, Healing, Merging, Migration, ModelChoice
from headprune.schemas.roles import RolesRecord

KEPT, ZERO, GONE = "■", "□", "·"  # a zero head is in the weights and computes nothing

_CARD = """---
{metadata}library_name: transformers
tags: [headprune, attention-pruning]
---

# {title}

{what}

{sizes}

{chosen}## Load it

```python
{code}
```

{needs}

{serve}{quality}{roles}## Proof

{proof}

{proof_rows}

## Heads

`{kept}` stays, {zero}`{gone}` is gone; a gap separates the queries of one KV head from the next.

```text
{heads}
```

`plan.json` lists the heads that are left; `headprune.json` holds versions, hashes and measurements.
The id of this result is `{id}`.
"""

_INHERITED = ("license", "license_name", "license_link", "language", "base_model")
_MEASURED = ("", "original", "this model", "against the original")
_NATIVE = "The config is a plain one; no other code is needed."
_RUNTIME = (
    "{why}, so modeling_headprune.py lies beside the weights. Where headprune is installed, "
    "headprune.from_pretrained loads the folder without remote code."
)
_UNEVEN = "Its layers differ in their number of heads, which the stock class cannot express"
_EVEN = "The stock class has no setting for the heads that are left"


def what(manifest: Manifest) -> str:
    """One sentence: what was made of which model, in all the steps that led to it."""
    name, steps = manifest.steps[0].source.name, "; then ".join(map(_step, manifest.steps))
    return f"{name}, {steps}. Made by headprune {manifest.versions['headprune']}."


def _step(step: LineageStep) -> str:
    done = step.done
    if isinstance(done, Healing):
        return f"trained for {done.steps} steps to match {done.teacher}"
    if isinstance(done, Merging):
        before, after = step.kv_heads
        return f"merged to {after} of its {before} KV heads ({done.merge})"
    if isinstance(done, Migration):
        return "rewritten for transformers 5"
    before, after = step.query_heads
    share = f"{after / max(before, 1):.1%}"
    chosen = chosen_by(done.evidence)
    return f"cut to {after} of its {before} attention heads ({share}), chosen by {chosen}"


def chosen_by(evidence: Evidence) -> str:
    """What chose heads, in a few words."""
    known_as = f"{evidence.kind} {evidence.id[:12]}"
    return known_as if evidence.criterion is None else f"{evidence.criterion} ({known_as})"


def sizes(steps: Sequence[LineageStep]) -> list[tuple[str, int, int]]:
    """What was counted, before the first of some steps and after the last."""
    first, last = _counted(steps[0]), _counted(steps[-1])
    # bytes of weights are of one element type
    return [(name, first[name][0], after) for name, (_, after) in last.items() if name in first]


def _counted(step: LineageStep) -> dict[str, BeforeAfter]:
    return {
        "query heads": step.query_heads,
        "KV heads": step.kv_heads,
        "parameters": step.parameters,
        f"bytes of weights ({step.dtype})": step.weight_bytes,
    }


def chosen_part(choice: ModelChoice | None) -> str:
    """What it was chosen among, as a part of the card; nothing where it was not."""
    if choice is None:
        return ""
    rows = [
        (one.name, f"{one.held_out:.4f}", f"{one.parameters:,}", f"{one.kv_heads:,}")
        for one in (choice.original, *choice.contenders)
    ]
    best = markdown_text(choice.chosen.name)
    return (
        f"## Chosen\n\nGoal: {markdown_text(choice.goal)}. Taken: {best}, the best on one half of "
        f"{choice.held_out_tokens:,} tokens of held-out text; the numbers are of the other half."
        "\n\n"
        f"{markdown_table(('', choice.measure, 'parameters', 'KV heads'), rows)}\n\n"
    )


def size_cells(rows: Sequence[tuple[str, int, int]]) -> list[tuple[str, str, str, str]]:
    """The same as text, with the share that is left."""
    return [
        (name, f"{before:,}", f"{after:,}", f"{after / before:.1%}" if before else "-")
        for name, before, after in rows
    ]


def load_code(manifest: Manifest, folder: str) -> str:
    """Python that loads the result."""
    quoted = '"' + printable(folder.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    remote = ", trust_remote_code=True" if manifest.shape is Shape.RUNTIME else ""
    auto = manifest.auto_class
    return f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained({quoted}{remote})"


def load_needs(manifest: Manifest) -> str:
    """What loading it takes."""
    if manifest.shape is Shape.NATIVE:
        return _NATIVE
    return _RUNTIME.format(why=_UNEVEN if manifest.uneven else _EVEN)


def serve_section(manifest: Manifest, folder: Path, title: str) -> str:
    """The commands that serve it, as a part of the card; nothing where no engine takes it."""
    lines = [f"# {engine}\n{line}" for engine, line in serving(manifest, folder, Path(title))]
    code = inert("\n\n".join(lines))
    return f"## Serve it\n\n```bash\n{code}\n```\n\n" if lines else ""


def proof_sentence(manifest: Manifest) -> str:
    """What was compared."""
    original = _compared(manifest)[0]
    if manifest.proof is None:
        return (
            "Every tensor of the result was read back from its folder and holds, to the bit, the "
            "slices of the original that stay, times their gates. No outputs were compared."
        )
    return (
        f"The {original} and the model read back from its folder gave the "
        "same outputs on probe inputs; differences are relative to the largest output."
    )


def proof_columns(manifest: Manifest) -> tuple[str, str]:
    """What the columns of ``proof_rows`` are called."""
    return ("", "count" if manifest.proof is None else "difference")


def proof_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """The differences that were measured, what they were held to, and what a mistake would show."""
    proof, original = manifest.proof, _compared(manifest)[0]
    if proof is None:
        return _tensor_rows(manifest)
    rows = [(f"{original} - reloaded from disk", f"{proof.gated_vs_reloaded:.1e}")]
    rows.append(("gates moved by one bit: rounding alone", f"{proof.rounding:.1e}"))
    rows.append((f"allowed in {proof.dtype}", f"{proof.tolerance:.0e}"))
    if proof.control is not None:
        rows.append(("negative control: one head misplaced", f"{proof.control:.1e}"))
    if proof.cast:
        rows.append((f"cost of writing {manifest.dtype}", f"{proof.cast:.1e}"))
    return rows


def _tensor_rows(manifest: Manifest) -> list[tuple[str, str]]:
    found = manifest.tensor_proof
    assert found is not None
    return [
        ("tensors equal to the original's", f"{found.tensors:,}"),
        ("of them without some heads", f"{found.cut:,}"),
        ("bytes compared", f"{found.bytes:,}"),
    ]


def _compared(manifest: Manifest) -> tuple[str, str]:
    if isinstance(manifest.done, Healing):
        return "healed model", "itself"
    if isinstance(manifest.done, Merging):
        return "merged original", "converted"
    return "gated original", "cut"


def heads_line(part: AttentionPlan) -> str:
    """One layer's heads by id, with a gap between KV groups: ``■■■ ··· ■■■``."""
    zero = {head for head, gate in zip(part.keep, part.scale or (), strict=False) if not gate}
    kept, group = set(part.keep), max(1, part.query_heads // max(1, part.kv_heads))
    # ids are those of the model before any cut, so they can lie above the present count
    count = max([part.query_heads, *(head + 1 for head in kept)])
    signs = [ZERO if head in zero else KEPT if head in kept else GONE for head in range(count)]
    if group == 1:
        return "".join(signs)
    return " ".join("".join(signs[at : at + group]) for at in range(0, count, group))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its cells escaped; the first column is left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    head, *body = ([markdown_text(cell) for cell in row] for row in (columns, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def line_text(text: str) -> str:
    """Text that stays on its line of a block of code, and does not end the block."""
    return printable(text).replace("`", "'")


def markdown_text(text: str) -> str:
    """Text that Markdown, and the HTML within it, shows as it is."""
    text = xml_safe(text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", " ".join(text.split()))


def quality_section(measured: Sequence[Sequence[str]]) -> str:
    """What an evaluation found, as a section of the card; empty where there was none.

    Args:
        measured: Per metric: its name, the original's value, the model's, and how they compare, as
            ``Report.rows`` gives them.
    """
    if not measured:
        return ""
    return f"## Quality\n\n{markdown_table(_MEASURED, measured)}\n\n"


def roles_section(record: RolesRecord | None) -> str:
    """What heads do, as a section of the card; empty where that was not measured."""
    if record is None:
        return ""
    rows = role_rows(record)
    said = markdown_table(ROLE_COLUMNS, rows) if rows else "No head has a role."
    return f"## Roles\n\n{said}\n\n"


def _carried(text: str, title: str) -> str:
    """A section of an earlier card as it is; empty where there is none."""
    found = re.search(rf"^## {title}\n.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def inherit_metadata(source: Path, folder: Path, origin: str | Path) -> None:
    """Begins the card of a result with the metadata of its model's card that hold for it, too.

    Args:
        source: The folder of its model.
        folder: The result.
        origin: The folder or hub id that was given.
    """
    card = source / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    kept = _metadata(text)
    if hub.may_be_id(origin):
        kept["base_model"] = str(origin)
    (folder / CARD).write_text(f"---\n{_as_yaml(kept)}---\n", encoding="utf-8")


def _metadata(text: str) -> dict[str, Any]:
    """What the front matter of a card says that holds for results as well."""
    found = re.match(r"---\s*?\n(.*?)^---\s*?$", text, re.MULTILINE | re.DOTALL)
    try:
        content = parse_yaml(found[1]) if found else {}
    except (ValueError, RecursionError, yaml.YAMLError):
        content = {}  # nobody can read it
    content = content if isinstance(content, dict) else {}
    return {name: content[name] for name in _INHERITED if name in content}


def _as_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True) if content else ""


def write_card(folder: Path, title: str, plan: Plan, manifest: Manifest) -> None:
    """Writes the model card of a new result, README.md."""
    (folder / CARD).write_text(card(folder, title, plan, manifest), encoding="utf-8")


def card(
    folder: Path,
    title: str,
    plan: Plan,
    manifest: Manifest,
    quality: str = "",
    roles: str = "",
) -> str:
    """The text of a model card.

    Args:
        folder: Where the result lies.
        title: Its name.
        plan: What is left of it.
        manifest: What was done.
        quality: What an evaluation found; see ``quality_section``.
        roles: What heads do; see ``roles_section``.
    """
    path = folder / CARD
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [(line_text(name), heads_line(part)) for name, part in plan.attentions.items()]
    width = max((len(name) for name, _ in lines), default=0)
    return _CARD.format(
        metadata=_as_yaml(_metadata(before)),
        title=markdown_text(title),
        what=markdown_text(what(manifest)),
        sizes=markdown_table(("", "before", "after", "left"), size_cells(sizes(manifest.steps))),
        chosen=chosen_part(manifest.choice),
        code=load_code(manifest, title),
        needs=markdown_text(load_needs(manifest)),
        serve=serve_section(manifest, folder, title),
        quality=quality,
        roles=roles,
        proof=proof_sentence(manifest),
        proof_rows=markdown_table(proof_columns(manifest), proof_rows(manifest)),
        kept=KEPT,
        zero=f"`{ZERO}` is a zero head, which computes nothing, "
        * any(ZERO in h for _, h in lines),
        gone=GONE,
        id=manifest.id,
        heads="\n".join(f"{name:<{width}}  {heads}" for name, heads in lines),
    )


def rewrite_card(
    folder: Path, measured: Sequence[Sequence[str]] = (), record: RolesRecord | None = None
) -> None:
    """Writes the model card of a result anew; what is not given stays as the card has it.

    Args:
        folder: The result.
        measured: What an evaluation found; see ``quality_section``.
        record: What heads do.

    Raises:
        CheckpointError: If the folder is no result of headprune.
    """
    manifest = read_manifest(folder)
    plan = read_plan(folder / "plan.json", {})
    path = folder / CARD
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    quality = quality_section(measured) or _carried(before, "Quality")
    roles = roles_section(record) or _carried(before, "Roles")
    write_whole(path, card(folder, folder.resolve().name, plan, manifest, quality, roles))
