"""What an engine is, and how one of them is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from torch import Tensor

from headprune.packages import refuse_missing
from headprune.registry import Registry

PAST, PRESENT = "past_key_values", "present"
"""What the names of a cache start with, as an input and as an output."""
MODEL, ENCODER, DECODER = "model", "encoder_model", "decoder_model"
"""What graphs are called."""


class LoadedGraph(Protocol):
    """A graph that an engine has loaded.

    Attributes:
        inputs: The shapes of its inputs by name; None for a dimension that changes.
    """

    inputs: Mapping[str, tuple[int | None, ...]]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its outputs by name."""


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        package: What must be installed.
        file: What the file of a graph is called, with ``{}`` for the graph.
    """

    package: str
    file: str

    def load(self, file: Path) -> LoadedGraph:
        """Loads a graph.

        Raises:
            HeadpruneError: If the engine is not installed.
        """
        refuse_missing("This model", self.package)
        open_graph: Callable[[Path], LoadedGraph]
        open_graph = import_module(f"headprune.engines.{self.package}").open_graph
        return open_graph(file)

    def graphs_in(self, folder: Path) -> dict[str, Path]:
        """The graphs of an exported model by name; none if it was exported for something else."""
        files = {name: folder / self.file.format(name) for name in (MODEL, ENCODER, DECODER)}
        return {name: file for name, file in files.items() if file.is_file()}


ENGINES: Registry[Engine] = Registry("engine")
ENGINES.add("onnxruntime", Engine("onnxruntime", "{}.onnx"))
ENGINES.add("openvino", Engine("openvino", "openvino_{}.xml"))
ENGINES.freeze()
