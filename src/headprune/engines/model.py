"""An exported model that is called as its class in transformers is, and runs in an engine.

What probes, measures and times a model so does the same with an exported one. The class without its
weights says what the model is; its graphs say what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.engines.spec import DECODER, ENCODER, ENGINES, MODEL, PAST, PRESENT, LoadedGraph
from headprune.errors import CheckpointError
from headprune.io.ownership import EXPORTED
from headprune.model.loading import load_config, native_of
from headprune.model.skeleton import without_weights
from headprune.runtime.modeling_headprune import pruned_class


@dataclass(frozen=True)
class Past:
    """What a decoder has read.

    Attributes:
        ids: The tokens, shape (batch, length).
        positions: Where they stand, of the same shape.
        cache: Keys and values by their names as inputs; empty where a graph has no cache, and
            reads all tokens again.
    """

    ids: Tensor
    positions: Tensor
    cache: Mapping[str, Tensor]


class NamedOutputs(dict[str, Any]):
    """Outputs by name, which are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class RunByEngine:
    """Mixed into a model class, whose weights are never asked for."""

    config: Any
    headprune_graphs: dict[str, LoadedGraph]

    device = torch.device("cpu")
    dtype = torch.float32

    def to(self, *_: Any, **__: Any) -> Any:
        """Itself: an engine is where it is."""
        return self

    def get_output_embeddings(self) -> None:
        """None that could be called by itself."""

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> NamedOutputs:
        """Runs the graphs; arguments are those of the class, ``past_key_values`` a ``Past``."""
        given = {name: value for name, value in inputs.items() if value is not None}
        past = given.pop("past_key_values", None)
        if DECODER in self.headprune_graphs:
            return self._encoded_and_decoded(input_ids, given, past)
        assert input_ids is not None
        graph, new = self.headprune_graphs[MODEL], input_ids.shape[1]
        past = past or Past(input_ids[:, :0], input_ids[:, :0], _empty_cache(graph, len(input_ids)))
        ids = torch.cat([past.ids, input_ids], 1)
        counted = torch.arange(past.ids.shape[1], ids.shape[1]).expand(len(ids), -1)
        positions = torch.cat([past.positions, given.pop("position_ids", counted)], 1)
        read = new if past.cache else ids.shape[1]
        known = {
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids),
            **given,
            **past.cache,
            "input_ids": ids[:, -read:],
            "position_ids": positions[:, -read:],
        }
        found = NamedOutputs(graph.run({name: known[name] for name in graph.inputs}))
        names = [name for name in found if name.startswith(f"{PRESENT}.")]
        cache = {PAST + name.removeprefix(PRESENT): found.pop(name) for name in names}
        if read > new:
            found["logits"] = found.logits[:, -new:]
        return NamedOutputs(found, past_key_values=Past(ids, positions, cache))

    def _encoded_and_decoded(
        self, input_ids: Tensor | None, given: dict[str, Any], past: Past | None
    ) -> NamedOutputs:
        """Decodes without a cache: the whole target so far is read again."""
        new = given["decoder_input_ids"]
        states = given.get("encoder_outputs", (None,))[0]
        mask = given.get("attention_mask")
        if states is None:
            assert input_ids is not None
            mask = torch.ones_like(input_ids) if mask is None else mask
            source = {"input_ids": input_ids, "attention_mask": mask}
            states = self.headprune_graphs[ENCODER].run(source)["last_hidden_state"]
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.long)
        ids = new if past is None else torch.cat([past.ids, new], 1)
        known = {
            "input_ids": ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": mask,
        }
        logits = self.headprune_graphs[DECODER].run(known)["logits"][:, -new.shape[1] :]
        read = Past(ids, ids[:, :0], {})
        return NamedOutputs(logits=logits, past_key_values=read, encoder_last_hidden_state=states)


def _empty_cache(graph: LoadedGraph, batch: int) -> dict[str, Tensor]:
    """A cache of no tokens: of its sizes that change, the first is the batch."""
    return {
        name: torch.zeros([batch, *(size or 0 for size in shape[1:])])
        for name, shape in graph.inputs.items()
        if name.startswith(PAST)
    }


def is_exported(model: str | Path) -> bool:
    """Whether it is a folder that ``headprune export`` wrote."""
    return (Path(model) / EXPORTED).is_file()


def open_exported(folder: str | Path, engine: str) -> PreTrainedModel:
    """Loads an exported model into an engine.

    Args:
        folder: What ``headprune export`` wrote.
        engine: The engine.

    Raises:
        HeadpruneError: If it was written for another engine, or this one is not installed.
    """
    row = ENGINES[engine]
    files = row.graphs_in(Path(folder))
    if not files:
        raise CheckpointError(
            f"'{folder}' holds no {row.file.format(MODEL)}, so {engine} cannot run it. Give a "
            "folder that 'headprune export' wrote for it."
        )
    config = load_config(folder)
    native = native_of(config)
    cls = native if getattr(config, "headprune", None) is None else pruned_class(native)
    graphs = {name: row.load(file) for name, file in files.items()}
    return run_by_engine(without_weights(cls, config), graphs)


def run_by_engine(net: PreTrainedModel, graphs: dict[str, LoadedGraph]) -> PreTrainedModel:
    """Has graphs compute what a model without weights is.

    Args:
        net: The model.
        graphs: Its graphs by name.
    """
    native = type(net)
    net.__class__ = type(native.__name__, (RunByEngine, native), {})
    # what has no numbers tells where inputs go
    net.headprune_place = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    net.headprune_graphs = graphs
    return net.eval()
