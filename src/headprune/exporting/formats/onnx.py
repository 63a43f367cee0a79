"""ONNX, for ONNX Runtime and what is built on it."""

from __future__ import annotations

from pathlib import Path

from headprune.config import ExportConfig, ExportDtype
from headprune.engines.spec import ENGINES
from headprune.exporting.formats.spec import Format, OnStep
from headprune.exporting.graphs import Graph
from headprune.exporting.run_by_engine import prove, refusal, write_graphs
from headprune.exporting.source import ExportSource
from headprune.schemas.exports import ExportProof

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


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    return write_graphs(source, folder, _save, on_step)


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    return prove(source, folder, _ENGINE)


onnx = Format(
    what="ONNX for ONNX Runtime: encoders, decoders with their cache, encoder-decoders",
    refusal=refusal,
    write=_write,
    prove=_prove,
    dtypes=(ExportDtype.FLOAT32,),
    modules=("onnx", "onnxscript", _ENGINE),
    extra="onnx",
)
