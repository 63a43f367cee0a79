"""A DeciLM, for engines that know no other model with counts per layer.

vLLM's own class, SGLang, TensorRT-LLM and MLX. It has one number of query heads for all layers, so
that only the KV cache shrinks.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from headprune.config import ExportConfig
from headprune.engines.targets import BLOCK, decilm_refusal
from headprune.errors import ProofError
from headprune.exporting.checkpoint import write_weights
from headprune.exporting.formats.spec import Format, OnStep
from headprune.exporting.regularise import regularise
from headprune.exporting.source import ExportSource
from headprune.exporting.weights import StoredWeights, Weights
from headprune.io.folders import copy_companions
from headprune.model import probes
from headprune.model.attention import family_of
from headprune.proof import equivalence
from headprune.runtime import configuration_decilm
from headprune.runtime.modeling_headprune import SCHEMA, layout_entry
from headprune.schemas.exports import ExportProof

_OURS = ("headprune", "per_layer_config", "allow_global_per_layer_attribute_access")


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    return decilm_refusal(source.net)


def _regular(source: ExportSource) -> tuple[ExportSource, tuple[str, ...]]:
    """The model with equally many query heads in every layer, and none where it may have none."""
    kept = [a for a in source.attentions if a.query_heads]
    step = math.lcm(*(a.kv_heads for a in kept)) if kept else 1
    most = max((a.kv_heads * max(a.group_sizes) for a in kept), default=1)
    queries = step * math.ceil(most / step)
    config = copy.deepcopy(source.config)
    config.per_layer_config = None
    config.num_attention_heads = config.num_key_value_heads = queries
    config.head_dim = source.attentions[0].head_dim
    config.headprune = {
        "schema_version": SCHEMA,
        "family": family_of(config).for_runtime(),
        "layout": {
            a.path: layout_entry(a.query_ids, a.kv_ids, a.group_sizes) for a in source.attentions
        },
    }
    regular, _ = regularise(
        replace(source, config=config),
        may_be_empty=lambda layer: layer > 0,
        group_size=lambda a: queries // max(a.kv_heads, 1),
    )
    before = sum(a.query_heads for a in source.attentions)
    added = sum(a.query_heads for a in regular.attentions) - before
    said = (
        [
            f"{added} zero query heads: DeciLM has {queries} in every layer, so that only the KV "
            "cache shrinks."
        ]
        if added
        else []
    )
    if not source.attentions[0].query_heads:
        said.append("Layer 0 without heads has one KV head of zeros: engines need one there.")
    if source.config.intermediate_size % BLOCK:
        said.append(
            f"The MLP's width {source.config.intermediate_size} is no multiple of {BLOCK}: vLLM "
            "reads it as it is; SGLang, TensorRT-LLM and MLX cannot."
        )
    return regular, tuple(said)


def _config(regular: ExportSource) -> dict[str, Any]:
    own = {n: v for n, v in regular.config.to_dict().items() if n not in _OURS}
    width, hidden = own["intermediate_size"], own["hidden_size"]
    ffn = {"no_op": False, "intermediate_size": width, "hidden_act": "silu"}
    ffn |= {"replace_with_linear": False, "sparsify": None}
    if width % BLOCK == 0:
        ffn["ffn_mult"] = 3 * width / (2 * hidden)
    blocks = []
    for a in regular.attentions:
        group = a.group_sizes[0] if a.query_heads else None
        attention = {"no_op": group is None, "n_heads_in_group": group}
        blocks.append({"attention": {**attention, "replace_with_linear": False}, "ffn": ffn})
    module = Path(configuration_decilm.__file__).stem
    return {
        **own,
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": f"{module}.DeciLMConfig"},
        "rope_theta": own["rope_parameters"]["rope_theta"],
        "block_configs": blocks,
    }


class _Present(Weights):
    """Weights but for those of layers without attention."""

    def __init__(self, regular: ExportSource) -> None:
        skipped = [a.path.rpartition(".")[0] for a in regular.attentions if not a.query_heads]
        gone = tuple(f"{at}.{name}." for at in skipped for name in ("self_attn", "input_layernorm"))
        self._weights = regular.weights
        self._names = [name for name in regular.weights if not name.startswith(gone)]

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    regular, changes = _regular(source)
    text = json.dumps(_config(regular), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    code = Path(configuration_decilm.__file__)
    shutil.copyfile(code, folder / code.name)
    copy_companions(source.folder, folder)
    write_weights(replace(regular, weights=_Present(regular)), folder, on_step)
    return changes


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    """Builds what an engine builds of the blocks, and compares outputs."""
    regular, _ = _regular(source)
    written = StoredWeights(folder, regular.net)
    _refuse_other_blocks(folder, regular, written)
    net = source.load()
    inputs = probes.probe_inputs(net)
    wanted = probes.probe(net, inputs)
    del net
    return ExportProof(
        how="read back",
        engine=f"transformers {metadata.version('transformers')}",
        compared="outputs, relative to the largest, after the checks of DeciLM's blocks,",
        difference=equivalence.difference(wanted, probes.probe(regular.made_of(written), inputs)),
        tolerance=1e-5,
    )


def _refuse_other_blocks(folder: Path, regular: ExportSource, written: StoredWeights) -> None:
    """Refuses blocks that describe other tensors than those that are there.

    Raises:
        ProofError: Naming the layer.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    for layer, (block, attention) in enumerate(
        zip(config.block_configs, regular.attentions, strict=True)
    ):
        name = f"{attention.path}.k_proj.weight"
        rows = written[name].shape[0] if name in written else 0
        said = 0
        if not block.attention.no_op:
            kv_heads = config.num_attention_heads // block.attention.n_heads_in_group
            said = kv_heads * config.head_dim
        if rows != said or (layer == 0 and not rows):
            raise ProofError(f"Block {layer} describes {said} rows of K, and {rows} are there.")


decilm = Format(
    what="a DeciLM for vLLM's own class, SGLang, TensorRT-LLM and MLX: only the cache shrinks",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    serve="python -m sglang.launch_server --model-path {} --trust-remote-code",
)
