"""ExecuTorch with XNNPACK, for phones and other small machines: one text at a time, no cache."""

from __future__ import annotations

from pathlib import Path

from headprune.config import ExportConfig, ExportDtype
from headprune.engines.spec import ENGINES
from headprune.exporting.formats.spec import Format, OnStep
from headprune.exporting.graphs import Graph
from headprune.exporting.run_by_engine import prove, refusal, write_graphs
from headprune.exporting.source import ExportSource
from headprune.model.lengths import most_tokens
from headprune.schemas.exports import ExportProof

_ENGINE = "executorch"
_LONGEST = 512  # tokens that memory is planned for


def _save(graph: Graph, folder: Path) -> None:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    longest = min(_LONGEST, most_tokens(graph.module.model.config) or _LONGEST)
    length = torch.export.Dim("length", min=2, max=longest)
    example = tuple(
        one[:1].clone(memory_format=torch.contiguous_format) for one in graph.inputs.values()
    )
    program = torch.export.export(
        graph.module, example, dynamic_shapes=(({1: length},) * len(example),), strict=False
    )
    names = {"input_names": " ".join(graph.inputs), "output_names": " ".join(graph.outputs)}
    lowered = to_edge_transform_and_lower(
        program, partitioner=[XnnpackPartitioner()], constant_methods=names
    )
    with (folder / ENGINES[_ENGINE].file.format(graph.name)).open("wb") as stream:
        lowered.to_executorch().write_to_file(stream)


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    if source.task == "seq2seq-lm":
        return "an encoder-decoder decodes from a cache, which this format lacks. Give --to onnx."
    return refusal(source, config)


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    write_graphs(source, folder, _save, on_step, cached=False)
    return (f"Texts have at most {_LONGEST} tokens, and are run one by one without a cache.",)


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    return prove(source, folder, _ENGINE)


executorch = Format(
    what="ExecuTorch with XNNPACK: encoders, and decoders without a cache",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    dtypes=(ExportDtype.FLOAT32,),
    modules=(_ENGINE,),
    extra=ENGINES[_ENGINE].extra,
)
