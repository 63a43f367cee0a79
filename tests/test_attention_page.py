"""headprune attention: the weights of the model, on a page in a real browser."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import headprune
from headprune.errors import FamilyError, HeadpruneError
from headprune.model.attention import attention_of, layer_names
from headprune.planning.choose import CutRequest
from headprune.result.prune import prune
from headprune.role.sentence import MOST_TOKENS, read_sentence
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.tensors.units import Unit
from tests import planted, tiny
from tests.test_cli import run

TEXT = "w1 w2 w3 w1 w2 w9 w1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose head 0.0 looks one token back; 1.3 is another of its heads, cut from it."""
    home = tmp_path_factory.mktemp("models")
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=1)
    tiny.save(model, home / "original")
    keep = ((0, 1, 2, 3), (1, 3))
    parts = {
        a.path: AttentionPlan(query_heads=4, kv_heads=4, keep=kept)
        for a, kept in zip(attention_of(model), keep, strict=True)
    }
    plan = Plan(unit=Unit.HEAD, attentions=parts)
    return prune(home / "original", home / "cut", CutRequest(plan=plan)).output


@pytest.fixture(scope="module")
def picture(folder):
    return headprune.attention_picture(folder, TEXT, heads=["0.0", "1.3"])


@pytest.fixture(scope="module")
def page(picture, tmp_path_factory):
    return picture.save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "albert", "falcon"))
def test_weights_are_those_of_the_model(case, tmp_path):
    model = tiny.model(case, attn="eager")
    sentence = read_sentence(tiny.save(model, tmp_path / "model"), TEXT)
    inputs = tiny.tokenizer()(TEXT, return_tensors="pt")
    told = model(input_ids=inputs["input_ids"], output_attentions=True).attentions
    # one module may run as several layers
    expected = [torch.stack(told).mean(0)] if case == "albert" else told
    assert len(sentence.layers) == len(expected)
    for layer, weights in zip(sentence.layers, expected, strict=True):
        torch.testing.assert_close(layer.weights, weights[0], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(layer.weights.flip(0), weights[0], atol=1e-3)
        assert layer.queries.labels == tuple(TEXT.split())


def test_cross_attention_looks_from_what_is_written_at_what_is_read(tmp_path):
    place = tiny.save(tiny.model("t5"), tmp_path / "model")
    for target in (None, "w7 w8 w9"):
        sentence = read_sentence(place, TEXT, target)
        layers = {layer.kind: layer for layer in sentence.layers}
        cross, decoder = layers["cross"], layers["decoder"]
        assert cross.keys.labels == layers["encoder"].queries.labels == tuple(TEXT.split())
        assert cross.queries.labels == decoder.keys.labels
        for layer in sentence.layers:
            sums = layer.weights.sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums))
    assert decoder.keys.labels == ("<s>", "w7", "w8")
    assert sentence.head("cross.1.4")[0].path == "decoder.block.1.layer.1.EncDecAttention"


def test_names_of_layers():
    one, two = "h.3.attn", "h.5.attn"
    assert layer_names([(one, "self"), (two, "self")]) == {one: "3", two: "5"}
    assert layer_names([(one, "self"), (two, "cross")]) == {one: "self.3", two: "cross.5"}
    assert layer_names([(one, "encoder")]) == {one: "encoder.3"}
    same = ["a.0.x.1.attn", "a.0.x.2.attn"]
    assert layer_names([(path, "self") for path in same]) == dict(zip(same, "01", strict=True))


def test_heads_that_look_sharply_come_first(picture, folder):
    assert picture.sentence.sharpest(1) == ("0.0",)
    assert headprune.attention_picture(folder, TEXT).heads[0] == "0.0"
    _, place = picture.sentence.head("0.0")
    back = picture.sentence.layers[0].weights[place].diagonal(-1)
    assert back.min() > 0.99
    assert picture.sentence.layers[0].weights[1].diagonal(-1).max() < 0.9  # does nothing


def test_a_notebook_shows_the_page(picture):
    shown = picture._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "<script" not in shown


def test_a_map_has_a_pixel_per_weight(picture):
    images = re.findall(
        r'<img src="data:image/png;base64,([^"]+)" alt="Head ([^"]+)"', picture.html()
    )
    assert [name for _, name in images] == [*(f"0.{head}" for head in range(4)), "1.1", "1.3"]
    for text, name in images:
        pixels = imread(io.BytesIO(base64.b64decode(text)))
        layer, place = picture.sentence.head(name)
        np.testing.assert_allclose(pixels[..., 3], layer.weights[place], atol=1 / 255)
    assert not np.allclose(pixels[..., 3], picture.sentence.layers[0].weights[0], atol=0.1)


def test_a_page_needs_nothing_and_can_be_read(browser, page, tmp_path):
    assert not re.search(r"""(src|href)=["']?(https?:|//|file:)|@import|url\(""", page.read_text())
    for width, dark in ((1280, False), (380, True)):
        browser.open(page, width, dark)
        browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
        assert (browser.complaints(), browser.fetched(), browser.overflow()) == ([], [], 0)
        looked_at, low = browser.low_contrast()
        assert looked_at > 200
        assert low == []
    # a damaged sibling is seen
    damaged = tmp_path / "damaged.html"
    damaged.write_text(
        page.read_text().replace("</main>", '<p style="width:2000px"><img src="x.png">')
    )
    browser.open(damaged)
    assert browser.complaints() and browser.overflow() > 0


def lines(browser, head):
    found = browser.run(
        f"return [...document.querySelectorAll('[data-shown=\"{head}\"] line')].map((l) =>"
        "[l.y1.baseVal.value, l.y2.baseVal.value, Number(l.getAttribute('stroke-opacity'))])"
    )
    return {(a, b): share for a, b, share in found}


def test_lines_and_the_table_say_the_weights(browser, page, picture):
    browser.open(page)
    assert [e.get_attribute("data-shown") for e in browser.all(".head")] == ["0.0", "1.3"]
    for head in ("0.0", "1.3"):
        layer, place = picture.sentence.head(head)
        weights = layer.weights[place]
        drawn = lines(browser, head)
        assert sorted(drawn.values()) == pytest.approx(
            sorted(weights[weights >= 0.05].tolist()), abs=1e-3
        )
        cells = browser.run(
            f"return [...document.querySelectorAll('[data-shown=\"{head}\"] td')]"
            ".map((e) => e.textContent).filter(Boolean)"
        )
        assert list(map(float, cells)) == pytest.approx(weights.flatten().tolist(), abs=0.0051)
    assert lines(browser, "0.0") != lines(browser, "1.3")


def test_the_keyboard_shows_heads_and_tells_of_tokens(browser, page):
    browser.open(page)
    focused = "return document.activeElement.dataset.head || ''"
    ActionChains(browser.driver).click(browser.find("[data-head='0.1']")).perform()
    told = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP):
        ActionChains(browser.driver).send_keys(key).perform()
        told.append(browser.run(focused))
    # 1.0 and 1.2 were cut, and cannot be entered
    assert told == ["0.2", "0.2", "0.1", "0.1"]
    assert len(browser.all(".cut")) == 2
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert len(browser.all(".head")) == 2  # pressed twice: put away again
    drawn = browser.find("[data-shown='0.0'] .lines")
    drawn.send_keys(Keys.ARROW_DOWN)
    drawn.send_keys(Keys.ARROW_DOWN)
    drawn.send_keys(Keys.ARROW_DOWN)
    assert browser.find("[data-shown='0.0'] .told").text == "“w3” gives “w2” 1.00"
    browser.find("[data-shown='0.0'] h3 button").click()
    assert browser.run(focused) == "0.0"
    assert browser.find("[data-head='0.0']").get_attribute("aria-pressed") == "false"


def test_tokens_are_text(browser, tmp_path):
    place = tiny.save(tiny.model("llama-gqa"), tmp_path / "<b>model")
    hostile = "</script><script>alert(1)</script>" + " w1" * 20  # most tokens are known ones
    page = headprune.attention_picture(place, hostile).save(tmp_path / "page.html")
    browser.open(page)
    assert browser.complaints() == []
    assert "<script>alert(1)" in browser.find(".summary").text
    assert browser.all(".head") and not browser.all("h1 b")


def test_the_command_writes_the_page(folder, tmp_path, capsys):
    output = tmp_path / "page.html"
    long = " ".join(["w1 w2"] * MOST_TOKENS)
    words = ["attention", folder, "--text", long, "--head", "1.3", output]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert f"has {2 * MOST_TOKENS} tokens; the model read the first {MOST_TOKENS}" in err
    written = output.read_text()
    code, _, err = run(capsys, *words)
    assert (code, "already exists" in err, output.read_text() == written) == (2, True, True)
    code, out, _ = run(capsys, *words, "--overwrite")
    assert (code, out.startswith("6 heads; shown first: 1.3.")) == (0, True)
    with pytest.raises(HeadpruneError, match="the output is a page; name an .html file"):
        headprune.attention(folder, tmp_path / "page.pdf", text=TEXT)
    with pytest.raises(HeadpruneError, match="layer 7: there is no such layer with heads"):
        headprune.attention(folder, tmp_path / "other.html", text=TEXT, layer="7")
    assert not (tmp_path / "other.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--head", "1.0"],
            "--head 1.0: there is no such head. 'transformer.h.1.attn' has the heads 1, 3,",
        ),
        (["--head", "7.0"], "there is no such layer. Layers: 0, 1; a head is named as in 0.0"),
        (["--config", "target=w1"], "target is for encoder-decoders, and this is a"),
        (["--config", "attention=cross"], "no 'cross' attention"),
        (["--text", "Nowhere known words"], "100% of the text's tokens are unknown"),
    ],
)
def test_bad_input_is_told_in_a_sentence(words, said, folder, tmp_path, capsys):
    given = ["--text", TEXT, tmp_path / "page.html", *words]
    code, _, err = run(capsys, "attention", folder, *given)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert said in err


def test_a_module_that_attends_to_other_places_is_named(tmp_path, monkeypatch):
    place = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    monkeypatch.setattr(
        "headprune.role.watch._weights", lambda outputs, attention: torch.ones(1, 6, 3, 3)
    )
    with pytest.raises(FamilyError, match=r"'model.layers.0.self_attn' attends to other places"):
        read_sentence(place, TEXT)
