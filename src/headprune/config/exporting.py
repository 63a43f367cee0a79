"""How a model is written for an engine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from headprune.declaration import Options, Panel, option


class ExportDtype(str, Enum):
    """Element type of the weights that are written for an engine."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"  # of llama.cpp: blocks of 32 numbers of 8 bits, with a scale each


class ExportProofBy(str, Enum):
    """What proves an exported model."""

    AUTO = "auto"
    ENGINE = "engine"
    READ_BACK = "read-back"


class ExportConfig(Options):
    """What is written for which engine."""

    to: str = option(
        "Format: gguf (llama.cpp), vllm, onnx, openvino.",
        panel=Panel.MAIN,
        metavar="FORMAT",
    )
    out_dtype: ExportDtype = option(
        "Element type of the weights, of those that the format has; auto is the checkpoint's.",
        ExportDtype.AUTO,
        Panel.MAIN,
    )
    like: Path | None = option(
        "gguf: a GGUF file of the original model, whose tokenizer is taken over.",
        None,
        Panel.MAIN,
        metavar="FILE",
    )
    prove: ExportProofBy = option(
        "engine: the engine runs what was written, and so does torch. read-back: the files are "
        "compared with the weights, which takes little memory. auto: the engine where it is "
        "installed.",
        ExportProofBy.AUTO,
        Panel.MAIN,
    )
