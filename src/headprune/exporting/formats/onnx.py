"""ONNX, for ONNX Runtime and what is built on it."""

from __future__ import annotations

from pathlib import Path

from headprune.engines.spec import ENGINES
from headprune.exporting.formats.graph import graph_format
from headprune.exporting.graphs import Graph

_ENGINE = "onnxruntime"


def _save(graph: Graph, folder: Path) -> None:
    import torch

    program = torch.onnx.export(
        graph.module,
        tuple(graph.inputs.values()),
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        dynamic_shapes=(tuple(graph.dims[name] for name in graph.inputs),),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(folder / ENGINES[_ENGINE].file.format(graph.name)))


onnx = graph_format(
    "ONNX for ONNX Runtime: encoders, decoders with their cache, encoder-decoders",
    _ENGINE,
    _save,
    ("onnx", "onnxscript", _ENGINE),
)
