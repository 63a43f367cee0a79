"""A tiny twin of a model that has no row in the table: its proof comes before any long work.

The twin has the class and the config of the model, with few layers, a small vocabulary and random
weights. Its heads are gated, cut, written and read back; a wrong cut of it must fail.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.context import Context
from headprune.errors import FamilyError, ProofError
from headprune.family import FAMILIES
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.model.loading import from_pretrained
from headprune.model.open import Model
from headprune.model.skeleton import without_weights
from headprune.model.units import default_unit
from headprune.result import equivalence
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import Cut, cut_heads, resolve
from headprune.tensors.units import members

_VOCABULARY = {"vocab_size": 128, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
_WIDTHS = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 1),
}
# from the smallest twin to one that is only less deep: some classes tie sizes to each other
_SMALL = {**_VOCABULARY, **_WIDTHS}
_ATTEMPTS = ({**_SMALL, "hidden_size": 128}, _SMALL, _VOCABULARY)
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
_MOST = 3e8  # parameters
_PROVEN: dict[str, float] = {}  # seconds by class and config


def refuse_unproven(model: Model, context: Context = Context()) -> float | None:
    """Refuse a model without a row whose tiny twin is not cut exactly.

    Args:
        model: The model, opened.
        context: Progress.

    Returns:
        Seconds that the proof took; None for a model that needs none.

    Raises:
        FamilyError: If no twin can be built and run, or a cut of it is not exact.
    """
    config = model.config
    if config.model_type in FAMILIES or getattr(config, "headprune", None) is not None:
        return None
    key = f"{type(config).__qualname__} {config.to_json_string()}"
    if key not in _PROVEN:
        context.stage("proving a tiny twin")
        began = time.monotonic()
        _prove(model.skeleton)
        _PROVEN[key] = time.monotonic() - began
        context.line(
            f"{config.model_type}: recognised by structure, proven on a tiny twin in "
            f"{_PROVEN[key]:.1f} s",
            True,
        )
    return _PROVEN[key]


def _prove(skeleton: PreTrainedModel) -> None:
    name, why = skeleton.config.model_type, "it is too large"
    for twin in _twins(skeleton):
        try:
            _refuse_inexact(twin)
            return
        except ProofError as error:
            raise FamilyError(
                f"Model type '{name}' has the projections of attention, but its forward does "
                f"something else with heads: on a tiny twin, the cut model differs from the gated "
                f"one. {error}"
            ) from None
        except Exception as error:  # a forward of any class fails in its own way
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise FamilyError(
        f"Model type '{name}' has the projections of attention, but no tiny twin of it could be "
        f"cut ({why}). It needs a row in headprune's table."
    )


def _twins(skeleton: PreTrainedModel) -> Iterator[PreTrainedModel]:
    layers = _layers_needed(skeleton)
    for sizes in _ATTEMPTS:
        config = copy.deepcopy(skeleton.config)
        try:
            _shrink(config, sizes, layers)
            net = without_weights(type(skeleton), config)
        except Exception:  # a config refuses sizes in its own way
            continue
        if net.num_parameters() <= _MOST:
            with torch.no_grad(), torch.random.fork_rng():  # draws of the command stay its own
                torch.manual_seed(0)
                net = type(skeleton)(config).eval()
                for parameter in net.parameters():  # a flat softmax would hide a wrong cut
                    parameter.normal_(float(parameter.dim() == 1), 0.1)
            yield net


def _layers_needed(skeleton: PreTrainedModel) -> int:
    """Return how many layers hold two modules of attention."""
    numbers = [
        int(next((part for part in a.path.split(".") if part.isdigit()), "0"))
        for a in attention_of(skeleton)
    ]
    distinct = sorted(set(numbers))
    return distinct[min(1, len(distinct) - 1)] + 1


def _shrink(config: PreTrainedConfig, sizes: Mapping[str, int], layers: int) -> None:
    """Write smaller sizes into a config, and into those of its parts."""
    parts = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    for part in parts:
        _shrink(part, sizes, layers)
    had = {n: getattr(config, n) for n in _DEPTHS if isinstance(getattr(config, n, None), int)}
    for name, value in list(vars(config).items()):
        of_layers = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
        if of_layers and len(value) in had.values() and len(value) > layers:
            setattr(config, name, value[:layers])
    smaller: dict[str, Any] = {**sizes, **dict.fromkeys(had, layers)}
    for name, value in smaller.items():
        now = getattr(config, name, None)
        if isinstance(now, int) and now > value:
            setattr(config, name, value)


def _refuse_inexact(twin: PreTrainedModel) -> None:
    """Refuse a twin whose gated, cut and reloaded outputs differ, or whose wrong cut passes."""
    cuts = resolve(_plan(twin), twin)
    expected = equivalence.expect(twin, cuts)
    others = [_other(cut) for cut in cuts]
    wrong = equivalence.expect(twin, others, expected.inputs, decoded=False)
    cut_heads(twin, cuts)
    outputs = probes.probe(twin, expected.inputs)
    equivalence.conclude(expected, outputs)
    try:
        equivalence.conclude(wrong, outputs)
    except ProofError:
        pass
    else:
        raise ProofError("A wrong cut of it passes as well.")
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        how = twin.config._attn_implementation
        reloaded = from_pretrained(folder, attn_implementation=how)
        equivalence.conclude(expected, probes.probe(reloaded, expected.inputs))


def _plan(twin: PreTrainedModel) -> Plan:
    """Return a plan that removes another unit of every module, and one module's heads all."""
    attentions = attention_of(twin)
    unit, parts = default_unit(attentions), {}
    for number, attention in enumerate(attentions):
        units = members(unit, attention.group_sizes)
        gone = units[number % len(units)] if len(units) > 1 else ()
        keep = [head for head in range(attention.query_heads) if head not in gone]
        if number == len(attentions) - 1 > 0:
            keep = []
        parts[attention.path] = AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(keep),
            scale=tuple(1 - head / (4 * attention.query_heads) for head in keep),
        )
    return Plan(unit=unit, attentions=parts)


def _other(cut: Cut) -> Cut:
    return cut if cut.scale is None else replace(cut, scale=cut.scale[::-1])
