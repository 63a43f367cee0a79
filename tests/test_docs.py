"""The documentation: generated pages, links, and walk-throughs that work as they are written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import headprune
from headprune.commands.command import all_commands
from headprune.config.base import flag
from headprune.evaluation.metrics import METRICS
from headprune.render.records import proof
from tests import tiny

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WALKS = ("family", "criterion", "merge", "metric", "task", "form", "format", "command")
OF_OTHERS = {"--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--compilation-config"}


@pytest.fixture
def scripts(monkeypatch):
    """scripts/docs as a place of modules."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "docs")


def test_the_table_of_families_is_what_the_command_prints(scripts):
    import registry_tables

    from headprune.family.capabilities import capabilities

    table = registry_tables.families().replace("\\_", "_")
    assert all(f"| {row.family} " in table for row in capabilities())
    page = (DOCS / "reference" / "families.md").read_text(encoding="utf-8")
    assert "<!-- generated: families -->" in page


def test_the_readme_has_the_table_of_engines(scripts):
    """With HEADPRUNE_WRITE_DOCS set, it is written there."""
    import registry_tables

    page, table = ROOT / "README.md", registry_tables.engines()
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- engines -->\n")
    shown, end, after = rest.partition("<!-- end of engines -->")
    if os.environ.get("HEADPRUNE_WRITE_DOCS"):
        page.write_text(f"{before}{start}{table}\n{end}{after}", encoding="utf-8")
        shown = f"{table}\n"
    assert start and end and shown == f"{table}\n"
    guide = (DOCS / "guides" / "deploy.md").read_text(encoding="utf-8")
    assert "<!-- generated: engines -->" in guide


def test_every_criterion_and_merge_is_in_the_reference(scripts):
    import registry_tables

    from headprune.evidence.criteria import CRITERIA
    from headprune.surgery.merges import MERGES

    assert all(f"## `{name}`" in registry_tables.criteria() for name in CRITERIA)
    assert all(f"## `{name}`" in registry_tables.merges() for name in MERGES)


def test_every_metric_and_every_field_of_a_file_is_in_the_reference(scripts):
    import registry_tables

    assert re.findall(r"^\| `(\w+)`", registry_tables.metrics(), re.MULTILINE) == list(METRICS)
    text = registry_tables.schemas()
    for model in registry_tables._SCHEMAS.values():
        assert all(f"| `{name}` | " in text for name in model.model_fields)
    for page in ("metrics", "schemas"):
        shown = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        assert f"<!-- generated: {page} -->" in shown


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: headprune\.(\w+)$", text, re.MULTILINE)
    functions = [name.replace("-", "_") for name in all_commands()]
    assert sorted(["__version__", *shown, *functions]) == dir(headprune)
    assert "<!-- generated: functions -->" in text


def nav_pages(entries):
    """The pages of a navigation of mkdocs."""
    pages = set()
    for entry in entries:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages |= nav_pages(below) if isinstance(below, list) else {str(below)}
    return pages


def unknown_options(page):
    """Options in the sentences of a page that its commands do not have."""
    options = {c.name: {flag(name) for name in c.options()} for c in all_commands().values()}
    blocks, text = re.findall(r"```.*?```", page, re.DOTALL), re.sub(r"(?s)```.*?```", "", page)
    run = set(re.findall(r"headprune ([a-z-]+)", " ".join(blocks))) & options.keys()
    every = set().union(OF_OTHERS, {"--config", "--json"}, *(options[name] for name in run))
    unknown = []
    for code in re.findall(r"`([^`\n]+)`", text):
        words = code.removeprefix("headprune ").split()
        if words[0] in options or (run and words[0].startswith("--")):
            own = options.get(words[0], every) | {"--config", "--json"}
            flags = [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]
            unknown += [code for name in flags if name not in own]
    return unknown


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=lambda page: page.stem)
def test_guides_name_options_of_their_commands(page):
    assert unknown_options(page.read_text(encoding="utf-8")) == []


def test_an_option_of_another_command_is_noticed():
    page = "```bash\nheadprune compress M OUT --keep 0.5\n```\n`--keep` and `--kv-budget 0.5`"
    assert unknown_options(f"{page}, `prune --layout ragged`") == ["--kv-budget 0.5"]
    assert unknown_options("`convert-gqa --layout uniform`") == ["convert-gqa --layout uniform"]


def test_every_page_is_in_the_navigation():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert nav_pages(settings["nav"]) == pages


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_root_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 3
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_nothing_is_installed_by_a_name_that_is_not_registered():
    places = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "docs", "src", "scripts"]
    files = [file for place in (*places, ".github", "configs") for file in _files(ROOT / place)]
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install\s[^\n]*[ '\"]headprune\b(?!/)", text), file


@pytest.mark.parametrize("name", [*WALKS, "index"])
def test_pages_for_contributors_name_files_that_exist(name):
    text = (DOCS / "contributing" / f"{name}.md").read_text(encoding="utf-8")
    added = re.findall(r'```python title="([^"]+)"', text)
    named = set(re.findall(r"`((?!transformers/)[\w.]+/[\w/.]+\.py)`", text)) - {*added}
    assert not [
        f for f in named if not any((p / f).exists() for p in (ROOT, ROOT / "src/headprune"))
    ]


def _files(place):
    kinds = (".md", ".py", ".yml", ".yaml", ".html")
    return [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in kinds]


def walk(name, root):
    """Does to a copy of the repository what a walk-through says; returns what it tries at the end.

    A block with a title is a file; a diff adds its lines after the line above them.
    """
    text = (DOCS / "contributing" / f"{name}.md").read_text(encoding="utf-8")
    tried = ""
    for language, title, block in re.findall(
        r'```(python|diff)(?: title="([^"]+)")?\n(.*?)```', text, re.DOTALL
    ):
        if not title:
            tried += block
        elif language == "python":
            assert not (root / title).exists(), title
            (root / title).write_text(block)
        else:
            apply(block, root / title)
    return tried


def apply(diff, file):
    """Adds the lines of a diff to a file, in which its other lines stand once, side by side."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line.startswith(" "))
    after = "".join(f"{line[1:]}\n" for line in lines)
    text = file.read_text()
    assert text.count(before) == 1 and before != after, (
        f"{file} has these lines elsewhere: {before}"
    )
    file.write_text(text.replace(before, after))


def test_the_walk_throughs_work(tmp_path):
    root, work = tmp_path / "repository", tmp_path / "work"
    work.mkdir()
    shutil.copytree(ROOT / "src", root / "src")
    code = "\n".join(walk(name, root) for name in WALKS)
    assert code.count("assert ") >= 4
    code += f"\nassert headprune.__file__.startswith({str(root)!r})"
    path = os.pathsep.join([str(root / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=work, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_walk_through_that_no_longer_fits_is_noticed(tmp_path):
    file = tmp_path / "table.py"
    file.write_text("a\nb\nc\n")
    apply(" a\n+x\n b\n", file)
    assert file.read_text() == "a\nx\nb\nc\n"
    with pytest.raises(AssertionError):
        apply(" a\n+x\n b\n", file)


def test_troubleshooting_quotes_what_is_said():
    page = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
        for file in (ROOT / "src").rglob("*.py")
    )
    assert len(quoted) >= 15 and "what nobody says" not in source
    assert not [text for text in quoted if text not in source]


def test_pasted_outputs_have_the_words_of_the_source(tmp_path):
    """Numbers are those of the demo; ``make pictures`` pastes them."""
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(1_000))
    settings = {"data": tmp_path / "text.txt", "context_tokens": 64}
    result = headprune.convert_swa(tmp_path / "model", tmp_path / "out", **settings)
    sentence, table = proof(result.manifest)
    words = [f"verified: {sentence.words}", *(name for name, _ in table.rows)]
    pasted = [
        re.findall("<!-- output: proof -->\n```text\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
    ]
    blocks = [block for page in pasted for block in page]
    assert len(blocks) == 3
    assert all(word in " ".join(block.split()) for block in blocks for word in words)
