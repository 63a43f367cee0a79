"""A tiny twin of a model that has no row in the table: its proof comes before any long work.

The twin has the class and the config of the model, with few layers, a small vocabulary and random
weights. Its heads are gated, cut, written and read back; a wrong cut of it must fail.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.config import ProofOption
from headprune.context import Context
from headprune.errors import FamilyError, ProofError
from headprune.family import FAMILIES, Family
from headprune.model import probes
from headprune.model.attention import attention_of, family_of
from headprune.model.loading import from_pretrained, remote_code
from headprune.model.open import Model
from headprune.model.recognition import key_of, note_outputs
from headprune.model.skeleton import without_weights
from headprune.model.units import default_unit
from headprune.proof import equivalence
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import Cut, cut_heads, resolve
from headprune.tensors.units import members

_WIDTHS = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size", "mlp_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 1),
    **{"linear_num_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 16),
}
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_COMMON = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
_VOCABULARY, _KV_HEADS, _HEADS, _WIDTH = 128, 2, 4, 16  # of a twin
_MOST = 2e8  # parameters
_FAR = 8  # layers
Shrink = Callable[[Mapping[str, Any]], dict[str, int]]
_PROVEN: dict[str, float] = {}  # seconds by class and config


class NoTwin(FamilyError):
    """No tiny twin of a model runs."""


def refuse_unproven(
    model: Model, context: Context = Context(), proof: ProofOption = ProofOption.AUTO
) -> float | None:
    """Refuse a model without a row if cuts of its tiny twin are inexact.

    Args:
        model: The model, opened.
        context: Progress.
        proof: "tensors" takes a model without a twin that runs.

    Returns:
        Seconds that the proof took; None for a model that needs none.

    Raises:
        FamilyError: If no twin can be built and run, or a cut of it is not exact.
    """
    config = model.config
    if config.model_type in FAMILIES or getattr(config, "headprune", None) is not None:
        return None
    key = key_of(config)
    if key not in _PROVEN:
        context.stage("proving a tiny twin")
        began = time.monotonic()
        try:
            prove(model.skeleton)
        except NoTwin as error:
            if proof is not ProofOption.TENSORS:
                raise
            context.line(f"{error} proof=tensors: nothing shows that a head goes alone.", False)
            return None
        _PROVEN[key] = time.monotonic() - began
        context.line(
            f"{config.model_type}: recognised by structure, proven on a tiny twin in "
            f"{_PROVEN[key]:.1f} s",
            True,
        )
    return _PROVEN[key]


def prove(skeleton: PreTrainedModel) -> None:
    """Prove the first twin that runs: with a layer without heads, or else with a head in each."""
    name, why = skeleton.config.model_type, "it is too large, or small ones look different"
    for row, twin in _twins(skeleton):
        for empty in (True, False)[row.keeps_a_head :]:
            try:
                with torch.random.fork_rng():  # draws of the command stay its own
                    _refuse_inexact(copy.deepcopy(twin), empty)
            except ProofError as error:
                raise FamilyError(
                    f"Model type '{name}' has the projections of attention, but its forward does "
                    f"something else with heads: on a tiny twin, the cut model differs from the "
                    f"gated one. {error}"
                ) from None
            except Exception as error:  # a forward of any class fails in its own way
                said = str(error).splitlines()
                why = f"{type(error).__name__}: {said[0] if said else ''}"
            else:
                if not empty and not row.keeps_a_head:
                    note_outputs(skeleton.config)
                return
    raise NoTwin(
        f"Model type '{name}' has the projections of attention, but no tiny twin of it could be "
        f"cut ({why}). It needs a row in headprune's table."
    )


def _twins(net: PreTrainedModel) -> Iterator[tuple[Family, PreTrainedModel]]:
    """Yield twins that read as a model does, with their rows.

    Where no small one of images or sound and text can be built, those of its text model.
    """
    row, built = family_of(net.config), False
    for twin in _smaller_twins(net):
        if _reads_as(row, twin.config):
            built = True
            yield row, twin
    text = _text_model(net)
    if text is not None and not built:
        yield from _twins(text)


def _reads_as(row: Family, config: PreTrainedConfig) -> bool:
    """Return whether a row, but for its sizes, is that of a twin's config."""
    try:
        other = family_of(config)
    except FamilyError:  # its sizes do not fit together
        return False
    facts = ("attention", "projections", "per_head", "full_width_norms", "keeps_kv")
    return all(getattr(row, fact) == getattr(other, fact) for fact in facts)


def _text_model(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return the innermost model that holds all attention, if its config is another one."""
    text = net.config.get_text_config()
    if text is net.config:
        return None
    paths = [attention.path for attention in attention_of(net)]
    inner = None
    for name, module in net.named_modules():
        if getattr(module, "config", None) is text and isinstance(module, PreTrainedModel):
            inner = module if all(path.startswith(f"{name}.") for path in paths) else inner
    if inner is not None:  # the config of the model is written later: it stays as it is
        inner = copy.copy(inner)
        inner.config = copy.copy(text)
        inner.config.architectures = [type(inner).__name__]
    return inner


def _smaller_twins(skeleton: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield twins, from the smallest to one that is only less deep: some sizes hang together."""
    layers = _layers_needed(skeleton)
    how = skeleton.config._attn_implementation
    attempts: tuple[Shrink, ...] = (_few_heads, lambda sizes: _WIDTHS, lambda sizes: {})
    for shrink in attempts:
        try:
            sizes = _smaller(skeleton.config, shrink, layers)
            config = type(skeleton.config).from_dict(sizes, attn_implementation=how)
            net = without_weights(type(skeleton), config)
        except Exception:  # a config refuses sizes in its own way
            continue
        if net.num_parameters() <= _MOST:
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(0)
                net = type(skeleton)(config).eval()
                for parameter in net.parameters():  # a flat softmax would hide a wrong cut
                    parameter.normal_(float(parameter.dim() == 1), 0.1)
            yield net


def _layers_needed(skeleton: PreTrainedModel) -> int:
    """Return how many layers hold a layer of every type, and two modules of attention.

    One module must do where the second is far away.
    """
    numbers = [
        int(next((part for part in a.path.split(".") if part.isdigit()), "0"))
        for a in attention_of(skeleton)
    ]
    distinct, types = sorted(set(numbers)), _layer_types(skeleton.config)
    period = max((types.index(each) for each in types), default=0) + 1
    second = distinct[min(1, len(distinct) - 1)]
    first = second if second < _FAR else distinct[0]
    return max(first + 1, _sharing(skeleton.config) + period)


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return getattr(config.get_text_config(), "layer_types", None) or []


def _sharing(config: PreTrainedConfig) -> int:
    """Return how many last layers of a twin read K and V of others."""
    types = _layer_types(config)
    shares = getattr(config.get_text_config(), "num_kv_shared_layers", 0)
    return max(map(types.index, types), default=0) + 1 if shares else 0


def _smaller(config: PreTrainedConfig, shrink: Shrink, layers: int) -> dict[str, Any]:
    """Return a config, and its parts, as a dictionary with smaller sizes."""
    sizes: dict[str, Any] = config.to_dict()
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            sizes[name] = _smaller(part, shrink, layers)
    depths = {name: sizes[name] for name in _DEPTHS if isinstance(sizes.get(name), int)}
    for name, value in sizes.items():
        of_layers = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
        if of_layers and len(value) in depths.values() and len(value) > layers:
            sizes[name] = value[:layers]
        if name.endswith(("token_id", "token_index")) and isinstance(value, int):
            sizes[name] = value % (_VOCABULARY - 4) + 4 if value >= _VOCABULARY else value
    if isinstance(own := sizes.get("per_layer_config"), dict):
        sizes["per_layer_config"] = {n: one for n, one in own.items() if int(n) < layers}
    if sizes.get("num_kv_shared_layers"):
        sizes["num_kv_shared_layers"] = _sharing(config)
    words = [name for name in sizes if name.startswith("vocab_size")]
    smaller = {**dict.fromkeys(words, _VOCABULARY), **dict.fromkeys(depths, layers)}
    common = {name: sizes.get(config.attribute_map.get(name, name)) for name in _COMMON}
    smaller |= shrink(common)
    for name, value in smaller.items():
        name = config.attribute_map.get(name, name)
        now = sizes.get(name)
        if isinstance(now, int) and now > value:
            sizes[name] = value
    return sizes


def _few_heads(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes of a few heads, which are as wide as before."""
    heads, kv_heads, hidden, head_dim = (sizes[name] for name in _COMMON)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return _WIDTHS
    kv_heads = kv_heads or heads
    fewer = min(kv_heads, _HEADS if kv_heads == heads else _KV_HEADS)
    queries = fewer * heads // kv_heads
    return {
        **_WIDTHS,
        **dict.fromkeys(("num_attention_heads", "num_heads"), queries),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), queries),
        "num_key_value_heads": fewer,
        "hidden_size": queries * (_WIDTH if isinstance(head_dim, int) else hidden // heads),
    }


def _refuse_inexact(twin: PreTrainedModel, empty: bool) -> None:
    """Refuse a twin whose gated, cut and reloaded outputs differ, or whose wrong cut passes."""
    cuts = resolve(_plan(twin, empty), twin)
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
        code = remote_code(twin.config)  # already permitted
        for file in code:
            shutil.copyfile(file, Path(folder) / file.name)
        how = twin.config._attn_implementation
        reloaded = from_pretrained(folder, attn_implementation=how, trust_remote_code=bool(code))
        equivalence.conclude(expected, probes.probe(reloaded, expected.inputs))


def _plan(twin: PreTrainedModel, empty: bool) -> Plan:
    """Return a plan that removes another unit of every module; ``empty``, all of the last one."""
    attentions = attention_of(twin)
    unit, parts = default_unit(attentions), {}
    for number, attention in enumerate(attentions):
        units = members(unit, attention.group_sizes)
        gone = units[number % len(units)] if len(units) > 1 else ()
        keep = [head for head in range(attention.query_heads) if head not in gone]
        if empty and number == len(attentions) - 1 > 0:
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
