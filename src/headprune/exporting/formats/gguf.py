"""GGUF, the file that llama.cpp and what is built on it run."""

from __future__ import annotations

from pathlib import Path

from headprune.config import ExportConfig, ExportDtype
from headprune.exporting.formats.spec import ExportSource, Format, OnStep
from headprune.exporting.llama_cpp import layout
from headprune.schemas.exports import ExportProof

FILE = "model.gguf"


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    return layout.refusal(source)


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    from headprune.exporting.llama_cpp import file

    arch, kind = layout.arch_of(source), file.type_of(source, config.out_dtype)
    file.write(
        source,
        arch,
        folder / FILE,
        kind,
        lambda writer: writer.add_tokenizer_model("none"),
        on_step,
    )
    return ()


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    from headprune.exporting.llama_cpp import file

    arch, kind = layout.arch_of(source), file.type_of(source, config.out_dtype)
    return file.read_back(source, arch, folder / FILE, kind)


gguf = Format(
    what="a GGUF file for llama.cpp, Ollama and LM Studio",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    dtypes=(
        ExportDtype.FLOAT32,
        ExportDtype.FLOAT16,
        ExportDtype.BFLOAT16,
        ExportDtype.Q8_0,
    ),
    modules=("gguf",),
    extra="llama-cpp",
)
