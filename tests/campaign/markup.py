"""Strings that are commands: to terminals, to CI runners, to browsers."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from tests.campaign.cases import Case
from tests.campaign.facts import link_originals
from tests.campaign.fuzz import READERS, lay_out
from tests.campaign.originals import MEASURING
from tests.campaign.trees import places
from tests.campaign.watched import Outcome, command

STRING = (
    "PWN\x1b]0;pwn\x07\x1b[2J\n::set-env name=PWN::pwn\n##[error]pwn\r::add-mask::pwn"
    "<pwn onload=pwn()><script>pwn()</script>]]>--><img src=x onerror=pwn()>\"'`|"
    "[a](javascript:pwn())\u202e\ud800\x9b2J"
)
# readers of files with strings in them
STRINGS = [
    name
    for name, reader in READERS.items()
    if Path(reader.target).suffix in (".json", ".yaml", ".jsonl")
]
# what a page is made of, and where strings of it come from
PAGES = [
    (source, file)
    for source, files in {
        "result": ("headprune.json", "plan.json", "config.json", "checked.json", "report.json"),
        "gates": ("gates.json", "config.yaml"),
        "scores": ("scores.json",),
        "healed": ("headprune.json",),
    }.items()
    for file in files
]
ACTIONS = ("model", "data", "limit", "baseline", "config", "label")


def strings(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    """The string in a file, wherever there is one or in a single place; then it is read."""
    reader, draw = READERS[STRINGS[case.number % len(STRINGS)]], case.random()
    lay_out(reader, here, originals)
    target = draw.choice(sorted(here.glob(reader.target)))
    _put(target, draw.randrange(1_000) if draw.random() < 0.7 else None)
    line = reader.lines[(case.number // len(STRINGS) + case.seed) % len(reader.lines)]
    return f"{target.name}, {line}", command(line, here / reader.folder)


def _put(file: Path, at: int | None) -> None:
    """Puts the string in the place of one text or name of a file, or of every text."""
    content = file.read_text()
    if file.suffix == ".jsonl":
        lines = content.splitlines()
        lines[-1] = json.dumps(_with_string(json.loads(lines[-1]), at))
        file.write_text("\n".join(lines) + "\n")
        return
    tree = yaml.safe_load(content) if file.suffix == ".yaml" else json.loads(content)
    file.write_text(json.dumps(_with_string(tree, at)))


def _with_string(tree: Any, at: int | None) -> Any:
    texts = [path for path in places(tree) if isinstance(_at(tree, path), str)]
    names = [path for path in places(tree) if isinstance(path[-1], str)]
    everywhere = texts + names
    if not everywhere:
        return STRING
    for path in texts if at is None else [everywhere[at % len(everywhere)]]:
        *above, key = path
        parent = _at(tree, above)
        if path in texts and (at is None or at % len(everywhere) < len(texts)):
            parent[key] = STRING
        else:
            parent[STRING] = parent.pop(key)
    return tree


def _at(tree: Any, path: Any) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def pages(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    """The string in what a report shows."""
    source, file = PAGES[case.number]
    link_originals(here, originals)
    shutil.copytree(originals / source, here / "a")
    if source == "result":
        for name in ("report.json", "checked.json"):
            shutil.copyfile(originals / name, here / "a" / name)
    # a place whose string does not make the file one that is refused
    draw, done, line = case.random(), None, ""
    sound = (here / "a" / file).read_bytes()
    for _ in range(12):
        (here / "a" / file).write_bytes(sound)
        _put(here / "a" / file, draw.randrange(1_000))
        runs = "result a" if source in ("gates", "scores") else "a"
        line = f"report {runs} out.html --overwrite"
        done = command(line, here)
        if done.code == 0 or done.code not in (1, 2):
            break
    assert done is not None
    return f"{source}/{file}, {line}", done


def actions(case: Case, here: Path, originals: Path) -> tuple[str, Outcome]:
    """The string in what check tells GitHub Actions and readers of JUnit."""
    link_originals(here, originals)
    kind = ACTIONS[case.number]
    name = STRING.replace("/", "").replace("\ud800", "")[:90]
    words = ["check", "--junit", "junit.xml", *MEASURING.split()]
    model, data, limit = "llama", "text.txt", "parameters <= 1"
    if kind == "model":
        model = name
        (here / name).symlink_to(originals / "llama")
    elif kind == "data":
        data = f"{name}.txt"
        (here / data).symlink_to(originals / "text.txt")
    elif kind == "limit":
        limit = f"perplexity <= {STRING}"
    elif kind == "label":
        rows = [{"text": f"w1 w2 w{i}", "label": STRING} for i in range(8)]
        data = "labels.jsonl"
        (here / data).write_text("".join(json.dumps(row) + "\n" for row in rows))
        words += ["--config", "label_column=label"]
    elif kind == "baseline":
        shutil.copyfile(originals / "baseline.json", here / "evil.json")
        _put(here / "evil.json", None)
        words += ["--baseline", "evil.json", "--limit", "perplexity <= +2 %"]
    else:
        (here / "evil.yaml").write_text(json.dumps({"limits": [STRING]}))
        words += ["--config", "evil.yaml"]
    words += [model, "--data", data, "--limit", limit]
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(here / "summary.md")}
    return f"{kind}: {words}", command(words, here, environment=environment)


# ---- what became of it


class _Page(HTMLParser):
    """Looks for elements and attributes that nobody meant."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.script = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Finds the string among elements and what they do."""
        kind = dict(attrs).get("type")
        self.script = tag == "script" and kind != "application/json"
        for name, value in attrs:
            acts = name.startswith("on") or name in ("href", "src")
            if acts and re.search(r"pwn\(", value or "") and not (value or "").startswith("#"):
                self.found = f"<{tag} {name}={value!r}>"
        if tag == "pwn":
            self.found = "<pwn>"

    def handle_endtag(self, tag: str) -> None:
        """Leaves a script."""
        self.script = False

    def handle_data(self, data: str) -> None:
        """Finds the string in a script."""
        if self.script and "pwn(" in data:
            self.found = "a script of somebody else's"


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def breaks(here: Path) -> str:
    """What is wrong with the pages, summaries and records of tests in a folder."""
    for file in here.iterdir():
        if file.is_symlink() or file.suffix not in (".html", ".md", ".xml"):
            continue
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
        if control := _CONTROL.search(text):
            return f"{file.name} has the control character {control[0]!r}"
        if file.suffix == ".html":
            page = _Page()
            page.feed(text)
            if page.found:
                return f"{file.name} has {page.found}"
        elif file.suffix == ".md" and re.search(r"<(pwn|script|img src=x)", text):
            return f"{file.name} has HTML of somebody else's"
        elif file.suffix == ".xml":
            try:
                ElementTree.fromstring(text)
            except ElementTree.ParseError as error:
                return f"{file.name} is no XML: {error}"
    return ""
