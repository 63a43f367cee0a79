"""headprune compress: the best candidate on held-out text, whole or not at all."""

import errno
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import headprune
from headprune.compression import candidates, compress, heldout, texts
from headprune.compression.candidates import CANDIDATES, RemoveHeads, ShareKvHeads, candidates_for
from headprune.compression.compress import Compressed, Outline, _Compression
from headprune.compression.goals import SizeGoal, _mergeable, goal_of
from headprune.compression.selection import distance
from headprune.config import CompressConfig, DataConfig, HealConfig, PlanConfig, build
from headprune.context import Context
from headprune.data.passages import passage_words
from headprune.errors import (
    DataError,
    FamilyError,
    HeadpruneError,
    Interrupted,
    PlanError,
    ProofError,
    TrainingError,
)
from headprune.evaluation.quality import TokenLosses
from headprune.evaluation.task_table import TASKS
from headprune.evaluation.written import write
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache
from headprune.model.heads import read_output, write_output
from headprune.model.loading import from_pretrained
from headprune.planning.budgets import Price, Prices
from headprune.render import records, terminal
from headprune.render import results as console
from headprune.result.refitting import JudgedRefit
from headprune.resuming import unwritable
from headprune.schemas.manifest import amend_manifest, read_manifest
from headprune.schemas.records import Contender, ModelChoice, RefitWorth
from headprune.surgery.edit import collecting
from headprune.tensors.units import Unit
from tests import tiny
from tests.marks import slow_unless
from tests.test_cli import refuses, run
from tests.test_last_words import passage_text, tokenizer

OTHERS = CANDIDATES[1:]  # than windows, which end the search where they lose little
SMALL = {"seq_len": 16, "calibration_tokens": 256, "held_out_tokens": 128}


@pytest.fixture
def data(tmp_path):
    """Two texts of the tiny tokenizer's language."""
    for number, words in enumerate((2_000, 900)):
        (tmp_path / f"text{number}.txt").write_text(tiny.text(words, number))
    return [tmp_path / "text0.txt", tmp_path / "text1.txt"]


def compressed(model, data, output, **settings):
    result = headprune.compress(model, output, **{**SMALL, "data": data, **settings})
    assert isinstance(result, Compressed)
    return result


def test_the_best_on_held_out_text_is_taken(llama_folder, data, tmp_path):
    result = compressed(llama_folder, data, tmp_path / "out", keep=0.75)
    choice, manifest = result.choice, read_manifest(tmp_path / "out")
    assert manifest.choice == choice and manifest.id == result.pruned.manifest.id
    choosing = [one.chosen_by for one in choice.contenders]
    assert len(choosing) == 2 and choosing == sorted(choosing) and not choice.left_out
    # the other half chose nothing, and is of the chosen one alone
    assert [one.held_out is None for one in choice.contenders] == [False, True]
    assert choice.chosen.held_out != choice.chosen.chosen_by
    assert choice.original.held_out == choice.original.chosen_by == 1.0
    assert result.unseen_beyond == SMALL["seq_len"]  # of 128 positions
    assert result.as_json()["unseen_beyond"] == SMALL["seq_len"]
    paper = io.StringIO()
    console.compressed(Console(file=paper, width=200), result)
    assert "contexts of more than 16 tokens were not measured" in paper.getvalue()
    assert choice.chosen.kv_heads == manifest.kv_heads[1] < manifest.kv_heads[0]
    assert set(choice.chosen.by_text) == {"text0", "text1"}
    net = from_pretrained(tmp_path / "out")
    assert sum(a.kv_heads for a in attention_of(net)) == choice.chosen.kv_heads
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Chosen" in card and choice.chosen.name.split(",")[0] in card
    # nothing is left beside it, and the record names no file that is gone
    assert {p.name for p in tmp_path.iterdir()} == {"llama", "out", "text0.txt", "text1.txt"}
    assert "-candidates" not in manifest.model_dump_json()


def test_words_that_only_the_passage_tells_choose_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(heldout, "FEWEST", 5)
    net, words = tiny.model("llama-gqa"), tokenizer()
    words.save_pretrained(tiny.save(net, tmp_path / "model"))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(passage_text(net, words, 160)))
    result = compressed(tmp_path / "model", [text], tmp_path / "out", keep=0.5, seq_len=128)
    choice, best = result.choice, result.choice.chosen
    (half,) = texts.read({"text": DataConfig(source=str(text))}).choose
    given = passage_words(half.examples(), 10**6, words, 128, inside=True)
    assert 5 <= choice.passage_words[0] < len(given) and choice.passage_words[1] >= 5
    assert choice.original.passage_words == choice.original.held_out_words == 1
    second = choice.contenders[1]
    assert best.passage_words is not None and second.passage_words is not None
    assert second.held_out_words is None is not best.held_out_words
    distances = [one.chosen_by * (1.1 - 0.1 * one.passage_words) for one in choice.contenders]
    assert distances == sorted(distances)
    paper = io.StringIO()
    console.compressed(Console(file=paper, width=200), result)
    assert f"words that only their passage tells, {choice.passage_words[0]}," in paper.getvalue()
    shown = f"{best.passage_words:.3f}", f"{best.held_out_words:.3f}"
    assert all(number in paper.getvalue() for number in shown)


@pytest.mark.parametrize(
    ("words", "first"), [((0.5, 1.0), 1), ((1.0, 0.5), 0), ((0.8, 0.9), 0), ((None, None), 0)]
)
def test_a_tenth_of_the_passage_words_is_a_hundredth_of_perplexity(words, first):
    sizes = {"parameters": 1, "kv_cache_bytes": 1, "query_heads": 1, "kv_heads": 1}
    pair = [
        Contender(name=str(at), chosen_by=1.05 + 0.03 * at, seconds=0, passage_words=kept, **sizes)
        for at, kept in enumerate(words)
    ]
    measure = TASKS["causal-lm"].measure
    assert min(pair, key=lambda one: distance(one, measure)) is pair[first]


@pytest.mark.parametrize("name", ["KV groups, fisher", "KV heads merged or removed, by layer"])
@pytest.mark.parametrize(("keep", "empty"), [(0.5, False), (0.17, True)])
def test_a_layer_is_left_without_heads_where_the_goal_leaves_no_choice(
    name, keep, empty, data, tmp_path, monkeypatch
):
    net = tiny.model("llama-gqa")
    with torch.no_grad():
        attention_of(net)[1].output_projection.get_parameter("weight").mul_(0.01)
    tiny.save(net, tmp_path / "model")
    row = [each for each in CANDIDATES if each.name == name]
    monkeypatch.setattr(candidates, "CANDIDATES", row)
    out = tmp_path / "out"
    assert not compressed(tmp_path / "model", data, out, keep=keep).choice.left_out
    counts = [attention.kv_heads for attention in attention_of(from_pretrained(out))]
    assert (0 in counts, sum(counts)) == (empty, round(12 * keep))


@pytest.fixture
def encoder(tmp_path):
    """A tiny encoder without a head, which is judged by its likeness to the original."""
    return tiny.save(tiny.model("bert-base"), tmp_path / "encoder")


@pytest.fixture
def sentences(tmp_path):
    """Sentences of the tiny tokenizer's language."""
    path = tmp_path / "sentences.txt"
    path.write_text(". ".join(tiny.text(9, i) for i in range(200)))
    return [path]


def test_heads_are_scored_on_shorter_sequences_than_refits_and_merges(
    llama_folder, data, tmp_path, monkeypatch
):
    lengths = {}

    def noted(name):
        made = getattr(candidates, name)

        def run(*args, **kwargs):
            found = {arg.seq_len for arg in args if hasattr(arg, "seq_len")}
            lengths[name] = lengths.get(name, set()) | found
            return made(*args, **kwargs)

        return run

    for name in ("scores_on", "propose_removal", "merged_of"):
        monkeypatch.setattr(candidates, name, noted(name))
    monkeypatch.setattr(candidates, "SCORED", 8)
    compressed(llama_folder, data, tmp_path / "out", keep=0.75)
    assert lengths == {"scores_on": {8}, "propose_removal": {16}, "merged_of": {16}}


def test_lengths_follow_the_text_and_what_is_seen_the_candidate(
    llama_folder, encoder, data, sentences, tmp_path, monkeypatch
):
    def lengths(model, files, tokens):
        config = CompressConfig(keep=0.5, seq_len=64, calibration_tokens=tokens)
        named = {file.name: DataConfig(source=str(file)) for file in files}
        work = _Compression(str(model), config, named, Context())
        return work.config.seq_len, work.judged

    assert lengths(llama_folder, data, 256) == (32, 64)  # an eighth
    assert lengths(llama_folder, data, 4096) == (64, 64)
    assert lengths(encoder, sentences, 256) == (64, 64)  # sentences are as long as they are
    monkeypatch.setattr(compress, "_JUDGED", 24)
    assert lengths(llama_folder, data, 4096) == (64, 24)
    plain = [c for c in CANDIDATES if c.name == "KV groups, fisher"]
    monkeypatch.setattr(candidates, "CANDIDATES", tuple(plain))
    for module in (candidates, compress):
        monkeypatch.setattr(module, "SCORED", 8)
    result = compressed(llama_folder, data, tmp_path / "out", keep=0.75)
    assert result.pruned.manifest.refit is None and result.unseen_beyond == 8


def test_a_refit_that_does_not_help_brings_in_the_fallback(
    encoder, sentences, tmp_path, monkeypatch
):
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[2:4])
    result = compressed(encoder, sentences, tmp_path / "sound", keep=0.75)
    sound, unseen = result.choice, result.unseen_beyond
    assert unseen is None  # it generates nothing
    assert sound.chosen.name == "heads, compensated, refit"

    def spoiling(net, *arguments, **settings):
        with collecting(net, attentions := attention_of(net)) as tensors:
            for attention in attentions:
                heads, bias = read_output(attention)
                write_output(attention, -3 * heads, bias)
        worth = RefitWorth(measure="m", tokens=1, without=1, refitted=2)
        return JudgedRefit(None, worth, tensors)

    monkeypatch.setattr("headprune.result.prune.judged_refit", spoiling)
    result = compressed(encoder, sentences, tmp_path / "spoilt", keep=0.75)
    names = [one.name for one in result.choice.contenders]
    assert names == ["heads, fisher", f"{sound.chosen.name} (left out)"]
    assert [one.name for one in sound.contenders] == [sound.chosen.name]
    assert result.pruned.manifest.refit is None


@pytest.mark.parametrize("learning_rate", [1e-3, 100.0])
def test_healing_is_kept_only_if_it_helps(learning_rate, encoder, sentences, tmp_path, monkeypatch):
    healing = HealConfig(steps=30, seq_len=16, learning_rate=learning_rate)
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[3:4])
    monkeypatch.setattr(_Compression, "_healing", lambda self: healing)
    result = compressed(encoder, sentences, tmp_path / "out", keep=0.75, heal_steps=30)
    names = [one.name for one in result.choice.contenders]
    done = [step.done.kind for step in result.pruned.manifest.steps]
    if learning_rate < 0.1:
        assert names == ["heads, fisher, healed 30 steps", "heads, fisher"]
        assert done == ["pruning", "healing"]
        assert result.choice.contenders[0].chosen_by >= result.choice.contenders[1].chosen_by
    else:
        assert names == ["heads, fisher"]
        assert list(result.choice.left_out) == ["heads, fisher, healed 30 steps"]
        assert done == ["pruning"]
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"encoder", "sentences.txt", "out"}


def as_trainings_say(error):
    """The error of a training that cannot write, which tells to go on with --resume."""
    said = unwritable(Path("out"), error)
    said.__context__ = error
    return said


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TrainingError("Training broke down: the loss is nan."), "Training broke down"),
        (ProofError("The outputs differ."), "The outputs differ."),
        (torch.OutOfMemoryError("CUDA out of memory."), "cpu ran out of memory."),
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full."),
        (as_trainings_say(OSError(errno.ENOSPC, "No space left")), "The disk is full."),
        (RuntimeError("something else"), None),
    ],
)
def test_healing_that_breaks_down_leaves_the_best_unhealed(
    error, told, encoder, sentences, tmp_path, monkeypatch
):
    def broken(*arguments, **settings):
        raise error

    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[3:4])
    monkeypatch.setattr("headprune.compression.compress.heal", broken)
    if told is None:  # whatever it is, it is not healing's alone
        with pytest.raises(RuntimeError, match="something else"):
            compressed(encoder, sentences, tmp_path / "out", keep=0.5, heal_steps=3)
        return
    choice = compressed(encoder, sentences, tmp_path / "out", keep=0.5, heal_steps=3).choice
    assert choice.chosen.name == "heads, fisher"
    ((name, why),) = choice.left_out.items()
    assert name == "heads, fisher, healed 3 steps" and why.startswith(told)


def test_a_candidate_that_needs_too_much_memory_is_left_out(
    llama_folder, data, tmp_path, monkeypatch
):
    def greedy(self, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ShareKvHeads, "make", greedy)
    monkeypatch.setattr(candidates, "CANDIDATES", (OTHERS[4], OTHERS[1]))
    choice = compressed(llama_folder, data, tmp_path / "out", keep=0.5).choice
    assert choice.left_out == {"KV heads merged or removed, by layer": "cpu ran out of memory."}
    assert choice.chosen.name == "KV groups, fisher"
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[4:5])
    with pytest.raises(HeadpruneError, match="ran out of memory while"):
        compressed(llama_folder, data, tmp_path / "none", keep=0.5)


def test_scores_that_take_too_much_memory_together_are_made_alone(
    llama_folder, data, tmp_path, monkeypatch
):
    scores_on = candidates.scores_on

    def greedy(model, config, *others, **settings):
        if "compensated" in config.criterion:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return scores_on(model, config, *others, **settings)

    monkeypatch.setattr(candidates, "scores_on", greedy)
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[:2])
    choice = compressed(llama_folder, data, tmp_path / "out", keep=0.5).choice
    assert {one.name.split(",")[1] for one in choice.contenders} == {" fisher"}
    assert choice.left_out and set(choice.left_out.values()) == {"cpu ran out of memory."}
    assert all("compensated" in name for name in choice.left_out)


def test_the_card_of_a_healed_result_tells_of_the_original(
    llama_folder, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[1:2])
    result = compressed(llama_folder, data, tmp_path / "out", keep=0.5, heal_steps=30)
    first, last = result.pruned.manifest.steps
    assert (first.done.kind, last.done.kind) == ("pruning", "healing")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama, cut to " in card and "; then healed for 30 steps to match" in card
    before, after = first.kv_heads[0], last.kv_heads[1]
    assert before > after and f"| KV heads | {before} | {after} | 50.0% |" in card


def test_a_few_long_documents_are_running_text(llama_folder, tmp_path):
    path = tmp_path / "five.jsonl"
    rows = [{"text": tiny.text(600, number)} for number in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    choice = compressed(llama_folder, [path], tmp_path / "out", keep=0.5).choice
    assert choice.held_out_tokens >= 2 * SMALL["seq_len"]
    path.write_text(json.dumps({"text": tiny.text(20)}))
    with pytest.raises(DataError, match="A sixteenth of the text, 2 tokens, is held out to choose"):
        compressed(llama_folder, [path], tmp_path / "short", keep=0.5)


def test_a_folder_is_read_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_PIECES", 2)
    for number, words in enumerate(("one two", "three", "four five")):  # no line ends at their ends
        (tmp_path / f"{number}.txt").write_text(words)
    (read,) = texts._documents("folder", DataConfig(source=str(tmp_path)), None).examples().texts
    assert read == ("one two\n\nthree",)  # of two files, as no more pieces are read
    monkeypatch.setattr(texts, "_PIECES", 128)
    (read,) = texts._documents("folder", DataConfig(source=str(tmp_path)), None).examples().texts
    assert read == ("one two\n\nthree\n\nfour five",)


def test_a_criterion_that_cannot_be_had_leaves_the_others(data, tmp_path):
    model = tiny.save(tiny.model("albert"), tmp_path / "albert")
    choice = compressed(model, data, tmp_path / "out", keep=0.5).choice
    assert choice.chosen.name == "heads, fisher"
    assert all("compensated" in name or "refit" in name for name in choice.left_out)


@pytest.mark.parametrize(
    ("case", "measure"),
    slow_unless(
        lambda case, _: case != "gpt2",
        [
            *(("gpt2", "perplexity ratio"), ("bert-mlm", "perplexity ratio")),
            ("bert-base", "similarity"),
        ],
    ),
)
def test_other_kinds_of_models(case, measure, data, sentences, tmp_path):
    model = tiny.save(tiny.model(case), tmp_path / "model")
    text = sentences if case == "bert-base" else data
    choice = compressed(model, text, tmp_path / "out", keep=0.5).choice
    assert (choice.measure, len(choice.contenders)) == (measure, 1)  # not grouped: no merging
    assert choice.chosen.query_heads * 2 == choice.original.query_heads
    assert choice.original.held_out is not None and abs(choice.original.held_out - 1) < 1e-5
    assert choice.chosen.held_out is not None and abs(choice.chosen.held_out - 1) > 1e-5


def test_pairs_and_labels(tmp_path):
    pairs, labelled = tmp_path / "pairs.tsv", tmp_path / "labelled.jsonl"
    pairs.write_text(
        "\n".join(["de\ten", *(f"{tiny.text(9, i)}\t{tiny.text(8, i)}" for i in range(80))])
    )
    rows = [json.dumps({"text": tiny.text(6, i), "label": i % 2}) for i in range(80)]
    labelled.write_text("\n".join(rows))
    translator = tiny.save(tiny.model("marian"), tmp_path / "translator")
    classifier = tiny.save(tiny.model("bert-classifier"), tmp_path / "classifier")
    result = compressed(translator, [pairs], tmp_path / "a", keep=0.75, text_column="de,en")
    assert result.choice.measure == "perplexity ratio" and result.choice.held_out_tokens > 50
    result = compressed(classifier, [labelled], tmp_path / "b", keep=0.75, label_column="label")
    agreement = result.choice.chosen.held_out
    assert result.choice.measure == "same labels" and agreement is not None and 0 <= agreement <= 1
    with pytest.raises(DataError, match="compressed on pairs: give --data and --text-column"):
        compressed(translator, [], tmp_path / "c", keep=0.75)
    with pytest.raises(DataError, match="labelled examples: give --data with label_column"):
        compressed(classifier, [labelled], tmp_path / "c", keep=0.75)
    labelled.write_text("\n".join(rows[:40]))
    with pytest.raises(DataError, match="5 rows, is held out, and 8 are needed"):
        compressed(classifier, [labelled], tmp_path / "c", keep=0.75, label_column="label")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("case", ["marian", "llama-mha"])
def test_a_metric_of_written_text_chooses(case, tmp_path):
    net, sources = tiny.model(case), [tiny.text(5 + n % 4, n) for n in range(96)]
    texts = write(net, sources, tiny.tokenizer(), 8, 8)
    rows = [f"{source}\t{text or 'x'}" for source, text in zip(sources, texts, strict=True)]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("\n".join(["a\tb", *rows]) + "\n")
    folder = tiny.save(net, tmp_path / "model")
    how = {"text_column": "a,b", "max_new_tokens": 8}
    choice = compressed(folder, [pairs], tmp_path / "o", keep=0.5, metric="chrf", **how).choice
    assert (choice.measure, choice.higher_is_better) == ("chrf", True)
    # the references are the texts of the original
    assert choice.original.chosen_by == choice.original.held_out == pytest.approx(100)
    assert choice.chosen.held_out is not None and choice.chosen.held_out < 99
    short = compressed(
        folder, [pairs], tmp_path / "p", keep=0.5, metric="chrf", **{**how, "max_new_tokens": 2}
    ).choice
    assert short.original.chosen_by < 99


def test_a_metric_that_cannot_choose_is_refused(data, tmp_path):
    folder = tiny.save(tiny.model("bert-mlm"), tmp_path / "model")
    with pytest.raises(HeadpruneError, match="--metric bleuu: .* chosen by one of .*Did you mean"):
        compressed(folder, data, tmp_path / "out", keep=0.5, metric="bleuu")
    with pytest.raises(DataError, match=r"written text, and this model \(masked-lm\) writes none"):
        compressed(folder, data, tmp_path / "out", keep=0.5, metric="bleu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("goal", "kept"),
    slow_unless(
        lambda goal, _: goal.keys() == {"max_kv_bytes"},
        [
            ({"max_params": 72_000}, lambda c: c.parameters <= 72_000),
            ({"max_kv_bytes": 700}, lambda c: c.kv_cache_bytes <= 700),
        ],
    ),
)
def test_other_goals_are_met_by_all_candidates(goal, kept, llama_folder, data, tmp_path):
    choice = compressed(llama_folder, data, tmp_path / "out", **goal).choice
    assert all(kept(one) for one in choice.contenders)
    assert not kept(choice.original)


def test_no_model_over_the_bytes_that_were_asked_for_is_taken(
    llama_folder, data, tmp_path, monkeypatch
):
    """A merge counts heads; a layer that it leaves without any keeps a little of a cache."""
    asked = {"max_kv_bytes": 160}
    choice = compressed(llama_folder, data, tmp_path / "out", **asked).choice
    sizes = [one.kv_cache_bytes for one in choice.contenders]
    assert sizes and max(sizes) <= 160
    assert "bytes of KV cache per token, and 160 were asked for" in str(choice.left_out)
    over = [one for one in CANDIDATES if isinstance(one.way, ShareKvHeads)]
    monkeypatch.setattr(candidates, "CANDIDATES", tuple(over))
    with pytest.raises(PlanError, match="No candidate comes to the goal.* and 160 were asked for"):
        compressed(llama_folder, data, tmp_path / "none", **asked)
    assert not (tmp_path / "none").exists()


def test_a_dry_run_says_what_would_be_done(llama_folder, tmp_path, capsys):
    line = ("compress", llama_folder, "--keep", 0.5, "--heal", 9, "--dry-run")
    code, out, err = run(capsys, *line, "--json")
    told = json.loads(out)
    assert (code, told["heal_steps"]) == (0, 9), err
    assert told["texts"] == ["code", "documentation", "novel", "play", "reference", "speeches"]
    assert (
        told["candidates"][-1] == "KV heads merged or removed, by layer"
        and len(told["candidates"]) == 3
    )
    code, out, err = run(capsys, *line)
    assert code == 0 and "0.5 of the KV heads, as queries share them" in out
    assert isinstance(headprune.compress(llama_folder, keep=0.5, dry_run=True), Outline)
    assert {p.name for p in tmp_path.iterdir()} == {"llama"}


def test_what_is_asked_for_wrongly_ends_in_a_sentence(llama_folder, data, tmp_path, capsys):
    out = tmp_path / "out"
    for wrong, message in [
        ({}, "exactly one of --keep"),
        ({"keep": 0.5, "max_params": 72_000}, "exactly one of --keep"),
        ({"max_params": 10}, r"--max-params 10: without any head, [\d,]+ are left"),
        ({"max_kv_bytes": 10}, "--max-kv-bytes 10"),
        (
            {"keep": 0.5, "seq_len": 128, "calibration_tokens": 1024},
            "needed: give some 2,048 tokens, a smaller seq_len",
        ),
    ]:
        with pytest.raises(HeadpruneError, match=message):
            compressed(llama_folder, data[1:], out, **wrong)
        assert not out.exists()
    refuses(capsys, "compress needs OUTPUT", "compress", llama_folder, "--keep", 0.5)
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(HeadpruneError, match="already exists"):
        compressed(llama_folder, data, out, keep=0.5)
    with pytest.raises(HeadpruneError, match="'mine.txt' in|mine.txt"):
        compressed(llama_folder, data, out, keep=0.5, overwrite=True)
    image = tiny.save(tiny.model("vit"), tmp_path / "image")
    with pytest.raises(FamilyError, match="compress reads text"):
        compressed(image, data, tmp_path / "c", keep=0.5)


def test_merges_are_offered_every_kv_head_that_fits():
    net, heads = tiny.model("llama-gqa"), 12
    for kept in range(4, heads + 1):
        prices = Prices(64.0, (Price(0.0, 80.0, -8.0),) * 4)
        room = 64 - 32 + 80 * kept
        assert _mergeable(prices, room) == kept and _mergeable(prices, room - 1) == kept - 1
    assert _mergeable(Prices(0.0, (Price(0.0, 8.0),) * 22), 8 * 15) == 15  # 22 * (15 / 22) < 15
    mixed = (Price(0.0, 80.0), Price(0.0, 0.0))  # of an encoder, whose heads cache nothing
    assert _mergeable(Prices(0.0, mixed), 400) == 0
    config = CompressConfig(max_kv_bytes=560)
    goal = goal_of(config, net, attention_of(net), torch.float32)
    assert goal.kv_share == pytest.approx(7 / heads)


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_bytes_of_cache_are_those_of_the_result(dtype, out_dtype, data, tmp_path, monkeypatch):
    """A budget for 9 of 12 KV heads in the result's element type leaves 9, not 4 and not 12."""
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[1:2])
    folder = tiny.save(tiny.model("llama-gqa", getattr(torch, dtype)), tmp_path / "m")
    head = 2 * 10 * getattr(torch, out_dtype).itemsize
    asked = {"max_kv_bytes": 9 * head, "out_dtype": out_dtype}
    chosen = compressed(folder, data, tmp_path / "c", **asked).choice.chosen
    headprune.score(folder, tmp_path / "s", criterion=["magnitude"])
    headprune.prune(folder, tmp_path / "p", scores=tmp_path / "s", **asked)
    found = []
    for out in (tmp_path / "c", tmp_path / "p"):
        net = AutoModelForCausalLM.from_pretrained(out, dtype="auto", trust_remote_code=True)
        cache = net(torch.tensor([[5, 6]]), use_cache=True).past_key_values
        found.append(sum(one.keys.nbytes + one.values.nbytes for one in cache.layers) // 2)
        assert 8 * head < found[-1] <= 9 * head
    assert found[0] == chosen.kv_cache_bytes


def test_a_candidate_whose_outputs_are_not_finite_is_left_out(
    llama_folder, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[:2])
    task, calls = TASKS["causal-lm"], []

    def breaking(run):
        calls.append(1)
        if len(calls) == 3:  # the original has two texts
            raise DataError("The loss of sequence 0 is nan.")
        return task.outputs(run)

    monkeypatch.setitem(TASKS, "causal-lm", replace(task, outputs=breaking))
    choice = compressed(llama_folder, data, tmp_path / "out", keep=0.5).choice
    assert list(choice.left_out.values()) == ["The loss of sequence 0 is nan."]
    assert [one.name for one in choice.contenders] == ["KV groups, fisher"]


def test_a_name_says_that_a_refit_was_left_out(llama_folder, data, tmp_path, monkeypatch):
    def leaving(*arguments):
        return JudgedRefit(None, RefitWorth(measure="m", tokens=1, without=1, refitted=2))

    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[:1])
    monkeypatch.setattr("headprune.result.prune.judged_refit", leaving)
    choice = compressed(llama_folder, data, tmp_path / "out", keep=0.5).choice
    assert choice.chosen.name == "KV groups, compensated, refit (left out)"


def test_the_table_fits_a_narrow_terminal_and_its_numbers_stay_whole():
    both = {"chosen_by": 1.0, "passage_words": 0.9, "far_nats": -0.125}
    sizes = {"parameters": 134_515_008, "kv_cache_bytes": 377_487_360, "kv_heads": 90}
    original = Contender(name="original", seconds=0, query_heads=270, **sizes, **both)
    name = "windows for 52 KV heads"
    one = original.model_copy(update={"name": name, "kv_cache_bytes": 100_663_296})
    how = {"goal": "half", "measure": "perplexity", "higher_is_better": False}
    how |= {"held_out_tokens": 4096, "passage_words": (9, 9), "kv_cache_tokens": 8192}
    table = records.contenders(ModelChoice(**how, original=original, contenders=(one,)))
    paper = io.StringIO()
    terminal.show(Console(file=paper, width=80), [table])
    text = paper.getvalue()
    names = ["> windows for 52 KV", "original"]
    numbers = ["100,663,296", "1.000", "0.900", "-0.125", "134,515,008", "377,487,360"]
    assert all(whole in text for whole in names + numbers), text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("at", ["ShareKvHeads", "heal"])
def test_a_stopped_compression_leaves_nothing(at, llama_folder, data, tmp_path, monkeypatch):
    def stopping(*arguments, **settings):
        raise Interrupted("Continue with --resume.") if at == "heal" else KeyboardInterrupt

    where = (compress, "heal") if at == "heal" else (ShareKvHeads, "make")
    monkeypatch.setattr(*where, stopping)
    before = {*tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        compressed(llama_folder, data, tmp_path / "out", keep=0.5, heal_steps=2)
    assert {*tmp_path.iterdir()} == before
    with pytest.raises(TypeError, match="resume"):
        compressed(llama_folder, data, tmp_path / "out", keep=0.5, resume=True)


def test_what_is_not_possible_is_said_and_left_out(llama_folder, data, tmp_path, monkeypatch):
    def refusing(self, *arguments):
        raise PlanError("It cannot be merged.")

    monkeypatch.setattr(ShareKvHeads, "make", refusing)
    monkeypatch.setattr(candidates, "CANDIDATES", (OTHERS[4], OTHERS[1]))
    choice = compressed(llama_folder, data, tmp_path / "out", keep=0.5).choice
    assert choice.left_out == {"KV heads merged or removed, by layer": "It cannot be merged."}
    assert [one.name for one in choice.contenders] == ["KV groups, fisher"]
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[4:5])
    with pytest.raises(PlanError, match="It cannot be merged"):
        compressed(llama_folder, data, tmp_path / "none", keep=0.5)
    assert not (tmp_path / "none").exists()


def bytes_model(folder):
    """A tiny Llama that reads any text, byte by byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: i for i, sign in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def test_without_data_the_text_that_ships_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[:1])
    model = bytes_model(tmp_path / "model")
    result = compressed(model, [], tmp_path / "out", keep=0.75, heal_steps=2)
    texts_of = set(result.choice.original.by_text)
    assert texts_of == {"code", "documentation", "novel", "play", "reference", "speeches"}
    refit = result.pruned.manifest.steps[0].refit
    assert refit is not None and refit.data == "the text that ships with headprune"


def test_measures_tell_the_original_from_others():
    def number(task, *both):
        measure = TASKS[task].measure
        return float(measure.number(measure.rows(*both)))

    losses = TokenLosses(np.array([10.0, 20.0]), np.array([5.0, 5.0]), np.zeros(2), {})
    worse = losses._replace(nll_nats=losses.nll_nats + np.array([1.0, 4.0]))
    assert number("causal-lm", losses, losses) == 1.0
    assert number("causal-lm", worse, losses) == pytest.approx(np.exp(0.5))
    classes = np.eye(4)[[1, 2, 3]], np.eye(4)[[1, 2, 0]]
    assert number("classification", *classes) == pytest.approx(2 / 3)
    tags = [np.array([0, 2]), np.array([1])], [np.array([0, 1]), np.array([1])]
    assert number("token-classification", *tags) == pytest.approx(2 / 3)
    unit = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert number("features", unit, unit) == 1.0
    assert number("features", unit, unit[::-1]) == 0.0


def test_which_candidates_apply_follows_from_the_goal():
    budget = PlanConfig(keep=0.5)
    grouped = candidates_for(SizeGoal("", budget, (Unit.KV_GROUP,), 0.5))
    single = candidates_for(SizeGoal("", budget, (Unit.HEAD,), None))
    assert {c.way.unit for c in grouped if isinstance(c.way, RemoveHeads)} == {Unit.KV_GROUP}
    assert [c.name for c in grouped if isinstance(c.way, ShareKvHeads)] == [
        "KV heads merged or removed, by layer"
    ]
    assert {c.way.unit for c in single if isinstance(c.way, RemoveHeads)} == {Unit.HEAD}
    assert not any(isinstance(c.way, ShareKvHeads) for c in single)
    assert len({c.name for c in CANDIDATES}) == len(CANDIDATES)


def test_a_manifest_is_amended_without_a_new_id(llama_folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "CANDIDATES", OTHERS[1:2])
    result = compressed(llama_folder, data, tmp_path / "out", keep=0.5)
    before = read_manifest(tmp_path / "out")
    amended = amend_manifest(tmp_path / "out", choice=None)
    assert amended.id == before.id and read_manifest(tmp_path / "out").choice is None
    assert before.choice == result.choice
    with pytest.raises(AssertionError):
        amend_manifest(tmp_path / "out", files={})


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ({"max_params": 10**9}, "nothing to do"),
        ({"max_kv_bytes": 10**9}, "nothing to do"),
        ({"max_params": 5}, "without any head"),
    ],
)
def test_goals_that_are_met_or_out_of_reach_are_refused_at_once(goal, said, llama_folder):
    with pytest.raises(PlanError, match=said):
        headprune.compress(llama_folder, dry_run=True, **goal)
    assert isinstance(headprune.compress(llama_folder, dry_run=True, keep=0.5), Outline)


@pytest.fixture(scope="module")
def long_reader(tmp_path_factory):
    """A model of 1,024 positions beside text that is longer."""
    folder = tmp_path_factory.mktemp("long")
    model = tiny.model("llama-gqa", attention_bias=False, max_position_embeddings=1024)
    tiny.save(model, folder / "m")
    (folder / "text.txt").write_text("\n".join(tiny.text(60, seed=seed) for seed in range(700)))
    return folder


@pytest.mark.parametrize(
    ("targets", "enough", "steps"), [((), 0.05, None), ((), 0.05, 2), (("anywhere",), -0.9, None)]
)
def test_a_budget_at_a_context(targets, enough, steps, long_reader, tmp_path, monkeypatch):
    """Windows are judged on longer sequences; where they lose little, nothing else is made."""
    first = replace(CANDIDATES[0], ends_search_below=enough)
    monkeypatch.setattr(candidates, "CANDIDATES", (first, *OTHERS))
    budget = 500_000  # of 983,040
    how = {"max_kv_bytes": budget, "context_tokens": 1024, "data": long_reader / "text.txt"}
    how |= {"targets": targets, "heal_steps": steps}
    made = headprune.compress(long_reader / "m", tmp_path / "out", **how)
    sizes = {one.name: one.kv_cache_bytes for one in made.choice.contenders}
    assert any("windows of 256 tokens" in name for name in sizes)
    others = set(made.choice.left_out.values())
    card = (tmp_path / "out" / "README.md").read_text()
    if enough > 0:
        assert len(sizes) == 1 and "measured alone" in card
        assert "was left out: windows lose less than 5 %." in card
        # a model of random weights is not worth healing; the step that would heal it was taken
        healing = "Healing did not lower the loss on held-out text: try more steps."
        assert others == {"windows lose less than 5 %.", *[healing] * bool(steps)}
    else:
        assert len(sizes) > 1 and not others
    assert max(sizes.values()) <= budget
    assert made.choice.kv_cache_tokens == 1024
    written = headprune.from_pretrained(tmp_path / "out")
    assert KVCache.of(written).elements(1024) * 4 == sizes[made.choice.chosen.name]
    if not targets:
        window = made.pruned.manifest.window
        assert "windows" in made.choice.chosen.name and (window.size, window.sinks) == (256, 4)


def test_a_small_budget_gets_a_small_window(long_reader):
    net = headprune.from_pretrained(long_reader / "m")
    windows = []
    for budget in (600_000, 250_000, 40_000):
        config = build(CompressConfig, max_kv_bytes=budget, context_tokens=1024)
        goal = goal_of(config, net, attention_of(net), torch.float32)
        windows.append(goal.window and goal.window.size)
    assert windows == [256, 128, None]
    config = build(CompressConfig, max_kv_bytes=400, context_tokens=None)
    assert goal_of(config, net, attention_of(net), torch.float32).window is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep": 0.5, "context_tokens": 512}, "--context is that of --max-kv-bytes"),
        ({"max_kv_bytes": 500_000, "context_tokens": 4096}, "tokenizer take 1,024 at most"),
        ({"max_kv_bytes": 500_000, "context_tokens": 512, "metric": "chrf"}, "no --context"),
        ({"max_kv_bytes": 5_000_000, "context_tokens": 1024}, "there is nothing to do"),
    ],
)
def test_budgets_at_contexts_that_cannot_be(long_reader, given, said):
    with pytest.raises(HeadpruneError, match=said):
        headprune.compress(long_reader / "m", dry_run=True, data=long_reader / "text.txt", **given)


def test_a_plain_config_has_the_windows_that_the_model_had(tmp_path):
    types = ["sliding_attention", "full_attention"] * 2
    own = {"layer_types": types, "sliding_window": 512, "max_position_embeddings": 1024}
    net = tiny.model("gemma2", **own)
    near = 4 * 4 * 511 * 2 * 3 * 10  # bytes of four layers with that window
    plain = ("anywhere",)
    for targets, budget, size in ((plain, near, 512), (plain, near - 1, None), ((), near, 256)):
        how = {"max_kv_bytes": budget, "context_tokens": 1024, "targets": targets}
        goal = goal_of(build(CompressConfig, **how), net, attention_of(net), torch.float32)
        assert (goal.window and goal.window.size) == size


def test_a_share_of_all_is_refused_before_the_others_are_made(llama_folder, tmp_path):
    with pytest.raises(HeadpruneError, match="--keep 1 is the whole model"):
        headprune.compress(llama_folder, tmp_path / "out", keep="0.5,1")
    assert not (tmp_path / "out").exists()


def test_answers_far_back_count():
    def one(**facts):
        sizes = dict.fromkeys(("parameters", "kv_cache_bytes", "query_heads", "kv_heads"), 1)
        return Contender(name="one", **{"chosen_by": 1.0, "seconds": 0.0, **sizes, **facts})

    measure = TASKS["causal-lm"].measure
    near, far = one(chosen_by=1.02, far_nats=0.05), one(chosen_by=1.0, far_nats=2.0)
    assert distance(near, measure) < distance(far, measure)
    assert distance(one(far_nats=-1.0), measure) == distance(one(), measure)


def test_facts_far_back_are_measured_and_shown(tmp_path):
    """With a tokenizer that knows the words of the questions: one token a character."""
    known = [*tiny.SPECIAL, *map(chr, range(32, 127)), "\n"]
    letters = Tokenizer(models.WordLevel({c: n for n, c in enumerate(known)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "model_max_length": 512}
    PreTrainedTokenizerFast(tokenizer_object=letters, **names).save_pretrained(tmp_path / "m")
    own = {"attention_bias": False, "max_position_embeddings": 512, "vocab_size": len(known)}
    tiny.model("llama-gqa", **own).save_pretrained(tmp_path / "m")
    (tmp_path / "text.txt").write_text("".join(f"{tiny.text(12, seed=n)}.\n" for n in range(300)))
    how = {"max_kv_bytes": 260_000, "context_tokens": 512, "seq_len": 128, "held_out_tokens": 1024}
    how |= {"calibration_tokens": 1024, "data": tmp_path / "text.txt", "targets": "anywhere"}
    made = headprune.compress(tmp_path / "m", tmp_path / "out", **how)
    near = next(one for one in made.choice.contenders if "windows" in one.name)
    assert made.choice.original.far_nats == 0 and near.far_nats != 0
    assert made.choice.chosen.held_out_far_nats != made.choice.original.held_out_far_nats == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nats of far answers" in card and f"{near.far_nats:+.3f}" in card


def test_the_folders_of_several_shares_are_claimed_first(llama_folder, tmp_path, monkeypatch):
    def none(*args, **kwargs):
        raise AssertionError("work has begun")

    monkeypatch.setattr("headprune.compression.compress.compress", none)
    (tmp_path / "out" / "0.5").mkdir(parents=True)
    (tmp_path / "out" / "0.5" / "mine.txt").touch()
    with pytest.raises(HeadpruneError, match=r"0\.5' already exists"):
        headprune.compress(llama_folder, tmp_path / "out", keep=(0.9, 0.5))
    with pytest.raises(HeadpruneError, match="names a share twice"):
        headprune.compress(llama_folder, tmp_path / "other", keep=(0.9, 0.5, 0.5))
    with pytest.raises(AssertionError, match="work has begun"):
        headprune.compress(llama_folder, tmp_path / "other", keep=(0.9, 0.6))
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "0.5"]
