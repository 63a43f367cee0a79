"""Every command that runs a model computes on another device what it computes on the CPU."""

import json
import traceback
from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM
from transformers.utils import logging

import headprune
from headprune import devices
from headprune.evaluation import evaluate as evaluation
from headprune.gates.gates import Gates
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.model.recording import _candidates, recording
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.sharpness import larger_queries
from headprune.tensors import least_squares
from tests import far, forked, tiny
from tests.cutting import ragged_plan
from tests.marks import slow_unless
from tests.test_verify import old_folder

CASES = ("llama-gqa", "gpt2", "bert-mlm", "t5")
FEW = {"seq_len": 16, "calibration_tokens": 192}
BATCHES = {"seq_len": 16, "batch_size": 4}
CLOSE = 2e-5  # of the largest number: products of tokens are float32 there, float64 on the CPU

pytestmark = pytest.mark.skipif(not far.there_is_one(), reason="needs torch with Python devices")


class Job:
    """A model, its data, and where a command writes on one of the devices."""

    def __init__(self, case, folder, device):
        self.case, self.folder, self.device = case, folder, device
        self.model, self.data = folder / "model", folder / "text.jsonl"
        self.columns = {"text_column": "text,target"} if case == "t5" else {"text_column": "text"}

    def write(self):
        """Writes the model and the data."""
        tiny.save(tiny.model(self.case), self.model)
        rows = [{"text": tiny.text(20, n), "target": tiny.text(12, n + 100)} for n in range(80)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(self, name, *arguments, **settings):
        """Runs a command."""
        settings.setdefault("device", self.device)
        return getattr(headprune, name)(*arguments, **settings)

    def output(self, name):
        """Where something is written."""
        return self.folder / f"{name}-{self.device}"

    def scores(self, *criteria, **settings):
        """Scores, and where they are."""
        output = self.output("scores")
        text = {"data": self.data, **FEW, **self.columns} if criteria != ("magnitude",) else {}
        self("score", self.model, criterion=criteria, output=output, **text | settings)
        return output

    def pruned(self, device=None, **settings):
        """A cut model."""
        output = self.output("pruned")
        given = {"scores": self.scores("magnitude", device="cpu"), "keep": 0.5}
        self("prune", self.model, output=output, device=device or self.device, **given | settings)
        return output


def score(job):
    """Every criterion."""
    criteria = ["compensated", "gradient", "fisher", "fluctuation", "wanda", "reconstruction"]
    criteria += ["magnitude", "random"]
    return _tensors(job.scores(*criteria))


def prune(job):
    """Without a refit."""
    return _tensors(job.pruned())


def refit(job):
    """With one."""
    return _tensors(job.pruned(refit=job.data, **FEW, **job.columns))


def convert_gqa(merge, **settings):
    """By a merge."""

    def convert(job):
        output = job.output("converted")
        given = {"merge": merge, "kv_heads": 1, "output": output, **settings}
        if merge == "lowrank" or "kv_budget" in given:
            given |= {"calibrate": job.data, **FEW}
        job("convert_gqa", job.model, **given)
        return _tensors(output)

    return convert


def train_gates(**settings):
    """Gates are drawn on the device, by the same draws here."""

    def train(job):
        given = {"target_heads": 0.5, "steps": 5, **BATCHES, **job.columns, **settings}
        job("train_gates", job.model, data=job.data, output=job.output("gates"), **given)
        return _tensors(job.output("gates")) | _losses(job.output("gates"))

    return train


def heal(job):
    """What was cut, and its losses."""
    student, output = job.pruned("cpu"), job.output("healed")
    # in bfloat16 where devices have it, which is not the same everywhere; Muon is for such alone
    alike = {"bf16": False, "optimizer": "adamw"}
    given = {"teacher": job.model, "steps": 4, **alike, **BATCHES, **job.columns}
    healed = job("heal", student, data=job.data, output=output, **given)
    losses = torch.tensor([healed.before, healed.after])
    return _tensors(output) | {"losses": losses}


def evaluate(job):
    """Against the original."""
    given = {"against": job.model, "speed": job.case == "llama-gqa", **BATCHES, **job.columns}
    report = job("evaluate", job.pruned("cpu"), data=str(job.data), **given)
    speed = report.model.speed
    assert speed is None or speed.device.startswith(job.device)
    found = {m.name: m.value for which in (report.model, report.against) for m in which.metrics}
    found |= {f"gap.{d.name}": d.interval.estimate for d in report.differences}
    return {name: torch.tensor(value) for name, value in found.items()}


def check(job):
    """Against the original."""
    limit = "perplexity <= 400 %"
    given = {"against": job.model, "limits": (limit,), **BATCHES, **job.columns}
    report = job("check", model=job.pruned("cpu"), data=str(job.data), **given)
    (found,) = report.limits
    return {"limit": torch.tensor([found.value, found.low, found.high])}


def verify(job):
    """What was cut on the CPU."""
    found = job("verify", job.pruned("cpu"), against=job.model)
    return {c.name: torch.tensor(float(c.passed)) for c in found.checks}


def migrate(job):
    """A folder of transformers 4."""
    old = old_folder(tiny.model(job.case), job.output("old"), {0: [1, 4], 2: [0, 1, 2]})
    job("migrate", old, output=job.output("migrated"))
    return _tensors(job.output("migrated"))


def compress(job):
    """With all its candidates."""
    output = job.output("compressed")
    given = {"keep": 0.75, "held_out_tokens": 64, **FEW, **job.columns}
    choice = job("compress", job.model, data=str(job.data), output=output, **given).choice
    near = {one.name: torch.tensor(one.chosen_by) for one in choice.contenders}
    return near | _tensors(output)


def convert_mla(job):
    """Latents, and what the record says of them."""
    output = job.output("latent")
    given = {"rank": 20, "rope_dim": 6, "calibration_tokens": 1_280, "seq_len": 16}
    record = job("convert_mla", job.model, data=job.data, output=output, **given).record
    return {"compared": torch.tensor(float(record.proof.passed))} | _tensors(output)


def inspect(job):
    """The price of latents."""
    found = job("inspect", job.model, data=job.data, latent=True)
    return {str(p.rank): torch.tensor([p.lost, p.perplexity_ratio]) for p in found.latents}


def _tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {f"{file.name}.{n}": tensor.float() for n, tensor in load_file(file).items()}
    assert found
    return found


def _losses(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    return {"losses": torch.tensor([json.loads(line)["loss"] for line in lines])}


JOBS = {
    "score": score,
    "prune": prune,
    "refit": refit,
    "convert": convert_gqa("lowrank"),
    "convert-procrustes": convert_gqa("procrustes", grouping="similar"),
    "convert-mean": convert_gqa("mean"),
    "convert-budget": convert_gqa(None, kv_heads=None, kv_budget=0.5),
    "gates": train_gates(),
    "gates-float32": train_gates(dtype="float32"),
    "gates-attention": train_gates(train="attention"),
    "gates-voita": train_gates(target_heads=None, l0_penalty=0.01),
    "gates-window": train_gates(form="window", target_heads=None, window=4, context_tokens=16),
    "heal": heal,
    "evaluate": evaluate,
    "check": check,
    "verify": verify,
    "migrate": migrate,
    "compress": compress,
    "latent": convert_mla,
    "inspect": inspect,
}


def gaps(here, there):
    """How far numbers are apart, each as a share of the largest of its tensor."""
    assert here.keys() == there.keys()
    found = {}
    for name, one in here.items():
        assert one.shape == there[name].shape, name
        largest = float(one.abs().max()) if one.numel() else 0.0
        gap = float((one - there[name]).abs().max()) if one.numel() else 0.0
        found[name] = gap / (largest or 1.0)
    return found


def compared(name, case, folder):
    """Runs a command on both devices, with the same products; how far apart they are."""
    device = far.Far()
    if name.startswith(("convert", "compress")):  # a basis of heads is any that spans the same
        least_squares.product_dtype = lambda device: torch.float64
    Job(case, folder, "cpu").write()
    with sdpa_kernel(SDPBackend.MATH):
        here = JOBS[name](Job(case, folder, "cpu"))
        with device:
            there = JOBS[name](Job(case, folder, "far"))
    assert device.waits  # it was there
    return gaps(here, there)


def agrees(name, case, folder):
    """Refuses other numbers than those of the CPU."""
    found = compared(name, case, folder)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= CLOSE, (worst, found[worst])


def differs(case, folder):
    """Refuses the numbers of the CPU where those of the device are made wrong."""
    right = least_squares.Moments.centred

    def wrong(moments):
        found = right(moments)
        far_off = isinstance(found.cross, far.FarTensor)
        return replace(found, cross=found.cross * 1.001) if far_off else found

    least_squares.Moments.centred = wrong  # of models with biases
    assert max(compared("refit", case, folder).values()) > CLOSE


def raises(case, folder):
    """Refuses a merge that goes through with a tensor made in the wrong place."""
    module = import_module("headprune.surgery.merges.procrustes")
    right = module._rotations
    module._rotations = lambda heads, pairs: right(heads, pairs).to("cpu")
    with pytest.raises(RuntimeError, match="all tensors on one device"):
        compared("convert-procrustes", case, folder)


def one_at_a_time(folder):
    """Refuses two models on the device while one is measured."""
    right, seen = evaluation.measure, []

    def measure(loaded, index, *others):
        seen.append([net.device.type for net in loaded.nets])
        return right(loaded, index, *others)

    evaluation.measure = measure
    compared("evaluate", "gpt2", folder)
    assert seen == [["cpu", "cpu"]] * 2 + [["far", "cpu"], ["cpu", "far"]]


def waits_of_a_step(folder, layers, **settings):
    """How often a step of training waits for the device."""
    configuration = tiny.config("llama-gqa")
    configuration.num_hidden_layers = layers
    job = Job("llama-gqa", folder / str(layers), "far")
    job.folder.mkdir(parents=True)
    job.write()
    tiny.save(LlamaForCausalLM(configuration), job.model)
    found = []
    for steps in (2, 3):
        with far.Far() as device:
            given = {"save_every": 100, **settings}
            train_gates(steps=steps, overwrite=True, **given)(job)
        found.append(sum(device.waits.values()))
    return found[1] - found[0]  # without what steps share


def waits_alike(folder):
    """Refuses waits that grow with layers or units."""
    counts = [
        waits_of_a_step(folder / unit, layers, unit=unit)
        for layers, unit in ((2, "kv-group"), (5, "kv-group"), (5, "head"))
    ]
    assert 0 < counts[0] < 30 and len(set(counts)) == 1, counts


def waits_by_layer(folder):
    """Refuses waits that do not grow where every layer waits."""
    right = Gates.source
    Gates.source = lambda gates, position: right(gates, position * int(bool(gates.kept.any())))
    shallow, deep = (waits_of_a_step(folder, layers) for layers in (2, 5))
    assert deep == shallow + 2 * 3, (shallow, deep)  # with gates, and without


def sends_nothing(folder, gates_stay=False):
    """Refuses copies to the device in every forward pass, of gates and of heads."""
    with far.Far() as device, devices.running_on("far"):
        net = tiny.model("llama-gqa")
        cut_heads(net, resolve(ragged_plan(net), net, ragged=True))
        net = net.to("far")
        attentions, ids = attention_of(net), torch.randint(5, 60, (2, 9)).to("far")
        gates = [torch.linspace(0.5, 1, a.query_heads) for a in attentions]
        source = (lambda position: gates[position][None]) if gates_stay else fixed(gates)
        rotations = []

        def attend(call):
            angles = torch.ones(9, 5, device="far")
            found = next(_candidates((angles.repeat(1, 2), angles.repeat(1, 2)), 9, 10))
            rotations.append(found.rotate(call.query))
            return call.outputs()

        device.sent.clear()
        with torch.no_grad(), gated(attentions, source), larger_queries(attentions, 1.1):
            before = sum(device.sent.values())
            net(ids)
            with recording(attentions, attend):
                net(ids)
        assert len(rotations) == len(attentions)
        assert sum(device.sent.values()) == before, device.sent


def sends_gates(folder):
    """Refuses a pass that is found to copy nothing where it does."""
    with pytest.raises(AssertionError, match="gating.py"):
        sends_nothing(folder, gates_stay=True)


def told(function, report, *arguments):
    """Calls a function, and writes what it raised."""
    logging.disable_progress_bar()
    try:
        function(*arguments)
    except BaseException:
        report.write_text(traceback.format_exc())


def apart(function, folder, *arguments):
    """Calls a function in a process of its own."""
    report = folder / "report.txt"
    assert forked.call(told, function, report, *arguments, folder) == 0
    if report.exists():
        pytest.fail(report.read_text())


def _quick(name, case):
    return (name, case) in {("refit", "llama-gqa"), ("score", "t5"), ("evaluate", "bert-mlm")}


def _rows():
    unlike = {("migrate", "llama-gqa"), ("migrate", "t5")}  # transformers 4 pruned none of these
    unlike |= set(product(("latent", "inspect"), CASES[1:]))  # has no latent form
    return [row for row in product(JOBS, CASES) if row not in unlike]


@pytest.mark.parametrize(("name", "case"), slow_unless(_quick, _rows()))
def test_a_device_gives_the_numbers_of_the_cpu(name, case, tmp_path):
    apart(agrees, tmp_path, name, case)


def test_other_numbers_would_be_seen(tmp_path):
    apart(differs, tmp_path, "gpt2")


def test_a_tensor_in_the_wrong_place_would_be_seen(tmp_path):
    apart(raises, tmp_path, "gpt2")


def test_one_model_is_on_the_device_while_it_is_measured(tmp_path):
    apart(one_at_a_time, tmp_path)


@pytest.mark.slow
def test_steps_wait_as_often_whatever_the_depth_and_the_units(tmp_path):
    apart(waits_alike, tmp_path)


def test_gates_and_heads_are_sent_once(tmp_path):
    apart(sends_nothing, tmp_path)


def test_gates_that_are_sent_again_would_be_seen(tmp_path):
    apart(sends_gates, tmp_path)


def test_waits_by_layer_would_be_seen(tmp_path):
    apart(waits_by_layer, tmp_path)
