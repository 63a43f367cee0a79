"""What a tokenizer puts around a text, such as BOS and EOS, is there wherever a model reads one."""

import json
import math
from contextlib import contextmanager

import pytest
import torch
from tokenizers import processors
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from headprune.compression.heldout import HeldOut, Lengths
from headprune.compression.texts import Documents, Parts
from headprune.config import (
    CalibrationConfig,
    CheckConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    Objective,
    RolesConfig,
    TrainGatesConfig,
)
from headprune.data.batches import batches, calibration, merge_calibration
from headprune.data.read import Examples
from headprune.data.sequences import all_windows
from headprune.data.tokens import around
from headprune.errors import DataError, HeadpruneError
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.evaluate import run as evaluate_loaded
from headprune.evaluation.loaded import load
from headprune.evaluation.refusals import refuse_other_tokenizer
from headprune.model.loading import load_tokenizer
from headprune.regression.check import check, update_baseline
from headprune.role.inputs import repeated_inputs, text_input
from tests import tiny

BOS, EOS, MASK = 2, 3, 4
TOKENIZERS = {
    "nothing": ([], []),
    "bos": ([BOS], []),
    "eos": ([], [EOS]),
    "both": ([BOS], [EOS]),
    "two": ([MASK, BOS], []),  # as GLM: [gMASK]<sop>
}
SEQ = 16


def adding(kind):
    """The tiny tokenizer, with something around every text."""
    made = tiny.tokenizer()
    before, after = (made.convert_ids_to_tokens(side) for side in TOKENIZERS[kind])
    special = [(token, made.convert_tokens_to_ids(token)) for token in {*before, *after}]
    if special:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=special
        )
    return made


def saved(kind, folder, case="llama-gqa"):
    tiny.save(tiny.model(case), folder)
    adding(kind).save_pretrained(folder)
    return folder


@contextmanager
def reads():
    """Whatever comes to an embedding of the vocabulary."""
    seen = []

    def look(module, args):
        if isinstance(module, nn.Embedding) and module.num_embeddings == tiny.VOCAB:
            seen.append(args[0].cpu())

    hook = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def begin(rows, before):
    """Whether every row begins so, and has none of it further on."""
    length = len(before)
    return all(
        list(row[:length]) == before and not set(before) & set(row[length:]) - {EOS} for row in rows
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_a_tokenizer_adds_is_known(kind):
    assert around(adding(kind)) == TOKENIZERS[kind]


def test_a_tokenizer_that_changes_the_text_is_refused():
    class Changing:
        all_special_ids = (0,)

        def get_vocab(self):
            return {"a": 1}

        def __call__(self, text, add_special_tokens=True, **_):
            return {"input_ids": [0, 2] if add_special_tokens else [1]}

    with pytest.raises(DataError, match=r"reads 'a' as \[1\], and with special tokens as \[0, 2\]"):
        around(Changing())


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_window_begins_as_a_text(kind, documents, closed):
    (before, after), of = TOKENIZERS[kind], adding(kind)
    texts = [(tiny.text(50, seed),) for seed in range(3)]
    rows = all_windows(Examples(texts, None, documents), of, SEQ, closed=closed)[0]["input_ids"]
    end = ([EOS] if documents else []) if closed else after or ([EOS] if documents else [])
    stream = [
        token
        for (text,) in texts
        for token in [*of(text, add_special_tokens=False)["input_ids"], *end]
    ]
    last = after if closed else []
    inner = SEQ - len(before) - len(last)
    assert rows == [
        [*before, *stream[i : i + inner], *last]
        for i in range(0, len(stream) // inner * inner, inner)
    ]


@pytest.mark.parametrize("kind", ["eos", "two"])
def test_samples_of_text_begin_as_a_text(kind, tmp_path, text_file):
    (before, after), of = TOKENIZERS[kind], adding(kind)
    folder, data = saved(kind, tmp_path / "model"), DataConfig(source=str(text_file))
    net = tiny.model("llama-gqa")
    config = CalibrationConfig(calibration_tokens=128, seq_len=SEQ)
    sample = calibration(net, load_tokenizer(folder), data, config, "score").fit
    assert begin(sample.rows["input_ids"], before)
    convert = ConvertConfig(kv_heads=1, calibration_tokens=128, seq_len=SEQ)
    assert begin(
        merge_calibration(net, load_tokenizer(folder), data, convert).fit.rows["input_ids"], before
    )
    text = Documents("text", tuple(((tiny.text(100),), None) for _ in range(3)), False)
    heldout = HeldOut(net, of, Parts((), (text,), (text,)), Lengths(SEQ, 64, 4))
    for half in (heldout.choose, heldout.report):
        assert half.rows and all(begin(rows["input_ids"], before) for rows in half.rows.values())
    roles = RolesConfig(sequences=4, seq_len=SEQ)
    for given in (text_input(net, of, data, roles)[0], *repeated_inputs(net, of, roles)):
        assert all(begin(batch["input_ids"].tolist(), before) for batch in given.batches)
        assert not given.period or given.start == len(before)
    t5 = tiny.model("t5")
    sample = merge_calibration(t5, load_tokenizer(folder), data, convert).fit
    assert begin(sample.rows["input_ids"], before)  # its encoder reads whole texts
    assert all(row[len(row) - len(after) :] == after for row in sample.rows["input_ids"])


@pytest.mark.parametrize("kind", ["eos", "two"])
def test_what_stands_before_a_text_is_not_predicted(kind, text_file):
    before, net = TOKENIZERS[kind][0], tiny.model("llama-gqa")
    config = TrainGatesConfig(target_heads=12, seq_len=SEQ, batch_size=4)
    data = DataConfig(source=str(text_file))
    read = batches(Objective.LM, net, adding(kind), data, config)
    batch = read.collate([read.rows[number] for number in range(4)])
    ids, labels = batch["input_ids"], batch["labels"]
    assert (labels[:, : len(before)] == -100).all()
    assert torch.equal(labels[:, len(before) :], ids[:, len(before) :])
    assert begin(ids.tolist(), before)


@pytest.mark.parametrize("kind", ["eos", "two"])
def test_whatever_an_evaluation_reads_begins_as_a_text(kind, tmp_path):
    before = TOKENIZERS[kind][0]
    folder = saved(kind, tmp_path / "model")
    prose = tmp_path / "prose.txt"
    prose.write_text("".join(f"{tiny.text(55, seed)} ending.\n\n" for seed in range(12)))
    config = EvaluateConfig(
        seq_len=SEQ,
        max_windows=4,
        last_words=3,
        needle=True,
        needle_lengths=(64,),
        needle_trials=1,
        speed=False,
    )
    loaded = load(folder, DataConfig(source=str(prose)), config)
    with reads() as seen:
        report = evaluate_loaded(loaded, config).report
    names = {metric.name for metric in report.model.metrics}
    assert {"perplexity", "last_word_accuracy", "needle_accuracy"} <= names
    assert len({ids.shape[1] for ids in seen}) >= 2  # windows and prompts
    assert all(begin(ids.tolist(), before) for ids in seen)
    assert report.provenance.settings.get("prefix_ids", []) == before


@pytest.mark.parametrize("kind", ["eos", "two"])
def test_perplexity_is_that_of_plain_torch(kind, tmp_path, text_file):
    before = TOKENIZERS[kind][0]
    folder = saved(kind, tmp_path / "model")
    words = tiny.tokenizer()(text_file.read_text())["input_ids"][: 5 * (SEQ - len(before))]
    text_file.write_text(tiny.tokenizer().decode(words))
    config = EvaluateConfig(seq_len=SEQ, speed=False)
    report = evaluate(folder, DataConfig(source=str(text_file)), config)
    (found,) = (m.value for m in report.model.metrics if m.name == "perplexity")
    net = tiny.model("llama-gqa")

    def by_hand(first):
        inner, losses = SEQ - len(before), []
        for start in range(0, 5 * inner, inner):
            ids = torch.tensor([*first, *words[start : start + inner]])
            with torch.no_grad():
                logits = net(ids[None]).logits[0]
            scored = max(1, len(first))
            losses.append(F.cross_entropy(logits[scored - 1 : -1], ids[scored:], reduction="none"))
        return math.exp(torch.cat(losses).double().mean())

    assert found == pytest.approx(by_hand(before), rel=1e-6)
    other = [BOS] if before == [] else []
    assert abs(by_hand(other) / found - 1) > 1e-3


def test_a_baseline_without_bos_is_refused(tmp_path, text_file):
    baseline = tmp_path / "baseline.json"
    config = CheckConfig(
        model=str(saved("bos", tmp_path / "model")),
        data=str(text_file),
        baseline=str(baseline),
        limits=("perplexity <= +2 %",),
        seq_len=SEQ,
        max_windows=12,
    )
    update_baseline(config)
    assert check(config).passed
    content = json.loads(baseline.read_text())
    assert content["settings"].pop("prefix_ids") == [BOS]
    baseline.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"other settings: prefix_ids was None and is \[2\]"):
        check(config)


def test_a_base_that_begins_a_text_otherwise_is_refused():
    with pytest.raises(HeadpruneError, match=r"around a text \(\[2\] and \[\]\)"):
        refuse_other_tokenizer(adding("bos"), adding("nothing"), ["a", "b"])
    refuse_other_tokenizer(adding("bos"), adding("bos"), ["a", "b"])
