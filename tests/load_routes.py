"""Uses a cut folder in all the ways people use one; run where headprune cannot be imported.

    python load_routes.py '[FOLDER, AUTO CLASS, [ROUTE, ...]]' ...

``FOLDER/../expected.safetensors`` holds ids, logits, and for a language model greedy tokens, of the
gated original. Prints one JSON line per route: the folder, its name, and what went wrong, if
anything. Every folder has a process of its own, forked from one that has imported the libraries.
"""

import sys


class Blocked:
    """An import hook that hides headprune."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "headprune":
            raise ImportError(f"{name} is hidden in this process")


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked)  # type: ignore[arg-type]

import copy
import importlib
import json
import os
import pickle
import tempfile
import traceback
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer

# what takes long to import, by the routes that need it
LIBRARIES = {
    "pipeline": "transformers.pipelines",
    "peft LoRA: train, save, load, merge": "peft",
    'accelerate device_map="auto"': "accelerate",
    "lm-eval": "lm_eval.models.huggingface",
}
ROUTES = {}


def route(name):
    """Registers a route under the name that the table of docs/guides/deploy.md shows."""

    def register(function):
        ROUTES[name] = function
        return function

    return register


class Case:
    """A folder, and what its model must compute."""

    def __init__(self, folder, auto):
        self.folder = folder
        self.auto = auto
        expected = load_file(Path(folder).parent / "expected.safetensors")
        self.ids, self.logits = expected["ids"], expected["logits"]
        self.tokens = expected.get("tokens")

    def load(self, where=None, **kwargs):
        """The model by its Auto class."""
        auto = getattr(transformers, self.auto)
        return auto.from_pretrained(where or self.folder, trust_remote_code=True, **kwargs).eval()

    @torch.no_grad()
    def check(self, model):
        """Fails unless the logits are those of the gated original."""
        torch.testing.assert_close(model(self.ids).logits.cpu(), self.logits, atol=2e-5, rtol=1e-4)


@route("AutoModel*.from_pretrained")
def plain(case):
    case.check(case.load())


@route("save_pretrained and back")
def save_round_trip(case):
    with tempfile.TemporaryDirectory() as again:
        case.load().save_pretrained(again)
        case.check(case.load(again))


@route("deepcopy")
def deep_copy(case):
    case.check(copy.deepcopy(case.load()))


@route("pickle of the model object")
def pickled(case):
    case.check(pickle.loads(pickle.dumps(case.load())))


@route("pipeline")
def pipeline(case):
    task = "text-generation" if case.tokens is not None else "fill-mask"
    run = transformers.pipeline(task, model=case.folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    if case.tokens is None:
        assert run("w1 <mask> w3")
        return
    text = tokenizer.decode(case.ids[0])
    got = run(text, max_new_tokens=12, do_sample=False)[0]["generated_text"]
    wanted = tokenizer.decode(case.tokens[0], skip_special_tokens=True)
    assert got.replace(" ", "") == wanted.replace(" ", "")


def _generated(case, **options):
    tokens = case.load().generate(case.ids[:1], max_new_tokens=12, do_sample=False, **options)
    assert tokens.tolist() == case.tokens.tolist()  # type: ignore[union-attr]


@route("generate, dynamic cache")
def generate_dynamic(case):
    _generated(case)


@route("generate, static cache")
def generate_static(case):
    _generated(case, cache_implementation="static")


@route("generate, prompt lookup")
def generate_lookup(case):
    _generated(case, prompt_lookup_num_tokens=3)


@route("torch.compile(fullgraph=True)")
def compiled(case):
    case.check(torch.compile(case.load(), fullgraph=True, backend="aot_eager"))


@route("gradient checkpointing")
def checkpointed(case):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = case.load().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(case.ids, labels=case.ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    torch.testing.assert_close(gradients[0], gradients[1])


@route("Trainer")
def trainer(case):
    rows = [{"input_ids": ids, "labels": ids} for ids in case.ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
        )
        run = transformers.Trainer(case.load(), arguments, train_dataset=rows)
        run.train()
        run.save_model(f"{folder}/trained")
        trained = case.load(f"{folder}/trained")
    (name, moved), *_ = trained.named_parameters()
    assert torch.equal(moved, dict(run.model.named_parameters())[name].detach().cpu())


@route("peft LoRA: train, save, load, merge")
def lora(case):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = case.load()
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    known = {"q_proj", "v_proj", "o_proj", "query", "value", "c_attn", "c_proj", "query_key_value"}
    names = sorted(present & known)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=names))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        adapted(case.ids, labels=case.ids).loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        adapted.eval().save_pretrained(folder)
        wanted = adapted(case.ids).logits
        loaded = PeftModel.from_pretrained(case.load(), folder).eval()
        torch.testing.assert_close(loaded(case.ids).logits, wanted)
        assert (wanted - case.logits).abs().max() > 1e-3  # the adapter does something
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(case.ids).logits, wanted, atol=2e-5, rtol=1e-4)


@route('accelerate device_map="auto"')
def device_map(case):
    case.check(case.load(device_map="auto"))


@route("accelerate, offload to CPU and disk")
def offload(case):
    from accelerate import cpu_offload, disk_offload

    case.check(cpu_offload(case.load(), execution_device=torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        case.check(disk_offload(case.load(), folder, execution_device=torch.device("cpu")))


@route("lm-eval")
def lm_eval(case):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=case.folder, trust_remote_code=True, device="cpu", batch_size=1)
    words = AutoTokenizer.from_pretrained(case.folder).decode(case.ids[0]).split()
    request = Instance("loglikelihood", {}, (" ".join(words[:4]), " " + " ".join(words[4:])), 0)
    ((got, _),) = model.loglikelihood([request], disable_tqdm=True)
    wanted = case.logits[0].log_softmax(-1)[3:-1].gather(-1, case.ids[0, 4:, None]).sum()
    assert abs(got - float(wanted)) < 1e-3, (got, float(wanted))


@route("sentence-transformers")
def sentences(case):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    options = {"trust_remote_code": True}
    words = Transformer(case.folder, model_kwargs=options, config_kwargs=options)
    model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())])
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    text = tokenizer.decode(case.ids[0])
    states = transformers.AutoModel.from_pretrained(case.folder, trust_remote_code=True)
    with torch.no_grad():
        wanted = states.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0]
    got = model.encode(text, convert_to_tensor=True).cpu()
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def main(folder, auto, names):
    """Runs the named routes."""
    case = Case(folder, auto)
    for name in names:
        try:
            ROUTES[name](case)
            failure = None
        except Exception:
            failure = traceback.format_exc()[-3000:]
        print(json.dumps({"route": name, "failure": failure, "folder": folder}), flush=True)
    assert not any(module.split(".")[0] == "headprune" for module in sys.modules)


def apart(job):
    """Runs a job in a process of its own, with a cache of modules of its own; its exit code."""
    with tempfile.TemporaryDirectory() as modules:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transformers.dynamic_module_utils.HF_MODULES_CACHE = modules
                main(*json.loads(job))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    named = {name for job in sys.argv[1:] for name in json.loads(job)[2]}
    for library in (LIBRARIES[name] for name in LIBRARIES if name in named):
        importlib.import_module(library)
    sys.exit(max(abs(apart(job)) for job in sys.argv[1:]))
