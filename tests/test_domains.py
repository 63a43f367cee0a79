"""Several data at once: their names, their metrics, and where these are limited and shown."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import headprune
from headprune.config import CheckConfig, DataConfig, EvaluateConfig, build, data_configs, domains
from headprune.errors import DataError, HeadpruneError
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.metrics import Samples, label, parted, within
from headprune.evaluation.report import Report
from headprune.planning.choose import CutRequest
from headprune.pytest_plugin import _assert_no_regression
from headprune.regression.check import check, update_baseline
from headprune.result.card import quality_section
from headprune.result.prune import prune
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_cli import run, succeeds

FAST = {"seq_len": 16, "resamples": 200, "speed": False, "max_windows": 12}


@pytest.fixture
def other_text(tmp_path):
    """Text in which no word depends on another."""
    path = tmp_path / "brown.txt"
    path.write_text(" ".join(reversed(tiny.text(1_000, seed=5).split())))
    return path


def evaluated(folder, *files, against=None):
    data = {file.stem: DataConfig(source=str(file)) for file in files}
    return evaluate(folder, data, EvaluateConfig(**FAST), against)


# --- names


@pytest.mark.parametrize(
    ("given", "names", "sources"),
    [
        ("a/wiki.txt", ["wiki"], ["a/wiki.txt"]),
        (Path("a/wiki.txt.gz"), ["wiki"], ["a/wiki.txt.gz"]),
        (["a.txt", "b=c.txt"], ["a", "b"], ["a.txt", "c.txt"]),
        ({"w": "a.txt", "b": "a.txt"}, ["w", "b"], ["a.txt", "a.txt"]),
        ({"w": {"source": "a.csv", "split": "x"}}, ["w"], ["a.csv"]),
        ("wikitext:wikitext-2-raw-v1", ["wikitext-wikitext-2-raw-v1"], None),
        (["a=b=c.txt"], ["a"], ["b=c.txt"]),
    ],
)
def test_data_have_names(given, names, sources):
    found = domains(given)
    assert [one.name for one in found] == names
    if sources is not None:
        assert [one.source for one in found] == sources


def test_a_file_with_an_equals_sign_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b.txt").write_text("x")
    found = domains(["a=b.txt", "a=c.txt"])
    assert [(one.name, one.source) for one in found] == [("a-b", "a=b.txt"), ("a", "c.txt")]


def test_two_of_a_name_are_refused():
    with pytest.raises(HeadpruneError, match=r"--data: two are called a; give names"):
        domains(["x/a.txt", "y/a.txt"])


def test_settings_of_a_domain_win_over_those_of_all():
    given = {"a": "me/a", "b": {"source": "me/b", "text_column": "body"}}
    found = data_configs(domains(given), DataConfig(source="", split="test", text_column="text"))
    assert [one.text_column for one in found.values()] == ["text", "body"]
    assert [one.split for one in found.values()] == ["test", "test"]


def test_names_of_metrics_come_apart():
    assert parted(within("perplexity", "brown")) == ("perplexity", "brown")
    assert parted(within("perplexity", "")) == ("perplexity", "")
    assert label("last_word_accuracy[my_text]") == "last word accuracy [my_text]"
    assert label("lambada_openai:acc_norm") == "lambada_openai: acc norm"


# --- what is measured


def test_every_domain_is_measured_as_by_itself(llama_folder, text_file, other_text):
    both = evaluated(llama_folder, text_file, other_text, against=llama_folder)
    alone = evaluated(llama_folder, other_text)
    found = {one.name: one.value for one in both.model.metrics}
    wanted = {one.name: one.value for one in alone.model.metrics}
    assert found["perplexity[brown]"] == pytest.approx(wanted["perplexity"], rel=1e-6)
    assert found["perplexity"] != pytest.approx(wanted["perplexity"], rel=1e-4)
    compared = {one.name: one.interval.estimate for one in both.differences}
    assert compared["perplexity[brown]"] == 1
    said = both.provenance.domains
    assert said is not None and said["brown"]["sha256"] == alone.provenance.data_sha256
    assert Report.model_validate_json(both.model_dump_json()) == both
    assert alone.provenance.domains is None


def test_embeddings_are_compared_on_every_domain(tmp_path):
    folder = tiny.save(tiny.model("bert-base"), tmp_path / "model")
    data = {}
    for name, seed in (("one", 0), ("two", 9)):
        path = tmp_path / f"{name}.jsonl"
        texts = [tiny.text(6, seed=seed + i) for i in range(5)]
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        data[name] = DataConfig(source=str(path))
    other = tiny.model("bert-base")
    other.encoder.layer[0].attention.self.value.weight.data *= 0.1
    changed = tiny.save(other, tmp_path / "changed")
    found = evaluate(changed, data, EvaluateConfig(**FAST), folder).model.metrics
    values = {one.name: one.value for one in found}
    assert set(values) == {
        *("mean_cosine", "similarity_correlation"),
        *("mean_cosine[two]", "similarity_correlation[two]"),
    }
    assert values["mean_cosine"] != pytest.approx(values["mean_cosine[two]"], abs=1e-6)


def test_samples_keep_domains_apart():
    columns = {"nll_nats": 2.0, "tokens": 1.0, "nll_nats[b]": 3.0, "tokens[b]": 1.0}
    samples = Samples({name: np.full(4, value) for name, value in columns.items()})
    assert samples.metrics() == (
        *("perplexity", "nll_nats_per_token"),
        *("perplexity[b]", "nll_nats_per_token[b]"),
    )
    assert samples.value("nll_nats_per_token") == 2
    assert samples.value("nll_nats_per_token[b]") == 3


# --- check


def test_limits_on_a_domain(llama_folder, text_file, other_text, tmp_path):
    settings = {
        **{"model": str(llama_folder), "data": [text_file, other_text], "seq_len": 16},
        **{"resamples": 1000, "max_windows": 30, "against": str(llama_folder)},
    }
    held = ("perplexity[brown] <= 105 %", "nll_nats_per_token[brown] <= 105 %")
    found = check(CheckConfig(**settings, limits=held))
    assert [one.verdict.value for one in found.limits] == ["passed", "passed"]
    broken = check(CheckConfig(**settings, limits=("perplexity[brown] <= 3",)))
    assert not broken.passed
    with pytest.raises(HeadpruneError, match=r"does not measure perplexity"):
        check(CheckConfig(**settings, limits=("perplexity[other] <= 3",)))
    path = tmp_path / "baseline.json"
    since = CheckConfig(**settings, baseline=str(path), limits=("perplexity[brown] <= +1 %",))
    assert "nll_nats[brown]" in update_baseline(since).samples
    assert check(since).passed
    first = tmp_path / "elsewhere" / "brown.txt"  # of the name that the second was given
    first.parent.mkdir()
    first.write_text(text_file.read_text())
    named = since.model_copy(update={"data": domains({"x": first, "brown": other_text})})
    update_baseline(named)
    assert _assert_no_regression(llama_folder, path).passed
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": tiny.text(20)}]
    chats.write_text((json.dumps({"messages": said}) + "\n") * 30)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(llama_folder)
    answers = [{"name": "chats", "source": str(chats), "loss": "answers"}, *named.data[1:]]
    update_baseline(build(CheckConfig, **{**since.model_dump(), "data": answers}))
    assert _assert_no_regression(llama_folder, path).passed
    update_baseline(named)
    other_text.write_text(tiny.text(1_000, seed=6))
    with pytest.raises(DataError, match="on other data: the texts of 'brown'"):
        check(since)


# --- command line, reports


def test_the_command_line_takes_several(llama_folder, text_file, other_text, tmp_path, capsys):
    sizes = f"--config seq_len={16} --no-speed --max-windows 12 --config resamples=100"
    settings = sizes.split()
    data = ("--data", text_file, "--data", f"b={other_text}", "--against", llama_folder)
    file = tmp_path / "reports" / "evaluation.json"
    file.parent.mkdir()
    out = succeeds(capsys, "evaluate", llama_folder, *data, *settings, file)
    assert "perplexity [b]" in out
    rows = Report.model_validate_json(file.read_text()).rows()
    card = quality_section(rows)
    assert r"| perplexity \[b\] |" in card and "1.000 x (95 %: 1.000 to 1.000)" in card
    assert quality_section([]) == ""
    code, _, err = run(capsys, "evaluate", llama_folder, *data, *settings, "--config", "card=true")
    assert code == 2 and "headprune.json" in err  # it is no result
    cut = tmp_path / "cut"
    prune(llama_folder, cut, CutRequest(plan=uneven_plan(headprune.from_pretrained(llama_folder))))
    before = (cut / "README.md").read_text()
    code, _, err = run(capsys, "evaluate", cut, *data, *settings, "--config", "card=true")
    after = (cut / "README.md").read_text()
    assert code == 0 and "## Quality" not in before, err
    start, stop = after.index("## Quality"), after.index("\n## ", after.index("## Quality"))
    assert r"| perplexity \[b\] |" in after[start:stop]
    assert after[:start] + after[stop + 1 :] == before
    assert headprune.verify(cut, against=llama_folder).passed


def test_settings_name_several():
    content = yaml.safe_load("data: {wiki: me/a, brown: me/b}")
    options = build(CheckConfig, model="m", **content)
    assert list(options.domains()) == ["wiki", "brown"]
