"""Reference tables of families, criteria and merges, read from their registries."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from pydantic import BaseModel

from headprune.evaluation.metrics import METRICS
from headprune.evaluation.report import Report
from headprune.evidence.criteria import CRITERIA
from headprune.family.capabilities import capabilities
from headprune.formats.export import FORMATS
from headprune.formats.format import ExportRecord
from headprune.planning.targets import SHAPES, TARGETS
from headprune.regression.baseline import Baseline
from headprune.regression.check import CheckReport
from headprune.render.models import families_markdown
from headprune.role import ROLES
from headprune.schemas.gates import GatesMetadata
from headprune.schemas.manifest import Manifest
from headprune.schemas.plan import Plan
from headprune.schemas.roles import RolesRecord
from headprune.schemas.scores import ScoresMetadata
from headprune.surgery.merges import MERGES, NEEDS_CALIBRATION

# what lies in files, and the class that reads and writes it
_SCHEMAS: dict[str, type[BaseModel]] = {
    "`headprune.json`, in every result": Manifest,
    "`plan.json`": Plan,
    "`gates.json`, in a folder of gates": GatesMetadata,
    "`scores.json`, in a folder of scores": ScoresMetadata,
    "The report of `evaluate`": Report,
    "The report of `check`": CheckReport,
    "The baseline of `check`": Baseline,
    "`roles.json`": RolesRecord,
    "`export.json`, in an export": ExportRecord,
}
_INPUTS = {
    "text": "the text",
    "repeated": "random tokens, twice",
    "trees": "`--trees`",
    "needles": "`--config needle_lengths=N`",
}
# the measurement behind each need, for readers; a new need must be named here
_NEEDS = {
    "gradients": "a loss and its gradients",
    "curvature": "a loss and its gradients",
    "activations": "text",
    "gram": "text",
    "recall": "text",
}


def families() -> str:
    """The table that ``headprune families --markdown`` prints."""
    return families_markdown(capabilities())


def criteria() -> str:
    """A table of all criteria, then a section for each with its docstring."""
    rows, sections = [], []
    for name, criterion in CRITERIA.items():
        needs = "; ".join(dict.fromkeys(_NEEDS[need] for need in sorted(criterion.needs)))
        refit = "yes" if criterion.assumes_refit else ""
        rows.append(f"| [`{name}`](#{name}) | {criterion.sees} | {needs or 'nothing'} | {refit} |")
        text = inspect.getdoc(criterion.score) or ""
        source = f"Source: {_escaped(criterion.source)}."
        sections.append(f"## `{name}` {{ #{name} }}\n\n{text}\n\n{source}")
    head = "| criterion | lowest score | needs | assumes a refit |\n| --- | --- | --- | --- |"
    return "\n\n".join(["\n".join([head, *rows]), *sections])


def roles() -> str:
    """A table of all roles, then the docstring of each."""
    rows, sections = [], []
    for name, role in ROLES.items():
        told = "attribute" if role.attribute else "role"
        control = {
            "uniform": "uniform attention",
            "unrepeated": "another second run",
            "offset": "most frequent offset",
            "elsewhere": "the needle elsewhere",
        }
        cells = (
            told,
            f"{'+' * role.beyond}{role.threshold:g}",
            _INPUTS[role.on],
            control.get(role.control or "", "none"),
        )
        rows.append(f"| `{role.sign}` | [`{name}`](#{name}) | {' | '.join(cells)} |")
        sections.append(f"### `{name}` {{ #{name} }}\n\n{_escaped(role.reference)}")
    head = "| | name | kind | threshold | measured on | control |\n|---|---|---|---|---|---|"
    return "\n\n".join(["\n".join([head, *rows]), *sections])


def merges() -> str:
    """A table of all merges, then a section for each with its docstring."""
    rows, sections = [], []
    for name in MERGES:
        text = _docstring(f"headprune.surgery.merges.{name.replace('-', '_')}")
        first = " ".join(text.split("\n\n")[0].split())
        needs = "yes" if name in NEEDS_CALIBRATION else ""
        rows.append(f"| [`{name}`](#{name}) | {first} | {needs} |")
        sections.append(f"## `{name}` {{ #{name} }}\n\n{text}")
    head = "| merge | shared K and V | needs text |\n| --- | --- | --- |"
    return "\n\n".join(["\n".join([head, *rows]), *sections])


def metrics() -> str:
    """A table of all metrics, and how each is compared with that of the original."""
    rows = []
    for name, spec in METRICS.items():
        better = "higher" if spec.higher_is_better else "lower"
        compared = spec.compared or ("by itself, as it is made of both" if spec.of_two else "")
        rows.append(f"| `{name}` | {spec.meaning} | {spec.unit} | {better} | {compared} |")
    head = "| metric | meaning | unit | better | against the original |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def schemas() -> str:
    """A section per file that headprune writes: what its fields mean."""
    sections = []
    for file, model in _SCHEMAS.items():
        version = model.model_fields["schema_version"].default
        text = _escaped(inspect.cleandoc(model.__doc__ or "").partition("Attributes:")[0].strip())
        fields = _attributes(model)
        rows = [f"| `{name}` | {_escaped(meaning)} |" for name, meaning in fields.items()]
        table = "\n".join(["| field | meaning |\n|---|---|", *rows])
        sections.append(f"## {file}\n\n{text} Schema version {version}.\n\n{table}")
    return "\n\n".join(sections)


def engines() -> str:
    """Shape of a result by engine: what it takes, and the version that was tried."""
    engines = list(TARGETS.values())
    rows = [("", *(e.name for e in engines)), ("---",) * (len(engines) + 1)]
    rows += [("by", *(e.way for e in engines))]
    rows += [(shape, *(e.cells[shape] for e in engines)) for shape in SHAPES]
    rows += [("tried with", *(e.tested for e in engines))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def formats() -> str:
    """The formats of export."""
    rows = [f"| `{name}` | {form.what} |" for name, form in FORMATS.items()]
    return "\n".join(["| `--to` | what is written |\n|---|---|", *rows])


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a class and those above it say of its fields."""
    found = {"schema_version": "Version of this schema."}
    for kind in reversed(model.__mro__):
        _, _, said = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        for name, meaning in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", said, re.MULTILINE):
            if name in model.model_fields:
                found[name] = " ".join(meaning.split())
    return {name: found[name] for name in model.model_fields}


def _docstring(module: str) -> str:
    found: Any = sys.modules[module]
    return _escaped(inspect.cleandoc(found.__doc__))


def _escaped(text: str) -> str:
    """Docstrings are plain text: the characters that Markdown would take as markup, as they are.

    Lines that are indented are formulas, which Markdown leaves alone.
    """
    lines = []
    for line in text.splitlines():
        plain = line.startswith("    ")
        lines.append(line if plain else line.replace("|", "\\|").replace("*", "\\*"))
    return "\n".join(lines)
