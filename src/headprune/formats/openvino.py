"""OpenVINO's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headprune.formats.graphs import Graph, graph_format
from headprune.formats.run import LoadedGraph

FILE = "openvino_{}.xml"


def save(graph: Graph, file: Path) -> None:
    """Write a graph, and its weights beside it."""
    import openvino

    shapes = [
        openvino.PartialShape([-1 if i in graph.dims[name] else n for i, n in enumerate(one.shape)])
        for name, one in graph.inputs.items()
    ]
    example = tuple(graph.inputs.values())
    model = openvino.convert_model(graph.module, example_input=example, input=shapes)
    names = (*graph.module.inputs, *graph.module.outputs)
    for port, name in zip((*model.inputs, *model.outputs), names, strict=True):
        port.get_tensor().set_names({name})
    openvino.save_model(model, str(file), compress_to_fp16=False)


def load(file: Path) -> LoadedGraph:
    """Load a graph into OpenVINO, on the CPU and in float32."""
    import openvino

    # where the processor has bfloat16, OpenVINO would compute in that
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    model = openvino.Core().compile_model(str(file), "CPU", settings)
    outputs = [port.get_any_name() for port in model.outputs]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: value.contiguous().numpy() for name, value in inputs.items()}
        results = model(arrays, share_inputs=True)
        return {name: torch.from_numpy(results[name]) for name in outputs}

    shapes = {
        port.get_any_name(): tuple(
            size.get_length() if size.is_static else None for size in port.get_partial_shape()
        )
        for port in model.inputs
    }
    return LoadedGraph(shapes, run)


FORMAT = graph_format(
    "openvino",
    "OpenVINO: encoders, decoders with their cache, encoder-decoders",
    FILE,
    save,
    load,
    ("openvino",),
)
