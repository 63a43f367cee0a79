"""GGUF, the file that llama.cpp and what is built on it run."""

from __future__ import annotations

from pathlib import Path

from headprune.config import ExportConfig, ExportDtype, ExportProofBy
from headprune.exporting.checkpoint import write_facts
from headprune.exporting.formats.spec import Format, OnStep
from headprune.exporting.llama_cpp import layout
from headprune.exporting.llama_cpp.tokenizer import vocabulary
from headprune.exporting.source import ExportSource
from headprune.schemas.exports import ExportProof

FILE = "model.gguf"


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    return layout.refusal(source)


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    from headprune.exporting.llama_cpp import file

    model, changes = layout.prepared(source)
    words = vocabulary(source, config.like)
    if not words.speaks:
        changes += ("There is no tokenizer beside the model: the file takes token ids alone.",)
    kind = file.type_of(source, config.out_dtype)
    file.write(model, folder / FILE, kind, words.fields, on_step)
    write_facts(source, folder)  # by which it is measured
    return changes


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    from headprune.exporting.llama_cpp import engine, file

    model, kind = layout.prepared(source)[0], file.type_of(source, config.out_dtype)
    read_back = file.read_back(model, folder / FILE, kind)
    asked = config.prove is not ExportProofBy.READ_BACK
    speaks = vocabulary(source, config.like).speaks  # the engine runs no file without a tokenizer
    if not (read_back.passed and asked and speaks and engine.installed()):
        return read_back
    return engine.prove(model, folder / FILE, kind, own_words=config.like is None)


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
    serve="llama-server -m {}/model.gguf",
)
