"""Damaged files of every kind: read, or refused in a sentence; more of them in make campaign."""

import copy
import functools
import gzip
import io
import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

import headprune
from headprune.command_line import settings_in
from headprune.commands.command import named
from headprune.config import DataConfig
from headprune.data.read import read_examples
from headprune.errors import HeadpruneError
from headprune.model.loading import load_tokenizer
from headprune.regression.baseline import read_baseline
from headprune.role.trees import read_trees
from headprune.schemas.manifest import read_manifest
from headprune.schemas.roles import read_roles
from tests import tiny
from tests.marks import tried
from tests.test_injection import place  # noqa: F401
from tests.test_verify import old_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # a damaged file may well be warned of
ROWS = [{"text": tiny.text(40, seed), "label": seed % 2} for seed in range(24)]
TREE = (
    "# text = w1 w2\n1\tw1\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_\n2\tw2\t_\tVERB\t_\t_\t0\troot\t_\t_\n\n"
)
CONTROL = "\x1b]0;pwned\x07\x1b[2J"
# what may stand where something else is meant
HOSTILE = [
    *(None, True, 0, 1, -1, 7, 0.5, 1e300, float("inf"), float("nan"), -0.0, 10**400),
    *("", "x", "0", "cpu", "../../etc/passwd", "__class__", "a" * 5000, CONTROL, "\ud800", "\x00"),
    *([], {}, [[]], [1.5], [-1], [0, 0], [None], ["x"], {"a": 1}, {"": None}, [True]),
    *("\n::error ::pwned", "@deep", "@open", "@digits"),
]
RAW = {'"@deep"': "[" * 99_999 + "]" * 99_999, '"@open"': "[" * 99_999, '"@digits"': "9" * 5_000}
YAML = [
    *("!!python/object/apply:os.system ['touch pwned']", "&a [*a]", "\tkey: x", "key: 'open"),
    *("? [a, b]\n: c", "<<: 1", "--- 1\n--- 2", "key: 2001-13-45", "key: .nan", "- " * 20_000),
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b]",
]


def dry(h, **how):
    return headprune.prune(h / "base", dry_run=True, **how)


def options(h):
    check = named("check")
    return check.arguments({"model": "m", "data": "d", **settings_in(h / "check.yaml", check)})


def rows_of(name):
    return name, lambda h: list(read_examples(DataConfig(source=str(h / name))).texts)


READERS = {
    "config": ("base/config.json", lambda h: headprune.inspect(h / "base")),
    "generation": ("base/generation_config.json", lambda h: headprune.from_pretrained(h / "base")),
    "tokenizer": ("base/tokenizer.json", lambda h: load_tokenizer(h / "base")),
    "its settings": ("base/tokenizer_config.json", lambda h: load_tokenizer(h / "base")),
    "weights": ("base/model.safetensors", lambda h: dry(h, plan=h / "short.json")),
    "index": ("shards/model.safetensors.index.json", lambda h: headprune.inspect(h / "shards")),
    "shard": ("shards/model-00001-of-*", lambda h: headprune.inspect(h / "shards")),
    "transformers 4": ("old/config.json", lambda h: headprune.inspect(h / "old")),
    "manifest": ("run/small/headprune.json", lambda h: read_manifest(h / "run/small")),
    "manifest, shown": ("run/small/headprune.json", lambda h: headprune.verify(h / "run/small")),
    "layout": ("run/small/config.json", lambda h: headprune.verify(h / "run/small")),
    "plan": ("run/small/plan.json", lambda h: dry(h, plan=h / "run/small/plan.json")),
    "short plan": ("short.json", lambda h: dry(h, plan=h / "short.json")),
    "gates": ("run/gates/gates.json", lambda h: dry(h, gates=h / "run/gates")),
    "their tensors": ("run/gates/gates.safetensors", lambda h: dry(h, gates=h / "run/gates")),
    "scores": ("scores/scores.json", lambda h: dry(h, scores=h / "scores", keep=0.5)),
    "their numbers": ("scores/scores.safetensors", lambda h: dry(h, scores=h / "scores", keep=4)),
    "roles": ("roles/roles.json", lambda h: read_roles(h / "roles")),
    "trees": ("trees.conllu", lambda h: read_trees(str(h / "trees.conllu"))),
    "baseline": ("b.json", lambda h: read_baseline(h / "b.json")),
    "settings": ("check.yaml", options),
    "report": (
        "run/report.json",
        lambda h: headprune.report([h / "run"], h / "o.html", overwrite=True),
    ),
    "check": (
        "run/check.json",
        lambda h: headprune.report([h / "run"], h / "o.html", overwrite=True),
    ),
    **{
        name: rows_of(name)
        for name in ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.parquet")
    },
}


@pytest.fixture(scope="module")
def home(place, tmp_path_factory):  # noqa: F811
    """One sound file of every kind."""
    home = Path(shutil.copytree(place, tmp_path_factory.mktemp("fuzz") / "home"))
    tiny.model("llama-gqa").save_pretrained(home / "shards", max_shard_size="90KB")
    old_folder(tiny.model("gpt2"), home / "old", {1: [2]})
    headprune.roles(home / "base", home / "roles", data=home / "text.txt", sequences=4, seq_len=16)
    (home / "short.json").write_text('{"model.layers.0.self_attn": [0, 1]}')
    (home / "trees.conllu").write_text(TREE * 9)
    (home / "check.yaml").write_text(yaml.safe_dump({"limits": ["perplexity <= 9"], "seed": 3}))
    table = Dataset.from_list(ROWS)
    (home / "a.txt").write_text(tiny.text(400))
    table.to_json(home / "a.jsonl")
    table.to_csv(home / "a.csv")
    table.to_csv(home / "a.tsv", sep="\t")
    table.to_parquet(home / "a.parquet")
    for name in ("a.txt", "a.jsonl"):
        (home / f"{name}.gz").write_bytes(gzip.compress((home / name).read_bytes(), mtime=0))
    for file, read in READERS.values():
        assert read(home) is not None, file  # all are sound
    return home


def places(node, above=()):
    """Paths to everything inside."""
    inside = list(node.items()) if isinstance(node, dict) else ()
    for key, child in list(enumerate(node[:40])) if isinstance(node, list) else inside:
        yield (*above, key)
        yield from places(child, (*above, key))


@st.composite
def damaged_tree(draw, tree):
    """JSON with one to three things wrong."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        if not (everywhere := [*places(tree)]):
            return draw(st.sampled_from(HOSTILE))
        *above, key = draw(st.sampled_from(everywhere))
        parent = functools.reduce(lambda node, step: node[step], above, tree)
        value, how = parent[key], draw(st.sampled_from(["other", "near", "drop", "rename", "add"]))
        if how == "drop":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from([f"{key}x", "", CONTROL, "../x"]))] = parent.pop(key)
        elif how == "near" and isinstance(value, (int, float)):
            near = (value + 1, value - 1, -value, value * 10, value / 2, str(value))
            parent[key] = draw(st.sampled_from(near))
        elif how == "near" and isinstance(value, (str, list)):
            parent[key] = draw(st.sampled_from([value[:-1], value * 2, value[::-1], [value]]))
        else:
            name = draw(st.sampled_from(["extra", "auto_map", "schema_version"]))
            at = name if how == "add" and isinstance(parent, dict) else key
            parent[at] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
    return tree


@st.composite
def damaged_bytes(draw, content):
    """A piece taken out, doubled, zeroed, turned over or made up; or all that follows cut off."""
    start = draw(st.integers(0, len(content)))
    piece = content[start : start + draw(st.sampled_from([1, 4, 64, 512]))]
    others = [b"", piece * 2, bytes(len(piece)), bytes(255 - byte for byte in piece)]
    other = draw(st.sampled_from(others) | st.binary(max_size=9))
    return content[:start] + other + draw(st.sampled_from([content[start + len(piece) :], b""]))


def packed(tree):
    """A tree as it stands in a file; what JSON has no value for stands there raw."""
    text = json.dumps(tree)
    for name, raw in RAW.items():
        text = text.replace(name, raw)
    return text.encode()


def damaged(name, content):
    """Contents of a file with something wrong in them."""
    raw = damaged_bytes(content)
    if name.endswith(".gz"):
        inside = damaged(name[:-3], gzip.decompress(content))
        return raw | inside.map(gzip.compress) | st.just(content + content[:-9])
    if name.endswith((".json", ".yaml")):
        trees = damaged_tree(yaml.safe_load(io.BytesIO(content))).map(packed)
        texts = [text.encode() for text in YAML]
        return trees | raw | st.sampled_from(texts) if name.endswith(".yaml") else trees | raw
    if name.endswith(".jsonl"):
        *lines, last = content.splitlines(keepends=True)
        ends = (damaged_tree(json.loads(last)).map(packed) | damaged_bytes(last)).map
        return raw | ends(lambda end: b"".join([*lines, end])) | ends(lambda end: end + content)
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", content[:8])
        header, body = content[8 : 8 + length], content[8 + length :]
        headers = damaged_tree(json.loads(header)).map(packed)
        lengths = st.sampled_from([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
        return (
            raw
            | headers.map(lambda made: struct.pack("<Q", len(made)) + made + body)
            | lengths.map(lambda wrong: struct.pack("<Q", wrong) + header + body)
        )
    return raw


@pytest.mark.parametrize("kind", READERS)
@tried(8)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(kind, data, home):
    name, read = READERS[kind]
    file = next(home.glob(name))
    sound = file.read_bytes()
    before = {path.name for path in home.iterdir()}
    file.write_bytes(data.draw(damaged(file.name, sound)))
    try:
        with suppress(HeadpruneError):
            read(home)
            before = {path.name for path in home.iterdir()}  # what is read may be written
        assert {path.name for path in home.iterdir()} == before
    finally:
        file.write_bytes(sound)
        (home / "o.html").unlink(missing_ok=True)
    assert not list(home.rglob("pwned"))
