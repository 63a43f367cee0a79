"""Which device models run on, what is refused there, and what one that is full is told by."""

import re
from contextlib import nullcontext

import accelerate
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

import headprune
from headprune import devices
from headprune.commands.command import _surroundings, all_commands
from headprune.context import Context
from headprune.distillation import heal as heal_module
from headprune.errors import FamilyError, HeadpruneError
from headprune.evaluation import evaluate as evaluation
from headprune.model import placement, probes
from headprune.model.attention import attention_of
from headprune.model.loading import native_class, task_of
from headprune.regression import check as check_module
from headprune.resuming import Run
from headprune.training import training_arguments
from tests import tiny
from tests.test_cli import refuses, run

COMMANDS = all_commands()

RUN_NO_MODEL = {"families", "report"}
ON_THE_CPU = {"export", "pad"}  # for engines


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two, as far as choosing goes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


def test_every_command_that_runs_a_model_has_it():
    without = {n for n, one in all_commands().items() if "device" not in one.parameters()}
    assert without == RUN_NO_MODEL | ON_THE_CPU


@pytest.mark.parametrize(
    ("asked", "found"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_device_is_chosen(two_gpus, asked, found):
    said = []
    with devices.running_on(asked, said.append):
        assert devices.chosen() == torch.device(found)
        with devices.running_on("auto", said.append):
            assert devices.chosen() == torch.device(found)
        assert not said
        devices.announce()
        devices.announce()
    assert said == [f"device: {found}"]
    assert devices.chosen() == torch.device("cuda:0")  # outside of any command


@pytest.mark.parametrize(
    ("dtype", "has", "emulated"),
    [
        ("float16", {"avx512_fp16": False, "avx512_f": True}, True),
        ("float16", {"avx512_fp16": True, "amx_fp16": False}, False),
        ("bfloat16", {"avx512_f": False, "avx512_bf16": False, "avx512_fp16": True}, True),
        ("bfloat16", {"avx512_f": True, "avx512_bf16": False}, False),
        ("float32", {"avx512_f": False, "avx512_fp16": False}, False),
        ("float16", {"neon": True}, False),  # nothing tells
    ],
)
def test_what_the_processor_emulates(dtype, has, emulated, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    with devices.running_on("cpu"):
        assert devices.emulates(dtype) is emulated


def test_measuring_in_an_emulated_type_is_told(tmp_path, text_file, capsys, monkeypatch):
    folder = tiny.save(tiny.model("llama-gqa").half(), tmp_path / "half")
    monkeypatch.setattr(devices, "emulates", lambda dtype: dtype == "float16")
    given = ["evaluate", folder, "--data", text_file, "--no-speed", "--max-windows", "2"]
    line = "is measured in float16, which this CPU only emulates: --config dtype=float32"
    code, _, err = run(capsys, *given, "--config", "seq_len=32")
    assert (code, line in " ".join(err.split())) == (0, True)
    code, _, err = run(capsys, *given, "--config", "seq_len=32", "--config", "dtype=float32")
    assert (code, line in " ".join(err.split())) == (0, False)


def test_a_mac_computes_on_its_cpu_unless_asked(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    for asked, found in (("auto", "cpu"), ("mps", "mps:0")):
        with devices.running_on(asked):
            assert devices.chosen() == torch.device(found)


def test_each_of_several_processes_has_its_own(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with devices.running_on("auto"):
        assert devices.chosen() == torch.device("cuda:1")
    one = "--device cuda:0 is one device, and several processes were started"
    with pytest.raises(HeadpruneError, match=one), devices.running_on("cuda:0"):
        pass


@pytest.mark.parametrize("asked", ["cuda:2", "mps", "gpu"])
def test_a_device_that_is_not_there_is_refused(two_gpus, asked):
    there = f"--device {asked}: there is no such device here; there are cpu, cuda:0, cuda:1."
    with pytest.raises(HeadpruneError, match=there), devices.running_on(asked):
        pass


def test_at_the_command_line(llama_folder, tmp_path, capsys):
    scores = tmp_path / "scores"
    given = ["score", llama_folder, "--criterion", "magnitude", scores]
    refuses(capsys, "--device cuda:99: there is no such device here", *given, "--device", "cuda:99")
    assert not scores.exists()
    code, _, err = run(capsys, *given, "--device", "cpu")
    assert code == 0 and err.count("device: cpu") == 1


def test_a_device_that_is_full_is_told_by_what_was_running(
    llama_folder, text_file, tmp_path, monkeypatch
):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(evaluation, "measure", full)
    report = tmp_path / "report.json"
    told = "while evaluating. Give a smaller batch_size or --seq-len or max_new_tokens, or pl"
    with pytest.raises(HeadpruneError, match=told) as error:
        headprune.evaluate(llama_folder, report, data=str(text_file), seq_len=16)
    assert error.value.exit_code == 2 and not report.exists()

    def broken(*arguments):
        raise RuntimeError("of another kind")

    monkeypatch.setattr(evaluation, "measure", broken)
    with pytest.raises(RuntimeError, match="of another kind"):
        headprune.evaluate(llama_folder, data=str(text_file), seq_len=16)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if "device" in c.parameters()])
def test_what_takes_less_memory_is_an_option_of_the_command(name, device, error, monkeypatch):
    command = COMMANDS[name]
    values = {n: p.default for n, p in command.parameters().items()} | {"device": "cpu"}
    values |= {"placement": "whole"} if "placement" in values else {}
    monkeypatch.setattr(devices, "chosen", lambda: torch.device(device))
    with (
        pytest.raises(HeadpruneError, match="ran out of memory while running") as told,
        _surroundings(command, values, Context()),
    ):
        raise error
    advice = str(told.value).partition("Give a smaller ")[2]
    named = {word.partition("=")[0] for word in re.findall(r"[\w=-]+", advice)} - {"or", "cpu"}
    known = {command.spell(n) for n in command.parameters()} | {"model"}
    assert named and named <= known
    of_host = isinstance(error, MemoryError) or device == "cpu"
    assert (command.spell("device") in named) is not of_host


@pytest.mark.parametrize(
    ("error", "full", "failed"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True, False),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), False, True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), False, True),
        (ValueError("CUDA error: out of memory"), False, False),
        (RuntimeError("of another kind"), False, False),
    ],
)
def test_full_devices_and_failed_ones_are_told_apart(error, full, failed):
    assert (devices.out_of_memory(error), devices.device_failed(error)) == (full, failed)


@pytest.mark.parametrize(
    ("command", "place", "told"),
    [
        (
            ["heal", "MODEL", "--teacher", "MODEL", "--steps", 1, "healed"],
            (heal_module, "train"),
            "while healing, which may be chance: run the command again, with --resume.",
        ),
        (
            ["check", "MODEL", "--limit", "perplexity <= 1000"],
            (check_module, "check"),
            "while evaluating, which may be chance: run the command again.",
        ),
    ],
)
def test_a_device_that_fails_is_told_and_what_to_do(
    command, place, told, llama_folder, text_file, tmp_path, monkeypatch, capsys
):
    def fail(*arguments):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(*place, fail)
    monkeypatch.chdir(tmp_path)
    given = [llama_folder if word == "MODEL" else word for word in command]
    small = ("--config", "seq_len=16", "--config", "device=cpu")
    code, _, err = run(capsys, *given, "--data", text_file, *small)
    # 1 would say that a check failed
    assert code == 2 and f"error: cpu itself failed {told} If that fails too" in err
    assert "report this" not in err
    assert err.count("AcceleratorError: CUDA error: unspecified launch failure") == 1


def test_a_command_to_go_on_asks_for_another_device_than_the_usual(two_gpus):
    for device, to_ask_for in (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("auto", None)):
        with devices.running_on(device):
            assert devices.asked() == to_ask_for


def test_trainer_takes_the_device(two_gpus, tmp_path, monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with devices.running_on("cuda:1"):
        arguments = training_arguments(Run(tmp_path, {}), 2, 2, 0, None)
    assert arguments.device == torch.device("cuda:1") and not arguments.use_cpu
    assert arguments.distributed_state.device == torch.device("cuda:1")
    assert set(map(str, current)) == {"cuda:1"}
    with devices.running_on("cpu"):
        arguments = training_arguments(Run(tmp_path, {}), 2, 2, 0, None)
    assert arguments.device == torch.device("cpu") and arguments.use_cpu
    assert arguments.distributed_state.device == torch.device("cpu")


def test_inputs_go_where_the_weights_are(two_gpus):
    model = tiny.model("llama-gqa")
    assert placement.input_device(model) == torch.device("cpu")
    waiting = model.to("meta")  # its weights come when they are needed
    assert placement.input_device(waiting) == torch.device("cuda:0")


def test_models_that_are_spread_are_refused():
    split = tiny.model("llama-gqa")
    attention_of(split)
    split._tp_size = 2
    with pytest.raises(FamilyError, match="split by tensor parallelism.*Load it without tp_plan"):
        attention_of(split)
    offloaded = accelerate.cpu_offload(tiny.model("llama-gqa"), torch.device("cpu"))
    with pytest.raises(FamilyError, match="offloaded by accelerate.*Load it without offloading"):
        attention_of(offloaded)


def test_a_sharded_class_is_that_of_transformers():
    class Sharded(nn.Module):
        pass

    made = type("FSDPLlamaForCausalLM", (Sharded, LlamaForCausalLM), {})
    assert native_class(made) is LlamaForCausalLM and native_class(PreTrainedModel) is not made
    model = tiny.model("llama-gqa")
    model.__class__ = made
    assert task_of(model) == "causal-lm"


@pytest.fixture
def tf32():
    """Products that a GPU may round."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def rounds():
    """Whether a GPU may round inputs of products, and of convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return matmul.allow_tf32, cudnn.allow_tf32


def test_proofs_compare_without_tf32(tf32):
    model, seen = tiny.model("llama-gqa"), []

    def look(*arguments):
        seen.append(rounds())

    model.model.layers[0].register_forward_hook(look)
    inputs = probes.probe_inputs(model)
    probes.probe(model, inputs)
    assert seen and not any(map(any, seen)) and rounds() == (True, True)
    seen.clear()
    model(**inputs)
    assert seen == [(True, True)]


@pytest.mark.gpu
def test_peak_memory_is_that_of_one_model(text_file, tmp_path):
    large = tiny.config("llama-gqa")
    large.intermediate_size = 500_000
    net = LlamaForCausalLM(large)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    base = tiny.save(net, tmp_path / "large")
    model = tiny.save(tiny.model("llama-gqa"), tmp_path / "small")
    report = headprune.evaluate(model, str(text_file), against=base, seq_len=16, split="train")
    small, big = report.model.speed, report.against.speed
    assert small.device == big.device == "cuda:0"
    # beside its weights a model holds what products of matrices work in, tens of MB
    assert weights < big.peak_memory_bytes
    assert small.peak_memory_bytes < big.peak_memory_bytes - 0.9 * weights
