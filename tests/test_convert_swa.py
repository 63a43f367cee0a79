"""convert-swa: which KV heads get a window, what is written, and what is refused."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import headprune
from headprune.config import DataConfig, HealConfig, SwaConfig, WindowConfig
from headprune.context import Context
from headprune.distillation.heal import heal
from headprune.distillation.pair import read_pair
from headprune.errors import CheckpointError, DataError, HeadpruneError, PlanError
from headprune.evidence.windows import window_scores
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache, model_cost
from headprune.model.open import open_model
from headprune.model.windows import no_windows
from headprune.planning.windows import plan_windows
from headprune.result.convert_swa import convert_swa
from headprune.result.verify import verify
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import read_plan
from headprune.schemas.records import Window
from headprune.schemas.scores import write_scores
from tests import tiny

SMALL = {"window": 8, "sinks": 2, "seq_len": 64, "calibration_tokens": 512}


@pytest.fixture
def folder(tmp_path):
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(3000))
    return tmp_path


def converted(folder, name="out", **settings):
    text = DataConfig(source=str(folder / "text.txt"))
    config = SwaConfig(**{**SMALL, **settings})
    return convert_swa(str(folder / "model"), folder / name, config, text)


def test_half_of_the_heads_by_default(folder):
    """Six of twelve: the result loads without headprune, and its record says what it is."""
    result = converted(folder)
    assert result.manifest.done.heads == 6
    assert result.manifest.done.window == Window(size=8, sinks=2)
    assert set(result.manifest.proof.windows) >= {"window shorter by one", "no sinks"}
    plain = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)
    ids = torch.randint(5, tiny.VOCAB, (2, 40))
    net = headprune.from_pretrained(folder / "out")
    with torch.no_grad():
        original = headprune.from_pretrained(folder / "model")
        assert plain(ids).logits.equal(net(ids).logits)
        assert (original(ids).logits - net(ids).logits).abs().max() > 1e-3
    assert sum(a.window_heads for a in attention_of(net)) == 6
    assert verify(folder / "out", folder / "model").passed


def test_the_heads_with_the_lowest_scores(folder):
    model = open_model(folder / "model")
    data = DataConfig(source=str(folder / "text.txt"))
    scores = window_scores(model, WindowConfig(**SMALL), data)
    values = scores.scores["window"].view(4, 3)
    for keep, full in ((0.0, 0), (0.01, 1), (5, 5), (0.25, 3), (11, 11)):
        plan = plan_windows(model, scores, keep)
        near = [part.window for part in plan.attentions.values()]
        lowest = values.flatten().argsort()[: 12 - full].tolist()
        assert [(layer, head) for layer, heads in enumerate(near) for head in heads] == sorted(
            divmod(each, 3) for each in lowest
        )
    write_scores(folder / "scores", scores)
    beyond = SwaConfig(max_kv_bytes=10**6, context_tokens=129)
    with pytest.raises(PlanError, match="take 128 at most"):
        convert_swa(folder / "model", folder / "a", beyond, scores=folder / "scores")
    again = convert_swa(folder / "model", folder / "a", SwaConfig(), scores=folder / "scores")
    assert again.plan.attentions == plan_windows(model, scores, 0.5).attentions
    assert again.manifest.evidence.id == scores.id


def test_layers(folder):
    plan = converted(folder, level="layer", keep_full=3).plan
    assert sorted(len(part.window) for part in plan.attentions.values()) == [0, 0, 0, 3]


@pytest.mark.parametrize("most", [11, 9, 4])
def test_a_budget_in_bytes(folder, most):
    """The most KV heads stay full that the bytes of a context allow."""
    size, near, context = 2 * 10 * 4, 10, 100
    bytes_of = {full: size * (full * context + (12 - full) * near) for full in range(13)}
    budget = bytes_of[most] + size
    result = converted(folder, max_kv_bytes=budget, context_tokens=context)
    cost = model_cost(headprune.from_pretrained(folder / "out"), context)
    assert cost.kv_cache_bytes == bytes_of[most] <= budget < bytes_of.get(most + 1, budget + 1)
    assert result.manifest.done.heads == 12 - most


def test_only_layers_with_a_whole_past(folder):
    """A hybrid's own windows stay; its full layers get others."""
    hybrid = tiny.model("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    tiny.save(hybrid, folder / "model")
    plan = converted(folder, keep_full=0.5).plan
    assert [len(part.window) for part in plan.attentions.values()][::2] == [0, 0]
    assert sum(len(part.window) for part in plan.attentions.values()) == 3


def test_a_window_as_wide_as_the_positions_hides_nothing(folder):
    """Phi-3 of 128k tokens has such windows."""
    wide = {"sliding_window": 4_096, "max_position_embeddings": 512, "eos_token_id": 2}
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 64}
    config = Phi3Config(
        vocab_size=tiny.VOCAB, hidden_size=48, num_hidden_layers=4, pad_token_id=0, **sizes, **wide
    )
    tiny.save(Phi3ForCausalLM(config).eval(), folder / "model")
    result = converted(folder, keep_full=0.5).model
    assert sum(attention.window_heads for attention in attention_of(result)) == 6
    ids = torch.randint(5, tiny.VOCAB, (1, 60))
    wanted = result.generate(ids, max_new_tokens=6, use_cache=False)
    assert result.generate(ids, max_new_tokens=6).equal(wanted)
    config.sliding_window = 30
    reasons = no_windows(Phi3ForCausalLM(config)).values()
    assert {*reasons} == {"it has a window already"}


def test_states_beside_keys_are_refused(folder):
    own = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 64}
    config = FalconH1Config(
        vocab_size=tiny.VOCAB, hidden_size=48, num_hidden_layers=2, head_dim=8, **sizes, **own
    )
    tiny.save(FalconH1ForCausalLM(config).eval(), folder / "model")
    with pytest.raises(PlanError, match="a layer of its cache holds a state beside keys"):
        converted(folder)


@pytest.mark.parametrize("tagged", [True, False])
def test_settings_without_an_end_stay(tagged, folder):
    """NVIDIA writes Infinity, and transformers a tag."""
    model = headprune.from_pretrained(folder / "model")
    model.config.time_step_limit = (0.0, float("inf"))
    tiny.save(model, folder / "model")
    file = folder / "model" / "config.json"
    if not tagged:
        assert '{\n      "__float__": "Infinity"\n    }' in file.read_text()
        plain = file.read_text().replace('{\n      "__float__": "Infinity"\n    }', "Infinity")
        file.write_text(plain)
    written = converted(folder).model.config
    assert [*written.time_step_limit] == [0, float("inf")]


def test_a_length_is_no_context(folder):
    with pytest.raises(HeadpruneError, match="not 8192.* is context_tokens"):
        headprune.convert_swa(folder / "model", folder / "out", context=8192)


def test_an_uneven_model_gets_windows(folder):
    """Heads are removed first, and windows come last."""
    plan = {path: [0, 1] for path in read_plan_of(folder / "model")[:2]}
    (folder / "cut.json").write_text(json.dumps(plan))
    headprune.prune(folder / "model", folder / "less", plan=folder / "cut.json")
    text = DataConfig(source=str(folder / "text.txt"))
    result = convert_swa(folder / "less", folder / "out", SwaConfig(**SMALL, keep_full=4), text)
    assert result.manifest.done.heads == 6
    assert [done.done.kind for done in result.manifest.steps] == ["pruning", "windowing"]
    with pytest.raises(PlanError, match="windows already"):
        convert_swa(folder / "out", folder / "more", SwaConfig(**SMALL), text)


def read_plan_of(folder):
    return [attention.path for attention in attention_of(headprune.from_pretrained(folder))]


def test_bfloat16(folder):
    tiny.save(tiny.model("llama-gqa", torch.bfloat16), folder / "model")
    assert converted(folder).manifest.dtype == "bfloat16"
    assert verify(folder / "out", folder / "model").passed


def test_healing(folder):
    """A model with windows is trained on texts longer than they are, and keeps them."""
    converted(folder, keep_full=0)
    text = DataConfig(source=str(folder / "text.txt"))
    config = HealConfig(steps=40, seq_len=32, optimizer="adamw", learning_rate=1e-4)
    healed = heal(folder / "out", folder / "model", text, folder / "healed", config)
    net = headprune.from_pretrained(folder / "healed")
    assert [a.window_heads for a in attention_of(net)] == [3] * 4
    assert attention_of(net)[0].window == (8, 2)
    assert healed.after < healed.before
    assert read_manifest(folder / "healed").proof.gated_vs_reloaded < 1e-4
    short = HealConfig(steps=3, seq_len=10)
    with pytest.raises(DataError, match="anything is lost to them. Give a --seq-len above 10"):
        heal(folder / "out", folder / "model", text, folder / "short", short)


@pytest.mark.parametrize("seq_len", [None, 16])
def test_windows_of_layers_are_healed_beyond_them(folder, seq_len):
    """As a plain config, too, whose attention modules do not name their window."""
    tiny.save(tiny.model("llama-gqa", attention_bias=False), folder / "model")
    settings = {"targets": ("anywhere",), "window": 16, "sinks": None, "keep_full": 0}
    converted(folder, **settings)
    text = DataConfig(source=str(folder / "text.txt"))
    config = HealConfig(steps=1, seq_len=seq_len, bf16=False)
    given = (folder / "out", folder / "model", text, config, Context())
    if seq_len is not None:
        with pytest.raises(DataError, match="sequences of 16 tokens end before anything is lost"):
            read_pair(*given)
        return
    pair = read_pair(*given)
    ids = torch.tensor(pair.rows[0]["input_ids"])[None]
    assert ids.shape[1] >= 32
    with torch.no_grad():
        student, teacher = (net(ids).logits[0] for net in (pair.model.net, pair.teacher))
    assert (student[16:] - teacher[16:]).abs().max() > 1e-3
    assert (student[:16] - teacher[:16]).abs().max() < 1e-5  # nothing is lost there
    own = KVCache.of(pair.model.net)
    assert own.lost_beyond(own) == 0  # windows that the teacher has, too


def test_little_text_is_cut_no_shorter_than_the_windows(folder):
    converted(folder, keep_full=0)
    (folder / "text.txt").write_text(tiny.text(250))
    text = DataConfig(source=str(folder / "text.txt"))
    pair = read_pair(folder / "out", folder / "model", text, HealConfig(steps=1), Context())
    assert len(pair.rows[0]["input_ids"]) == 2 * (8 + 2)


def test_a_budget_of_windows_of_layers_is_met_exactly(folder):
    tiny.save(tiny.model("llama-gqa", attention_bias=False), folder / "model")
    plain = {"level": "layer", "sinks": 0, "window": 8}
    sizes = converted(folder, "two", keep_full=2, **plain).manifest.kv_cache_bytes
    budget = {"max_kv_bytes": sizes[1], "context_tokens": 128}
    again = converted(
        folder, "again", **budget, **{**plain, "targets": ("anywhere",), "sinks": None}
    )
    assert again.manifest.done.heads == 6 and again.manifest.kv_cache_bytes == sizes
    less = {**budget, "max_kv_bytes": sizes[1] - 1}
    assert converted(folder, "less", **less, **plain).manifest.done.heads == 9


REFUSED = [
    ({"window": 126}, PlanError, "leaves nothing out of a context of 128 tokens"),
    ({"context_tokens": 10}, PlanError, "leaves nothing out of a context of 10 tokens"),
    ({"context_tokens": 129}, PlanError, "take 128 at most"),
    ({"keep_full": 1.0}, PlanError, "Nothing would get a window"),
    ({"keep_full": 1.5}, PlanError, "must lie between 0 and 1, not 1.5"),
    ({"keep_full": -0.5}, PlanError, "must lie between 0 and 1, not -0.5"),
    ({"keep_full": -1}, PlanError, "must not be negative"),
    ({"keep_full": 13}, PlanError, "the model has 12 KV heads with a whole past"),
    ({"keep_full": 5, "level": "layer"}, PlanError, "the model has 4 layers"),
    ({"max_kv_bytes": 10, "context_tokens": 100}, PlanError, "takes 9,600 bytes"),
    ({"seq_len": 9}, PlanError, "show nothing beyond a window of 8"),
]


@pytest.mark.parametrize(("settings", "kind", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_settings_that_do_not_fit(folder, settings, kind, said):
    with pytest.raises(kind, match=said):
        converted(folder, **settings)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("case", ["bert-mlm", "bloom", "gptj"])
def test_models_without_a_place_for_windows(folder, case):
    tiny.save(tiny.model(case), folder / "model")
    with pytest.raises(PlanError):
        converted(folder)
    assert not (folder / "out").exists()


def test_no_head_with_a_whole_past(folder):
    """It is allowed, and warned of."""
    warnings = converted(folder, keep_full=0).warnings
    assert any("No KV head keeps the whole past" in said for said in warnings)


def test_calls_that_do_not_fit(folder):
    call = {"model": folder / "model", "output": folder / "out"}
    for settings, said in (
        ({"max_kv_bytes": 10}, "give --context"),
        ({"max_kv_bytes": 10, "context_tokens": 50, "keep_full": 0.5}, "--keep-full or"),
        ({"heal_steps": 5}, "no effect without --data"),
        ({"scores": folder / "model"}, "no scores folder"),
        ({"scores": folder / "model", "window": 8}, "--window has no effect beside --scores"),
        ({"scores": folder / "model", "level": "layer"}, "--level has no effect beside --scores"),
        ({"scores": folder / "model", "context_tokens": 99}, "--context has no effect beside"),
    ):
        with pytest.raises(HeadpruneError, match=said):
            headprune.convert_swa(**call, **settings)
    assert not (folder / "out").exists()


def test_heads_are_removed_from_a_model_with_windows(folder):
    """A short plan names heads by id, which stand in another order now; windows stay."""
    converted(folder, keep_full=5)
    (folder / "cut.json").write_text(json.dumps({"model.layers.1.self_attn": [2, 3]}))
    headprune.prune(folder / "out", folder / "less", plan=folder / "cut.json")
    net = headprune.from_pretrained(folder / "less")
    before = attention_of(headprune.from_pretrained(folder / "out"))[1]
    after = attention_of(net)[1]
    kept = [head for head in before.kv_ids if head != 1]
    assert list(after.kv_ids) == kept
    assert after.window_heads == before.window_heads - (
        1 in before.kv_ids[3 - before.window_heads :]
    )
    with pytest.raises(PlanError, match="windows last"):
        headprune.convert_gqa(folder / "out", folder / "merged", kv_heads=1)


@pytest.mark.parametrize("content", [{"temperature": None, "eos_token_id": 3}, {}])
def test_generation_settings_stay(folder, content):
    (folder / "model" / "generation_config.json").write_text(json.dumps(content))
    converted(folder)
    written = json.loads((folder / "out" / "generation_config.json").read_text())
    assert written == content


def test_a_budget_counts_the_type_on_disk(folder):
    """12 heads of 10 + 10 numbers, 100 tokens, 2 bytes: the type of the result decides."""
    result = converted(folder, max_kv_bytes=40_000, context_tokens=100, out_dtype="bfloat16")
    cost = model_cost(headprune.from_pretrained(folder / "out"), 100)
    assert 36_000 < cost.kv_cache_bytes <= 40_000
    assert result.manifest.done.heads == 3


def test_exports_refuse_windows(folder):
    converted(folder)
    for target in ("gguf", "onnx", "vllm"):
        with pytest.raises(HeadpruneError, match="KV heads with windows"):
            headprune.export(folder / "out", folder / "exported", to=target)
    assert read_manifest(folder / "out").engines == ()


def test_a_plan_with_windows_is_cut(folder):
    """The plan of a result can be given to prune, by hand."""
    made = converted(folder)
    headprune.prune(folder / "model", folder / "again", plan=folder / "out" / "plan.json")
    one, two = (read_manifest(folder / name) for name in ("out", "again"))
    assert one.layout == two.layout
    assert read_plan(folder / "again" / "plan.json", {}).attentions == made.plan.attentions


def test_a_budget_of_heads_with_and_without_a_window(folder):
    converted(folder)
    text = str(folder / "text.txt")
    headprune.score(folder / "out", folder / "s", data=text, calibration_tokens=512, seq_len=32)
    with pytest.raises(PlanError, match="some KV heads have a window, and cost less than others"):
        headprune.prune(folder / "out", folder / "p", scores=folder / "s", max_kv_bytes=20_000)


def test_the_window_of_scores_counts(tmp_path):
    types = ["full_attention", "sliding_attention"] * 2
    model = tiny.model("ministral", sliding_window=8, layer_types=types)
    tiny.save(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(3000))
    own = {"form": "window", "unit": "layer", "sinks": 0, "calibration_tokens": 512}
    for window in (8, 12):
        scores, text = tmp_path / f"s{window}", str(tmp_path / "text.txt")
        headprune.score(tmp_path / "model", scores, data=text, window=window, **own)
    how = {"keep_full": 1, "targets": ["vllm"]}
    headprune.convert_swa(tmp_path / "model", tmp_path / "out", scores=tmp_path / "s8", **how)
    assert headprune.from_pretrained(tmp_path / "out").config.sliding_window == 8
    with pytest.raises(PlanError, match="have one of 8 tokens"):
        headprune.convert_swa(tmp_path / "model", tmp_path / "no", scores=tmp_path / "s12", **how)


def test_healing_keeps_warnings_and_says_how_to_go_on(folder):
    text = str(folder / "text.txt")
    small = {"window": 8, "sinks": 2, "data": text, "calibration_tokens": 512, "heal_steps": 2}
    model, out = folder / "model", folder / "out"
    healed = headprune.convert_swa(model, out, keep_full=0, **small)
    assert any("No KV head keeps the whole past" in each for each in healed.pruned.warnings)
    left = folder / "again-unhealed"
    left.mkdir()
    with pytest.raises(CheckpointError, match="headprune heal .*again-unhealed .* --steps 2$"):
        headprune.convert_swa(model, folder / "again", **small)
    (run := folder / "again-checkpoints").mkdir()
    (run / "config.yaml").write_text("heal: {steps: 2}")
    with pytest.raises(CheckpointError, match="headprune heal .*again-unhealed .* --resume"):
        headprune.convert_swa(model, folder / "again", **small)
    assert not [*left.iterdir()] and not (folder / "again").exists()
    headprune.convert_swa(model, folder / "again", overwrite=True, **small)
    assert not left.exists()


def test_healing_beside_scores_takes_a_seed(folder):
    text = str(folder / "text.txt")
    how = {"form": "window", "window": 8, "sinks": 2, "calibration_tokens": 512}
    headprune.score(folder / "model", folder / "s", data=text, **how)
    scored = {"scores": folder / "s", "seed": 3}
    with pytest.raises(HeadpruneError, match="seed has no effect beside --scores"):
        headprune.convert_swa(folder / "model", folder / "a", **scored)
    made = [
        headprune.convert_swa(
            folder / "model",
            folder / f"h{seed}",
            scores=folder / "s",
            data=text,
            heal_steps=2,
            seed=seed,
        ).after
        for seed in (3, 4)
    ]
    assert made[0] != made[1]
