"""Model folders: what plain transformers makes of one is what is cut, and is there afterwards."""

import ast
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPProcessor,
    WhisperFeatureExtractor,
)

import headprune
from headprune.errors import CheckpointError
from headprune.io.folders import COMPANIONS
from headprune.model.open import open_model
from headprune.model.stored import stored_tensors
from tests import tiny
from tests.cutting import uneven_plan

CARD = {"license": "other", "license_name": "our-own", "base_model": "some/base", "language": "en"}
EXTRAS = {
    "LICENSE": "You may.",
    "Notice.txt": "By us.",
    "USE_POLICY.md": "Do no harm.",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
    "custom_generate/generate.py": "raise SystemExit('custom_generate was run')\n",
    "custom_generate/requirements.txt": "transformers",
    "README.md": f"---\n{yaml.safe_dump(CARD)}tags: [x]\n---\n# Mine\n",
}
# of a config, what a cut changes
HEADS = {"num_attention_heads", "num_key_value_heads", "head_dim", "per_layer_config", "headprune"}
HEADS |= {"auto_map", "allow_global_per_layer_attribute_access", "_name_or_path"}
HEADS |= {"transformers_version"}
AUTO = {
    "llama-gqa": AutoModelForCausalLM,
    "bart": AutoModelForSeq2SeqLM,
    "whisper": AutoModelForSpeechSeq2Seq,
    "clip": AutoModel,
}


def edit(path, **settings):
    """Changes entries of a JSON file; those that are None go."""
    content = {**json.loads(path.read_text()), **settings} if path.is_file() else settings
    path.write_text(json.dumps({n: value for n, value in content.items() if value is not None}))


def save(folder, case="llama-gqa"):
    """Writes a tiny model with its tokenizer and, where it has one, its processor."""
    net = tiny.model(case)
    tiny.save(net, folder)
    if case == "clip":
        CLIPProcessor(CLIPImageProcessorPil(size=14), tiny.tokenizer()).save_pretrained(folder)
    if case == "whisper":
        WhisperFeatureExtractor(feature_size=8, hop_length=80).save_pretrained(folder)
    return net


def prune(folder, proof="auto", output="out"):
    """Cuts a model unevenly, by the model that plain transformers makes of its folder."""
    case = AutoConfig.from_pretrained(folder).model_type
    auto = next((auto for name, auto in AUTO.items() if name.startswith(case)), AutoModel)
    plan = folder.parent / "plan.json"
    uneven_plan(auto.from_pretrained(folder)).write(plan)
    return headprune.prune(folder, plan=plan, output=folder.parent / output, proof=proof)


def differences(one, other):
    """The names under which two folders hold different things."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def seen(folder, auto):
    """What plain transformers makes of a folder, beside the heads."""
    seen = {}
    config = AutoConfig.from_pretrained(folder)
    seen |= {f"config {n}": v for n, v in _settings(config.to_dict()).items()}
    if config.is_encoder_decoder or auto is AutoModelForCausalLM:
        cls = auto._model_mapping[type(config)]
        # without the weights, of which a plain class has no place for the uneven ones
        net = cls.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
        settings = net.generation_config.to_dict()
        seen |= {f"generation {n}": v for n, v in settings.items() if n != "transformers_version"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen |= {"vocabulary": tokenizer.get_vocab(), "templates": tokenizer.chat_template}
    seen |= {"special tokens": tokenizer.special_tokens_map, "class": type(tokenizer)}
    if any(folder.glob("*processor*.json")):
        seen["processor"] = AutoProcessor.from_pretrained(folder).to_dict()
    seen |= {n: (folder / n).read_bytes() for n in EXTRAS if (folder / n).is_file()}
    if "README.md" in seen:
        head = yaml.safe_load(seen["README.md"].decode().split("---")[1])
        seen["README.md"] = {name: head.get(name) for name in CARD}
    return seen


def _settings(config):
    """The settings of a config and of its parts, without those of heads."""
    parts = {n: {**v, "dtype": None} for n, v in config.items() if n.endswith("_config") and v}
    config = {**config, **{name: _settings(part) for name, part in parts.items()}}
    return {name: value for name, value in config.items() if name not in HEADS}


# transformers reads templates from files that it does not close
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("case", "generation"),
    [*((case, "file") for case in AUTO), *((case, "config") for case in AUTO if case != "clip")],
)
def test_all_but_the_heads_is_as_it_was(case, generation, tmp_path):
    folder, out, auto = tmp_path / "model", tmp_path / "out", AUTO[case]
    save(folder, case)
    for name, text in EXTRAS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    settings = {"num_beams": 3, "repetition_penalty": 1.3, "max_length": 77}
    if generation == "config":
        (folder / "generation_config.json").unlink()
        edit(folder / "config.json", **settings, no_repeat_ngram_size=2)
    elif case != "clip":  # a combination that transformers reads with a warning, and never writes
        edit(folder / "generation_config.json", **settings, temperature=0.5, do_sample=False)
    pruned = prune(folder, proof="tensors")
    was = seen(folder, auto)
    assert differences(was, seen(out, auto)) == []
    assert any("custom_generate/ was copied" in warning for warning in pruned.warnings)
    if (case, generation) != ("llama-gqa", "file"):
        return
    for name in (*EXTRAS, "generation_config.json", "tokenizer.json"):
        kept = (out / name).read_bytes()
        if name in EXTRAS:
            (out / name).unlink()
        else:
            (out / name).write_bytes(kept.replace(b"77", b"78").replace(b'"w5"', b'"v5"'))
            assert (out / name).read_bytes() != kept
        assert differences(was, seen(out, auto)), name
        (out / name).write_bytes(kept)


def test_every_file_of_a_vocabulary_is_taken_over():
    named = set()
    for file in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                names = {getattr(target, "id", "").lower() for target in node.targets}
                files = node.value.values if "vocab_files_names" in names else []
                named |= {file.value for file in files if isinstance(file, ast.Constant)}
    assert len(named) > 15
    known = [name for name in named if any(fnmatch(name, pattern) for pattern in COMPANIONS)]
    assert sorted(named) == sorted(known)


# ------------------------------------------------------------------- which weights


def named_file(folder):
    """The config names weights beside model.safetensors."""
    _scaled(folder, "other.safetensors")
    edit(folder / "config.json", transformers_weights="other.safetensors")


def named_index(folder):
    """The config names an index beside model.safetensors."""
    shard = _scaled(folder, "other-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(shard), shard.name)}
    edit(folder / "other.safetensors.index.json", **index)
    edit(folder / "config.json", transformers_weights="other.safetensors.index.json")


def shards(folder):
    """Shards and their index beside model.safetensors."""
    named_index(folder)
    (folder / "other.safetensors.index.json").rename(folder / "model.safetensors.index.json")
    edit(folder / "config.json", transformers_weights=None)


def pickle(folder):
    """A pickle beside model.safetensors."""
    weights = load_file(_scaled(folder, "x.safetensors"))
    torch.save(weights, folder / "pytorch_model.bin")


def _scaled(folder, name):
    weights = load_file(folder / "model.safetensors")
    save_file({n: 1.5 * w for n, w in weights.items()}, folder / name, {"format": "pt"})
    return folder / name


@pytest.mark.parametrize("add", [named_file, named_index, shards, pickle])
def test_the_weights_that_transformers_loads_are_cut(add, tmp_path):
    folder = tmp_path / "model"
    save(folder)
    add(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    prune(folder, "tensors")
    prune(folder, "outputs", output="proven")
    name = "model.embed_tokens.weight"
    held = [load_file(tmp_path / out / "model.safetensors")[name] for out in ("out", "proven")]
    assert all(torch.equal(weight, plain.get_parameter(name)) for weight in held)
    other = "model" if add.__name__.startswith("named") else "other-00001-of-00001"
    other = "x" if add is pickle else other
    assert not torch.equal(held[0], load_file(folder / f"{other}.safetensors")[name])


# ------------------------------------------------------------------- what is refused


def adapter(folder):
    """An adapter beside the model."""
    edit(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="some/base")


def adapter_alone(folder):
    """An adapter without its model."""
    adapter(folder)
    (folder / "config.json").unlink()


def other_name(folder):
    """Weights of a name that transformers does not look for."""
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")


def pickle_alone(folder):
    """Weights of transformers as a pickle, beside others of another tool."""
    pickle(folder)
    (folder / "model.safetensors").unlink()


def pointer(folder):
    """What git-lfs puts in place of the weights."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(text)


def flash(folder):
    """An implementation of attention that is not installed."""
    edit(folder / "config.json", attn_implementation="flash_attention_2")


def encoder(folder):
    """The encoder of a model, saved alone."""
    shutil.rmtree(folder)
    tiny.save(tiny.model("bart").get_encoder(), folder)


REFUSED = {
    adapter: r"holds an adapter .*merge_and_unload",
    adapter_alone: r"holds an adapter .*merge_and_unload",
    other_name: r"no model.safetensors, .* but 'model.fp16.safetensors'. .* rename it",
    pickle_alone: r"pytorch_model.bin' is a pickle",
    pointer: r"is a pointer of git-lfs, .* 'git lfs pull'",
    flash: r"needs a missing package: FlashAttention2 .*, such as attn_implementation",
    encoder: r"It was saved as a BartEncoder; save the whole model",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_no_whole_model_is_refused_for_what_it_is(change, tmp_path):
    folder = tmp_path / "model"
    save(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=REFUSED[change]) as refused:
        _ = open_model(folder).net
    assert "damaged" not in str(refused.value)


# ------------------------------------------------------------------- the cache of the hub


@pytest.fixture
def cache(tmp_path):
    """A cache of the hub with two revisions of a model; the second has fewer KV heads."""
    repository = tmp_path / "hub" / "models--some--model"
    for number, (revision, case) in enumerate({"main": "llama-gqa", "old": "llama-mqa"}.items()):
        commit = str(number) * 40
        save(repository / "snapshots" / commit, case)
        edit(repository / "snapshots" / commit / "generation_config.json", num_beams=number + 2)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    return tmp_path / "hub"


@pytest.mark.parametrize("weights", [True, False])
def test_headers_are_those_of_the_revision(cache, weights):
    for revision, case, beams in (("main", "llama-gqa", 2), ("old", "llama-mqa", 3)):
        where = {"revision": revision, "cache_dir": str(cache)}
        held = stored_tensors("some/model", **where)
        assert {n: t.shape for n, t in held.items()} == {
            n: tuple(tensor.shape) for n, tensor in tiny.model(case).state_dict().items()
        }
        net = headprune.from_pretrained("some/model", **where, weights=weights)
        assert net.config.num_key_value_heads == tiny.model(case).config.num_key_value_heads
        assert net.generation_config.num_beams == beams
    assert stored_tensors("some/model", cache_dir=str(cache.parent)) == {}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("lacking", ["the weights", "model-00001-of-00001.safetensors"])
def test_what_a_cache_lacks_is_not_said_of_the_hub(cache, lacking, weights):
    snapshot = cache / "models--some--model" / "snapshots" / ("0" * 40)
    (snapshot / "model.safetensors").unlink()
    if lacking.startswith("model"):
        index = {"metadata": {}, "weight_map": {"x": lacking}}
        edit(snapshot / "model.safetensors.index.json", **index)
    said = rf"The cache of the hub lacks {lacking} of 'some/model', .*\(HF_HUB_OFFLINE is set\)"
    with pytest.raises(CheckpointError, match=said):
        headprune.from_pretrained("some/model", cache_dir=str(cache), weights=weights)


@pytest.mark.parametrize("spelt", [".", "./", "..", "../..", "some/..", "../llama/.", "link/.."])
def test_a_folder_has_its_name_however_it_is_spelt(spelt, tmp_path, monkeypatch):
    folder = tmp_path / "llama"
    tiny.save(tiny.model("llama-gqa"), folder)
    (folder / "some" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder / "some")
    within = {"..": "some", "../..": "some/deep", "link/..": "../"}.get(spelt, "")
    monkeypatch.chdir(folder / within)
    for model in (spelt, Path(spelt)):
        scores = headprune.score(model, tmp_path / "scores", criterion="random", overwrite=True)
        assert scores.metadata.model.name == "llama"


def test_a_model_that_is_here_is_called_by_its_name(tmp_path, monkeypatch):
    folder, out, report = tmp_path / "llama", tmp_path / "out", tmp_path / "report.json"
    tiny.save(tiny.model("llama-gqa"), folder)
    (tmp_path / "text.txt").write_text(tiny.text(200))
    monkeypatch.chdir(folder)
    made = headprune.prune(".", out, plan={"model.layers.0.self_attn": [0, 1]})
    assert made.manifest.source.name == "llama"
    assert "\nllama, cut to" in (out / "README.md").read_text()
    settings = {"data": tmp_path / "text.txt", "speed": False, "seq_len": 16, "max_windows": 2}
    measured = headprune.evaluate(str(out), against=".", output=report, **settings)
    assert measured.against is not None and Path(measured.against.name).name == "llama"
    monkeypatch.chdir(out)
    assert Path(headprune.verify(".").folder).name == "out"
