"""The model card of a result, README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headprune.io import hub
from headprune.io.parsing import parse_yaml
from headprune.io.writing import write_whole
from headprune.render import records
from headprune.render.blocks import Block, Code, Paragraph, Section, Table
from headprune.render.markdown import escaped, markdown
from headprune.result.engines import serving
from headprune.schemas.manifest import CARD, Manifest, read_manifest
from headprune.schemas.plan import Plan, read_plan
from headprune.schemas.records import Healing
from headprune.schemas.roles import RolesRecord

_INHERITED = ("license", "license_name", "license_link", "language", "base_model")
_MEASURED = ("", "original", "this model", "against the original")
_FILES = (
    "plan.json lists the remaining heads; headprune.json holds versions, hashes and "
    "measurements. The id of this result is {id}."
)


def card(folder: Path, title: str, plan: Plan, manifest: Manifest, sections: str = "") -> str:
    """Return the text of a model card.

    Args:
        folder: Where the result lies.
        title: Its name.
        plan: The remaining heads.
        manifest: Its record.
        sections: Quality and roles, as ``quality_section`` and ``roles_section`` give them.
    """
    served = [Code(line, title=name) for name, line in serving(manifest, Path(title))]
    before: list[Block] = [Paragraph(records.what(manifest)), *records.windows(manifest)]
    before.append(records.sizes(manifest.steps))
    for step in manifest.steps:
        if isinstance(step.done, Healing) and step.done.conversion:
            before.append(Section("Converted before", list(map(Paragraph, step.done.conversion))))
    if manifest.choice is not None:
        before.append(Section("Chosen", records.chosen(manifest.choice)))
    stored = Paragraph(records.how_stored(manifest))
    before.append(Section("Load it", [records.load_code(manifest, title), stored]))
    before += [Section("Serve it", served)] * bool(served)
    drawn = records.heads_drawn(plan, manifest.layout)
    after = [
        Section("Proof", records.proof(manifest)),
        Section("Heads", [*drawn, Paragraph(_FILES.format(id=manifest.id))]),
    ]
    front = {**_metadata(_text(folder)), "library_name": "transformers"}
    front["tags"] = ["headprune", "attention-pruning"]
    head = f"---\n{_as_yaml(front)}---\n\n# {escaped(title)}"
    parts = (head, markdown(before), sections.strip(), markdown(after))
    return "\n\n".join(filter(None, parts)) + "\n"


def quality_section(measured: Sequence[Sequence[str]]) -> str:
    """Return the rows of an evaluation as a section; empty where there is none.

    Args:
        measured: Per metric: its name, the original's value, the model's, and how they compare, as
            ``Report.rows`` gives them.
    """
    table = Table(_MEASURED, measured)
    return markdown([Section("Quality", [table])] if measured else [])


def roles_section(record: RolesRecord | None) -> str:
    """Return the roles of heads as a section; empty where they were not measured."""
    if record is None:
        return ""
    table = records.roles(record)
    return markdown([Section("Roles", [table or Paragraph("No head has a role.")])])


def inherit_metadata(source: Path, folder: Path, origin: str | Path) -> None:
    """Begins the card of a result with the metadata of its model's card that hold for it, too.

    Args:
        source: The folder of its model.
        folder: The result.
        origin: The folder or hub id, as given.
    """
    kept = _metadata(_text(source))
    if hub.may_be_id(origin):
        kept["base_model"] = str(origin)
    (folder / CARD).write_text(f"---\n{_as_yaml(kept)}---\n", encoding="utf-8")


def write_card(folder: Path, title: str, plan: Plan, manifest: Manifest) -> None:
    """Writes the model card of a new result."""
    (folder / CARD).write_text(card(folder, title, plan, manifest), encoding="utf-8")


def rewrite_card(
    folder: Path, measured: Sequence[Sequence[str]] = (), record: RolesRecord | None = None
) -> None:
    """Write the model card of a result anew; keep sections without new content.

    Args:
        folder: The result.
        measured: Rows of an evaluation; see ``quality_section``.
        record: Roles of its heads.

    Raises:
        CheckpointError: If the folder is no result of headprune.
    """
    manifest, plan = read_manifest(folder), read_plan(folder / "plan.json", {})
    before = _text(folder)
    quality = quality_section(measured) or _section(before, "Quality")
    roles = roles_section(record) or _section(before, "Roles")
    sections = f"{quality.strip()}\n\n{roles.strip()}"
    write_whole(folder / CARD, card(folder, folder.resolve().name, plan, manifest, sections))


def _text(folder: Path) -> str:
    path = folder / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _section(text: str, title: str) -> str:
    """A section of an earlier card as it is; empty where there is none."""
    section = re.search(rf"^## {title}\n.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    return section[0] if section else ""


def _metadata(text: str) -> dict[str, Any]:
    """The front matter of a card that holds for results as well."""
    front = re.match(r"---\s*?\n(.*?)^---\s*?$", text, re.MULTILINE | re.DOTALL)
    try:
        content = parse_yaml(front[1]) if front else {}
    except (ValueError, RecursionError, yaml.YAMLError):
        content = {}  # nobody can read it
    content = content if isinstance(content, dict) else {}
    return {name: content[name] for name in _INHERITED if name in content}


def _as_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True) if content else ""
