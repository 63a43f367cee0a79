"""Metrics of what a model writes."""

import jiwer
import numpy as np
import pytest
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers.processors import TemplateProcessing

from headprune import packages
from headprune.config import CheckConfig, DataConfig, EvaluateConfig
from headprune.config.stages import WRITTEN
from headprune.context import Allowed
from headprune.errors import DataError, HeadpruneError, HeadpruneWarning
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.metrics import METRICS, Samples
from headprune.evaluation.written import COUNTED, refuse_metrics, scores, write
from headprune.model.attention import attention_of
from headprune.regression.check import check
from tests import tiny

REFERENCES = ["the cat sat on the mat today", "hello world who are you", "a third line", "yes"]
WRITES = ["the cat sat on a mat today", "hello world, who are you", "one line", "yes "]


def rouge(name):
    scorer = RougeScorer([name])
    return lambda ours, theirs: float(
        np.mean([scorer.score(t, o)[name].fmeasure for o, t in zip(ours, theirs, strict=True)])
    )


WHOLE = {
    "bleu": lambda ours, theirs: sacrebleu.corpus_bleu(ours, [theirs]).score,
    "chrf": lambda ours, theirs: sacrebleu.corpus_chrf(ours, [theirs]).score,
    "ter": lambda ours, theirs: sacrebleu.corpus_ter(ours, [theirs]).score,
    "rouge1": rouge("rouge1"),
    "rouge2": rouge("rouge2"),
    "rouge_l": rouge("rougeL"),
    "wer": lambda ours, theirs: jiwer.wer(theirs, ours),
    "cer": lambda ours, theirs: jiwer.cer(theirs, ours),
    "exact_match": lambda ours, theirs: np.mean(
        [o.strip() == t for o, t in zip(ours, theirs, strict=True)]
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_resample_is_what_the_package_says_of_its_texts(name):
    columns, numbers = scores([name], WRITES, REFERENCES)
    statistic = Samples(columns).statistic(name)
    draws = np.array([[0, 1, 2, 3], [0, 0, 2, 3], [3, 1, 1, 0]])
    values = statistic(draws)
    assert not numbers and values.shape == (3,)
    for draw, value in zip(draws.tolist(), values, strict=True):
        of = [[texts[number] for number in draw] for texts in (WRITES, REFERENCES)]
        assert value == pytest.approx(WHOLE[name](*of), abs=1e-9)
        of[0] = ["nothing"] * len(draw)
        assert value != pytest.approx(WHOLE[name](*of), abs=1e-9)


def test_the_names_of_settings_are_those_of_metrics():
    assert tuple(COUNTED) == WRITTEN and set(WRITTEN) <= set(METRICS)
    limits = ("bleu >= 20", "perplexity <= 9", "wer <= 0.2")
    config = CheckConfig(model="m", data="d", limits=limits).evaluate_config()
    assert config.metrics == ("bleu", "wer") and config.last_words == 0


def translator(folder, case="marian"):
    """A folder of an encoder-decoder, and ``data.tsv`` beside it with its own output."""
    net = tiny.model(case)
    tiny.save(net, folder)
    tokenizer = tiny.tokenizer()
    sources = [tiny.text(4 + number % 5, number) for number in range(24)]
    texts = write(net, sources, tokenizer, 4, 12)
    rows = [f"{source}\t{text or 'x'}" for source, text in zip(sources, texts, strict=True)]
    (folder.parent / "data.tsv").write_text("\n".join(["source\ttarget", *rows]) + "\n")
    return folder


@pytest.mark.parametrize("case", ["marian", "bart"])
def test_an_evaluation_compares_what_both_write(case, tmp_path):
    folder = translator(tmp_path / "model", case)
    cut = tiny.model(case)
    for attention in attention_of(cut):
        attention.output_projection.get_parameter("weight").data.zero_()
    tiny.save(cut, tmp_path / "cut")
    data = DataConfig(source=str(tmp_path / "data.tsv"), text_column="source,target")
    names = ("bleu", "chrf", "exact_match", "wer")
    config = EvaluateConfig(
        metrics=names, max_new_tokens=12, speed=False, seq_len=32, resamples=200
    )
    report = evaluate(tmp_path / "cut", data, config, folder)
    ours, base = (
        {one.name: one.value for one in side.metrics if one.name in names}
        for side in (report.model, report.against)
        if side is not None
    )
    # the references are the greedy texts of the original
    assert base == {
        "bleu": pytest.approx(100),
        "chrf": pytest.approx(100),
        "exact_match": 1,
        "wer": 0,
    }
    assert ours["bleu"] < 99 and ours["wer"] > 0 and ours["exact_match"] < 1
    found = {one.name: one.interval for one in report.differences}
    assert set(names) <= set(found)
    assert found["bleu"].estimate == pytest.approx(ours["bleu"] - 100)
    assert found["bleu"].low <= found["bleu"].estimate <= found["bleu"].high < 0
    assert {"perplexity"} < {one.name for one in report.model.metrics}
    recorded = report.provenance.settings
    assert (recorded["metrics"], recorded["max_new_tokens"]) == ([*names], 12)


def test_limits_on_what_is_written(tmp_path):
    folder = translator(tmp_path / "model")
    limits = ("bleu >= 60", "exact_match >= 0.6", "wer <= 0.5", "bleu recovery >= 60 %")
    config = CheckConfig(
        model=str(folder),
        data=str(tmp_path / "data.tsv"),
        against=str(folder),
        split="train",
        text_column="source,target",
        limits=limits,
        max_new_tokens=12,
        seq_len=32,
    )
    found = check(config)
    assert found.passed, found.limits
    few = check(config.model_copy(update={"max_new_tokens": 4, "limits": limits[:3]}))
    broken = {one.metric for one in few.limits if one.verdict.value == "broken"}
    assert broken >= {"bleu", "exact_match"}


def test_prompts_are_padded_on_the_left():
    model, tokenizer = tiny.model("llama-gqa"), tiny.tokenizer()
    prompts = [tiny.text(3 + number % 4, number) for number in range(9)]
    alone = write(model, prompts, tokenizer, 1, 6)
    assert write(model, prompts, tokenizer, 4, 6) == alone and len(set(alone)) > 1
    assert all(not text.startswith(prompt) for text, prompt in zip(alone, prompts, strict=True))
    with torch.no_grad():  # the likeliest tokens, one after the other
        ids = tokenizer(prompts[0], return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        for _ in range(6):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.decode(ids[0, start:], skip_special_tokens=True) == alone[0]


MODULE = """
import datasets
import evaluate

class Longest(evaluate.Metric):
    def _info(self):
        strings = datasets.Value("string")
        features = datasets.Features({"predictions": strings, "references": strings})
        return evaluate.MetricInfo("", "", features)

    def _compute(self, predictions, references):
        return {"longest": float(max(map(len, predictions))), "named": "text"}
"""


def test_a_module_of_evaluate_is_read_where_code_may_run(tmp_path):
    module = tmp_path / "longest.py"
    module.write_text(MODULE)
    with pytest.raises(HeadpruneError, match="runs code that comes with it"):
        refuse_metrics([str(module)], Allowed())
    refuse_metrics([str(module)], Allowed(trust_remote_code=True))
    columns, (number,) = scores([str(module)], WRITES, REFERENCES)
    assert not columns and (number.name, number.value, number.n) == ("longest:longest", 26, 4)
    module.write_text(MODULE.replace('"named": "text"', '"named": float("nan")'))
    with pytest.warns(HeadpruneWarning, match="longest: named is nan on 4 examples, and is left"):
        assert [one.name for one in scores([str(module)], WRITES, REFERENCES)[1]] == [number.name]
    module.write_text(MODULE.replace("max(map(len, predictions))", "1 / 0"))
    with pytest.raises(HeadpruneError, match="could not be computed: (float )?division by zero"):
        scores([str(module)], WRITES, REFERENCES)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"metrics": "blue"}, "known are bleu, chrf.*Did you mean 'bleu'"),
        ({"metrics": "bleu", "text_column": "source"}, "name both columns"),
        (
            {"metrics": "wer", "model": "bert"},
            "a Bert.* writes none.*accuracy and F1 of classifiers",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(settings, why, tmp_path):
    folder = translator(tmp_path / "model")
    if settings.pop("model", None):
        tiny.save(tiny.model("bert"), folder := tmp_path / "bert")
    columns = settings.pop("text_column", "source,target")
    data = DataConfig(source=str(tmp_path / "data.tsv"), text_column=columns)
    with pytest.raises(HeadpruneError, match=why):
        evaluate(folder, data, EvaluateConfig(**settings, speed=False, seq_len=32))


def test_a_missing_package_and_empty_texts_are_said(monkeypatch):
    with pytest.raises(DataError, match="wrote nothing after 4 prompts"):
        scores(["bleu"], ["", " ", "", ""], REFERENCES)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(HeadpruneError, match=r"--metric wer needs jiwer: pip install jiwer\."):
        refuse_metrics(["wer"], Allowed())
    refuse_metrics(["exact_match"], Allowed())


def test_a_prompt_does_not_end_with_the_end_token():
    """A tokenizer that appends it, as many were saved, would have the model begin anew."""
    net, plain, ending = tiny.model("llama-gqa"), tiny.tokenizer(), tiny.tokenizer()
    first, last = ending.bos_token, ending.eos_token
    special = [(each, ending.convert_tokens_to_ids(each)) for each in (first, last)]
    ending._tokenizer.post_processor = TemplateProcessing(
        single=f"$A {last}", special_tokens=special[1:]
    )
    prompts = [tiny.text(5 + n, n) for n in range(3)]
    assert ending(prompts[0])["input_ids"] == [*plain(prompts[0])["input_ids"], special[1][1]]
    wanted = write(net, prompts, plain, 2, 6)
    assert write(net, prompts, ending, 2, 6) == wanted
    assert write(net, [f"{prompt} {last}" for prompt in prompts], plain, 2, 6) != wanted
