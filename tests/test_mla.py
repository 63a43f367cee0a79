"""headprune convert-mla: keys and values from one latent, in a stock DeepSeek class."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

import headprune
from headprune.config import CalibrationConfig, DataConfig, HealConfig, HealTrain
from headprune.context import Context
from headprune.distillation.heal import Healed
from headprune.distillation.trainer import trainable
from headprune.errors import HeadpruneError, ProofError
from headprune.formats import mla
from headprune.formats.export import Exported
from headprune.model.attention import attention_of
from headprune.schemas.records import Healing
from headprune.surgery import sharpness
from headprune.surgery.latent import latent_of, projected
from tests import tiny
from tests.test_cli import printed

SMALL = {"calibration_tokens": 1_500, "seq_len": 32}
IDS = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def text(tmp_path):
    """A text that tiny models know."""
    file = tmp_path / "text.txt"
    file.write_text(tiny.text(4_000))
    return file


def saved(case, folder):
    """A tiny model, on disk as well."""
    model = tiny.model(case)
    tiny.save(model, folder)
    return model.requires_grad_(False)


def fitter(model, text):
    """The moments of a model on a text."""
    config = CalibrationConfig(**SMALL)
    data = DataConfig(source=str(text))
    return mla.Fitter(model.float(), tiny.tokenizer(), data, config, Context())


def apart(one, other):
    """The largest difference of logits, over the largest."""
    with torch.no_grad():
        wanted = one(IDS).logits
        return float((other(IDS).logits - wanted).abs().max() / wanted.abs().max())


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 500.0}


@pytest.mark.parametrize("rope", [{}, LLAMA3], ids=["default", "llama3"])
def test_a_latent_that_loses_nothing_computes_the_original(rope, text, tmp_path):
    config = tiny.model("llama-mqa").config
    config.rope_parameters |= rope
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    tiny.save(model, tmp_path / "m")
    width = model.model.layers[0].self_attn.k_proj.out_features  # of one head
    sizes = {"rank": 2 * width, "rope_dim": width}
    result = headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, **sizes, **SMALL)
    assert isinstance(result, Exported) and result.record.proof.passed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"
    assert apart(model.float(), loaded) < 1e-5
    up = loaded.model.layers[1].self_attn.kv_b_proj.weight.data
    up.copy_(up.roll(1, 0))
    assert apart(model, loaded) > 0.01


@pytest.mark.parametrize("case", ["llama-gqa", "smollm3", "qwen2"])
def test_a_smaller_latent_computes_the_projected_original(case, text, tmp_path):
    model = saved(case, tmp_path / "m").float()
    fits = fitter(model, text)
    fit = fits.of_size(fits.whole // 2)
    assert fit.size <= fits.whole // 2
    result = mla.converted(model, fits, fit)
    with torch.no_grad(), projected(model, fits.attentions, fit.latents):
        in_place = model(IDS).logits

    @torch.no_grad()
    def gap():
        return float((result(IDS).logits - in_place).abs().max() / in_place.abs().max())

    assert gap() < 1e-5 and apart(model, result) > 1e-3
    assert all(0 < latent.lost < 1 for latent in fit.latents.values())
    assert fits.ratio(fit) != pytest.approx(1.0, abs=1e-4)
    if result.config.attention_bias:  # queries', keys' and values' travel
        for layer in result.model.layers:
            layer.self_attn.q_b_proj.weight.data[:, -1] = 0.0
        assert gap() > 1e-3


def test_larger_scores_are_taken_where_they_lose_less(text, tmp_path, monkeypatch):
    model = saved("qwen2", tmp_path / "m").float()
    fits = fitter(model, text)
    fit = fits.fit(20, 4)
    larger = replace(fit, sharpness=1.3)
    with torch.no_grad():
        with fits.in_place(larger):
            wanted = model(IDS).logits
        assert (mla.converted(model, fits, larger)(IDS).logits - wanted).abs().max() < 1e-4
        assert (mla.converted(model, fits, fit)(IDS).logits - wanted).abs().max() > 1e-3
        for layer in model.model.layers:  # scores grow alike
            for parameter in layer.self_attn.q_proj.parameters():
                parameter *= 1.3
        with fits.in_place(fit):
            assert (model(IDS).logits - wanted).abs().max() < 1e-4
    monkeypatch.setattr(sharpness, "FACTORS", (1.1, 1.2, 0.5, 1.3))
    losses = iter([0.7, 0.9, 0.8, 0.85])  # of the original first, which is kept
    monkeypatch.setattr(mla, "mean_loss", lambda *_: next(losses))
    best = fits.sharpened(replace(fit, loss=1.0))
    assert (best.loss, best.sharpness) == (0.8, 1.2) and next(losses, None) is None
    lossless = replace(fit, loss=0.709)
    assert fits.sharpened(lossless) is lossless


def test_a_latent_need_not_hold_what_all_keys_share(text, tmp_path):
    """A constant in K without rotation adds the same to all scores of a query."""
    model = saved("qwen2", tmp_path / "m").float()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data *= 100.0  # as large as in Qwen2.5
    fits = fitter(model, text)
    fit = fits.fit(20, 4)
    assert all(latent.offset.any() for latent in fit.latents.values())
    for moments in fits.moments.values():
        moments.biased = False
    whole = fits.fit(20, 4)
    assert all(
        fit.latents[path].mean_square < 0.1 * one.mean_square for path, one in whole.latents.items()
    )
    latents = {path: replace(one, offset=0 * one.offset) for path, one in fit.latents.items()}
    with torch.no_grad():
        with projected(model, fits.attentions, fit.latents):
            wanted = model(IDS).logits
        assert (mla.converted(model, fits, fit)(IDS).logits - wanted).abs().max() < 1e-4
        other = mla.converted(model, fits, replace(fit, latents=latents))
        assert (other(IDS).logits - wanted).abs().max() > 1e-3  # as V moves with it


def test_the_norm_of_an_engine_is_the_one_of_transformers(text, tmp_path):
    """Engines take the config's eps in the norm of the latent, and transformers 1e-6."""
    model = saved("llama-gqa", tmp_path / "m").float()
    model.config.rms_norm_eps = 1e-3
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.variance_epsilon = 1e-3
    fits = fitter(model, text)
    fit = fits.fit(30, 10)
    result = mla.converted(model, fits, fit)
    assert result.config.rms_norm_eps == mla._EPS
    norm = result.model.layers[0].self_attn.kv_a_layernorm
    assert norm.variance_epsilon == mla._EPS
    with torch.no_grad(), projected(model, fits.attentions, fit.latents):
        in_place = model(IDS).logits
        assert (result(IDS).logits - in_place).abs().max() < 1e-4 * in_place.abs().max()


def test_the_output_matrix_is_a_tensor_of_its_own(text, tmp_path):
    """In vLLM's class a tied one stays zero."""
    config = tiny.model("llama-gqa").config
    config.tie_word_embeddings, config.rms_norm_eps = True, 1e-5
    model = LlamaForCausalLM(config).eval()
    tiny.save(model, tmp_path / "m")
    sizes = {"rank": 16, "rope_dim": 8}
    headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, **sizes, **SMALL)
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    stored = load_file(tmp_path / "out/model.safetensors")
    head = stored["lm_head.weight"]
    assert torch.equal(head, model.lm_head.weight.to(head.dtype))
    assert not torch.allclose(head, stored["model.embed_tokens.weight"])  # which eps scales


def test_a_linear_norm_is_linear_in_bfloat16():
    """The factors on both sides of a norm are stored, and rounded, apart."""
    for square in (0.05, 1.0, 2.7):
        small, weight, factor = (torch.tensor(x) for x in mla._linear_norm(square))
        assert torch.equal(small.bfloat16().float(), small)
        through = small.double() / mla._EPS**0.5 * weight.bfloat16().double() * factor.double()
        assert float(through) == pytest.approx(1.0, rel=1e-6)


def test_the_size_of_keys_decides_nothing(text, tmp_path):
    model = saved("llama-gqa", tmp_path / "m").float()
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 1e-5
        layer.self_attn.q_proj.weight.data *= 1e5
    assert all(moments.rotates for moments in fitter(model, text).moments.values())


def test_more_rank_loses_less(text, tmp_path):
    fits = fitter(saved("llama-gqa", tmp_path / "m"), text)

    def lost(rank):
        return [latent.lost for latent in fits.fit(rank, 10).latents.values()]

    few, more = lost(12), lost(30)
    assert all(a > b for a, b in zip(few, more, strict=True))
    ranks = fits.joint_ranks()
    assert ranks.keys() == {a.path for a in fits.attentions}
    assert all(0 < rank <= fits.whole for rank in ranks.values())


def test_the_cache_holds_as_many_numbers_as_said(text, tmp_path):
    saved("llama-gqa", tmp_path / "m")
    half = 2 * tiny.LAYERS * 30
    result = headprune.convert_mla(
        tmp_path / "m", tmp_path / "out", data=text, kv_bytes=half, **SMALL
    )
    assert isinstance(result, Exported)
    assert f"become {half:,} in 16 bits" in result.record.changes[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    cache = loaded(IDS, use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 2 * numbers == half * IDS.numel()
    generated = loaded.generate(IDS[:1], max_new_tokens=5, do_sample=False)
    whole = loaded.generate(IDS[:1], max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(generated, whole)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])  # too small for float16
def test_a_result_is_in_bfloat16_and_heals(stored, text, tmp_path):
    model = saved("llama-gqa", tmp_path / "m").to(stored)
    tiny.save(model, tmp_path / "m")
    cut, out = tmp_path / "cut", tmp_path / "out"
    headprune.convert_mla(tmp_path / "m", cut, data=text, kv_bytes=240, **SMALL)
    assert AutoModelForCausalLM.from_pretrained(cut).dtype == torch.bfloat16
    report = headprune.evaluate(cut, data=text, against=tmp_path / "m", seq_len=16, speed=False)
    assert report.against is not None
    cache = [side.cost.kv_cache_bytes for side in (report.model, report.against)]
    assert cache == [240, 480]
    healed = headprune.convert_mla(
        tmp_path / "m", out, data=text, kv_bytes=240, heal_steps=40, **SMALL
    )
    assert isinstance(healed, Healed) and not (tmp_path / "out-unhealed").exists()
    assert healed.pruned.manifest.done.seed == 0
    other = {"data": text, "kv_bytes": 240, "heal_steps": 2, "seed": 7, **SMALL}
    seeded = headprune.convert_mla(tmp_path / "m", tmp_path / "seeded", **other)
    assert seeded.pruned.manifest.done.seed == 7
    assert healed.taken_after > 0

    @torch.no_grad()
    def off(folder):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return float((loaded(IDS).logits - model.float()(IDS).logits).square().mean())

    assert off(out) < 0.95 * off(cut)
    assert type(healed.model).__name__ == "DeepseekV3ForCausalLM"
    manifest = healed.pruned.manifest
    assert manifest.engines == ()  # vLLM would need an environment variable, or drop biases
    assert isinstance(manifest.done, Healing) and "become 240" in manifest.done.conversion[0]
    assert manifest.done.conversion[0] in (out / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("train", list(HealTrain))
def test_what_feeds_a_linear_norm_stays(train, text, tmp_path):
    """Its weights are about 1e-9, and a step of any optimiser erases them."""
    fits = fitter(saved("qwen2", tmp_path / "m"), text)
    result = mla.converted(fits.net, fits, fits.fit(30, 8))
    trainable(result, attention_of(result), HealConfig(steps=1, train=train))
    moving = {name for name, weight in result.named_parameters() if weight.requires_grad}
    assert not any("_a_proj" in name or "_a_layernorm" in name for name in moving)
    assert any("kv_b_proj" in name for name in moving)
    result.model.layers[0].self_attn.kv_a_layernorm.weight.data.fill_(1.0)
    trainable(result, attention_of(result), HealConfig(steps=1))
    assert result.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.requires_grad


def test_keys_take_the_mean_rotation_of_a_distance(text, tmp_path):
    fits = fitter(saved("llama-gqa", tmp_path / "m"), text)
    moments, distance = fits.first, 3
    moments.distances = torch.zeros(8).double()
    moments.distances[distance] = 1.0
    latent = latent_of(moments, fits.frequencies, 2, fits.whole)
    width, half = moments.width, moments.head_dim // 2
    keys = (latent.up @ latent.down)[:width, :width]
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, moments.head_dim, generator=draw).double()
    key[[0, half]] = 0.0  # the fastest frequency stays rotary
    angles = torch.cat([fits.frequencies, fits.frequencies]) * distance
    turned = torch.cat([-query[half:], query[:half]])
    rotated = query * angles.cos() + turned * angles.sin()
    score = query @ (keys @ nn.functional.pad(key, (0, width - len(key))))[: len(key)]
    assert score == pytest.approx(float(rotated @ key), rel=1e-6)
    assert score != pytest.approx(float(query @ key), rel=1e-2)


@pytest.mark.parametrize("zero", ["q_proj", "v_proj", "o_proj"])
def test_a_layer_of_zeros_has_a_latent(zero, text, tmp_path):
    model = saved("llama-gqa", tmp_path / "m").float()
    getattr(model.model.layers[0].self_attn, zero).weight.data.zero_()
    fits = fitter(model, text)
    fit = fits.fit(30, 10)
    with torch.no_grad(), projected(model, fits.attentions, fit.latents):
        wanted = model(IDS).logits
    assert wanted.isfinite().all()
    assert (mla.converted(model, fits, fit)(IDS).logits - wanted).abs().max() < 1e-4


def test_a_latent_that_the_norm_bends_is_no_proof(text, tmp_path, monkeypatch):
    saved("llama-gqa", tmp_path / "m")
    monkeypatch.setattr(mla, "_SMALL", 1.0)
    with pytest.raises(ProofError, match="compute something else"):
        headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, kv_bytes=240, **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_control_that_moves_nothing_is_no_proof(text, tmp_path, monkeypatch):
    saved("llama-gqa", tmp_path / "m")
    monkeypatch.setattr(mla, "_misplaced", lambda fit: fit)
    with pytest.raises(ProofError, match="inconclusive"):
        headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, kv_bytes=240, **SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "sizes", "said"),
    [
        ("qwen3", {"kv_bytes": 240}, r"norms after its projections \(q_norm, k_norm\)"),
        ("mistral", {"kv_bytes": 240}, "has a window"),
        ("gpt2", {"kv_bytes": 240}, "a gpt2 is none of llama"),
        ("llama-gqa", {"kv_bytes": 10_000}, "the model has 480 already"),
        ("llama-gqa", {"kv_bytes": 16}, "needs 40 at least"),
        ("llama-gqa", {"rank": 99, "rope_dim": 10}, "a rank is 1 to 60"),
        ("llama-gqa", {"rank": 20, "rope_dim": 7}, "an even number to 10"),
        ("llama-gqa", {"rank": 20}, "give --kv-bytes, or --rank and --rope-dim"),
        ("llama-gqa", {}, "give --kv-bytes, or --rank and --rope-dim"),
    ],
)
def test_impossible_latents_are_refused(case, sizes, said, text, tmp_path):
    saved(case, tmp_path / "m")
    with pytest.raises(HeadpruneError, match=said):
        headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, **sizes, **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_model_without_logits_of_words_is_refused(text, tmp_path):
    tiny.save(LlamaForSequenceClassification(tiny.model("llama-gqa").config), tmp_path / "m")
    with pytest.raises(HeadpruneError, match="its task is classification"):
        headprune.convert_mla(tmp_path / "m", tmp_path / "out", data=text, kv_bytes=240, **SMALL)


def test_little_text_is_refused(text, tmp_path):
    saved("llama-gqa", tmp_path / "m")
    with pytest.raises(HeadpruneError, match="More than 60 tokens, as K and V have numbers"):
        headprune.convert_mla(
            tmp_path / "m",
            tmp_path / "out",
            data=text,
            kv_bytes=240,
            calibration_tokens=48,
            seq_len=16,
        )


@pytest.mark.filterwarnings("ignore:Sequences of 512 tokens")  # tiny models take 128
def test_inspect_shows_the_price(text, tmp_path, capsys):
    saved("llama-gqa", tmp_path / "m")
    command = ("inspect", tmp_path / "m", "--latent", "--data", text)
    code, shown, _ = printed(capsys, *command, "--json")
    inspected = json.loads(shown)
    sizes = [price["kv_cache_bytes_per_token"] for price in inspected["latents"]]
    assert code == 0 and sizes == sorted(sizes, reverse=True)
    assert all(price["perplexity_ratio"] > 0.5 for price in inspected["latents"])
    table = printed(capsys, *command)[1]
    assert "KV bytes/token, latent" in table and "holds 99 %" in table
    assert printed(capsys, *command[:3])[0] == 2
