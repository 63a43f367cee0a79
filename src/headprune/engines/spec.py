"""What an engine is, and how one of them is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from torch import Tensor

from headprune.errors import HeadpruneError
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
        extra: The extra of headprune that installs it.
        file: What the file of a graph is called, with ``{}`` for the graph.
    """

    package: str
    extra: str
    file: str

    def load(self, file: Path) -> LoadedGraph:
        """Loads a graph.

        Raises:
            HeadpruneError: If the engine is not installed.
        """
        self.refuse_missing()
        open_graph: Callable[[Path], LoadedGraph]
        open_graph = import_module(f"headprune.engines.{self.package}").open_graph
        return open_graph(file)

    def refuse_missing(self) -> None:
        """Refuses to go on without the engine.

        Raises:
            HeadpruneError: Naming the extra.
        """
        if find_spec(self.package) is None:
            raise HeadpruneError(
                f"The engine {self.package} is not installed. Install the extra: pip install "
                f"'headprune[{self.extra}]'."
            )

    def graphs_in(self, folder: Path) -> dict[str, Path]:
        """The graphs of an exported model by name; none if it was exported for something else."""
        files = {name: folder / self.file.format(name) for name in (MODEL, ENCODER, DECODER)}
        return {name: file for name, file in files.items() if file.is_file()}


ENGINES: Registry[Engine] = Registry("engine")
ENGINES.add("onnxruntime", Engine("onnxruntime", "onnx", "{}.onnx"))
ENGINES.add("openvino", Engine("openvino", "openvino", "openvino_{}.xml"))
ENGINES.freeze()
