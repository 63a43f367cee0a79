"""A folder that vLLM serves with different heads per layer, by its transformers backend."""

from __future__ import annotations

from importlib import metadata
from itertools import zip_longest
from pathlib import Path

import torch

from headprune.config import ExportConfig
from headprune.errors import PlanError, ProofError
from headprune.formats.checkpoint import OnStep, write_checkpoint
from headprune.formats.format import ExportProof, Format
from headprune.formats.regularise import regularise
from headprune.formats.source import ExportSource, open_source
from headprune.model.probes import probe, proof_inputs
from headprune.planning.targets import vllm_refusal
from headprune.proof.equivalence import difference
from headprune.proof.left_alone import refuse_other_settings
from headprune.runtime.modeling_headprune import REPEATING


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    reason = vllm_refusal(source.net)
    if reason is not None:
        return reason
    if not source.net.is_backend_compatible():
        return (
            "vLLM's backend puts its own attention where transformers' attention interface is "
            f"called, and a {source.config.model_type} does not call it."
        )
    _, missing = source.on_disk()
    if missing:
        return f"its folder has no '{missing[0]}'. It is incomplete or damaged; get it again."
    try:
        regularise(source)
    except PlanError as error:
        return str(error)
    return None


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    regular, changes = regularise(source)
    write_checkpoint(regular, folder, on_step)
    return changes


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    """Run the folder in transformers, and repeat vLLM's checks of a folder."""
    written = open_source(folder, source.trust_remote_code)
    _refuse_unserved(written)
    checks = "outputs, relative to the largest, after vLLM's checks of config and shapes,"
    return read_back(source, written).model_copy(
        update={"why_not": "vLLM is not run here", "compared": checks}
    )


def read_back(source: ExportSource, written: ExportSource, tolerance: float = 1e-5) -> ExportProof:
    """Compare a folder with its source in transformers, and the weights outside attention."""
    refuse_other_settings(source.folder, source.config, written.config, written.folder)
    _refuse_other_weights(source, written)
    net = source.load()
    inputs = proof_inputs(net)
    wanted = probe(net, inputs)
    del net
    return ExportProof(
        how="read back",
        engine=f"transformers {metadata.version('transformers')}",
        why_not="no engine runs here",
        compared="outputs, relative to the largest,",
        difference=difference(wanted, probe(written.load(), inputs)),
        tolerance=tolerance,
    )


def _refuse_other_weights(source: ExportSource, written: ExportSource) -> None:
    """Raise ProofError for a weight outside attention that is not the source's."""
    heads = tuple(f"{attention.path}." for attention in source.attentions)
    for name in source.weights:
        if name.startswith(heads):
            continue
        found = written.weights[name].blocks() if name in written.weights else ()
        pairs = zip_longest(source.weights[name].blocks(), found, fillvalue=torch.empty(0))
        if not all(one.dtype is two.dtype and torch.equal(one, two) for one, two in pairs):
            raise ProofError(f"'{name}' of the folder is not the original's.")


def _refuse_unserved(written: ExportSource) -> None:
    """Raise ProofError where vLLM's transformers backend stops."""
    config = written.config.get_text_config(decoder=True)
    per_layer = getattr(config, "per_layer_config", None)
    for layer, attention in enumerate(written.attentions):
        shown = getattr(attention.module, "config", config)
        if not attention.query_heads or shown._attn_implementation == REPEATING:
            raise ProofError(f"{attention.path} does not go through the attention interface.")
        stated = config if per_layer is None else per_layer[layer]
        heads = stated.num_attention_heads
        counts = heads, getattr(stated, "num_key_value_heads", heads)  # as vLLM counts them
        if counts != (attention.query_heads, attention.kv_heads):
            raise ProofError(
                f"{attention.path} has {attention.query_heads} query heads and "
                f"{attention.kv_heads} KV heads, and the config says {counts[0]} and {counts[1]}."
            )


FORMAT = Format(
    what="a folder for vLLM's transformers backend (--model-impl transformers)",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    serve="vllm serve {} --model-impl transformers --trust-remote-code",
)
