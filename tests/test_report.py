"""headprune report: what it finds, what it says, and the page in a real browser."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import headprune
from headprune.config import (
    CheckConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    TrainGatesConfig,
)
from headprune.distillation.heal import heal
from headprune.errors import CheckpointError, HeadpruneError, HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.report import Report
from headprune.gates.train_gates import train_gates
from headprune.model.cost import model_cost
from headprune.planning.choose import CutRequest
from headprune.regression.check import check
from headprune.render.charts import quality_charts
from headprune.render.report import comparison, report
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.schemas.gates import read_gates, read_metadata, write_gates
from headprune.schemas.manifest import read_manifest
from headprune.schemas.scores import Scores, ScoresMetadata, write_scores
from tests import tiny
from tests.test_cli import run as command

EVALUATE = EvaluateConfig(
    seq_len=16, max_windows=8, memory=10**6, decode_batches=(1, 2), needle=True, needle_trials=1
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs: gates, a cut and its evaluation; and a conversion that was healed."""
    home = tmp_path_factory.mktemp("runs")
    text = home / "text.txt"
    text.write_text(tiny.text(1_000))
    data = DataConfig(source=str(text))
    base = str(tiny.save(tiny.model("llama-gqa"), home / "base"))
    config = TrainGatesConfig(target_heads=0.5, steps=8, batch_size=2, seq_len=16)
    train_gates(base, data, home / "cut" / "gates", config)
    prune(base, home / "cut" / "small", CutRequest(gates=home / "cut" / "gates"))
    evaluate(str(home / "cut" / "small"), data, EVALUATE, against=base).write(
        home / "cut" / "report.json"
    )
    convert_gqa(base, home / "mqa" / "merged", ConvertConfig(kv_heads=1))
    healing = HealConfig(steps=2, batch_size=2, seq_len=16)
    heal(str(home / "mqa" / "merged"), base, data, home / "mqa" / "healed", healing)
    return home


@pytest.fixture(scope="module")
def page(place):
    """The page of the first run."""
    return report([place / "cut"], place / "cut.html").output


@pytest.fixture(scope="module")
def pages(place, page):
    """The page of one result, and that of two."""
    return [page, report([place / "cut", place / "mqa"], place / "two.html").output]


def test_a_page_needs_nothing_and_complains_of_nothing(browser, pages):
    for page in pages:
        text = page.read_text()
        assert not re.search(r"""(src|href)=["']?(https?:|//|file:)|@import|url\(["']?http""", text)
        browser.open(page)
        assert browser.complaints() == []
        assert browser.fetched() == []
        twice = browser.run(
            "const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);"
            "return ids.filter((id, i) => ids.indexOf(id) !== i)"
        )
        assert twice == []
    browser.driver.execute_script("console.error('the log is read')")
    assert len(browser.complaints()) == 1


def test_pointing_at_a_head_tells_of_it(browser, page, place):
    browser.open(page)
    plan = json.loads((place / "cut" / "small" / "plan.json").read_text())["attentions"]
    path = "model.layers.1.self_attn"
    cells = browser.all(".heads rect")
    assert len(cells) == sum(part["query_heads"] for part in plan.values())
    for head in range(plan[path]["query_heads"]):
        place_of = list(plan).index(path) * plan[path]["query_heads"] + head
        ActionChains(browser.driver).move_to_element(cells[place_of]).perform()
        told = browser.find(".told").text
        stays = "stays" if head in plan[path]["keep"] else "removed"
        assert told.startswith(f"{path}, head {head}: {stays}; KV head {head // 2}; gate open with")


def test_the_keyboard_moves_from_head_to_head(browser, page):
    browser.open(page)
    heads = browser.find(".heads")
    told = []
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.END, Keys.ARROW_RIGHT):
        heads.send_keys(key)
        told.append(browser.find(".told").text.partition(":")[0])
    layers = [f"model.layers.{layer}.self_attn, head " for layer in (0, 1)]
    assert told == [f"{layers[0]}0", *(f"{layers[1]}{head}" for head in (0, 1, 5, 5))]
    assert browser.find(".told").get_attribute("role") == "status"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_readable_on_a_phone_in_light_and_dark(browser, pages, dark):
    for page in pages:
        for width in (380, 1280):
            browser.open(page, width, dark)
            browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
            assert browser.overflow() <= 0
            looked_at, low = browser.low_contrast()
            assert looked_at > 200
            assert low == []
    browser.run("document.querySelector('h1').style.color = 'var(--paper)'")
    browser.run("document.querySelector('.told').style.minWidth = '1500px'")
    assert len(browser.low_contrast()[1]) == 1
    assert browser.overflow() > 0


def test_names_are_text(browser, place, tmp_path):
    name = "<script>alert(1)"
    shutil.copytree(place / "cut", tmp_path / name)
    written = json.loads((tmp_path / name / "report.json").read_text())
    written["against"]["name"] = "<img src=x onerror=alert(2)>"
    written["provenance"]["data"]["source"] = "</script><script>alert(3)</script>|`x`"
    (tmp_path / name / "report.json").write_text(json.dumps(written))
    for runs in ([name], [name, "<b>"]):
        if len(runs) > 1:
            shutil.copytree(place / "mqa", tmp_path / "<b>")
        page = report([tmp_path / run for run in runs], tmp_path / f"{len(runs)}.html").output
        browser.open(page)
        assert browser.complaints() == []
        assert name in browser.find("h1" if len(runs) == 1 else ".summary a").text
        assert not browser.all("img") and not browser.all("main b")


def test_the_numbers_are_those_of_the_files(place, page):
    text = page.read_text()
    measured = json.loads((place / "cut" / "report.json").read_text())
    manifest = json.loads((place / "cut" / "small" / "headprune.json").read_text())
    for _, of_base, value, _ in Report.model_validate(measured).rows():
        assert f"<td>{value}</td>" in text and f"<td>{of_base}</td>" in text
    interval = measured["differences"][0]["interval"]
    assert f"{interval['low']:.3f} to {interval['high']:.3f}" in text
    assert f"{manifest['proof']['gated_vs_reloaded']:.1e}" in text
    assert f"Heads: {manifest['query_heads'][1]} of {manifest['query_heads'][0]} stay" in text
    cache = measured["model"]["cost"]["kv_cache_bytes"]
    assert f"{cache:,}" in text
    found = (
        measured["model"]["needle"][-1]["accuracy"],
        measured["against"]["needle"][-1]["accuracy"],
    )
    assert "<td>{:.2f} ({:.2f})</td></tr>".format(*found) in text
    assert f"{measured['model']['longest_context']:,}</td>" in text
    assert manifest["source"]["fingerprint"] in text
    assert measured["provenance"]["data_sha256"] in text
    card = (place / "cut" / "small" / "README.md").read_text()
    assert f"| query heads | 24 | {manifest['query_heads'][1]} | 50.0% |" in card
    assert f"{manifest['proof']['gated_vs_reloaded']:.1e}" in card
    assert card.count("■") - 1 == manifest["query_heads"][1]
    assert "Gates keep 12 of 24 query heads" in text


def test_gates_belong_to_the_cut_they_made(place, tmp_path):
    shutil.copytree(place / "cut" / "gates", tmp_path / "gates")
    runs = report([place / "cut" / "small", tmp_path / "gates"], tmp_path / "a.html").runs
    assert [run.name for run in runs] == ["small"]
    assert runs[0].head_map.evidence is not None

    folder = tmp_path / "gates"
    gates = read_gates(folder, read_metadata(folder).model)
    tensors = {"log_alpha": gates.log_alpha, "kept": gates.kept, "course": gates.course + 0.01}
    write_gates(folder, gates.metadata, tensors, gates.weights)
    with pytest.warns(HeadpruneWarning, match="belongs to none of its results: '.*gates'"):
        runs = report([place / "cut" / "small", tmp_path / "gates"], tmp_path / "b.html").runs
    assert [run.name for run in runs] == ["small"]
    assert runs[0].head_map.evidence is None


@pytest.mark.parametrize(
    ("part", "changed", "charts"),
    [
        ("model", {"name": "other"}, 1),
        ("settings", {"seq_len": 64}, 2),
        ("model", {"dtype": "bfloat16"}, 2),
    ],
)
def test_what_was_measured_otherwise_is_drawn_apart(part, changed, charts, place, tmp_path):
    (run,) = report([place / "cut"], tmp_path / "page.html").runs
    path, runs = place / "cut" / "report.json", []
    for number in range(2):
        content = json.loads(path.read_text())
        if number:
            {**content, "settings": content["provenance"]["settings"]}[part].update(changed)
        one = Report.model_validate(content)
        runs.append(replace(run, name=str(number), evaluations=(one,)))
    drawn = quality_charts(runs)
    assert len(drawn) == charts
    assert len({chart.note for chart in drawn}) == charts  # and told apart


def test_steps_of_a_chain_are_one_run(place, tmp_path):
    done = report([place / "mqa"], tmp_path / "chain.html")
    (run,) = done.runs
    assert run.path.name == "healed"
    assert "12 KV heads merged into 4 (mean, adjacent); then healed for 2 steps" in run.summary
    assert run.head_map.layers[0].cells[5].facts["KV head"] == "2, merged with 0, 1"


def test_heads_that_went_before_stay_known(place, tmp_path):
    first = json.loads((place / "cut" / "small" / "headprune.json").read_text())["layout"]
    path = next(path for path, heads in first.items() if len(heads["query_heads"]) > 2)
    left = first[path]["query_heads"]
    group = left[:2]
    (tmp_path / "plan.json").write_text(json.dumps({path: group}))
    prune(str(place / "cut" / "small"), tmp_path / "again", CutRequest(plan=tmp_path / "plan.json"))
    (run,) = report([tmp_path / "again"], tmp_path / "again.html").runs
    layer = next(layer for layer in run.head_map.layers if layer.path == path)
    states = {cell.head: cell.state for cell in layer.cells}
    assert all(states[head] == "removed" for head in group)
    assert all(states[head] == "kept" for head in left[2:])
    assert all(states[head] == "earlier" for head in set(states) - set(left))


@pytest.fixture(scope="module")
def windowed(place):
    """A merged model that lost two heads, and has windows in two layers; and the same, healed."""
    base, home = place / "mqa" / "merged", place / "windowed"
    plan = json.loads((base / "plan.json").read_text()) | {"window": {"size": 8, "sinks": 2}}
    for layer, (path, part) in enumerate(plan["attentions"].items()):
        near = [0] if layer > 1 else []
        keep = [2, 3, 4, 5] if layer == 0 else part["keep"]
        plan["attentions"][path] = {"query_heads": 6, "kv_heads": 1, "keep": keep, "window": near}
    home.mkdir()
    (home / "plan.json").write_text(json.dumps({**plan, "model": None}))
    result = prune(base, home / "cut", CutRequest(plan=home / "plan.json"))
    assert not result.warnings
    data = DataConfig(source=str(place / "text.txt"))
    healing = HealConfig(steps=1, batch_size=2, seq_len=32)
    heal(str(home / "cut"), str(place / "base"), data, home / "healed", healing)
    return home


LOST = "2 of 4 KV heads see only the latest 8 tokens and the first 2: what lies between is lost"


def test_every_form_has_its_mark(browser, windowed, place, page):
    runs = report([windowed, place / "mqa" / "merged"], windowed / "page.html", True).runs
    (run,) = (run for run in runs if run.path.name == "healed")
    states = [[cell.state for cell in layer.cells] for layer in run.head_map.layers]
    assert states[:2] == [["removed"] * 2 + ["merged"] * 4, ["merged"] * 6]
    assert states[2:] == [["window"] * 6] * 2
    assert LOST in run.summary and run.head_map.counts == (22, 24)
    browser.open(windowed / "page.html")
    figure = f"#{browser.find('.map').get_attribute('id')}"
    cells = browser.all(f"{figure} .heads rect")
    shapes = {
        cell.get_attribute("class"): browser.driver.execute_script(
            "const s = getComputedStyle(arguments[0]); return [s.width, s.rx, s.stroke]", cell
        )
        for cell in cells
    }
    assert len({tuple(shape) for shape in shapes.values()}) == len(shapes) == 3
    legend = [one.text.strip() for one in browser.all(f"{figure} .key span")]
    assert legend == ["stays, sees a window", "stays, shares merged keys and values", "removed"]
    ActionChains(browser.driver).move_to_element(cells[-1]).perform()
    told = browser.find(f"{figure} .told").text
    assert "3.self_attn, head 5: stays, sees a window; KV head 2, merged with 0, 1" in told
    assert "; sees the latest 8 tokens and the first 2" in told
    browser.open(page)  # nothing has a window there
    assert [one.text.strip() for one in browser.all(".key span")][:2] == ["stays", "removed"]


@pytest.mark.parametrize("name", ["cut", "healed"])
def test_what_windows_lose_is_said_at_every_step(name, windowed, capsys):
    manifest, net = read_manifest(windowed / name), headprune.from_pretrained(windowed / name)
    tokens, (_, bytes_after) = manifest.kv_cache_tokens, manifest.kv_cache_bytes
    assert bytes_after == model_cost(net, tokens).kv_cache_bytes < manifest.kv_cache_bytes[0] or (
        name == "healed"
    )
    card = (windowed / name / "README.md").read_text()
    row = f"| KV cache bytes at {tokens} tokens (float32) | "
    before = model_cost(tiny.model("llama-gqa"), tokens).kv_cache_bytes
    assert LOST in card and f"{row}{before:,} | {bytes_after:,} |" in card
    assert "◧ sees a window" in card and "  ◧◧◧◧◧◧\n" in card and "▣ shares" not in card
    shown = " ".join(command(capsys, "inspect", windowed / name)[1].split())
    assert LOST in shown and f"{bytes_after:,}" in shown and "50% with a window" not in shown
    inspected = json.loads(command(capsys, "inspect", windowed / name, "--json")[1])
    assert [a["window_heads"] for a in inspected["attentions"]] == [0, 0, 1, 1]
    assert inspected["window"] == {"size": 8, "sinks": 2}


def test_a_card_without_windows_says_nothing_of_them(place):
    card = (place / "cut" / "small" / "README.md").read_text()
    assert "window" not in card.replace("windows)", "") and "■ stays, · is gone" in card
    merged = (place / "mqa" / "merged" / "README.md").read_text()
    assert "▣ shares merged keys and values" in merged and "■" not in merged


def test_scores_are_told(place, tmp_path):
    gates = json.loads((place / "cut" / "gates" / "gates.json").read_text())
    units = sum(len(sizes) for sizes in gates["group_sizes"])
    scores = tmp_path / "scores"
    metadata = {n: gates[n] for n in ("model", "unit", "modules", "heads", "group_sizes")}
    metadata |= {"created": "", "versions": {}, "criteria": {"taylor": ""}}
    metadata |= {"data": None, "calibration": {}, "tokens": 0}
    values = {"taylor": torch.arange(units, dtype=torch.float32)}
    write_scores(scores, Scores(ScoresMetadata.model_validate_json(json.dumps(metadata)), values))
    (run,) = report([place / "cut", scores], tmp_path / "a.html").runs
    assert run.head_map.layers[1].cells[0].facts["score taylor"] == "3"
    (run,) = report([place / "cut" / "small", scores], tmp_path / "b.html").runs
    assert run.head_map.evidence == "score taylor"
    assert run.head_map.layers[1].cells[2].evidence == 4.0
    with pytest.raises(CheckpointError, match="no result to report on in '.*scores'"):
        report([scores], tmp_path / "scores.html")
    save_file({"taylor": values["taylor"][:-1]}, scores / "scores.safetensors")
    with pytest.raises(CheckpointError, match="not as they were written"):
        report([place / "cut" / "small", scores], tmp_path / "c.html")


@pytest.mark.parametrize("unit", ["kv-group", "head"])
def test_scores_of_a_cut_model_stand_at_the_ids_of_their_heads(unit, tmp_path):
    net = tiny.model("llama-mha")
    tiny.save(net, tmp_path / "base")
    path, gone = "model.layers.0.self_attn", [0, 2]
    (tmp_path / "plan.json").write_text(json.dumps({path: gone}))
    prune(str(tmp_path / "base"), tmp_path / "cut", CutRequest(plan=tmp_path / "plan.json"))
    headprune.score(tmp_path / "cut", tmp_path / "scores", criterion="magnitude", unit=unit)
    (tmp_path / "plan.json").write_text(json.dumps({path: [1]}))
    prune(str(tmp_path / "cut"), tmp_path / "again", CutRequest(plan=tmp_path / "plan.json"))
    runs = [tmp_path / "again", tmp_path / "scores"]
    (run,) = report(runs, tmp_path / "scores.html").runs
    (layer,) = (layer for layer in run.head_map.layers if layer.path == path)
    blocks = net.get_submodule(f"{path}.o_proj").weight.detach().unflatten(1, (6, -1))
    wanted = blocks.double().square().sum((0, 2)).sqrt()
    for cell in layer.cells:
        assert (cell.state == "earlier") == (cell.head in gone)
        if cell.head not in gone:
            assert cell.evidence == pytest.approx(float(wanted[cell.head]), rel=1e-5)
    assert layer.cells[1].evidence != pytest.approx(float(wanted[0]), rel=1e-3)


def test_the_command(place, tmp_path, capsys):
    output, mine = tmp_path / "page.html", tmp_path / "mine.html"
    code, out, _ = command(capsys, "report", place / "cut", output, "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["name"] == "cut"
    code, _, err = command(capsys, "report", place / "cut", output)
    assert code == 2 and "already exists" in err and "--overwrite" in err
    code, out, _ = command(capsys, "report", place / "cut", output, "--overwrite")
    assert code == 0 and "Written to" in out
    mine.write_text("<h1>mine</h1>")
    code, _, err = command(capsys, "report", place / "cut", mine, "--overwrite")
    assert code == 2 and "headprune did not write it" in err


def unreportable(place, home):
    """Runs that cannot be reported on, and the decisive words."""
    (home / "empty").mkdir()
    damaged = {}
    for name in ("report", "manifest"):
        damaged[name] = shutil.copytree(place / "cut", home / name)
    (damaged["report"] / "report.json").write_text("{")
    (damaged["manifest"] / "small" / "headprune.json").write_text("{}")
    return {
        "nothing": (home / "empty", "holds nothing to report on"),
        "missing": (home / "missing", "There is no run at"),
        "no report": (place / "cut" / "small" / "plan.json", "holds nothing to report on"),
        "report": (damaged["report"], "report.json' is not readable as JSON"),
        "manifest": (damaged["manifest"], "headprune.json' is not valid"),
    }


def test_what_cannot_be_reported_on(place, tmp_path, capsys):
    for run, message in unreportable(place, tmp_path).values():
        code, _, err = command(capsys, "report", run, tmp_path / "page.html")
        assert code == 2
        assert message in err
        assert err.count("error:") == 1 and "Traceback" not in err
        assert not (tmp_path / "page.html").exists()
    for output in ("page.md", "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(HeadpruneError, match=r"the output is a page; name an .html file"):
            report([place / "cut"], tmp_path / output)
    with pytest.raises(HeadpruneError, match="There is no run to report on"):
        report([], tmp_path / "page.html")


def test_a_check_is_shown_with_its_result(place, tmp_path):
    run = shutil.copytree(place / "cut", tmp_path / "run")
    config = CheckConfig(
        model=str(run / "small"),
        data=str(place / "text.txt"),
        limits=("perplexity <= 1e6", "query_heads == 24"),
        seq_len=16,
    )
    (run / "check.json").write_text(check(config).model_dump_json())
    page = report([run], tmp_path / "page.html").output.read_text()
    for told in ("broken", "perplexity &lt;= 1e6", "query_heads == 24", "1 of 2 limits hold"):
        assert told in page


def test_a_step_on_the_way_is_not_called_the_original(place, tmp_path):
    run = shutil.copytree(place / "mqa", tmp_path / "run")
    data = DataConfig(source=str(place / "text.txt"))

    def measured(against):
        evaluation = evaluate(str(run / "healed"), data, EVALUATE, against=against)
        evaluation.write(run / f"{Path(against).name}.json")
        (shown,) = report([run], tmp_path / "page.html", overwrite=True).runs
        return {row[0]: row[1] for row in comparison([shown]).rows}

    column = measured(str(run / "merged"))
    assert "perplexity, against merged" in column and "the original" not in str(column)
    assert column["KV heads"] == "4 of 12 (33.3%)"
    drawn = (tmp_path / "page.html").read_text()
    assert "quality of merged" in drawn and "quality of original" not in drawn
    column = measured(str(place / "base"))  # of the two, what it is compared with
    assert "perplexity, against the original" in column and "against merged" not in str(column)
    assert column["KV heads"] == "4 of 12 (33.3%)"


def test_the_course_of_gates_is_drawn(page):
    """A line per gate, from its start to the end of the training, and how many are decided."""
    text = page.read_text()
    assert "probability that the gate is open" in text
    stays, closes = (
        int(n)
        for n in re.search(r"stays open \((\d+)\).*?closes \((\d+)\)", text, re.DOTALL).groups()
    )
    assert (stays, closes) == (6, 6)
    (decided,) = re.findall(r"(\d+) of 12 gates are decided after 8 steps", text)[:1]
    gates = load_file(page.parent / "cut" / "gates" / "gates.safetensors")
    assert int(decided) == int(((gates["course"][-1] - 0.5).abs() >= 0.4).sum())
