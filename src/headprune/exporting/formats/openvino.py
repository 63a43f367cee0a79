"""OpenVINO's own files."""

from __future__ import annotations

from pathlib import Path

from headprune.engines.spec import ENGINES
from headprune.exporting.formats.graph import graph_format
from headprune.exporting.graphs import Graph

_ENGINE = "openvino"


def _save(graph: Graph, folder: Path) -> None:
    import openvino

    shapes = [
        openvino.PartialShape([-1 if i in graph.dims[name] else n for i, n in enumerate(one.shape)])
        for name, one in graph.inputs.items()
    ]
    model = openvino.convert_model(
        graph.module, example_input=tuple(graph.inputs.values()), input=shapes
    )
    for ports, names in ((model.inputs, graph.inputs), (model.outputs, graph.outputs)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    file = folder / ENGINES[_ENGINE].file.format(graph.name)
    openvino.save_model(model, str(file), compress_to_fp16=False)


openvino = graph_format(
    "OpenVINO: encoders, decoders with their cache, encoder-decoders",
    _ENGINE,
    _save,
    (_ENGINE,),
)
