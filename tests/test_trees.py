"""Parsed sentences: words and tokens, syntactic and rare-token heads, and files that are none."""

import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headprune.config import DataConfig, RolesConfig
from headprune.data.read import digest_of_data
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.attention import attention_of
from headprune.role import ROLES, table
from headprune.role.attended import Attended
from headprune.role.inputs import trees_input
from headprune.role.measure import roles
from headprune.role.table import DIRECTED, offset_control
from headprune.role.trees import read_trees
from headprune.role.watch import watch
from tests import planted, tiny
from tests.test_cli import run

# a range, an empty node, a subtype, words that are not in what they are written as, two spaces
SENTENCES = """\
# sent_id = 1
# text = I don't  see naïve cafés.
1\tI\t_\t_\t_\t_\t4\tnsubj:pass\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\t_\t_\t_\t_\t4\taux\t_\t_
3\tn't\t_\t_\t_\t_\t4\tadvmod\t_\t_
4\tsee\t_\t_\t_\t_\t0\troot\t_\t_
4.1\tghost\t_\t_\t_\t_\t_\t_\t_\t_
5\tnaïve\t_\t_\t_\t_\t6\tamod\t_\t_
6\tcafés\t_\t_\t_\t_\t4\tobj\t_\t_
7\t.\t_\t_\t_\t_\t4\tpunct\t_\t_

# text = Il va du lac
1\tIl\t_\t_\t_\t_\t2\tnsubj\t_\t_
2\tva\t_\t_\t_\t_\t0\troot\t_\t_
3-4\tdu\t_\t_\t_\t_\t_\t_\t_\t_
3\tde\t_\t_\t_\t_\t5\tcase\t_\t_
4\tle\t_\t_\t_\t_\t5\tdet\t_\t_
5\tlac\t_\t_\t_\t_\t2\tobl\t_\t_

# text = words that are not there
1\tother\t_\t_\t_\t_\t0\troot\t_\t_
"""


def _written(folder, content=SENTENCES):
    path = folder / "trees.conllu"
    path.write_text(content, encoding="utf-8")
    return str(path)


def test_words_are_found_in_their_text(tmp_path):
    first, second = read_trees(_written(tmp_path))
    words = [first.text[start:end] for start, end in first.spans]
    assert words == ["I", "do", "n't", "see", "naïve", "cafés", "."]
    assert first.relations[0] == "nsubj"
    assert first.heads == (3, 3, 3, -1, 5, 3, -1)
    words = [second.text[start:end] for start, end in second.spans]
    assert words == ["Il", "va", "du", "du", "lac"]


def _tokenizer(kind, texts):
    """Trained on the spot, with a vocabulary so small that words fall apart."""
    special = ["<pad>", "<s>", "[UNK]"]
    if kind == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # the space counts
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=262, special_tokens=special, initial_alphabet=alphabet
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=40, special_tokens=special)
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "WordPiece":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


@pytest.mark.parametrize("kind", ["byte-level BPE", "WordPiece"])
def test_tokens_belong_to_the_words_whose_letters_they_hold(kind, tmp_path):
    trees = read_trees(_written(tmp_path))
    tokenizer = _tokenizer(kind, [tree.text for tree in trees])
    pieces = 0
    for tree in trees:
        offsets = tokenizer(tree.text, return_offsets_mapping=True)["offset_mapping"]
        belongs = tree.belonging(offsets)
        assert belongs.any(0).all()  # of every word
        for word, (start, end) in enumerate(tree.spans):
            tokens = belongs[:, word].nonzero().flatten().tolist()
            letters = {at for token in tokens for at in range(*offsets[token])}
            assert set(range(start, end)) <= letters
            for token in tokens:  # nothing but spaces before it
                if belongs[token].sum() == 1:
                    assert not tree.text[offsets[token][0] : start].strip()
        assert not belongs[[start == end for start, end in offsets]].any()  # special tokens
        assert (tree.belonging([(a + 3, b + 3) for a, b in offsets]) != belongs).any()
        pieces += int((belongs.sum(0) > 1).sum())
    assert pieces  # words of several tokens


def test_attention_to_a_word_is_that_to_all_its_tokens():
    # three words; the last is of two tokens, and looks at the first, of two tokens as well
    belongs = torch.tensor([[[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]]).bool()
    rows = [[1.0, 0, 0, 0, 0]] * 3 + [[0.2, 0.2, 0.3, 0.3, 0], [0.3, 0.2, 0.4, 0, 0.1]]
    facts = {
        "belongs": belongs,
        "heads": torch.tensor([[2, 2, -1]]),
        "relations": torch.tensor([[DIRECTED.index("nsubj-head"), DIRECTED.index("obj-head"), -1]]),
    }

    def measured(weights):
        all_of, ids = torch.ones(1, 5, dtype=torch.bool), torch.arange(5)[None]
        attn = Attended(torch.tensor([[weights]]), all_of, all_of, ids, True, {}, facts=facts)
        sums, counts = ROLES["syntactic"].measure(attn)
        assert int(counts.sum()) == 2  # what words before them depend on is not in view
        return {
            name: float(sums[0, 0, DIRECTED.index(name)]) for name in ("head-nsubj", "head-obj")
        }

    assert measured(rows) == {"head-nsubj": 1, "head-obj": 0}
    rows[4] = [0.1, 0, 0.8, 0, 0.1]
    assert measured(rows) == {"head-nsubj": 0, "head-obj": 1}


def _sentences(count, partner=30):
    """Words w0 ... w29; the last is that of one before it and 30 more, and depends on it."""
    draw, parts = random.Random(0), []
    for _ in range(count):
        words = [draw.randrange(partner) for _ in range(10)]
        words = list(dict.fromkeys(words))
        subject = draw.randrange(len(words))
        words.append(words[subject] + partner)
        rows = ["# text = " + " ".join(f"w{word}" for word in words)]
        for place, word in enumerate(words):
            head, relation = (0, "root") if place == len(words) - 1 else (len(words), "dep")
            relation = "nsubj" if place == subject else relation
            rows.append(f"{place + 1}\tw{word}\t_\t_\t_\t_\t{head}\t{relation}\t_\t_")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _told(model, folder, sentences=150):
    text = folder / "text.txt"
    text.write_text(tiny.text(600))
    trees = _written(folder, _sentences(sentences))
    config = RolesConfig(sequences=4, seq_len=60, resamples=200, trees=trees)
    place, data = tiny.save(model, folder / "model"), DataConfig(source=str(text))
    record = roles(str(place), folder / "roles", data, config, overwrite=True)
    assert record.trees_sha256 == digest_of_data(DataConfig(source=trees)) != record.data_sha256
    return [head for module in record.modules for head in module.heads]


def _planted():
    model = planted.gpt2()
    planted.partner(model, 0, 0, by=30)
    planted.offset(model, 0, 1, by=3)
    planted.highest(model, 0, 2)
    return model


def test_a_planted_syntactic_head_is_told_and_one_that_looks_at_an_offset_is_not(tmp_path):
    heads = _told(_planted(), tmp_path)
    score = heads[0].scores["syntactic"]
    assert (heads[0].role, score.variant, score.state) == ("syntactic", "head-nsubj", "over")
    assert score.score == pytest.approx(1, abs=1e-3)
    assert score.control is not None
    assert score.control < 0.5
    assert heads[1].role != "syntactic"
    assert heads[1].scores["syntactic"].low <= heads[1].scores["syntactic"].control
    spoilt = _planted()
    planted.shuffled(spoilt, 0, 0)
    assert _told(spoilt, tmp_path)[0].scores["syntactic"].state == "under"
    # of fewer than a hundred words nothing is said
    fewer = _told(_planted(), tmp_path, sentences=80)[0].scores["syntactic"]
    assert (fewer.state, fewer.variant) == ("under", "head-dep")


def test_a_head_that_looks_at_rare_tokens_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "FREQUENT", 30)
    heads = _told(_planted(), tmp_path)  # w30 to w59 are the rarest words
    assert heads[2].scores["rare-token"].score == pytest.approx(1)
    assert heads[0].scores["rare-token"].state == "under"
    assert heads[3].scores["rare-token"].state == "under"
    monkeypatch.setattr(table, "FREQUENT", 500)
    assert "rare-token" not in _told(_planted(), tmp_path)[2].scores


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "t5"))
def test_sentences_do_not_depend_on_their_batch(case, tmp_path):
    model, trees = tiny.model(case), _written(tmp_path, _sentences(20))
    on_trees = {name: role for name, role in ROLES.items() if role.on == "trees"}
    alone, together = [], []
    for size, sums in ((1, alone), (2, together)):
        config = RolesConfig(batch_size=size, trees=trees)
        reading = trees_input(model, tiny.tokenizer(), config)
        assert len(reading.batches) == -(-20 // (8 * size))
        watched = watch(model, attention_of(model), reading, on_trees, {})
        sums += watched.sums.items()
        sums += [(c, offset_control(reading.facts, c)) for c in {*watched.causal.values()}]
    for (key, one), (again, two) in zip(alone, together, strict=True):
        assert key == again
        torch.testing.assert_close(one, two)
    assert any(float(sums.sum()) > 0 for _, (sums, _) in alone)


def test_slow_tokenizers_leave_syntax_out_and_small_models_refuse_it(tmp_path):
    model, config = tiny.model("llama-gqa"), RolesConfig(trees=_written(tmp_path, _sentences(4)))
    with pytest.warns(HeadpruneWarning, match="SimpleNamespace does not say where tokens stand"):
        assert trees_input(model, SimpleNamespace(is_fast=False), config) is None
    model.config.max_position_embeddings = 3
    with pytest.raises(DataError, match=r"0 of 4 sentences fit into the 3 tokens"):
        trees_input(model, tiny.tokenizer(), config)


@pytest.mark.parametrize(
    ("content", "said"),
    [("Once upon a time\n", "'Once upon a time' has 1 columns"), (None, "trees.conllu")],
)
def test_a_file_without_trees_is_refused(content, said, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(600))
    if content is not None:
        _written(tmp_path, content)
    model, output = tiny.save(tiny.model("llama-gqa"), tmp_path / "model"), tmp_path / "roles"
    asked = ["--data", text, "--trees", tmp_path / "trees.conllu", "--config", "seq_len=60"]
    code, _, err = run(capsys, "roles", model, output, *asked)
    assert (code, output.exists()) == (2, False)
    assert said in err
