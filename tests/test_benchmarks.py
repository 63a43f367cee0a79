"""The docs hold what the benchmarks wrote, and name commands that exist.

Where others cut, the heads that are left make up for it, and the model is as it was afterwards.
"""

import gzip
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from filelock import FileLock

from headprune.data.text import Sequences
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.model.heads import read_output
from tests import tiny

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    """scripts/bench.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import bench

    return bench


def test_pages_name_commands_that_exist(bench):
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"scripts/[\w/]+\.py", text))
    assert named and all((ROOT / script).is_file() for script in named)
    tables = re.findall(r"protocol\.py measure (configs/\S+)", text)
    assert tables and all((ROOT / table).is_file() for table in tables)
    commands = {one.name or one.callback.__name__ for one in bench.app.registered_commands}
    commands = {name.replace("_", "-") for name in commands}
    assert set(re.findall(r"bench\.py ([a-z][\w-]*)", text)) == commands


def test_benchmarks_without_a_protocol(bench, capsys):
    bench.check(sizes="3,30", seeds=2)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 2 * len(bench.SYNTHETIC)
    assert all(sum(map(int, row.strip("| ").split(" | ")[3:])) == 2 for row in rows[2:])
    net = tiny.model("llama-gqa")
    counts = [attention.kv_heads for attention in attention_of(net)]
    size = attention_of(net)[0].query_heads // counts[0]
    kept = [len(part.keep) // size for part in bench.alternate_half(net).attentions.values()]
    assert kept == [(count + layer % 2) // 2 for layer, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("name", "gone"), [("SlimGPT", [0, 3, 4, 5]), ("OSSCAR", [3, 3, 3, 3]), ("LLM-Drop", None)]
)
def test_what_others_cut(name, gone, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import rivals

    net = tiny.model("llama-gqa").requires_grad_(False)
    attentions, ids = attention_of(net), torch.randint(5, tiny.VOCAB, (16, 32))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": [[1] * 32] * 16})

    def collate(features):
        return {key: torch.tensor([f[key] for f in features]) for key in features[0]}

    text = Sequences(rows, collate, batch_size=4)
    before, wanted = [read_output(a)[0].clone() for a in attentions], net(ids).logits
    gates, context = rivals.CUTTERS[name](net, attentions, 0.5, text)
    closed = [int((gate == 0).sum()) for gate in gates]
    assert closed == gone if gone else sorted(closed) == [0, 0, 6, 6]

    def far():
        with gated(attentions, fixed(gates)):
            return float((net(ids).logits - wanted).norm() / wanted.norm())

    with context:
        made_up = far()
    bare = far()
    assert made_up < 0.5 * bare if gone else made_up == bare > 0
    after = [read_output(a)[0] for a in attentions]
    assert all(map(torch.equal, before, after))


@pytest.fixture
def protocol(monkeypatch):
    """scripts/protocol.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import protocol

    return protocol


def test_only_what_is_written_down_is_published(protocol, tmp_path, monkeypatch):
    import rivals

    config = tmp_path / "own.yaml"
    config.write_text("model: x\nrows: [{name: a, method: FLAP}]\n")
    with pytest.raises(protocol.ProtocolError, match="may not be published"):
        protocol.read_config(config)
    configs = [protocol.read_config(file) for file in protocol.CONFIGS.glob("*.yaml")]
    long = [c for c in configs if c.measure in ("far", "prefilled")]
    short = [c for c in configs if c not in long]
    kinds = [(c.sha256, c.dtype) for c in short if any(r.method == "original" for r in c.rows)]
    assert sorted(kinds) == sorted({(c.sha256, c.dtype) for c in short})  # each once
    assert all(c.rows[0].method == "original" for c in long)
    for rows in (config.rows for config in configs):
        assert len({row.name for row in rows}) == len(rows)
        assert {r.method for r in rows} <= {
            "original",
            "kvpress",
            *protocol.OURS,
            *rivals.RIVALS,
            *rivals.CUTTERS,
        }
    other = protocol.Text("text.gz", protocol.BROWN.sha256)
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"another text"))
    with pytest.raises(protocol.ProtocolError, match="is not the text of the protocol"):
        other.read(tmp_path)
    with pytest.raises(protocol.ProtocolError, match="cannot be read"):
        other.read(tmp_path / "elsewhere")
    (tmp_path / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(protocol.ProtocolError, match=f"is not the {configs[0].model} of the"):
        protocol.Bench(configs[0], str(tmp_path), tmp_path, tmp_path)
    with FileLock(tmp_path / "at-work"), pytest.raises(protocol.ProtocolError, match="is at work"):
        protocol.Bench(configs[0], str(tmp_path), tmp_path, tmp_path)
    published = protocol.Results.read()
    monkeypatch.setattr(protocol, "RESULTS", tmp_path / "results.json")
    with pytest.raises(protocol.ProtocolError, match="was measured meanwhile"):
        published.write_with(published.results[0])
    assert not protocol.RESULTS.exists()
    (tmp_path / "results.json").write_text('{"texts": {"brown": "0"}, "results": []}')
    with pytest.raises(protocol.ProtocolError, match="is of other texts"):
        protocol.Results.read()


def test_the_tables_of_pages_are_those_of_the_results(protocol):
    results = protocol.Results.read()
    marked = 0
    for page in (ROOT / "docs" / "benchmarks").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert protocol.rendered(text, results) == text, page.name
        marked += text.count("<!-- protocol:")
    assert marked
    some = results.results[0]
    row = protocol.Row(name=some.row, method="original", settings={"keep": 0.5})
    with pytest.raises(protocol.ProtocolError, match="is of other settings"):
        row.chosen_of(some)
    assert protocol.rendered("<!-- protocol: smollm2-heads -->\nold\n<!-- end -->", results) != (
        "<!-- protocol: smollm2-heads -->\nold\n<!-- end -->"
    )


def test_a_model_without_a_tokenizer_reads_what_it_wrote(protocol, tmp_path):
    tiny.model("gpt2").save_pretrained(tmp_path / "model")
    folder = protocol._with_numbers(tmp_path / "model", tmp_path / "with-numbers")
    net, tokenizer = protocol.from_pretrained(folder), protocol.load_tokenizer(str(folder))
    lines = [protocol.own_text(net, seed, count=3).splitlines() for seed in (0, 0, 1)]
    assert lines[0] == lines[1] != lines[2]
    for line in lines[0]:
        ids = tokenizer(line)["input_ids"]
        assert line == " ".join(map(str, ids)) and len(ids) == protocol.OWN
        assert ids[0] == net.config.bos_token_id and net.config.eos_token_id not in ids
    # windows are sequences, whether of one or of all lines
    bench = object.__new__(protocol.OwnText)
    bench.tokenizer = tokenizer
    one_by_one = [bench.nll(net, line, protocol.OWN) for line in lines[0]]
    assert bench.nll(net, "\n".join(lines[0]), protocol.OWN) == pytest.approx(
        sum(one_by_one) / len(one_by_one)
    )


def test_texts_are_joined_as_published(protocol):
    raw = " \n = Title = \n \n A line . \n"
    # the rows of the data set on the hub: "", " = Title = \n", "", " A line . \n"
    assert protocol._as_published(raw) == "\n\n = Title = \n\n\n\n\n A line . \n"
    conllu = "# text = 3 dogs .\n1\t3\tx\n\n# sent_id = b\n# text = Ja\n"
    assert protocol._sentences_of(conllu) == "3 dogs .\nJa"
    parts = protocol._quarters("".join(f"{n}\n" for n in range(8)))
    assert len(parts) == 4 and "".join(parts).split() == [*map(str, range(8))]


def test_losses_after_a_context(protocol):
    net = tiny.model("llama").eval()
    ids = torch.randint(3, net.config.vocab_size, (1, 60))
    context, rest = ids[0, :20].tolist(), ids[0, 20:].tolist()
    with torch.no_grad():
        logits = net(ids).logits[0, 19:-1]
    wanted = torch.nn.functional.cross_entropy(logits, ids[0, 20:], reduction="none")
    [(nats, hits)] = protocol.continued(net, [(context, rest)])
    assert nats == pytest.approx(wanted.tolist(), abs=1e-5)
    assert hits == (logits.argmax(-1) == ids[0, 20:]).tolist()

    @contextmanager
    def forgets(net):
        """Lose the keys of the context, as a press does."""
        yield
        caches[-1].layers[0].keys[:, :, :10] = 0

    caches = []
    of_net = net.forward

    def remembering(*args, **kwargs):
        output = of_net(*args, **kwargs)
        caches.append(output.past_key_values)
        return output

    net.forward = remembering
    [(pressed, _)] = protocol.continued(net, [(context, rest)], forgets)
    assert pressed[0] == pytest.approx(nats[0])  # of the whole context
    assert pressed[1:] != pytest.approx(nats[1:], abs=1e-5)
