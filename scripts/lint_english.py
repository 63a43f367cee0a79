"""Find English that has to be read twice, in docs, docstrings, comments and messages.

    python scripts/lint_english.py

The rules are data: scripts/english.yaml. A line that needs an exception ends in `english: ok`.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

RULES = Path(__file__).with_name("english.yaml")
EXEMPT = "english: ok"


class Passage(NamedTuple):
    """A run of prose in a file, and the kind of text that it is."""

    path: Path
    line: int
    kind: str
    text: str


def python_passages(path: Path) -> Iterator[Passage]:
    """Yield docstrings, comments and the strings of a Python file that hold a sentence."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and isinstance(first, ast.Expr):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if id(node) in docstrings else "message"
            if kind == "docstring" or node.value.count(" ") > 2:
                yield Passage(path, node.lineno, kind, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(path, token.start[0], "comment", token.string.lstrip("# "))


def markdown_passages(path: Path) -> Iterator[Passage]:
    """Yield the paragraphs of a Markdown file, without code blocks and tables."""
    fenced, start, lines = False, 0, list[str]()
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        prose = not fenced and line.strip() and not line.lstrip().startswith(("|", "<", "#", "!"))
        listed = line.lstrip().startswith(("- ", "* ", "1."))
        if lines and (not prose or listed):
            yield Passage(path, start, "docs", "\n".join(lines))
            lines = []
        if prose:
            start = start if lines else number
            lines.append(line)


def violations(
    passage: Passage, rules: list[dict[str, str]], longest: dict[str, int]
) -> Iterator[str]:
    """Yield a line for each rule that a passage breaks, and for each sentence that is too long."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "code", passage.text)
    for rule in rules:
        if passage.kind not in rule.get("in", passage.kind).split():
            continue
        for match in re.finditer(rule["pattern"], prose, re.IGNORECASE | re.MULTILINE):
            line = passage.line + prose[: match.start()].count("\n")
            yield f"{passage.path}:{line}: {match.group().strip()!r}: {rule['instead']}"
    limit = longest.get(passage.kind)
    running = re.sub(r"^ {4,}\S.*$", "", inspect.cleandoc(prose), flags=re.MULTILINE)  # no tables
    for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", running) if limit else []:
        words = re.findall(r"[A-Za-z][\w'-]*", sentence)
        if limit and len(words) > limit:
            yield f"{passage.path}:{passage.line}: {len(words)} words: {' '.join(words[:8])} ..."


def main() -> int:
    """Print the violations; return 1 if there is one."""
    settings = yaml.safe_load(RULES.read_text())
    count = 0
    for pattern in settings["files"]:
        for path in sorted(Path().glob(pattern)):
            lines = path.read_text().splitlines()
            read = python_passages if path.suffix == ".py" else markdown_passages
            for passage in read(path):
                if EXEMPT in "".join(lines[passage.line - 1 : passage.line]):
                    continue
                for violation in violations(passage, settings["rules"], settings["longest"]):
                    count += 1
                    print(violation)
    print(f"{count} to mend" if count else "English: nothing to mend", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
