"""ONNX, for ONNX Runtime and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headprune.formats.graphs import Graph, graph_format
from headprune.formats.run import LoadedGraph

FILE = "{}.onnx"


def save(graph: Graph, file: Path) -> None:
    """Write a graph."""
    program = torch.onnx.export(
        graph.module,
        tuple(graph.inputs.values()),
        input_names=graph.module.inputs,
        output_names=graph.module.outputs,
        dynamic_shapes=(tuple(graph.dims[name] for name in graph.inputs),),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(file))


def load(file: Path) -> LoadedGraph:
    """Load a graph into ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    outputs = [port.name for port in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: value.contiguous().numpy() for name, value in inputs.items()}
        results = session.run(outputs, arrays)
        return dict(zip(outputs, map(torch.from_numpy, results), strict=True))

    shapes = {
        port.name: tuple(size if isinstance(size, int) else None for size in port.shape)
        for port in session.get_inputs()
    }
    return LoadedGraph(shapes, run)


FORMAT = graph_format(
    "onnxruntime",
    "ONNX for ONNX Runtime: encoders, decoders with their cache, encoder-decoders",
    FILE,
    save,
    load,
    ("onnx", "onnxscript", "onnxruntime"),
)
