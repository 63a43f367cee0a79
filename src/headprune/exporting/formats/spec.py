"""What a format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headprune.config import ExportConfig, ExportDtype
from headprune.exporting.source import ExportSource
from headprune.schemas.exports import ExportProof

OnStep = Callable[..., None]
"""Called with how much is done, and how much there is (``Context.step``)."""


@dataclass(frozen=True)
class Format:
    """A way to write a model for an engine.

    Attributes:
        what: What it is, and who runs it.
        refusal: Why it cannot hold a model, as a sentence that says what would; None if it can.
        write: Writes a model into an empty folder, telling ``OnStep`` how far it is; returns what
            was written otherwise than it is in the model and computes the same, a sentence each.
        prove: Compares what was written with the model, in the engine where it is installed.
        dtypes: Element types of weights that it has, beside "auto".
        modules: What must be installed to write it.
        serve: The command that serves the folder, which stands for "{}" in it.
    """

    what: str
    refusal: Callable[[ExportSource, ExportConfig], str | None]
    write: Callable[[ExportSource, Path, ExportConfig, OnStep], tuple[str, ...]]
    prove: Callable[[ExportSource, Path, ExportConfig], ExportProof]
    dtypes: tuple[ExportDtype, ...] = ()
    modules: tuple[str, ...] = ()
    serve: str = ""
