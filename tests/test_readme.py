"""Every command and Python example of README and guides runs, on tiny stand-ins for the models."""

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from headprune import app as cli
from headprune.commands.listing import listed
from headprune.evaluation.written import write
from tests import tiny
from tests.marks import slow_unless
from tests.test_verify import PRUNED, old_folder

ROOT = Path(__file__).parents[1]
LONG = ("compress", "evaluate", "gqa", "memory", "roles", "without-training")
GUIDES = {page.stem: page for page in sorted((ROOT / "docs" / "guides").glob("*.md"))}
PAGES = {"README": ROOT / "README.md", **GUIDES}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
MODELS = {
    "HuggingFaceTB/SmolLM2-135M": "llama-gqa",
    "meta-llama/Llama-3.2-1B": "llama-gqa",
    "Helsinki-NLP/opus-mt-de-en": "marian",
}
SMALL = ["--steps", "3", "--config", "batch_size=2", "--config", "seq_len=16"]


def blocks(language, name):
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[name], re.DOTALL)


def commands(name):
    """The headprune commands of a page."""
    lines = [line for block in blocks("bash", name) for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("headprune ")]


def run(name, monkeypatch):
    """Runs all commands of a page, with smaller numbers; its blocks of files are written before."""
    for block in blocks("python", name):
        if file := re.match(r"# (\w+\.py)\n", block):
            Path(file[1]).write_text(block)
    for command in commands(name):
        shrunk = ["hub.txt" if word.startswith("wikitext:") else word for word in command]
        if "train-gates" in shrunk:
            shrunk += SMALL
        if "heal" in shrunk:
            shrunk[shrunk.index("--steps") + 1] = "3"
            shrunk += SMALL[2:]
        if "compress" in shrunk:
            # tiny models know no word of the text that ships
            for small in ("seq_len=16", "calibration_tokens=256", "held_out_tokens=64"):
                shrunk += ["--config", small]
            shrunk += [] if "--data" in shrunk else ["--data", "text.txt"]
            shrunk = [{"94000000": "61000", "8192": "128"}.get(word, word) for word in shrunk]
        if "--heal" in shrunk:
            shrunk[shrunk.index("--heal") + 1] = "3"
        if "convert-gqa" in shrunk:
            shrunk += ["--seq-len", "16"]
        if "convert-mla" in shrunk:
            shrunk[shrunk.index("--kv-bytes") + 1] = "240"
            shrunk += ["--config", "seq_len=16", "--config", "calibration_tokens=512"]
        scores = shrunk[1] == "score" and "--data" in shrunk
        if scores:
            shrunk += ["--seq-len", "16", "--calibration-tokens", "256"]
        if shrunk[1] == "prune" and "--refit" in shrunk:
            shrunk += ["--config", "seq_len=16", "--config", "calibration_tokens=256"]
        if "evaluate" in shrunk:
            shrunk += ["--seq-len", "16"]
        chosen = not {"--scores", "--gates"} & {*shrunk}
        if "window" in shrunk or ("convert-swa" in shrunk and chosen):
            shrunk += ["--window", "8"]
        if "convert-swa" in shrunk and chosen:
            shrunk = [{"120000000": "100000", "8192": "128"}.get(word, word) for word in shrunk]
            shrunk += ["--config", "seq_len=32", "--config", "calibration_tokens=512"]
        shrunk = ["needle_lengths=64,100" if "needle_lengths" in w else w for w in shrunk]
        if "--keep-roles" in shrunk:  # which no head of a tiny model has
            at = shrunk.index("--keep-roles")
            del shrunk[at : at + 2]
        if shrunk[1] == "attention":  # in words that tiny models know
            shrunk[shrunk.index("--text") + 1] = tiny.text(9)
        if shrunk[1] == "roles":
            few = "--config seq_len=16 --config sequences=4 --config resamples=20"
            shrunk = [word.replace("tokens=2048", "tokens=64") for word in shrunk] + few.split()
        monkeypatch.setattr("sys.argv", shrunk)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, command


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory):
    """A working folder, in which the pages' names mean tiny models and texts, after the README."""
    folder = tmp_path_factory.mktemp("readme")
    for name, case in MODELS.items():
        own = {"attention_bias": False} if case == "llama-gqa" else {}  # as theirs
        tiny.save(tiny.model(case, **own), folder / name)
    old_folder(tiny.model("bert-mlm"), folder / "pruned-by-transformers-4", PRUNED)
    rows = ["de\ten", *(f"{tiny.text(9, i)}\t{tiny.text(8, i)}" for i in range(80))]
    for name in ("pairs.tsv", "test.tsv"):
        (folder / name).write_text("\n".join(rows))
    for name in ("text.txt", "test.txt", "hub.txt", "brown.txt", "code.txt"):
        (folder / name).write_text(tiny.text(2_000))
    with gzip.open(folder / "en_ewt-ud-dev.conllu.gz", "wt", encoding="utf-8") as trees:
        words = tiny.text(4).split()
        rows = (f"{i}\t{w}" + "\t_" * 4 + f"\t{i - 1}\tdep\t_\t_" for i, w in enumerate(words, 1))
        trees.write(40 * ("\n".join([f"# text = {' '.join(words)}", *rows]) + "\n\n"))
    (check,) = re.findall(r"```yaml\n# headprune.yaml\n(.*?)```", TEXTS["ci"], re.DOTALL)
    # a layer without heads keeps its length in the cache, which in a tiny model is a share of it
    check = check.replace("seq_len: 256", "seq_len: 16").replace("token <= 75 %", "token <= 77 %")
    (folder / "headprune.yaml").write_text(check)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        run("README", monkeypatch)
        yield folder


@pytest.fixture
def stand_ins(after_readme, tmp_path, monkeypatch):
    """A copy of that folder, to work in."""
    folder = tmp_path / "work"
    shutil.copytree(after_readme, folder)
    monkeypatch.chdir(folder)
    return folder


def test_the_commands_of_the_readme_run(after_readme):
    assert len(commands("README")) >= 3
    assert (after_readme / "report.json").exists()
    assert (after_readme / "smaller" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:The model finds 0 of")  # needles, as it is random
@pytest.mark.filterwarnings("ignore:Sequences of 512 tokens")  # inspect --latent, of models of 128
@pytest.mark.parametrize(
    "name",
    # what takes longest there, compress, merges and exports, runs in tests of its own too
    slow_unless(lambda name: name not in LONG, filter(commands, GUIDES)),
)
def test_the_commands_of_a_guide_run_after_those_of_the_readme(name, stand_ins, monkeypatch):
    run(name, monkeypatch)


def test_the_module_of_evaluate_in_the_guide_runs(stand_ins, monkeypatch):
    (command,) = (words for words in commands("evaluate") if "length_ratio.py" in words)
    monkeypatch.setattr("tests.test_readme.commands", lambda name: [[*command, "quality.json"]])
    texts = []

    def noted(*given, **settings):
        texts.append(write(*given, **settings))
        return texts[-1]

    monkeypatch.setattr("headprune.evaluation.evaluate.write", noted)
    run("evaluate", monkeypatch)
    report = json.loads(Path("quality.json").read_text())
    (found,) = (m for m in report["model"]["metrics"] if m["name"] == "length_ratio:words")
    wanted = [row.split("\t")[1] for row in Path("test.tsv").read_text().splitlines()[1:]]
    counts = [sum(len(text.split()) for text in some) for some in (texts[0], wanted)]
    assert found["value"] == pytest.approx(counts[0] / counts[1]) and found["n"] == len(wanted)
    assert found["value"] != pytest.approx(counts[1] / counts[0])


def test_every_block_of_commands_is_found():
    assert sum(len(commands(name)) for name in PAGES) >= 40
    for text in TEXTS.values():
        for language, block in re.findall(
            r"^```(\w+).*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE
        ):
            assert language == "bash" or not re.search("^headprune ", block, re.MULTILINE), block


def test_the_python_example_runs(stand_ins):
    example = "\n".join(blocks("python", "python"))
    shrunk = example.replace("steps=300", "steps=3, seq_len=16, batch_size=2")
    shrunk = shrunk.replace("against=model)\nsmall", "against=model, seq_len=16)\nsmall")
    shrunk = shrunk.replace("speed=False)", "speed=False, seq_len=16)")
    assert shrunk.count("seq_len=16") == 3
    scope = {}
    exec(compile(shrunk, "python.md", "exec"), scope)
    assert type(scope["small"]).__name__ == "LlamaForCausalLM"


def test_the_notebook_runs(stand_ins):
    notebook = json.loads((ROOT / "docs/notebooks/start.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) == 8 and not any(c.get("outputs") for c in notebook["cells"])
    code = "\n".join(cells)
    for small in ("data=train)", "refit=train)"):
        code = code.replace(small, f"{small[:-1]}, seq_len=16, calibration_tokens=256)", 1)
    code = code.replace("speed=False)", "speed=False, seq_len=16)")
    code = code.replace("data=train).manifest", "data=train, window=8, seq_len=16).manifest")
    assert code.count("seq_len=16") == 4
    scope = {}
    exec(compile(code, "start.ipynb", "exec"), scope)
    assert scope["result"].manifest.query_heads[1] < scope["result"].manifest.query_heads[0]


def test_every_command_is_in_the_table(monkeypatch):
    assert "<!-- generated: commands -->" in (ROOT / "docs/reference/commands/index.md").read_text(
        encoding="utf-8"
    )
    monkeypatch.syspath_prepend(ROOT / "scripts" / "docs")
    import command_pages

    named = set(re.findall(r"\| \[`headprune ([a-z-]+)", command_pages.commands()))
    assert named == set(listed())


def test_the_readme_is_short():
    assert len(TEXTS["README"].splitlines()) <= 160
