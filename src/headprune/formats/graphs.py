"""A model as graphs of tensors, which engines run instead of Python: written, and proven.

Names are optimum's: a model of one graph is ``model``, an encoder-decoder is ``encoder_model`` and
``decoder_model``. The cache of a decoder is an input, ``past_key_values.N.key`` and ``.value``.
It is also an output, ``present.N.key`` and ``.value``. Both have the sizes of layer N; a layer
without heads has none. transformers' ``register_dynamic_cache_export_support`` does not do: it
passes existing caches as one list, which gives those behind a layer without heads to other layers.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from headprune import devices
from headprune.config import ExportConfig, ExportDtype, ExportProofBy
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.formats.checkpoint import OnStep, write_facts
from headprune.formats.experts import run_all_experts
from headprune.formats.format import ExportProof, Format
from headprune.formats.run import (
    DECODER,
    ENCODER,
    MODEL,
    PAST,
    PRESENT,
    LoadedGraph,
    open_graphs,
    run_by_engine,
)
from headprune.formats.source import ExportSource, built
from headprune.model.attention import attention_of
from headprune.model.loading import task_of
from headprune.model.probes import probe, probe_inputs
from headprune.planning.targets import graph_refusal
from headprune.proof.equivalence import allowed, difference

_PARTS = ("key", "value")
_BATCH = {0: "batch_size", 1: "sequence_length"}

Named = Mapping[str, Tensor]


class Flat(nn.Module):
    """A model that takes and returns a flat sequence of tensors.

    Args:
        model: The model.
        run: Run it on inputs by name; outputs by name.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        run: Callable[[PreTrainedModel, dict[str, Tensor]], Named],
        inputs: Iterable[str],
        outputs: Iterable[str],
    ):
        super().__init__()
        self.model, self.run = model, run
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the model."""
        result = self.run(self.model, dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)


@dataclass(frozen=True)
class Graph:
    """A module of tensors in and tensors out.

    Attributes:
        name: Name of its file.
        module: The module.
        inputs: Examples of its inputs, in their order.
        dims: Names of the dimensions that change, per input.
    """

    name: str
    module: Flat
    inputs: dict[str, Tensor]
    dims: dict[str, dict[int, str]]


def _plain(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Named:
    options = {"use_cache": False} if _takes(model, "use_cache") else {}
    outputs: Named = model(**inputs, **options)
    return outputs


def _encode(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Named:
    outputs: Named = model.get_encoder()(**inputs)
    return outputs


def _decode_encoded(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Named:
    outputs: Named = model(
        encoder_outputs=BaseModelOutput(inputs["encoder_hidden_states"]),
        attention_mask=inputs["encoder_attention_mask"],
        decoder_input_ids=inputs["input_ids"],
        use_cache=False,
    )
    return outputs


def _decode(model: PreTrainedModel, inputs: dict[str, Tensor], layers: int) -> Named:
    """Decode with a cache that comes in and goes out as tensors."""
    past = {name: inputs.pop(name) for name in list(inputs) if name.startswith(PAST)}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    seen, cache = mask.shape[1] - ids.shape[1], DynamicCache()
    stub = mask.new_zeros((ids.shape[0], 1, seen, 1), dtype=model.dtype)
    for number in range(layers):
        # transformers reads the length of the cache off the stub of a layer without heads
        keys, values = (past.get(f"{PAST}.{number}.{part}", stub) for part in _PARTS)
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    outputs = {"logits": model(**inputs, past_key_values=cache, use_cache=True).logits}
    for number, layer in enumerate(cache.layers):
        for part, tensor in zip(_PARTS, (layer.keys, layer.values), strict=True):
            outputs[f"{PRESENT}.{number}.{part}"] = tensor
    return outputs


@torch.no_grad()
def graphs_of(model: PreTrainedModel) -> list[Graph]:
    """Return the graphs of a model.

    Args:
        model: The model, in float32 and on the CPU.

    Raises:
        HeadpruneError: If a decoder caches more than keys and values.
    """
    inputs, task = probe_inputs(model), task_of(model)
    if task == "multiple-choice":
        raise HeadpruneError(
            f"A {type(model).__name__} reads several texts at once, and such a model has no graph. "
            "Run it in PyTorch."
        )
    if task == "seq2seq-lm":
        return _encoder_decoder(model, inputs)
    if task == "causal-lm":
        return [_decoder(model, inputs["input_ids"])]
    if getattr(model.config, "type_vocab_size", 0) and _takes(model, "token_type_ids"):
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    outputs = [name for name, value in _plain(model, inputs).items() if _is_output(value)]
    module = Flat(model, _plain, inputs, outputs)
    return [Graph(MODEL, module, inputs, dict.fromkeys(inputs, _BATCH))]


def _is_output(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _decoder(model: PreTrainedModel, ids: Tensor) -> Graph:
    """Return a decoder with the example of a text that follows another."""
    before, now = ids[:, :-3], ids[:, -3:]
    inputs = {"input_ids": now, "attention_mask": torch.ones_like(ids)}
    if _takes(model, "position_ids"):
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        inputs["position_ids"] = positions[:, before.shape[1] :]
    dims = dict.fromkeys(inputs, _BATCH)
    dims["attention_mask"] = {0: "batch_size", 1: "past_sequence_length + sequence_length"}
    cache, attentions = DynamicCache(), attention_of(model)
    filled = model(before, past_key_values=cache, use_cache=True).get("past_key_values")
    if filled is not cache or len(cache.layers) != len(attentions):
        raise HeadpruneError(
            f"A {type(model).__name__} keeps more than keys and values, or none, from one token "
            "to the next, and such a decoder has no graph."
        )
    for number, (layer, attention) in enumerate(zip(cache.layers, attentions, strict=True)):
        if attention.query_heads:
            for part, tensor in zip(_PARTS, (layer.keys, layer.values), strict=True):
                inputs[f"{PAST}.{number}.{part}"] = tensor
                dims[f"{PAST}.{number}.{part}"] = {0: "batch_size", 2: "past_sequence_length"}
    presents = [PRESENT + name.removeprefix(PAST) for name in inputs if name.startswith(PAST)]
    run = partial(_decode, layers=len(attentions))
    return Graph(MODEL, Flat(model, run, inputs, ["logits", *presents]), inputs, dims)


def _encoder_decoder(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Graph]:
    target = {
        "input_ids": inputs.pop("decoder_input_ids"),
        "encoder_hidden_states": _encode(model, inputs)["last_hidden_state"],
        "encoder_attention_mask": inputs["attention_mask"],
    }
    source = {0: "batch_size", 1: "encoder_sequence_length"}
    encoder = Flat(model, _encode, inputs, ["last_hidden_state"])
    decoder = Flat(model, _decode_encoded, target, ["logits"])
    return [
        Graph(ENCODER, encoder, inputs, dict.fromkeys(inputs, source)),
        Graph(DECODER, decoder, target, {**dict.fromkeys(target, source), "input_ids": _BATCH}),
    ]


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def graph_format(
    engine: str,
    what: str,
    file: str,
    save: Callable[[Graph, Path], None],
    load: Callable[[Path], LoadedGraph],
    modules: tuple[str, ...],
) -> Format:
    """Return a format of graphs in float32.

    Args:
        engine: The package of the engine that runs them.
        what: As of ``Format``.
        file: The name of a graph's file, "{}" for the graph.
        save: Write one graph to a file.
        load: Load one graph.
        modules: As of ``Format``.
    """

    def write(
        source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
    ) -> tuple[str, ...]:
        write_graphs(source, lambda graph: save(graph, folder / file.format(graph.name)))
        write_facts(source, folder)
        return ()

    def prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
        return compare(source, lambda: open_graphs(folder, file, load), engine)

    dtypes = (ExportDtype.FLOAT32,)
    return Format(what, _refusal, write, prove, dtypes, modules)


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    if config.prove is ExportProofBy.READ_BACK:
        return "graphs are proven by running them. Give --prove engine."
    return graph_refusal(source.net)


@torch.no_grad()
def write_graphs(source: ExportSource, save: Callable[[Graph], None]) -> None:
    """Write the graphs of a model.

    Raises:
        PlanError: If the exporter cannot make one.
    """
    net = source.load()
    run_all_experts(net)
    for graph in graphs_of(net):
        with _failures_named(PlanError, f"The exporter cannot make a graph of {source.folder}"):
            graph.module(*graph.inputs.values())  # some models keep constants of a first run
            save(graph)


def compare(
    source: ExportSource, opened: Callable[[], dict[str, LoadedGraph]], engine: str
) -> ExportProof:
    """Compare an exported model in an engine with the model in torch.

    Raises:
        ProofError: If the engine cannot run it.
    """
    net: PreTrainedModel = source.load()
    inputs = probe_inputs(net)
    wanted = probe(net, inputs)
    with _failures_named(ProofError, f"{engine} cannot run the graphs of '{source.folder}'"):
        outputs = probe(run_by_engine(built(source.config), opened()), inputs)
    gap = difference(wanted, outputs)
    return ExportProof(
        how="engine",
        engine=f"{engine} {version(engine)}",
        compared=", ".join(name.replace("_", " ") for name in wanted),
        difference=gap,
        tolerance=allowed(net, inputs, wanted, gap),
    )


@contextmanager
def _failures_named(kind: type[HeadpruneError], what: str) -> Iterator[None]:
    """Turn the errors of an exporter or engine into one of ours, and drop its warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (HeadpruneError, OSError):  # a full disk is no limit of an exporter
        raise
    except Exception as error:  # exporters and engines raise anything at a graph they do not know
        if devices.is_device_failure(error):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost says how to report bugs
            cause = cause.__cause__
        plain = " ".join(Text.from_ansi(str(cause)).plain.split())[:400]  # PyTorch colours it
        why = plain or type(cause).__name__
        raise kind(f"{what} ({why}). Nothing was left there; give another --to.") from error
    finally:
        logger.setLevel(level)
