"""Scores of windows: the slope of the loss by the share of full attention."""

import pytest
import torch

import headprune
from headprune.config import DataConfig, WindowConfig
from headprune.context import Context
from headprune.data.far import far_rows
from headprune.errors import HeadpruneError, PlanError
from headprune.evidence.losses import example_losses
from headprune.evidence.windows import (
    CRITERION,
    candidates,
    sequence_of,
    slopes,
    window_scores,
)
from headprune.model.gating import frozen
from headprune.model.open import open_model
from headprune.model.windows import attending
from headprune.schemas.records import Window
from headprune.schemas.scores import write_scores
from headprune.tensors.units import Unit, members
from tests import tiny

WINDOW = (8, 3)
LENGTH = 40


def batch(rows=3, padding=0, seed=0):
    """Random tokens; the first rows are padded on the left."""
    ids = torch.randint(5, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : padding * (row + 1)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}


def by_mixture(net, batch, window=WINDOW):
    """The same slopes by autograd of a mixture of both outputs, token by token."""
    attentions = candidates(net)
    shares = {
        a.module: torch.ones(*batch["input_ids"].shape, a.query_heads, requires_grad=True)
        for a in attentions
    }

    def mixed(call):
        share = shares[call.module][..., None].to(call.query.dtype)
        narrow = call.masked(range(call.key.shape[1]), window)
        return share * call.outputs(call.mask) + (1 - share) * narrow

    with frozen(net), attending(attentions, mixed):
        example_losses(net, "causal-lm", batch).sum().backward()
    return [shares[a.module].grad[:, sum(WINDOW) :] for a in attentions]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2", "qwen3", "gpt_neox"))
def test_slopes_are_those_of_a_mixture(case, padding, attn):
    net, rows = tiny.model(case, attn=attn), batch(padding=padding)
    (ours,) = slopes(net, candidates(net), [rows], WINDOW)
    for ours_of, wanted in zip(ours, by_mixture(net, rows), strict=True):
        torch.testing.assert_close(ours_of, wanted, rtol=1e-4, atol=1e-6)
    for other in ((WINDOW[0] + 1, WINDOW[1]), (sum(WINDOW), 0)):
        wrong = by_mixture(net, rows, other)
        assert not torch.allclose(ours[0], wrong[0], rtol=1e-2, atol=1e-5)


def test_slopes_do_not_depend_on_the_batch():
    net, rows = tiny.model("llama-gqa"), batch()
    alone = [
        {n: v[i : i + 1] if n != "use_cache" else v for n, v in rows.items()} for i in (0, 1, 2)
    ]
    (whole,) = slopes(net, candidates(net), [rows], WINDOW)
    apart = [
        torch.cat(one) for one in zip(*slopes(net, candidates(net), alone, WINDOW), strict=True)
    ]
    for one, other in zip(whole, apart, strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.allclose(one, other.flip(0))


def test_a_model_in_bfloat16_has_about_the_same_slopes():
    net = tiny.model("llama-gqa")
    (exact,) = slopes(net, candidates(net), [batch(8)], WINDOW)
    (half,) = slopes(net.to(torch.bfloat16), candidates(net), [batch(8)], WINDOW)
    one, other = torch.cat([e.flatten() for e in exact]), torch.cat([h.flatten() for h in half])
    assert torch.corrcoef(torch.stack([one, other]))[0, 1] > 0.99
    assert torch.corrcoef(torch.stack([one, other.roll(1)]))[0, 1] < 0.9


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    tiny.save(tiny.model("llama-gqa"), folder / "model")
    (folder / "text.txt").write_text(tiny.text(4000))
    return folder


def data_of(place):
    return DataConfig(source=str(place / "text.txt"))


def scored(place, **settings):
    config = WindowConfig(window=8, sinks=3, calibration_tokens=256, **settings)
    return window_scores(open_model(place / "model"), config, data_of(place))


def test_units_sum_signed_slopes(place):
    """A layer whose heads' slopes cancel loses nothing, whatever its heads lose alone."""
    heads, layers = scored(place), scored(place, unit="layer")
    assert heads.metadata.units == [3] * 4
    assert layers.metadata.units == [1] * 4
    assert heads.metadata.window == layers.metadata.window
    assert members(Unit.LAYER, (2, 2, 2)) == [[0, 1, 2, 3, 4, 5]]
    assert members(Unit.LAYER, ()) == []
    one, summed = layers.scores[CRITERION], heads.scores[CRITERION].view(4, 3).sum(1)
    assert not torch.allclose(one, summed / summed.sum(), rtol=1e-2)


def test_layers_that_come_and_go_score_alike(place):
    found = {
        placement: headprune.score(
            place / "model",
            place / f"scores-{placement}",
            form="window",
            data=place / "text.txt",
            calibration_tokens=256,
            placement=placement,
        ).scores[CRITERION]
        for placement in ("whole", "layers")
    }
    torch.testing.assert_close(found["whole"], found["layers"])


def test_modules_that_have_windows_are_left_out():
    net = tiny.model("qwen2-sliding_first")
    full = [f"model.layers.{number}.self_attn" for number in (1, 3)]
    assert [attention.path for attention in candidates(net)] == full
    with pytest.raises(PlanError, match="No attention .* window: it has a window already"):
        candidates(tiny.model("qwen2-sliding", layer_types=["sliding_attention"] * tiny.LAYERS))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("bert-mlm", "causal"),
        ("t5", "causal"),
        ("bloom", "bias for every head"),
        ("deepseek_v3", "one latent"),
    ],
)
def test_models_without_a_place_for_windows_are_refused(case, why):
    with pytest.raises(PlanError, match=why):
        candidates(tiny.model(case))


def test_attention_of_its_own_is_refused():
    net = tiny.model("gptj")
    with pytest.raises(PlanError, match="attention interface"):
        list(slopes(net, candidates(net), [batch()], WINDOW))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"window": 125}, "leaves nothing out"),
        ({"context_tokens": 200}, "--context 200: model and tokenizer take 128"),
        ({"seq_len": 12}, "show nothing beyond a window of 8"),
    ],
)
def test_windows_that_hide_nothing_are_refused(place, settings, why):
    config = WindowConfig(**{"window": 8, "sinks": 3, **settings})
    with pytest.raises(PlanError, match=why):
        window_scores(open_model(place / "model"), config, data_of(place))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"unit": "layer"}, "--unit layer goes with --form window"),
        ({"form": "window", "unit": "head"}, "whole KV heads"),
        ({"form": "window", "unit": "query-slot"}, "whole KV heads"),
        (
            {"form": "window", "criterion": "fisher"},
            "--criterion has no effect without --form removed",
        ),
        ({"form": "window", "attention": "self"}, "attention has no effect"),
        ({"window": 8}, "--window has no effect without --form window"),
        ({"context_tokens": 64}, "--context has no effect without --form window"),
    ],
)
def test_options_without_effect_are_refused(place, settings, why):
    with pytest.raises(HeadpruneError, match=why):
        headprune.score(place / "model", place / "none", data=place / "text.txt", **settings)
    assert not (place / "none").exists()


def test_scores_of_windows_remove_nothing(place):
    write_scores(place / "of-windows", scored(place))
    with pytest.raises(PlanError, match="headprune convert-swa"):
        headprune.prune(place / "model", place / "none", scores=place / "of-windows", keep=0.5)


class Letters:
    """A tokenizer whose tokens are characters."""

    unk_token_id = None

    def __call__(self, texts, **how):
        if isinstance(texts, str):
            return {"input_ids": [ord(sign) for sign in texts]}
        return {"input_ids": [[ord(sign) for sign in text] for text in texts]}

    def decode(self, ids, **how):
        return "".join(map(chr, ids))


def test_far_answers_were_said_once_beyond_the_window():
    texts = [[ord("z")] * 700 for _ in range(6)]
    rows = far_rows(texts, Letters(), (100, 4), 1, seed=0)
    assert len(rows) == len(texts)
    for row in rows:
        text, answers = Letters().decode(row["input_ids"]), [[]]
        assert len(text) == len(row["labels"]) == 700
        for place, label in enumerate(row["labels"]):
            assert label in (-100, ord(text[place]))
            answers[-1].append(place) if label != -100 else answers.append([])
        asked = [range(each[0], each[-1] + 1) for each in answers if each]
        assert len(asked) == 3
        for places in asked:
            answer = text[places.start : places.stop]
            begin = text[: places.start].rindex("\n")
            fact = text[begin : places.stop] + ".\n"
            assert 4 <= text.index(fact) <= begin - 100 - len(fact)
            assert answer.strip()
    others = far_rows(texts, Letters(), (100, 4), 1, seed=1)
    assert rows != others
    assert rows == far_rows(texts, Letters(), (100, 4), 1, seed=0)
    assert far_rows([text[:120] for text in texts], Letters(), (100, 4), 1, seed=0) == []


def test_a_single_text_is_not_asked_for_its_own_words():
    """They may stand within the window, where nothing is lost, and so may another answer."""
    text = "every word of this text is said " * 30
    (row,) = far_rows([list(map(ord, text))], Letters(), (100, 4), 1, seed=0)
    labels = "".join(chr(label) if label != -100 else "|" for label in row["labels"])
    answers = [each.strip() for each in labels.split("|") if each]
    assert len({*answers}) == len(answers) == 2
    said = " ".join(answers)
    assert not any(said[at : at + 6] in text for at in range(len(said) - 5))


def test_texts_too_short_for_prompts_are_scored_alone(place):
    lines = []
    config = WindowConfig(window=8, sinks=3, calibration_tokens=256)
    context = Context(line=lambda line, good=None: lines.append(line))
    scores = window_scores(open_model(place / "model"), config, data_of(place), context)
    assert "by text alone" in lines[-1]
    assert scores.scores[CRITERION].sum() == pytest.approx(1)  # shares of the text
    assert scores.metadata.tokens == 256


def test_texts_that_are_shorter_than_facts_and_questions():
    texts = [[ord("z")] * size for size in (30, 90, 150, 256)] * 2
    assert far_rows(texts, Letters(), (64, 4), 1, seed=0) == []


def test_more_sinks_than_tokens_of_a_window():
    net = tiny.model("llama-gqa")
    assert sequence_of(net, tiny.tokenizer(), Window(size=8, sinks=40)) > 8 + 40
