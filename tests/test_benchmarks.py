"""The benchmark of GPUs runs without one, and the docs hold what it wrote and nothing else.

Where others cut, the heads that are left make up for it, and the model is as it was afterwards.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from headprune.data.text import Sequences
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.model.heads import read_output
from tests import tiny

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/bench_gpu.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import bench_gpu

    return bench_gpu


@pytest.mark.slow
def test_every_measurement_is_made(bench: Any, tmp_path: Path) -> None:
    bench.main(["tiny"], 10.0, tmp_path / "gpu.md")
    page = (tmp_path / "gpu.md").read_text()
    rows = re.findall(r"^\| (\S.*?) \| (\S*) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert page.startswith(bench.TOP)
    assert len(rows) == 21
    for what, seconds, peak, note in rows:
        assert seconds or note, what
        assert not peak, what  # a CPU says none
        assert "failed" not in note and "out of" not in note, (what, note)
    assert len({what for what, *_ in rows}) == len(rows)


def test_what_does_not_come_to_pass_is_told(bench: Any) -> None:
    import torch

    def full() -> None:
        raise torch.OutOfMemoryError("no room")

    def broken() -> None:
        raise ValueError("why\nmore")

    table = bench.Table("tiny", float("inf"), torch.device("cpu"))
    assert table.measure("fits", lambda: "well") is not None
    assert table.measure("full", full) is None
    assert table.measure("broken", broken) is None
    late = bench.Table("tiny", 0.0, torch.device("cpu"))
    assert late.measure("late", broken) is None
    assert table.rows[0].endswith("|  | well |")
    assert table.rows[1:] == [
        "| full |  |  | out of memory |",
        "| broken |  |  | failed: ValueError: why |",
    ]
    assert late.rows == ["| late |  |  | not begun: out of time |"]


@pytest.mark.parametrize(
    ("name", "gone"),
    [("SlimGPT", [0, 3, 4, 5]), ("OSSCAR", [3, 3, 3, 3]), ("LLM-Drop", None)],
)
def test_what_others_cut(
    name: str, gone: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import rivals

    net = tiny.model("llama-gqa").requires_grad_(False)
    attentions, ids = attention_of(net), torch.randint(5, tiny.VOCAB, (16, 32))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": [[1] * 32] * 16})

    def collate(features: list[dict[str, Any]]) -> Any:
        return {key: torch.tensor([f[key] for f in features]) for key in features[0]}

    text = Sequences(rows, collate, batch_size=4)
    before, wanted = [read_output(a)[0].clone() for a in attentions], net(ids).logits
    gates, context = rivals.CUTTERS[name](net, attentions, 0.5, text)
    closed = [int((gate == 0).sum()) for gate in gates]
    assert closed == gone if gone else sorted(closed) == [0, 0, 6, 6]

    def far() -> float:
        with gated(attentions, fixed(gates)):
            return float((net(ids).logits - wanted).norm() / wanted.norm())

    with context:
        made_up = far()
    bare = far()
    assert made_up < 0.5 * bare if gone else made_up == bare > 0
    after = [read_output(a)[0] for a in attentions]
    assert all(map(torch.equal, before, after))


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/protocol.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import protocol

    return protocol


def test_only_what_is_written_down_is_published(
    protocol: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rivals

    config = tmp_path / "own.yaml"
    config.write_text("model: x\nrows: [{name: a, method: FLAP}]\n")
    with pytest.raises(protocol.ProtocolError, match="may not be published"):
        protocol.read_config(config)
    configs = [protocol.read_config(file) for file in protocol.CONFIGS.glob("*.yaml")]
    with_original = [c.model for c in configs if any(r.method == "original" for r in c.rows)]
    assert sorted(with_original) == sorted({c.model for c in configs})  # each once
    for rows in (config.rows for config in configs):
        assert len({row.name for row in rows}) == len(rows)
        assert {r.method for r in rows} <= {
            "original",
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
    published = protocol.Results.read()
    monkeypatch.setattr(protocol, "RESULTS", tmp_path / "results.json")
    with pytest.raises(protocol.ProtocolError, match="was measured meanwhile"):
        published.write_with(published.results[0])
    assert not protocol.RESULTS.exists()
    (tmp_path / "results.json").write_text('{"texts": {"brown": "0"}, "results": []}')
    with pytest.raises(protocol.ProtocolError, match="is of other texts"):
        protocol.Results.read()


def test_the_tables_of_pages_are_those_of_the_results(protocol: Any) -> None:
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


def test_texts_are_joined_as_published(protocol: Any) -> None:
    raw = " \n = Title = \n \n A line . \n"
    # the rows of the data set on the hub: "", " = Title = \n", "", " A line . \n"
    assert protocol._as_published(raw) == "\n\n = Title = \n\n\n\n\n A line . \n"
    conllu = "# text = 3 dogs .\n1\t3\tx\n\n# sent_id = b\n# text = Ja\n"
    assert protocol._sentences_of(conllu) == "3 dogs .\nJa"
    parts = protocol._quarters("".join(f"{n}\n" for n in range(8)))
    assert len(parts) == 4 and "".join(parts).split() == [*map(str, range(8))]
