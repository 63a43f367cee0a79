"""An exported model that runs in an engine, with the calls of its class in transformers.

So probes and measures of a model also work on an exported one. The class without its weights gives
the model's facts; its graphs compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

PAST, PRESENT = "past_key_values", "present"
"""Prefixes of the names of a cache, as an input and as an output."""
MODEL, ENCODER, DECODER = "model", "encoder_model", "decoder_model"
"""Names of graphs."""


@dataclass(frozen=True)
class LoadedGraph:
    """A graph in an engine.

    Attributes:
        inputs: Shapes of its inputs by name; None for a dimension that changes.
        run: Compute its outputs by name.
    """

    inputs: Mapping[str, tuple[int | None, ...]]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def open_graphs(
    folder: Path, file: str, load: Callable[[Path], LoadedGraph]
) -> dict[str, LoadedGraph]:
    """Load the graphs in a folder, by name; ``file`` names their files, "{}" for the graph."""
    files = {name: folder / file.format(name) for name in (MODEL, ENCODER, DECODER)}
    return {name: load(path) for name, path in files.items() if path.is_file()}


class RunByEngine:
    """Mixin of a model class, whose weights stay unused.

    ``past_key_values`` hold the cache, by its names as inputs. Graphs of an encoder-decoder have no
    cache: there they hold the target so far, to read again.
    """

    config: Any
    headprune_graphs: dict[str, LoadedGraph]

    device = torch.device("cpu")
    dtype = torch.float32

    def to(self, *_: Any, **__: Any) -> Any:
        """Return itself: an engine does not move."""
        return self

    def get_output_embeddings(self) -> None:
        """Return None: no part can be called by itself."""

    def __call__(
        self, input_ids: Tensor | None = None, past_key_values: Any = None, **inputs: Any
    ) -> ModelOutput:
        """Run the graphs; arguments are those of the class."""
        given = {name: value for name, value in inputs.items() if value is not None}
        if DECODER in self.headprune_graphs:
            return self._encode_and_decode(input_ids, past_key_values, given)
        assert input_ids is not None
        graph, batch = self.headprune_graphs[MODEL], len(input_ids)
        cache: dict[str, Tensor] = past_key_values or {
            name: torch.zeros([batch, *(size or 0 for size in shape[1:])])
            for name, shape in graph.inputs.items()
            if name.startswith(PAST)
        }
        seen = next((keys.shape[2] for keys in cache.values()), 0)
        length = seen + input_ids.shape[1]
        known = {
            "attention_mask": input_ids.new_ones(batch, length),
            "token_type_ids": torch.zeros_like(input_ids),
            "position_ids": torch.arange(seen, length).expand(batch, -1),
            **given,
            **cache,
            "input_ids": input_ids,
        }
        outputs = graph.run({name: known[name] for name in graph.inputs})
        names = [name for name in outputs if name.startswith(f"{PRESENT}.")]
        cache = {PAST + name.removeprefix(PRESENT): outputs.pop(name) for name in names}
        return ModelOutput(**outputs, past_key_values=cache)

    def _encode_and_decode(
        self, input_ids: Tensor | None, past: Tensor | None, given: dict[str, Any]
    ) -> ModelOutput:
        target, mask = given["decoder_input_ids"], given.get("attention_mask")
        if "encoder_outputs" in given:
            states = given["encoder_outputs"][0]
        else:
            assert input_ids is not None
            mask = torch.ones_like(input_ids) if mask is None else mask
            source = {"input_ids": input_ids, "attention_mask": mask}
            states = self.headprune_graphs[ENCODER].run(source)["last_hidden_state"]
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.long)
        ids = target if past is None else torch.cat([past, target], 1)
        known = {"input_ids": ids, "encoder_hidden_states": states, "encoder_attention_mask": mask}
        logits = self.headprune_graphs[DECODER].run(known)["logits"][:, -target.shape[1] :]
        return ModelOutput(logits=logits, past_key_values=ids, encoder_last_hidden_state=states)


def run_by_engine(net: PreTrainedModel, graphs: dict[str, LoadedGraph]) -> PreTrainedModel:
    """Make graphs, by name, compute for a model without weights."""
    native = type(net)
    net.__class__ = type(native.__name__, (RunByEngine, native), {})
    # the one tensor with numbers, by which inputs are placed
    net.headprune_place = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    net.headprune_graphs = graphs
    return net.eval()
