"""Files that were damaged or tampered with are refused in a sentence, and do no harm."""

import shutil
from pathlib import Path

import pytest
import torch

import headprune
from headprune.config import ScoreConfig
from headprune.errors import CheckpointError, HeadpruneError, PlanError
from headprune.evidence.score import score
from headprune.io.markup import sentence
from headprune.model import probes
from headprune.model.attention import attention_of, identity
from headprune.model.loading import load_config, load_tokenizer
from headprune.model.open import open_model
from headprune.model.reading import damage_is
from headprune.model.skeleton import without_weights
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.result.preview import preview
from headprune.result.prune import prune
from headprune.runtime import modeling_headprune
from headprune.schemas.gates import GatesMetadata, write_gates
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import AttentionPlan, Plan, read_plan
from headprune.tensors.units import Unit, members
from tests import tiny
from tests.cutting import uneven_plan
from tests.damage import edit, in_shards, of

LAYER = "model.layers.{}.self_attn"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny Llama, and two results made of it: an uneven one, and a plain one."""
    root = tmp_path_factory.mktemp("made")
    model = tiny.model("llama-gqa")
    folder = tiny.save(model, root / "model")
    keep = {a.path: (0, 1, 4, 5) for a in attention_of(model)}
    parts = {p: AttentionPlan(query_heads=6, kv_heads=3, keep=k) for p, k in keep.items()}
    plain = Plan(unit=Unit.KV_GROUP, attentions=parts)
    return {
        "model": folder,
        "uneven": prune(folder, root / "uneven", CutRequest(plan=uneven_plan(model))).output,
        "plain": prune(folder, root / "plain", CutRequest(plan=plain)).output,
    }


@pytest.fixture
def model(made, tmp_path):
    """A copy of the Llama, to be damaged."""
    return Path(shutil.copytree(made["model"], tmp_path / "model"))


@pytest.fixture
def uneven(made, tmp_path):
    """A copy of the uneven result, to be damaged."""
    return Path(shutil.copytree(made["uneven"], tmp_path / "uneven"))


def refusal(error, call):
    """What an error says, which is short and on one line."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


# Configs: what transformers would trip over


CONFIGS = {
    "a number for a class": ({"architectures": [[1.5]]}, "architectures.0: Input should be"),
    "a part of a module": ({"architectures": ["__class__"]}, "architectures"),
    "text for classes": ({"architectures": "LlamaModel"}, "architectures: Input should be"),
    "no model type": ({"model_type": ["llama"]}, "model_type: Input should be"),
    "code": ({"auto_map": ["x"]}, "auto_map: Input should be"),
    "weights elsewhere": ({"transformers_weights": "../x.safetensors"}, "in its own folder"),
    "a pickle": ({"transformers_weights": "adapter_model.bin"}, "is no safetensors file"),
    "a type": ({"vocab_size": "many"}, "could not read its config"),
    "an object": ({"rope_parameters": [1]}, "config"),
    "an activation": ({"hidden_act": "none"}, "does not load as LlamaForCausalLM"),
    "a division": ({"num_attention_heads": 0}, "config"),
    "negative": ({"hidden_size": -48, "head_dim": None}, "config"),
    "windows of no size": ({"layer_types": ["sliding_attention"] * 4}, "sliding_window no size"),
    "packed": ({"quantization_config": {"quant_method": "gptq"}}, "load"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_damaged_config_is_refused_before_anything_is_built(case, model):
    changes, message = CONFIGS[case]
    edit(model / "config.json", lambda config: config.update(changes))
    assert message in refusal(CheckpointError, lambda: headprune.from_pretrained(model))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"model_type": "llama", "x": ' + '{"x":' * 900 + "1" + "}" * 901),
        ("config.json", '{"vocab_size": ' + "9" * 5_000 + "}"),
        ("config.json", '{"rope_theta": NaN}'),
        ("generation_config.json", "[1]"),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"max_length": {}, "pad_token_id": "x", "cache_config": 3}'),
    ],
    ids=lambda text: text[:24],
)
def test_files_that_hold_no_settings(name, text, model):
    (model / name).write_text(text)
    assert str(model) in refusal(CheckpointError, lambda: headprune.from_pretrained(model))


TOKENIZERS = [
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"model_max_length": "512"}'),
    ("tokenizer_config.json", '{"tokenizer_class": 3}'),
    ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedModel"}'),
    ("tokenizer.json", "{}"),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "WordLevel", "vocab": 3}}'),
    ("tokenizer.json", "\udcff"),
]


@pytest.mark.parametrize(("name", "text"), TOKENIZERS)
def test_a_damaged_tokenizer(name, text, model):
    (model / name).write_text(text, errors="surrogateescape")
    assert str(model) in refusal(CheckpointError, lambda: load_tokenizer(model))


def test_only_what_a_library_raises_is_taken_for_damage():
    panic = type("PanicException", (BaseException,), {})  # what Rust's libraries raise

    def library(error):
        with damage_is(lambda why: f"It is damaged: {why}"):
            raise error

    assert refusal(CheckpointError, lambda: library(KeyError("x"))).endswith("KeyError: 'x'")
    assert "at lib.rs" in refusal(CheckpointError, lambda: library(panic("at lib.rs")))
    failed = torch.AcceleratorError("CUDA error: unspecified launch failure")
    for error in (KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError(), failed):
        with pytest.raises(type(error)):
            library(error)
    config = tiny.config("llama-gqa")
    with pytest.raises(AttributeError), damage_is(lambda why: why):  # headprune's own bug
        sentence(None)  # type: ignore[arg-type]
    assert without_weights(type(tiny.model("llama-gqa")), config).device.type == "meta"


def test_texts_that_are_too_short_for_a_proof(model, tmp_path):
    edit(model / "config.json", lambda config: config.update(max_position_embeddings=6))
    plan = uneven_plan(headprune.from_pretrained(model))
    text = refusal(HeadpruneError, lambda: prune(model, tmp_path / "out", CutRequest(plan=plan)))
    assert "end after 6 tokens (max_position_embeddings)" in text


# Weights: the index


def shard_names(index, name):
    index["weight_map"]["model.norm.weight"] = name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: shard_names(i, "../model/model.safetensors"), "in its own folder"),
        (lambda i: shard_names(i, "model.bin"), "'model.bin' is no safetensors file"),
        (lambda i: shard_names(i, "none.safetensors"), "'none.safetensors', which are not beside"),
        (lambda i: shard_names(i, 3), "weight_map"),
        (lambda i: i.update(weight_map=[]), "weight_map"),
        (lambda i: i.update(weight_map={}), "weight_map"),
        (lambda i: i.pop("metadata"), "metadata: Field required"),
        (lambda i: i.clear(), "metadata: Field required"),
    ],
    ids=["outside", "pickle", "missing", "number", "list", "empty", "no metadata", "nothing"],
)
def test_an_index_names_safetensors_beside_it(change, message, model):
    index = in_shards(model)
    headprune.from_pretrained(model)  # it was fine before
    edit(index, change)
    assert message in refusal(CheckpointError, lambda: headprune.from_pretrained(model))


# The layout in config.json, which lies beside a manifest or not


@pytest.mark.parametrize("number", [[1], {"a": 1}, "x"])
def test_a_layers_own_config_that_is_damaged(number, uneven):
    edit(
        uneven / "config.json",
        lambda c: c["per_layer_config"]["1"].update(num_attention_heads=number),
    )
    text = refusal(CheckpointError, lambda: open_model(uneven).net)
    assert "could not read its config" in text and "num_attention_heads" in text


LAYOUTS = {
    "twice": ({"query_heads": [0, 0, 4, 5]}, "names a head twice"),
    "negative": ({"query_heads": [-1, 1, 4, 5]}, "greater than or equal to 0"),
    "truth": ({"query_heads": [True, 0, 4, 5]}, "should be a valid integer"),
    "text": ({"kv_heads": ["0", "2"]}, "should be a valid integer"),
    "a list": ({"kv_heads": [[0], [2]]}, "should be a valid integer"),
    "no list": ({"kv_heads": 2}, "should be a valid tuple"),
    "missing": ({"kv_heads": None}, "should be a valid tuple"),
    "short": ({"group_sizes": [2]}, "do not make groups of 2"),
    "small": ({"group_sizes": [1, 1]}, "do not make groups of 1, 1"),
    "long": ({"group_sizes": [2, 1, 1]}, "do not make groups of 2, 1, 1"),
    "negative size": ({"group_sizes": [5, -1]}, "greater than or equal to 0"),
    "empty group": ({"group_sizes": [4, 0]}, "do not make groups of 4, 0"),
    "text sizes": ({"group_sizes": ["2", "2"]}, "should be a valid integer"),
    "uneven": ({"query_heads": [0, 1, 4]}, "3 query heads and 2 KV heads do not make groups"),
    "foreign": ({"heads": [1]}, "not permitted"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_damaged_layout(case, uneven):
    change, message = LAYOUTS[case]
    path = LAYER.format(0)
    edit(uneven / "config.json", lambda c: c["headprune"]["layout"][path].update(change))
    text = refusal(CheckpointError, lambda: headprune.from_pretrained(uneven))
    assert message in text
    assert path in text
    # where headprune is not installed, the runtime refuses the same
    config = load_config(uneven)
    with pytest.raises(ValueError, match=r"layers.0.self_attn"):
        modeling_headprune.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "change",
    [{"kv_heads": [2, 0]}, {"group_sizes": [3, 1]}, {"query_heads": [0, 1, 4, 99]}],
    ids=["order", "sizes", "another"],
)
def test_a_layout_that_is_not_the_manifests(change, uneven):
    edit(uneven / "config.json", lambda c: c["headprune"]["layout"][LAYER.format(0)].update(change))
    text = refusal(CheckpointError, lambda: headprune.from_pretrained(uneven))
    assert "describe other heads of 'model.layers.0.self_attn'" in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (LAYER.format(0), "12 query_heads of 'model.layers.0.self_attn', which has 6"),
        (LAYER.format(9), "modules that LlamaForCausalLM does not have: layers.9.self_attn"),
    ],
)
def test_a_layout_that_the_model_has_no_place_for(path, message, uneven):
    (uneven / "headprune.json").unlink()
    headprune.from_pretrained(uneven)
    heads = {"query_heads": list(range(12)), "kv_heads": [0, 1]}
    edit(uneven / "config.json", lambda c: c["headprune"]["layout"].update({path: heads}))
    assert message in refusal(CheckpointError, lambda: headprune.from_pretrained(uneven))


@pytest.mark.parametrize("row", [{"forward": "kv_heads"}, {"__class__": "kv_heads"}, [], None])
def test_the_row_of_the_family_is_headprunes_own(row, uneven):
    wanted = headprune.from_pretrained(uneven)
    inputs = probes.probe_inputs(wanted)
    edit(uneven / "config.json", lambda c: c["headprune"]["family"].update(follows=row))
    got = headprune.from_pretrained(uneven)
    assert equivalence.difference(probes.probe(wanted, inputs), probes.probe(got, inputs)) == 0
    with pytest.raises(ValueError, match=r"damaged: 'follows'|is no number of heads"):
        modeling_headprune.LlamaForCausalLM(load_config(uneven))


# The manifest


MANIFESTS = {
    "digits": (lambda m: m.update(parameters=[1, 2, 3]), "parameters"),
    "schema": (lambda m: m.update(schema_version={}), "schema_version"),
    "proof": (lambda m: m.update(proof=[]), "proof"),
    "no proof": (lambda m: m["proof"].clear(), "proof.gated_vs_reloaded: Field required"),
    "dtype": (lambda m: m["proof"].update(dtype="int8"), "proof.dtype"),
    "tolerance": (lambda m: m["proof"].update(tolerance="x"), "proof.tolerance"),
    "probe": (lambda m: m.update(probe=3), "probe"),
    "no outputs": (lambda m: m["probe"].update(outputs={}), "probe.outputs"),
    "seed": (lambda m: m["probe"].update(seed=-1), "probe.seed"),
    "digest": (lambda m: m["probe"].update(inputs_sha256="x"), "probe.inputs_sha256"),
    "positions": (lambda m: logits(m).update(positions=[10**9], values=[0.0]), "position 10000000"),
    "values": (lambda m: logits(m).update(values=[0.0]), "1 values for 256 positions"),
    "text": (lambda m: logits(m).update(values=["x"]), "values.0"),
    "none": (lambda m: logits(m).update(values=[], positions=[]), "positions"),
    "files": (lambda m: m.update(files={"../x": "0" * 64}), "no file that it can vouch for"),
    "hash": (lambda m: m["files"].update({"config.json": "x"}), "files.config.json"),
    "lineage": (lambda m: m.update(lineage=[{"source": {"name": 3}}]), "lineage.0.id: Field"),
    "layout": (lambda m: m.update(layout={"x": {"query_heads": [0]}}), "layout.x.kv_heads"),
}


def logits(manifest):
    return manifest["probe"]["outputs"]["logits"]


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest(case, uneven):
    change, message = MANIFESTS[case]
    edit(uneven / "headprune.json", change)
    assert message in refusal(CheckpointError, lambda: read_manifest(uneven))


def test_a_manifest_of_other_weights(made, tmp_path):
    plain = Path(shutil.copytree(made["plain"], tmp_path / "plain"))
    heads = {"query_heads": [0, 1], "kv_heads": [0]}
    edit(plain / "headprune.json", lambda m: m["layout"].update({LAYER.format(2): heads}))
    text = refusal(CheckpointError, lambda: headprune.from_pretrained(plain))
    assert "2 query and 1 KV heads in 'model.layers.2.self_attn', and the weights hold 4" in text


def test_ids_are_told_to_another_head_as_well(made):
    base = headprune.from_pretrained(made["plain"], auto_class="AutoModel")
    assert {a.query_ids for a in attention_of(base)} == {(0, 1, 4, 5)}


# Gates


@pytest.fixture
def gates(model, tmp_path):
    """Gates as train-gates writes them, for the KV groups of the tiny Llama."""
    net = headprune.from_pretrained(model)
    attentions = attention_of(net)
    units = [len(u) for a in attentions for u in members(Unit.KV_GROUP, a.group_sizes)]
    kept = torch.arange(len(units)) % 3 != 0
    metadata = GatesMetadata(
        headprune_version="0",
        model=identity(net, model),
        unit=Unit.KV_GROUP,
        temperature=2 / 3,
        modules=tuple(a.path for a in attentions),
        heads=tuple(a.query_ids for a in attentions),
        group_sizes=tuple(a.group_sizes for a in attentions),
        query_heads=sum(units),
        kept_heads=int((torch.tensor(units) * kept).sum()),
        steps=2,
        data="text.txt",
        final_loss=2.0,
        trained_weights=True,
        seed=0,
    )
    tensors = {"log_alpha": torch.arange(len(units)).float(), "kept": kept}
    tensors["course"] = torch.rand(21, len(units))
    weights = {"model.norm.weight": torch.ones(48), "lm_head.weight": torch.ones(tiny.VOCAB, 48)}
    (tmp_path / "gates").mkdir()
    write_gates(tmp_path / "gates", metadata, tensors, weights)
    return tmp_path / "gates"


GATES = {
    "unit": (of("gates.json", lambda m: m.update(unit="head")), "not as they were written"),
    "order": (of("gates.json", lambda m: m["modules"].reverse()), "not as they were written"),
    "no heads": (of("gates.json", lambda m: m.pop("heads")), "heads: Field required"),
    "no id": (of("gates.json", lambda m: m.pop("id")), "not as they were written"),
    "truth": (of("gates.json", lambda m: m.update(kept_heads=True)), "kept_heads"),
    "nan": (
        of("gates.safetensors", lambda t: t["log_alpha"].fill_(float("nan"))),
        "not as they were written",
    ),
    **{
        f"{name} is called {other}": (
            of("gates.safetensors", lambda t, n=name, o=other: t.update({o: t.pop(n)})),
            "not as they were written",
        )
        for name in ("log_alpha", "course", "kept")
        for other in ("metadata", "weights", "log_alpha_", "")
    },
    "one more tensor": (
        of("gates.safetensors", lambda t: t.update(more=t["kept"].clone())),
        "not as they were written",
    ),
    "another shape": (
        of("gates.safetensors", lambda t: t.update(kept=t["kept"][:1])),
        "not as they were written",
    ),
    "a renamed weight": (
        of("weights.safetensors", lambda t: t.update(other=t.pop("lm_head.weight"))),
        "not as they were written",
    ),
    "bytes": (lambda f: (f / "gates.safetensors").write_bytes(b"x" * 9), "cannot be read"),
    "no bytes": (lambda f: (f / "gates.safetensors").write_bytes(b""), "cannot be read"),
    "weights gone": (lambda f: (f / "weights.safetensors").unlink(), "cannot be read"),
    "a weight gone": (
        of("weights.safetensors", lambda t: t.pop("lm_head.weight")),
        "not as they were written",
    ),
    "a loss": (of("gates.json", lambda m: m.update(final_loss=None)), "final_loss"),
    "schema": (of("gates.json", lambda m: m.update(schema_version=2)), "Upgrade headprune"),
}


def test_sound_gates_are_taken(gates, model):
    cut = preview(model, CutRequest(gates=gates)).plan
    assert (cut.kept_heads, cut.query_heads) == (16, 24)


@pytest.mark.parametrize("case", GATES)
def test_gates_that_do_not_fit(case, gates, model):
    damage, message = GATES[case]
    damage(gates)
    assert message in refusal(HeadpruneError, lambda: preview(model, CutRequest(gates=gates)))


# Scores


@pytest.fixture
def scores(model, tmp_path):
    score(model, tmp_path / "scores", ScoreConfig(criterion=["magnitude"]))
    return tmp_path / "scores"


SCORES = {
    "sizes": (
        of("scores.json", lambda m: m["group_sizes"][0].append(1)),
        "not as they were written",
    ),
    "negative": (of("scores.json", lambda m: m["heads"][1].append(-1)), "heads.1"),
    "tensors": (lambda f: (f / "scores.safetensors").unlink(), "cannot be read"),
    "other tensors": (
        of("scores.safetensors", lambda t: t["magnitude"].fill_(float("nan"))),
        "not as they were written",
    ),
    "a renamed tensor": (
        of("scores.safetensors", lambda t: t.update(other=t.pop("magnitude"))),
        "not as they were written",
    ),
    "another shape": (
        of("scores.safetensors", lambda t: t.update(magnitude=t["magnitude"][:1])),
        "not as they were written",
    ),
    "depth": (lambda f: (f / "scores.json").write_text("[" * 100_000), "nested too deeply"),
}


@pytest.mark.parametrize("case", SCORES)
def test_scores_that_do_not_fit(case, scores, model):
    damage, message = SCORES[case]
    preview(model, CutRequest(scores=scores, keep=0.5))  # it was fine before
    damage(scores)
    assert message in refusal(
        HeadpruneError, lambda: preview(model, CutRequest(scores=scores, keep=0.5))
    )


# Plans


FULL = (
    '{{"unit": "head", "attentions": {{"a": {{"query_heads": 2, "kv_heads": 2, "keep": {keep}}}}}}}'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FULL.format(keep="[[0], 1]"), "attentions.a.keep.0: Input should be a valid integer"),
        (FULL.format(keep="[true]"), "attentions.a.keep.0: Input should be a valid integer"),
        (FULL.format(keep='["1"]'), "attentions.a.keep.0: Input should be a valid integer"),
        (FULL.format(keep='[0], "scale": [1e999]'), "is not finite"),
        (FULL.format(keep='[0], "groups": [[true], [0]]'), "attentions.a.groups.0.0"),
        (FULL.format(keep="[" + "9" * 5_000 + "]"), "is not readable as JSON"),
        (FULL.format(keep="[" * 50_000), "nested too deeply"),
        ('{"attentions": {"a": {}, "a": {}}}', "'a' is given twice"),
        ('{"a": [0], "a": [1]}', "'a' is given twice"),
        ('{"a": [[0]]}', "is no plan"),
        ('{"a": [true]}', "is no plan"),
        ('{"a": {"step": []}}', "is no plan"),
        ('{"schema_version": {}, "attentions": {}}', "schema_version"),
        ('{"schema_version": 2, "attentions": {}}', "Upgrade headprune"),
        ('"x"', "is no plan"),
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_plan(text, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert message in refusal(PlanError, lambda: read_plan(path, {"a": ((0, 1), 2)}))


def test_a_plan_with_a_byte_order_mark(tmp_path):
    path, text = tmp_path / "plan.json", FULL.format(keep="[1]")
    path.write_text(text)
    plain = read_plan(path, {"a": ((0, 1), 2)})
    path.write_text(text, encoding="utf-8-sig")
    assert read_plan(path, {"a": ((0, 1), 2)}) == plain


@pytest.mark.parametrize("pruned", [[[0]], {"0": [True]}, {"0": ["1"]}, {"0": 3}, {"0": [[1]]}, 7])
def test_damaged_entries_of_transformers_4(pruned, model):
    edit(model / "config.json", lambda config: config.update(pruned_heads=pruned))
    text = refusal(CheckpointError, lambda: headprune.from_pretrained(model))
    assert "no map from layer numbers" in text
