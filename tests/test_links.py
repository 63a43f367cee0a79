"""Links in folders: those of a model lead to its own files, and nothing is written through one."""

import hashlib
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerFast

import headprune
from headprune.errors import CheckpointError
from headprune.model.loading import load_tokenizer
from tests import tiny

SECRET = "the key of the user"
PLAN = {"model.layers.0.self_attn": [0, 1]}


def _named(net, folder):
    net.config.name_or_path = str(folder)
    return net


# whether a command reads a model first, or another one
READS = {
    "attention": lambda m, out, text: headprune.attention(m, out / "o.html", text="w1 w2"),
    "check": lambda m, out, text: headprune.check(m, data=text, limits="perplexity <= 9"),
    "check against": lambda m, out, text: headprune.check(
        out.parent / "good", data=text, limits="perplexity <= 105 %", against=m, seq_len=16
    ),
    "compress": lambda m, out, text: headprune.compress(m, out, data=text, keep=0.5),
    "convert_gqa": lambda m, out, text: headprune.convert_gqa(m, out, kv_heads=1),
    "convert_mla": lambda m, out, text: headprune.convert_mla(m, out, data=text, kv_bytes=64),
    "convert_swa": lambda m, out, text: headprune.convert_swa(m, out, data=text),
    "evaluate": lambda m, out, text: headprune.evaluate(m, data=text, output=out),
    "evaluate against": lambda m, out, text: headprune.evaluate(
        out.parent / "good", data=text, against=m
    ),
    "export": lambda m, out, text: headprune.export(m, out, to="vllm"),
    "heal": lambda m, out, text: headprune.heal(
        m, out, teacher=out.parent / "good", data=text, steps=1
    ),
    "heal by": lambda m, out, text: headprune.heal(
        out.parent / "good", out, teacher=m, data=text, steps=1
    ),
    "inspect": lambda m, out, text: headprune.inspect(m),
    "migrate": lambda m, out, text: headprune.migrate(m, out),
    "pad": lambda m, out, text: headprune.pad(m, out, multiple_of=2),
    "prune": lambda m, out, text: headprune.prune(m, out, plan=PLAN),
    "report": lambda m, out, text: headprune.report([m], out / "o.html"),
    "roles": lambda m, out, text: headprune.roles(m, out, data=text),
    "score": lambda m, out, text: headprune.score(m, out, criterion="random"),
    "train_gates": lambda m, out, text: headprune.train_gates(m, out, data=text, target_heads=12),
    "verify": lambda m, out, text: headprune.verify(m),
    "verify against": lambda m, out, text: headprune.verify(out.parent / "good", against=m),
    "from_pretrained": lambda m, out, text: headprune.from_pretrained(m),
    "with a config": lambda m, out, text: headprune.from_pretrained(
        m, config=AutoConfig.from_pretrained(out.parent / "good")
    ),
    "held": lambda m, out, text: headprune.prune(
        _named(headprune.from_pretrained(out.parent / "good"), m), out, plan=PLAN
    ),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A result of headprune, which every command takes."""
    home = tmp_path_factory.mktemp("cut")
    tiny.save(tiny.model("llama-mha"), home / "llama")
    headprune.prune(home / "llama", home / "cut", plan={"model.layers.1.self_attn": [0, 1, 2]})
    return home / "cut"


@pytest.fixture(scope="module")
def wanted(cut):
    """Its own cut."""
    headprune.prune(cut, cut.with_name("wanted"), plan=PLAN)
    return cut.with_name("wanted")


@pytest.fixture
def home(cut, tmp_path):
    """Two copies of it, good and bad, with a file of the user and his text."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "text.txt").write_text(tiny.text(400))
    for name in ("good", "bad"):
        shutil.copytree(cut, tmp_path / name)
    return tmp_path


def contents(folder):
    """All files of a folder, and its links by name."""
    return {
        str(path.relative_to(folder)): None if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", READS)
def test_no_command_reads_a_model_with_a_link_to_a_file_of_the_user(name, home):
    (home / "bad" / "LICENSE").symlink_to(home / "secret")
    before = contents(home)
    with pytest.raises(CheckpointError, match=r"'LICENSE' in '.*bad' is a link to '.*secret'"):
        READS[name](home / "bad", home / "out", home / "text.txt")
    assert contents(home) == before


def test_all_commands_that_read_a_model_are_tried():
    assert {*headprune._COMMANDS} <= {*READS, "families"}


def _linked(link, to):
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(to)


@pytest.mark.parametrize(
    "name",
    [
        *("LICENSE", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("config.json", "generation_config.json", "model.safetensors", "headprune.json"),
        *("plan.json", "README.md", "modeling_headprune.py", "custom_generate/generate.py"),
        *("additional_chat_templates/a.jinja", "custom_generate", "1_Pooling", "of/nobody"),
    ],
)
@pytest.mark.parametrize("how", ["absolute", "relative", "two links", "broken", "circle"])
def test_a_link_that_leaves_a_model_is_refused_by_name(name, how, home):
    folder = home / "bad"
    there = home / "good" / name if (home / "good" / name).exists() else home / "secret"
    to = {
        "absolute": there,
        "relative": "../" * (name.count("/") + 1) + str(there.relative_to(home)),
        "two links": folder / "a",
        "broken": "gone",
        "circle": Path(name).name,
    }
    if how == "two links":
        (home / "outside").symlink_to(there)
        (folder / "a").symlink_to(home / "outside")
    _linked(folder / name, to[how])
    named = "a" if how == "two links" and name > "a" else name
    with pytest.raises(CheckpointError, match=f"'({name}|{named})' in '.*bad' is a link to"):
        headprune.prune(folder, home / "out", plan=PLAN)
    assert not (home / "out").exists()


def test_the_address_of_a_clone_is_no_part_of_a_model(home):
    (home / "bad" / ".git").mkdir()
    (home / "bad" / ".git" / "config").write_text("url = https://user:password@hub/model")
    headprune.prune(home / "bad", home / "out", plan=PLAN)
    (home / "bad" / "LICENSE").symlink_to(".git/config")
    with pytest.raises(CheckpointError, match=r"'LICENSE' in"):
        headprune.prune(home / "bad", home / "again", plan=PLAN)


# ------------------------------------------------------------- links of a model


def cached(folder, hub, name="models--me--llama"):
    """A snapshot in the cache of the hub, as huggingface_hub makes it, of the files of a folder."""
    snapshot, blobs = hub / name / "snapshots" / "1", hub / name / "blobs"
    blobs.mkdir(parents=True)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blobs / digest)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * (len(link.relative_to(hub).parts) - 2) + f"blobs/{digest}")
    return snapshot


def with_links_inside(folder, home):
    """A folder whose files are links to others of it."""
    (folder / "kept" / "deep").mkdir(parents=True)
    for file in [file for file in folder.iterdir() if file.is_file()]:
        file.rename(folder / "kept" / "deep" / file.name)
        (folder / "kept" / file.name).symlink_to(f"deep/{file.name}")
        file.symlink_to(folder / "kept" / file.name)
    (folder / "1_Pooling").symlink_to("kept/deep")
    return folder


def by_a_link(folder, home):
    """A link to a folder."""
    (home / "link").symlink_to("bad")
    return home / "link"


def in_a_linked_cache(folder, home):
    """A model in a folder of a repository, in a cache on another disk."""
    snapshot = cached(folder.parent / "bad", home / "disk")
    (home / "cache").symlink_to("disk")
    return home / "cache" / snapshot.relative_to(home / "disk")


@pytest.mark.parametrize("how", [cached, with_links_inside, by_a_link, in_a_linked_cache])
def test_links_to_files_of_the_model_are_followed(how, home, wanted):
    folder = home / "bad"
    (folder / "LICENSE").write_text("You may.")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("x = 1")
    model = how(folder, home)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    headprune.prune(model, home / "out", plan=PLAN)
    made, right = (load_file(place / "model.safetensors") for place in (home / "out", wanted))
    assert made.keys() == right.keys() and all(made[name].equal(right[name]) for name in right)
    assert (home / "out" / "LICENSE").read_text() == "You may."
    assert (home / "out" / "custom_generate" / "generate.py").read_text() == "x = 1"
    assert not any(path.is_symlink() for path in (home / "out").rglob("*"))
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("how", ["of another repository", "blobs is a link", "a blob is a link"])
def test_the_cache_of_the_hub_leads_to_blobs_of_the_same_repository(how, home):
    snapshot = cached(home / "good", home / "hub")
    blobs = snapshot.parents[1] / "blobs"
    license, secret = snapshot / "LICENSE", home / "hub" / "models--my--own" / "blobs" / "secret"
    secret.parent.mkdir(parents=True)
    secret.write_text(SECRET)
    license.symlink_to("../../blobs/secret")
    if how == "of another repository":
        _linked(license, "../../../models--my--own/blobs/secret")
    elif how == "a blob is a link":
        (blobs / "secret").symlink_to(secret)
    else:
        for blob in blobs.iterdir():
            blob.rename(secret.with_name(blob.name))
        _linked(blobs, secret.parent)
    with pytest.raises(CheckpointError, match="is a link to '.*models--my--own/blobs/"):
        headprune.prune(snapshot, home / "out", plan=PLAN)


def test_results_with_links_are_neither_copied_nor_published(home, monkeypatch):
    asked = []
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(
            huggingface_hub.HfApi, name, lambda self, *a, name=name, **k: asked.append(name)
        )
    result = headprune.prune(home / "good", home / "out", plan=PLAN)
    result.push_to_hub("me/model")
    assert asked == ["create_repo", "upload_folder"]
    (home / "out" / "notes.txt").symlink_to(home / "secret")
    for publish in (result.push_to_hub, result.save_pretrained):
        with pytest.raises(CheckpointError, match=r"'notes\.txt' in"):
            publish(str(home / "there"))
    assert len(asked) == 2 and not (home / "there").exists()


def test_a_tokenizer_alone_is_not_read_through_a_link(home):
    assert isinstance(load_tokenizer(home / "bad"), PreTrainedTokenizerFast)
    (home / "bad" / "chat_template.jinja").symlink_to(home / "secret")
    with pytest.raises(CheckpointError, match=r"'chat_template\.jinja' in"):
        load_tokenizer(home / "bad")


# --------------------------------------------------------------------- writing


def test_a_card_takes_the_place_of_a_link_to_the_cache(home):
    snapshot = cached(home / "good", home / "hub")
    headprune.evaluate(
        snapshot, data=home / "text.txt", card=True, speed=False, seq_len=16, max_windows=4
    )
    assert not (snapshot / "README.md").is_symlink()
    wrong = [
        path.name
        for path in (snapshot.parents[1] / "blobs").iterdir()
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name
    ]
    assert wrong == []


def _checked(m, text, **files):
    headprune.check(m, data=text, limits="perplexity <= 9", **files)


WRITES = {
    "out": lambda m, out, text: headprune.prune(m, out, plan=PLAN, overwrite=True),
    "exported": lambda m, out, text: headprune.export(m, out, to="vllm", overwrite=True),
    "scores": lambda m, out, text: headprune.score(m, out, criterion="random", overwrite=True),
    "roles": lambda m, out, text: headprune.roles(m, out, data=text, overwrite=True),
    "gates": lambda m, out, text: headprune.train_gates(
        m, out, data=text, target_heads=12, overwrite=True
    ),
    "plan.json": lambda m, out, text: headprune.prune(
        m, plan=PLAN, dry_run=True, save_plan=out, overwrite=True
    ),
    "evaluation.json": lambda m, out, text: headprune.evaluate(m, data=text, output=out),
    "report.html": lambda m, out, text: headprune.report([m], out, overwrite=True),
    "attention.html": lambda m, out, text: headprune.attention(
        m, out, text="w1 w2", overwrite=True
    ),
    "check.json": lambda m, out, text: _checked(m, text, output=out),
    "junit.xml": lambda m, out, text: _checked(m, text, junit=out),
    "baseline.json": lambda m, out, text: _checked(m, text, baseline=out, update_baseline=True),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("to", ["mine", "gone"])
def test_no_output_is_written_through_a_link(name, to, home):
    (home / "mine").write_text("mine") if "." in name else (home / "mine").mkdir()
    (home / name).symlink_to(to)
    before = contents(home)
    with pytest.raises(CheckpointError, match=f"is a link to '{to}', and nothing is written"):
        WRITES[name](home / "good", home / name, home / "text.txt")
    assert contents(home) == before


@pytest.mark.parametrize("name", ["out-checkpoints", "out-runs", "out-checkpoints/checkpoints"])
def test_no_training_writes_through_a_link(name, home):
    (home / "mine").mkdir()
    _linked(home / name, home / "mine")
    with pytest.raises(CheckpointError, match="is a link to"):
        WRITES["gates"](home / "good", home / "out", home / "text.txt")
    assert not any((home / "mine").iterdir())
