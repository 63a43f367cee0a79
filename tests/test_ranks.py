"""Ranks of heads: as a singular value decomposition of whole matrices has them; bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import headprune
from headprune.config import ConvertConfig, LayoutOption
from headprune.errors import FamilyError
from headprune.evidence.ranks import module_ranks
from headprune.exporting.convert_gqa import convert_gqa
from headprune.exporting.prune import prune
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.heads import read_heads
from headprune.planning.from_evidence import CutRequest
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.ranks import SHARES
from tests import cutting, tiny
from tests.test_cli import run


def _batches(model: PreTrainedModel, size: int = 2, pad: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 60, (4, 30), generator=generator)
    padded, turned = (torch.nn.functional.pad(r, (0, pad), value=1) for r in (rows, rows.flip(1)))
    found: list[Batch] = []
    for ids, answers in zip(padded.split(size), turned.split(size), strict=True):
        batch: Batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
        if model.config.is_encoder_decoder:
            labels = torch.where(answers == 1, -100, answers)
            batch.update(decoder_input_ids=answers, labels=labels)
        found.append(batch)
    return found


@torch.no_grad()
def _by_decomposition(
    model: PreTrainedModel, batches: list[Batch], whiten: bool = True
) -> dict[str, list[list[tuple[int, ...]]]]:
    """Ranks of the products of whole weight matrices, by what enters the projections."""
    attentions, seen = attention_of(model), {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args: seen.setdefault(path, []).append(args[0].flatten(0, -2))

    for attention in attentions:
        for projection in attention.projections:
            projection.module.register_forward_pre_hook(keep(projection.path))
    for batch in batches:
        model(**batch)
    found: dict[str, list[list[tuple[int, ...]]]] = {"values": [], "scores": []}
    for attention in attentions:
        heads = read_heads(attention)
        roots = {role: _root(_entering(attention, role, seen), role == "q") for role in "qkv"}
        if not whiten:
            roots = {role: torch.eye(len(root)).double() for role, root in roots.items()}
        q = _affine(heads.q, heads.q_bias) @ roots["q"]
        k, v = (w.double() @ roots[role] for role, w in (("k", heads.k), ("v", heads.v)))
        at = list(zip(range(attention.query_heads), heads.owners, strict=True))
        found["values"].append([_widths(heads.o[h].double() @ v[kv]) for h, kv in at])
        found["scores"].append([_widths(q[h].T @ k[kv]) for h, kv in at])
    return found


def _affine(weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = torch.zeros(weight.shape[:2]) if bias is None else bias
    return torch.cat([weight, bias[..., None]], -1).double()


def _entering(attention: Attention, role: str, seen: dict[str, list[Tensor]]) -> Tensor:
    projection = next(p for p in attention.projections if role in p.holds)
    return torch.cat(seen[projection.path]).double()


def _root(x: Tensor, affine: bool) -> Tensor:
    """Of the second moment, with a 1 for the bias; or of the covariance."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1) if affine else x - x.mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root


def _widths(product: Tensor) -> tuple[int, ...]:
    energy = torch.linalg.svdvals(product).square()
    held = energy.cumsum(0) / energy.sum()
    return tuple(int((held < share).sum()) + 1 for share in SHARES)


def _ranks(model: PreTrainedModel, batches: list[Batch]) -> dict[str, list[list[tuple[int, ...]]]]:
    modules = module_ranks(model, attention_of(model), batches)
    return {
        name: [[getattr(head, name) for head in module.heads] for module in modules]
        for name in ("values", "scores")
    }


@pytest.mark.parametrize(
    "case", tiny.present("llama-gqa", "llama-mqa", "gpt2", "falcon-new", "bert-mlm", "t5")
)
def test_ranks_are_those_of_whole_matrices(case: str) -> None:
    model = tiny.model(case)
    batches = _batches(model)
    found = _ranks(model, batches)
    assert found == _by_decomposition(model, batches)
    assert found != _by_decomposition(model, batches, whiten=False)
    assert len({widths for module in found["scores"] for widths in module}) > 1  # heads differ


@pytest.mark.parametrize("case", tiny.present("bert-mlm", "t5"))
def test_neither_batch_nor_padding_counts_for_ranks(case: str) -> None:
    model = tiny.model(case)
    found = _ranks(model, _batches(model))
    assert found == _ranks(model, _batches(model, size=1, pad=5))
    other = [{**batch, "input_ids": batch["input_ids"] % 9 + 5} for batch in _batches(model)]
    assert found != _ranks(model, other)  # type: ignore[arg-type]


def test_a_narrow_head_is_found() -> None:
    model = tiny.model("llama-mha")
    attention = attention_of(model)[1]
    with torch.no_grad():
        attention.module.v_proj.weight[22:30] = 0  # of head 2 two directions are left
        attention.module.o_proj.weight[:, 30:40] = 0  # head 3 writes nothing
    found = module_ranks(model, attention_of(model), _batches(model))[1]
    assert found.heads[2].values[-1] == 2
    assert found.heads[3].values == (0, 0, 0)
    assert min(head.values[-1] for head in (*found.heads[:2], *found.heads[4:])) > 5
    hidden, free = 48, sum(10 - rank for rank in found.group_values)
    assert found.saved == 2 * hidden * free


def test_a_ragged_cut_keeps_the_numbers_of_the_original(tmp_path: Path) -> None:
    model = tiny.model("llama-gqa")
    whole, plan = tiny.save(model, tmp_path / "whole"), cutting.ragged_plan(model)
    prune(whole, tmp_path / "cut", CutRequest(plan=plan, layout=LayoutOption.RAGGED))
    cut = headprune.from_pretrained(tmp_path / "cut")
    first = module_ranks(cut, attention_of(cut), _batches(cut))[0]
    before = module_ranks(model, attention_of(model), _batches(model))[0]
    assert [head.head for head in first.heads] == [1, 2, 3, 4, 5]
    assert first.heads == before.heads[1:]  # the first layer reads the same
    assert len(first.group_values) == 3
    assert _ranks(cut, _batches(cut)) == _by_decomposition(cut, _batches(cut))


def test_keys_that_several_queries_share_count_once(tmp_path: Path) -> None:
    whole = tiny.save(tiny.model("gpt2"), tmp_path / "whole")
    convert_gqa(str(whole), tmp_path / "shared", ConvertConfig(kv_heads=2, merge="mean"))
    model = headprune.from_pretrained(tmp_path / "shared")
    assert model.transformer.h[0].attn.c_attn.headprune_positions  # K and V come once per query
    assert _ranks(model, _batches(model)) == _by_decomposition(model, _batches(model))


def test_a_module_that_did_not_run_is_named() -> None:
    model = tiny.model("llama-mha")
    with pytest.raises(FamilyError, match=r"'model.layers.0.self_attn' did not run"):
        module_ranks(model, attention_of(model), [])


def test_a_module_with_a_latent_is_named() -> None:
    model = tiny.model("deepseek_v3")
    with pytest.raises(FamilyError, match=r"'model.layers.0.self_attn' has no Q, K and V"):
        module_ranks(model, attention_of(model), _batches(model))


@pytest.fixture
def text_and_model(tmp_path: Path) -> tuple[Path, Path]:
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(1500))
    return text, tiny.save(tiny.model("llama-gqa"), tmp_path / "model")


def test_inspect_shows_and_draws_ranks(
    text_and_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, model = text_and_model
    asked = ["--ranks", "--data", text, "--calibration-tokens", "600", "--seq-len", "60"]
    code, out, _ = run(capsys, "inspect", model, *asked)
    assert code == 0
    assert "of 24 heads hold 99% of what they write in fewer directions" in " ".join(out.split())
    _, out, _ = run(capsys, "inspect", model, *asked, "--figure", tmp_path / "r.svg", "--json")
    ranks = json.loads(out)["ranks"]
    assert ranks["tokens"] == 600
    widths = [head["values"] for module in ranks["modules"] for head in module["heads"]]
    assert len(widths) == 24
    assert all(1 <= a <= b <= c <= 10 for a, b, c in widths)
    assert {path.name for path in tmp_path.glob("*.svg")} == {"r-values.svg", "r-scores.svg"}
    code, _, err = run(capsys, "inspect", model, *asked, "--figure", tmp_path / "r.svg")
    assert code == 2
    assert "r-values.svg" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks"], "--ranks has no effect without --data"),
        (["--data", "text.txt"], "--data has no effect without --ranks"),
        (["--ranks", "--data", "none.txt"], "none.txt"),
        (["--figure", "r.svg"], "--figure has no effect without --ranks"),
        (["--seq-len", "60", "--split", "test"], "--seq-len and --split have no effect"),
    ],
)
def test_inspect_says_what_ranks_need(
    arguments: list[str],
    said: str,
    text_and_model: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "inspect", text_and_model[1], *arguments)
    assert code == 2
    assert said in err
