"""Embeddings are made as the files of sentence-transformers beside a model say."""

import json

import numpy as np
import pytest
import torch

import headprune
from headprune.config import DataConfig, EvaluateConfig
from headprune.errors import CheckpointError, FamilyError, HeadpruneError
from headprune.evaluation import quality
from headprune.evaluation.loaded import load
from headprune.model.embedding import head_of, read_as_embedded, recipe_of
from headprune.model.losses import divergence
from tests import classes, tiny

PACKAGE = "sentence_transformers.models"
MODES = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
OLD = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
TEXTS = [tiny.text(n, seed=n).capitalize() for n in (3, 31, 12, 7)]
PROMPTS = {"prompts": {"query": "w3 w4 w5 ", "document": ""}, "default_prompt_name": "query"}
OF_POOLING, OF_ALL = "1_Pooling/config.json", "config_sentence_transformers.json"
SETTINGS = {
    **{mode: {OF_POOLING: {"pooling_mode": mode}} for mode in MODES},
    "several": {OF_POOLING: {"pooling_mode": ["cls", "mean", "mean_sqrt_len_tokens"]}},
    "flags": {OF_POOLING: {f"pooling_mode_{name}": True for name in OLD.values()}},
    "max_seq_length": {"sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": False}},
    "an old name": {"sentence_roberta_config.json": {"max_seq_length": 6}},
    "another": {"sentence_xlm-roberta_config.json": {"max_seq_length": 6}},
    "longer than the tokenizer's": {
        "sentence_bert_config.json": {"max_seq_length": 16},
        "tokenizer_config.json": {"model_max_length": 4},
    },
    "do_lower_case": {"sentence_distilbert_config.json": {"do_lower_case": True}},
    "version 5": {
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": "token_embeddings",
            "processor_kwargs": {"model_max_length": 5},
        }
    },
    "processing": {
        "sentence_bert_config.json": {
            "processing_kwargs": {"text": {"max_length": 9, "truncation": True}}
        }
    },
    "prompt": {OF_ALL: PROMPTS},
    "prompt and length": {
        OF_ALL: PROMPTS,
        "sentence_bert_config.json": {"max_seq_length": 8},
        OF_POOLING: {"pooling_mode": "weightedmean", "include_prompt": True},
    },
    "prompts without a default": {OF_ALL: {**PROMPTS, "default_prompt_name": None}},
    "truncate_dim": {OF_ALL: {"truncate_dim": 7, "similarity_fn_name": "cosine"}},
}


def described(folder, files, *further):
    """A tiny encoder with files of sentence-transformers."""
    tiny.save(tiny.model("bert-base"), folder)
    kinds = ("Transformer", "Pooling", *further)
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"{PACKAGE}.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    for name, settings in {OF_POOLING: {}, **files}.items():
        size = {"word_embedding_dimension": 48} if name == OF_POOLING else {}
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else size
        (folder / name).write_text(json.dumps(before | settings))
    return folder


def embedded(folder, texts=TEXTS):
    """Embeddings as ``evaluate`` makes them."""
    file = folder.parent / f"{folder.name}.jsonl"
    rows = zip(texts[::2], texts[1::2], (0, 1), strict=True)
    lines = (json.dumps({"a": a, "b": b, "score": score}) for a, b, score in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    data = DataConfig(source=str(file), text_column="a,b", label_column="score")
    loaded = load(folder, data, EvaluateConfig(seq_len=64))
    return quality.embeddings(
        quality.Pass(loaded.nets[0], loaded.domains[0].rows, loaded.tokenizer, 3)
    )


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers, and of cut sequences
@pytest.mark.parametrize("name", SETTINGS)
def test_embeddings_are_those_of_sentence_transformers(name, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = described(tmp_path / "model", SETTINGS[name], "Normalize")
    model = library.SentenceTransformer(str(folder), device="cpu")
    wanted = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embedded(folder), wanted, atol=1e-5)
    if name not in ("mean", "mean_sqrt_len_tokens", "prompts without a default"):
        plain = described(tmp_path / "plain", {})
        found = embedded(plain)
        assert found.shape != wanted.shape or np.abs(found - wanted).max() > 1e-3


@pytest.mark.parametrize("mode", OLD)
def test_older_files_say_it_by_flags(mode, tmp_path):
    flags = {f"pooling_mode_{name}": name == OLD[mode] for name in OLD.values()}
    folder = described(tmp_path, {OF_POOLING: flags}, "Normalize")
    assert recipe_of(headprune.from_pretrained(folder)).pooling == (mode,)


@pytest.mark.parametrize(
    ("further", "files", "why"),
    [
        (("Dense",), {}, "made by 'Dense'"),
        ((), {OF_POOLING: {"pooling_mode": "attention"}}, "made by 'attention'"),
        (
            (),
            {OF_ALL: PROMPTS, OF_POOLING: {"include_prompt": False}},
            "a pooling without its prompt",
        ),
        ((), {OF_ALL: {"model_type": "SparseEncoder"}}, "a SparseEncoder"),
        ((), {OF_ALL: {"similarity_fn_name": "dot"}}, "compares embeddings by dot"),
        ((), {"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "transformer_task"),
        (
            (),
            {"sentence_bert_config.json": {"processing_kwargs": {"text": {"truncation": False}}}},
            "truncation False",
        ),
        ((), {"sentence_bert_config.json": {"config_args": {"is_decoder": True}}}, "is_decoder"),
        ((), {OF_POOLING: {"pooling_mode_entmax": True}}, "made by pooling_mode_entmax True"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(further, files, why, tmp_path):
    with pytest.raises(FamilyError, match=why):
        embedded(described(tmp_path / "model", files, *further))


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers
@pytest.mark.parametrize(
    "order", [("Pooling", "Transformer"), ("Normalize", "Transformer", "Pooling")]
)
def test_modules_in_an_order_that_the_library_does_not_take(order, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = described(tmp_path / "model", {}, "Normalize")
    file = folder / "modules.json"
    by_kind = {each["type"].rpartition(".")[2]: each for each in json.loads(file.read_text())}
    file.write_text(json.dumps([by_kind[kind] for kind in order]))
    with pytest.raises((KeyError, TypeError, AttributeError, ValueError)):
        library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with pytest.raises(FamilyError, match=f"made by {', '.join(order)} in this order"):
        embedded(folder)


def test_a_folder_is_read_anew(tmp_path, monkeypatch):
    folders = {
        mode: described(tmp_path / mode, {OF_POOLING: {"pooling_mode": mode}})
        for mode in ("cls", "max")
    }
    models = {}
    for mode, folder in folders.items():
        monkeypatch.chdir(folder)
        models[mode] = headprune.from_pretrained(".")
        assert recipe_of(models[mode]).pooling == (mode,)
    assert recipe_of(models["cls"]).pooling == ("cls",)  # as when it was loaded
    (folders["max"] / OF_POOLING).write_text(json.dumps({"pooling_mode": "lasttoken"}))
    (folders["max"] / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    assert recipe_of(headprune.from_pretrained(folders["max"])).pooling == ("lasttoken",)
    assert read_as_embedded(tiny.tokenizer(), folders["max"]).model_max_length == 6


def test_damaged_files_are_refused(tmp_path):
    folder = described(tmp_path / "model", {OF_ALL: {"default_prompt_name": "absent"}})
    with pytest.raises(CheckpointError, match="settings beside it that are none"):
        embedded(folder)
    folder = described(tmp_path / "other", {})
    (folder / "modules.json").write_text("[{")
    with pytest.raises(CheckpointError, match=r"'modules.json' of .* cannot be read"):
        embedded(folder)


def test_healing_looks_at_the_tokens_that_the_embedding_is_made_of(tmp_path):
    batch = {"input_ids": torch.arange(5, 21).reshape(2, 8)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 6:] = 0
    for mode, places in (("cls", [0, 0]), ("lasttoken", [7, 5])):
        model = headprune.from_pretrained(
            described(tmp_path / mode, {OF_POOLING: {"pooling_mode": mode}})
        )
        with torch.no_grad():
            wanted = model(**batch)
            model.encoder.layer[1].output.dense.weight[:3].mul_(-2)
            got = model(**batch)
        seen, aim = (x.last_hidden_state[[0, 1], places] for x in (got, wanted))
        found = divergence(got, wanted, batch, head_of(model))
        torch.testing.assert_close(found, (seen - aim).square().sum() / aim.square().sum())
        every = divergence(got, wanted, batch, head_of(tiny.model("bert-base")))
        assert not torch.allclose(found, every)


def test_a_result_keeps_its_pooling(tmp_path):
    folder = described(tmp_path / "model", {OF_POOLING: {"pooling_mode": "cls"}})
    plan = classes.plan_of_one_unit(headprune.from_pretrained(folder), tmp_path / "plan.json")
    headprune.prune(folder, tmp_path / "cut", plan=plan)
    assert recipe_of(headprune.from_pretrained(tmp_path / "cut")).pooling == ("cls",)
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (folder / name).read_bytes()


def test_a_model_in_memory_keeps_its_settings(tmp_path):
    files = {OF_POOLING: {"pooling_mode": "cls"}, OF_ALL: PROMPTS}
    folder = described(tmp_path / "model", files)
    net = headprune.from_pretrained(folder)
    plan = classes.plan_of_one_unit(net, tmp_path / "plan.json")
    cut = headprune.prune(net, tmp_path / "cut", plan=plan).model
    assert (
        recipe_of(cut)
        == recipe_of(headprune.from_pretrained(folder))
        != recipe_of(tiny.model("bert-base"))
    )


def test_embeddings_of_other_lengths_are_refused_before_they_are_made(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    described(ours, {OF_ALL: {"truncate_dim": 7}})
    described(theirs, {OF_ALL: {"truncate_dim": 9}})
    (tmp_path / "rows.txt").write_text("\n".join(TEXTS))
    with pytest.raises(HeadpruneError, match="embeddings of 7 numbers.*embeddings of 9 numbers"):
        headprune.evaluate(ours, data=tmp_path / "rows.txt", against=theirs)
