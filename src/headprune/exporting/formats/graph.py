"""What the formats of graphs share: what lies beside the graphs, and their proof."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from rich.text import Text
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import ExportConfig, ExportDtype, ExportProofBy
from headprune.engines.model import open_exported
from headprune.engines.targets import graph_refusal
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.exporting.checkpoint import write_facts
from headprune.exporting.experts import run_all_experts
from headprune.exporting.formats.spec import Format, OnStep
from headprune.exporting.graphs import Graph, graphs_of
from headprune.exporting.source import ExportSource
from headprune.model.probes import probe, probe_inputs
from headprune.proof.equivalence import allowed, difference
from headprune.schemas.exports import ExportProof

Save = Callable[[Graph, Path], None]


def refusal(source: ExportSource, config: ExportConfig) -> str | None:
    """Why graphs cannot hold a model; None if they can."""
    if config.prove is ExportProofBy.READ_BACK:
        return "what was written is proven by running it. Give prove engine."
    return graph_refusal(source.net)


@torch.no_grad()
def write_graphs(
    source: ExportSource, folder: Path, save: Save, on_step: OnStep
) -> tuple[str, ...]:
    """Writes the graphs of a model, its config and its tokenizer.

    Args:
        source: The model.
        folder: Where to.
        save: Writes one graph into the folder.
        on_step: Told how many graphs are written, and how many there are.
    """
    net = source.load()
    run_all_experts(net)
    graphs = graphs_of(net)
    for done, graph in enumerate(graphs):
        on_step(done, len(graphs))
        try:
            with _quiet():
                graph.module(*graph.inputs.values())  # what is kept from a first run is kept now
                save(graph, folder)
        except OSError:  # a full disk is no limit of the exporter
            raise
        except Exception as error:  # whatever an exporter raises at what it does not know
            if devices.gave_out(error):
                raise
            raise PlanError(
                f"The exporter cannot make a graph of this {type(net).__name__} ({_why(error)}). "
                "Give another --to."
            ) from error
    write_facts(source, folder)
    return ()


def _why(error: BaseException) -> str:
    while error.__cause__ is not None:  # what an exporter says of its own is how to report bugs
        error = error.__cause__
    plain = Text.from_ansi(str(error)).plain  # PyTorch colours what it says
    return " ".join(plain.split())[:400] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops what exporters warn of: the proof finds what matters of it."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def prove(source: ExportSource, folder: Path, engine: str) -> ExportProof:
    """Compares what an engine makes of an exported model with what torch makes of the model.

    Raises:
        ProofError: If the engine cannot run it.
    """
    net: PreTrainedModel = source.load()
    inputs = probe_inputs(net)
    wanted = probe(net, inputs)
    try:
        found = probe(open_exported(folder, engine), inputs)
    except (HeadpruneError, OSError):
        raise
    except Exception as error:  # whatever an engine raises at a graph that it cannot run
        if devices.gave_out(error):
            raise
        raise ProofError(
            f"{engine} cannot run what was written of '{source.folder}' ({_why(error)}). Nothing "
            "was left there; give another --to."
        ) from error
    gap = difference(wanted, found)
    return ExportProof(
        how="engine",
        engine=f"{engine} {version(engine)}",
        compared=", ".join(name.replace("_", " ") for name in wanted),
        difference=gap,
        tolerance=allowed(net, inputs, wanted, gap),
    )


def graph_format(what: str, engine: str, save: Save, modules: tuple[str, ...]) -> Format:
    """A format of graphs with caches, in float32, that one engine runs.

    Args:
        what: What it is.
        engine: The engine, a row of ``ENGINES``.
        save: Writes one graph into a folder.
        modules: What it needs.
    """

    def write(
        source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
    ) -> tuple[str, ...]:
        return write_graphs(source, folder, save, on_step)

    return Format(
        what=what,
        refusal=refusal,
        write=write,
        prove=lambda source, folder, config: prove(source, folder, engine),
        dtypes=(ExportDtype.FLOAT32,),
        modules=modules,
    )
