"""Embeddings are pooled as the files of sentence-transformers beside a model say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import headprune
from headprune.errors import CheckpointError, FamilyError
from headprune.evaluation import quality
from headprune.model.embedding import head_of, pooling_of
from headprune.model.losses import divergence
from tests import classes, tiny

MODES = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens")
OLD = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
TEXTS = [tiny.text(n, seed=n) for n in (3, 12, 7)]


def pooled(folder: Path, mode: str, *further: str, **settings: Any) -> Path:
    """A tiny encoder with the files that say how its embedding is made."""
    tiny.save(tiny.model("bert-base"), folder)
    kinds = ("Transformer", "Pooling", *further)
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"x.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    written = settings or {"embedding_dimension": 48, "pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(written))
    return folder


def embedded(folder: Path) -> Any:
    tokenizer = tiny.tokenizer()
    rows = Dataset.from_dict(dict(tokenizer(TEXTS)))
    return quality.embeddings(headprune.from_pretrained(folder), rows, tokenizer, batch_size=3)


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers
@pytest.mark.parametrize("mode", MODES)
def test_embeddings_are_those_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Pooling, Transformer

    folder = pooled(tmp_path / "model", mode)
    words = Transformer(str(folder))
    model = library.SentenceTransformer(modules=[words, Pooling(48, pooling_mode=mode)])
    wanted = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embedded(folder), wanted, atol=1e-5)
    # the square root of the length changes no direction
    other = pooled(tmp_path / "other", "cls" if mode != "cls" else "mean")
    assert np.abs(embedded(other) - wanted).max() > 1e-3


@pytest.mark.parametrize("mode", OLD)
def test_older_files_say_it_by_flags(mode: str, tmp_path: Path) -> None:
    flags = {f"pooling_mode_{name}": name == OLD[mode] for name in OLD.values()}
    folder = pooled(tmp_path, mode, "Normalize", word_embedding_dimension=48, **flags)
    assert pooling_of(headprune.from_pretrained(folder)) == mode


def test_other_embeddings_are_refused(tmp_path: Path) -> None:
    for number, (mode, further, why) in enumerate(
        [
            ("weightedmean", (), "made by 'weightedmean'"),
            (["cls", "mean"], (), "made by cls and mean"),
            ("mean", ("Dense",), "made by 'Dense'"),
        ]
    ):
        folder = pooled(tmp_path / str(number), "", *further, pooling_mode=mode)
        with pytest.raises(FamilyError, match=why):
            embedded(folder)
    (folder / "modules.json").write_text("[{")
    with pytest.raises(CheckpointError, match=r"'modules.json' of .* cannot be read"):
        embedded(folder)


def test_healing_looks_at_the_tokens_that_the_embedding_is_made_of(tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(5, 21).reshape(2, 8)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 6:] = 0
    for mode, places in (("cls", [0, 0]), ("lasttoken", [7, 5])):
        model = headprune.from_pretrained(pooled(tmp_path / mode, mode))
        with torch.no_grad():
            wanted = model(**batch)
            model.encoder.layer[1].output.dense.weight[:3].mul_(-2)
            got = model(**batch)
        seen, aim = (x.last_hidden_state[[0, 1], places] for x in (got, wanted))
        found = divergence(got, wanted, batch, head_of(model))
        torch.testing.assert_close(found, (seen - aim).square().sum() / aim.square().sum())
        every = divergence(got, wanted, batch, head_of(tiny.model("bert-base")))
        assert not torch.allclose(found, every)


def test_a_result_keeps_its_pooling(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "model", "cls")
    plan = classes.plan_of_one_unit(headprune.from_pretrained(folder), tmp_path / "plan.json")
    headprune.prune(folder, tmp_path / "cut", plan=plan)
    assert pooling_of(headprune.from_pretrained(tmp_path / "cut")) == "cls"
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (folder / name).read_bytes()
