"""Tasks of lm-eval: local files of tasks on tiny models, against numbers worked out here."""

import json
import math
import warnings

import lm_eval
import pytest
import torch

from headprune import packages
from headprune.config import CheckConfig, DataConfig, EvaluateConfig
from headprune.errors import HeadpruneError, HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.report import Report
from headprune.evaluation.tasks import refuse_tasks
from headprune.regression.check import check
from tests import tiny

FAST = {**{"seq_len": 16, "resamples": 200, "speed": False, "max_windows": 6}, **{"last_words": 0}}
ROWS = [
    {"context": tiny.text(5, seed=n), "choices": [f"w{n}", f"w{n + 20}"], "answer": n % 2}
    for n in range(12)
]
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""

pytestmark = pytest.mark.filterwarnings("default")  # those of lm-eval are its own


@pytest.fixture
def task_file(tmp_path, monkeypatch):
    """A task of twelve questions with two answers each."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    file = folder / "tiny_choice.yaml"
    file.write_text(TASK.format(file=folder / "rows.jsonl"))
    return file


def answered(case):
    """Which questions a tiny model answers right."""
    model, words, right = tiny.model(case), tiny.tokenizer(), []
    for row in ROWS:
        with torch.no_grad():
            logits = model(**words(row["context"], return_tensors="pt")).logits[0, -1]
        first, second = (float(logits[words.convert_tokens_to_ids(w)]) for w in row["choices"])
        right.append(float(int(second > first) == row["answer"]))
    return right


def test_scores_are_those_of_the_model(task_file, llama_folder, text_file, tmp_path):
    other = tiny.save(tiny.model("llama-mha"), tmp_path / "other")
    data = DataConfig(source=str(text_file))
    config = EvaluateConfig(**FAST, tasks=str(task_file))
    report = evaluate(llama_folder, data, config, other)
    ours, theirs = answered("llama-gqa"), answered("llama-mha")
    (found,) = (one for one in report.model.metrics if ":" in one.name)
    assert (found.name, found.n) == ("tiny_choice:acc", 12)
    assert found.value == pytest.approx(sum(ours) / 12)
    assert ours != theirs
    assert found.stderr is not None and found.stderr > 0
    (gap,) = (one for one in report.differences if ":" in one.name)
    assert gap.interval.estimate == pytest.approx((sum(ours) - sum(theirs)) / 12)
    assert gap.interval.low < gap.interval.estimate < gap.interval.high
    assert "lm_eval" in report.provenance.versions
    assert report.provenance.settings["tasks"] == [str(task_file)]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["acc,none", "acc_stderr,none"])
def test_a_score_that_is_no_number_leaves_a_report_that_can_be_read(
    key, number, task_file, llama_folder, text_file, tmp_path, monkeypatch
):
    run = lm_eval.simple_evaluate

    def broken(*given, **settings):
        results = run(*given, **settings)
        results["results"]["tiny_choice"][key] = number
        return results

    monkeypatch.setattr(lm_eval, "simple_evaluate", broken)
    config = EvaluateConfig(**FAST, tasks=str(task_file))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = evaluate(llama_folder, DataConfig(source=str(text_file)), config)
    told = [str(one.message) for one in said if one.category is HeadpruneWarning]
    report.write(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    names = [one["name"] for one in content["model"]["metrics"]]
    assert ("tiny_choice:acc" in names) == (key != "acc,none")
    assert any(f"tiny_choice: acc is {number} on 12 examples" in one for one in told) == (
        key == "acc,none"
    )
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report


def test_scores_can_be_limited(task_file, llama_folder, text_file):
    settings = {
        **{"model": str(llama_folder), "data": str(text_file), "tasks": str(task_file.parent)},
        **{"seq_len": 16, "max_windows": 6, "resamples": 1000, "against": str(llama_folder)},
    }
    limits = ("tiny_choice:acc <= -0.1 %",)
    found = check(CheckConfig(**settings, limits=("tiny_choice:acc >= 10 %",)))
    assert found.passed, found.limits
    assert not check(CheckConfig(**settings, limits=("tiny_choice:acc >= 1.5",))).passed
    with pytest.raises(HeadpruneError, match=r"no task gives tiny_choice:f1 .* tiny_choice:acc\."):
        check(CheckConfig(**settings, limits=("tiny_choice:f1 >= 0.1",)))
    with pytest.raises(HeadpruneError, match="give --baseline"):
        check(CheckConfig(**settings, limits=limits))


@pytest.mark.slow  # lm-eval reads the files of all its tasks
def test_a_misspelt_task_is_refused():
    with pytest.raises(HeadpruneError, match=r"--tasks lambada_opena: .*Did you mean 'lambada_op"):
        refuse_tasks(["lambada_opena"])


def test_files_without_a_task_are_refused(tmp_path):
    with pytest.raises(HeadpruneError, match="there is no such file"):
        refuse_tasks([str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text("x: 1")
    with pytest.raises(HeadpruneError, match="no YAML file there names a task"):
        refuse_tasks([str(tmp_path / "a.yaml")])
    with pytest.raises(HeadpruneError, match="no YAML file there names a task"):
        refuse_tasks([str(tmp_path)])


def test_the_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    refuse_tasks([])
    data = DataConfig(source=str(tmp_path / "none.txt"))
    (tmp_path / "none.txt").write_text("w1 w2")
    with pytest.raises(HeadpruneError, match=r"^--tasks needs lm-eval: pip install lm-eval\.$"):
        evaluate("nowhere", data, EvaluateConfig(**FAST, tasks="lambada_openai"))


def test_encoders_have_no_tasks_and_no_needles(task_file, text_file, tmp_path):
    folder, data = tiny.save(tiny.model("bert-mlm"), tmp_path / "bert"), str(text_file)
    for name, value in (("tasks", str(task_file)), ("needle", True)):
        with pytest.raises(HeadpruneError, match=f"--{name} is for models that generate"):
            evaluate(folder, DataConfig(source=data), EvaluateConfig(**FAST, **{name: value}))
