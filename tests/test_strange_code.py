"""Code where a stranger can put it, and paths that lead out: none of it runs or is read."""

import json
import os
import pickle
import shutil
from itertools import product
from pathlib import Path

import pytest

from tests import tiny
from tests.campaign.originals import MEASURING, REFITTING, SCORING, small
from tests.campaign.watched import Outcome, flaw
from tests.marks import slow_unless
from tests.test_cli import printed

pytestmark = pytest.mark.filterwarnings("ignore")
CANARY = "pwned"  # the folder that the code makes where it runs


class Bomb:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def bomb(file):
    file.write_bytes(pickle.dumps({"model.weight": Bomb(file.parent / CANARY)}))


def script(file):
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import os\nos.mkdir({str(file.parent / CANARY)!r})\ngenerate = Evil = None\n")


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def auto_map(model, module="evil", **others):
    script(model / f"{module}.py")
    named = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    edit(model / "config.json", auto_map=dict.fromkeys(named, f"{module}.Evil"), **others)


def unknown_type(model):
    auto_map(model, model_type="evil", architectures=["Evil"])


def tokenizer(model):
    script(model / "evil.py")
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    edit(model / "tokenizer_config.json", **code)


def custom_generate(model):
    script(model / "custom_generate" / "generate.py")
    (model / "custom_generate" / "requirements.txt").touch()


def runtime(model):
    """Code under the name of the file that travels with results."""
    auto_map(model, "modeling_headprune")


def neighbours(model):
    """What the runtime file might import."""
    for name in ("torch.py", "transformers.py", "headprune.py", "sitecustomize.py", "__init__.py"):
        script(model / name)


def pickled(model):
    (model / "model.safetensors").unlink()
    bomb(model / "pytorch_model.bin")


def pickles_beside(model):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        bomb(model / name)


def pickle_in_index(model):
    bomb(model / "evil.bin")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "evil.bin"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").rename(model / "other.safetensors")


def adapter(model):
    auto_map(model)
    of = {"peft_type": "LORA", "base_model_name_or_path": str(model), "auto_mapping": {}}
    (model / "adapter_config.json").write_text(json.dumps(of))


def template(model):
    code = "{{ cycler.__init__.__globals__.os.mkdir('" + str(model / CANARY) + "') }}"
    (model / "chat_template.jinja").write_text(code)
    edit(model / "tokenizer_config.json", chat_template=code)


def kernel(model):
    edit(model / "config.json", _attn_implementation="evil/kernel", quantization_config={"a": 1})


CARRIERS = [auto_map, unknown_type, tokenizer, custom_generate, runtime, neighbours]
CARRIERS += [pickled, pickles_beside, pickle_in_index, adapter, template, kernel]
D = "--data text.txt"
TRAIN = "--steps 2 --config batch_size=2 --config seq_len=16"
COMMANDS = [
    "inspect evil",
    "verify evil",
    "prune evil --plan plan.json out",
    f"prune evil --plan plan.json --refit text.txt {REFITTING} out",
    "convert-gqa evil --kv-heads 1 out",
    f"score evil {D} --criterion fisher {SCORING} out",
    f"evaluate evil {D} --no-speed {MEASURING}",
    f"evaluate llama {D} --against evil --no-speed {MEASURING}",
    f"check evil {D} {MEASURING} --limit perplexity<=1e9",
    f"train-gates evil {D} --target-heads 0.5 {TRAIN} out",
    f"heal evil --teacher llama {D} {TRAIN} out",
    f"heal llama --teacher evil {D} {TRAIN} out",
    "migrate evil out",
    "report evil out.html",
    "verify result --against evil",
]
ALL = [*product(CARRIERS, COMMANDS)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A model and a result, a text and a plan."""
    import headprune

    home = tmp_path_factory.mktemp("sound")
    tiny.save(small("llama-gqa"), home / "llama")
    (home / "text.txt").write_text(tiny.text(1_000))
    (home / "plan.json").write_text('{"model.layers.0.self_attn": [0, 1]}')
    headprune.prune(home / "llama", home / "result", plan=home / "plan.json")
    return home


@pytest.fixture
def home(sound, tmp_path, monkeypatch):
    """A copy of it, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(sound, tmp_path / "home"))
    return tmp_path / "home"


def run_unharmed(line, capsys):
    """Run a command; it ends as one should, and no code ran."""
    code, out, err = printed(capsys, *line.split())
    assert flaw(Outcome(code, out, err, 0, 0)) == "", err
    assert not [*Path.cwd().rglob(CANARY)]
    return code, out + err


@pytest.mark.parametrize(
    ("carry", "line"),
    slow_unless(lambda *row: (ALL.index(row) // len(COMMANDS) + ALL.index(row)) % 6 == 0, ALL),
)
def test_code_in_a_folder_does_not_run(carry, line, home, capsys):
    # results are loaded by another route than other models
    of_results = line.startswith(("verify", "report")) or ALL.index((carry, line)) % 4 == 3
    shutil.copytree(home / ("result" if of_results else "llama"), home / "evil")
    carry(home / "evil")
    run_unharmed(line, capsys)


def test_the_canary_is_seen(home, capsys):
    script(home / "evil.py")
    exec((home / "evil.py").read_text())
    with pytest.raises(AssertionError):
        run_unharmed("inspect llama", capsys)


SECRET = "the secret of the machine"
OUTSIDE = '"vocab_file": "{0}", "tokenizer_file": "{0}", '


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("llama/tokenizer_config.json", "{", f"{{{OUTSIDE}", f"evaluate evil {D} {MEASURING}"),
        ("result/headprune.json", '"config.json"', '"{0}"', "!verify evil"),
        ("result/config.json", '"LlamaForCausalLM"', '"{0}"', "!inspect evil"),
    ],
    ids=["tokenizer", "manifest", "class"],
)
def test_a_path_does_not_lead_out(file, old, new, line, home, capsys):
    secret = home.parent / "secret.txt"
    secret.write_text(SECRET)
    for path in (str(secret), "../../secret.txt"):
        shutil.copytree(home / file.split("/")[0], home / "evil")
        place = home / "evil" / file.split("/")[1]
        assert old in place.read_text()
        place.write_text(place.read_text().replace(old, new.replace("{0}", path)))
        code, said = run_unharmed(line.removeprefix("!"), capsys)
        assert SECRET not in said and (code or not line.startswith("!"))
        shutil.rmtree(home / "evil")
    assert secret.read_text() == SECRET
