"""A model as graphs of plain tensors: what engines run instead of Python.

Names are those that optimum gives, so that what reads its folders reads these: a model of one graph
is ``model``, an encoder-decoder is ``encoder_model`` and ``decoder_model``. The cache of a decoder
is an input, ``past_key_values.N.key`` and ``.value``, and an output, ``present.N.key`` and
``.value``, of the sizes that layer N has; a layer without heads has none.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from headprune.engines.spec import DECODER, ENCODER, MODEL, PAST, PRESENT
from headprune.errors import HeadpruneError
from headprune.model.attention import attention_of
from headprune.model.loading import task_of
from headprune.model.probes import probe_inputs

_PARTS = ("key", "value")

Dims = dict[int, str]


class Flat(nn.Module, ABC):
    """Takes tensors one after the other, and gives them so.

    Attributes:
        outputs: The names of what it gives.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str], outputs: Iterable[str]):
        super().__init__()
        self.model, self.names, self.outputs = model, list(names), list(outputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the model."""
        result = self.run(dict(zip(self.names, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)

    @abstractmethod
    def run(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Runs the model on inputs by name; outputs by name."""


@dataclass(frozen=True)
class Graph:
    """A module of tensors in and tensors out.

    Attributes:
        name: What its file is called.
        module: The module; its outputs are a tuple.
        inputs: Examples of its inputs, in the order in which it takes them.
        dims: Their dimensions that may change, each with its name.
    """

    name: str
    module: Flat
    inputs: dict[str, Tensor]
    dims: dict[str, Dims]

    @property
    def outputs(self) -> list[str]:
        """The names of its outputs."""
        return self.module.outputs


class _Plain(Flat):
    """A model that gives all at once."""

    def run(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        options = {"use_cache": False} if _takes(self.model, "use_cache") else {}
        found: Mapping[str, Tensor] = self.model(**given, **options)
        return found


class _Encoder(Flat):
    """The encoder of an encoder-decoder."""

    def run(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.model.get_encoder()(**given)
        return found


class _Target(Flat):
    """The decoder of an encoder-decoder, on what its encoder gave."""

    def run(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.model(
            encoder_outputs=BaseModelOutput(given["encoder_hidden_states"]),
            attention_mask=given["encoder_attention_mask"],
            decoder_input_ids=given["input_ids"],
            use_cache=False,
        )
        return found


class _Decoder(Flat):
    """A decoder whose cache comes in and goes out as tensors."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str], outputs: Iterable[str]):
        super().__init__(model, names, outputs)
        self.layers = len(attention_of(model))

    def run(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        past = {name: given.pop(name) for name in list(given) if name.startswith(PAST)}
        ids, mask = given["input_ids"], given["attention_mask"]
        seen, cache = mask.shape[1] - ids.shape[1], DynamicCache()
        stub = mask.new_zeros((ids.shape[0], 1, seen, 1), dtype=self.model.dtype)
        for number in range(self.layers):
            # the stub of a layer without heads is what tells transformers how long the cache is
            keys, values = (past.get(f"{PAST}.{number}.{part}", stub) for part in _PARTS)
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        found = {"logits": self.model(**given, past_key_values=cache, use_cache=True).logits}
        for number, layer in enumerate(cache.layers):
            for part, tensor in zip(_PARTS, (layer.keys, layer.values), strict=True):
                found[f"{PRESENT}.{number}.{part}"] = tensor
        return found


@torch.no_grad()
def graphs_of(model: PreTrainedModel) -> list[Graph]:
    """The graphs that a model comes to.

    Args:
        model: The model, in float32 and on the CPU.

    Raises:
        HeadpruneError: If a decoder keeps something else in its cache.
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
    module = _Plain(model, inputs, ())
    found = module.run(dict(inputs)).items()
    module.outputs = [name for name, value in found if _is_output(value)]
    both = {0: "batch_size", 1: "sequence_length"}
    return [Graph(MODEL, module, inputs, dict.fromkeys(inputs, both))]


def _is_output(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand(len(ids), -1)


def _decoder(model: PreTrainedModel, ids: Tensor) -> Graph:
    """A decoder on a piece of text that follows another."""
    before, now = ids[:, :-3], ids[:, -3:]
    inputs = {"input_ids": now, "attention_mask": torch.ones_like(ids)}
    if _takes(model, "position_ids"):
        inputs["position_ids"] = _positions(ids)[:, before.shape[1] :]
    dims = {name: {0: "batch_size", 1: "sequence_length"} for name in inputs}
    dims["attention_mask"] = {0: "batch_size", 1: "past_sequence_length + sequence_length"}
    cache, attentions = DynamicCache(), attention_of(model)
    given = model(before, past_key_values=cache, use_cache=True).get("past_key_values")
    if given is not cache or len(cache.layers) != len(attentions):
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
    return Graph(MODEL, _Decoder(model, inputs, ["logits", *presents]), inputs, dims)


def _encoder_decoder(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Graph]:
    target = inputs.pop("decoder_input_ids")
    of_decoder = {
        "input_ids": target,
        "encoder_hidden_states": model.get_encoder()(**inputs).last_hidden_state,
        "encoder_attention_mask": inputs["attention_mask"],
    }
    both = {0: "batch_size", 1: "encoder_sequence_length"}
    dims = {**dict.fromkeys(of_decoder, both), "input_ids": {0: "batch_size", 1: "sequence_length"}}
    encoder = _Encoder(model, inputs, ["last_hidden_state"])
    return [
        Graph(ENCODER, encoder, inputs, dict.fromkeys(inputs, both)),
        Graph(DECODER, _Target(model, of_decoder, ["logits"]), of_decoder, dims),
    ]


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
