"""Random inputs of whatever a model takes, and its outputs on them.

A language model is probed three times: one forward over a padded batch, and two decodings with a KV
cache, of one text and of a padded batch in pieces: wrong caches show only there. Outputs of W_O are
kept too, as a module with small weights changes the model's outputs by less than rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from headprune.errors import FamilyError
from headprune.model.attention import attention_of, family_of
from headprune.model.batch import CLASSIFIERS, most_tokens, task_of
from headprune.model.placement import on_device, without_tf32
from headprune.runtime.modeling_headprune import input_dim
from headprune.schemas.proofs import PROBE_SEED

_DECODED = 4
_CHUNKS = (4, 1, 1)
_ROWS = 64  # of one call of a module


class Outputs(dict[str, Tensor]):
    """Outputs of a model by name.

    Attributes:
        modules: Outputs of every W_O without its bias, at some positions of every call, by path.
        controls: Their difference from those with wrong gates (``result.equivalence``).
    """

    def __init__(self, *args: Any, **outputs: Tensor) -> None:
        super().__init__(*args, **outputs)
        self.modules: dict[str, Tensor] = {}
        self.controls: dict[str, float] = {}


def probe_inputs(model: PreTrainedModel, seed: int = PROBE_SEED) -> dict[str, Tensor]:
    """Return two random examples; texts are of unequal length and padded."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    takes = set(inspect.signature(model.forward).parameters)
    kinds = family_of(config).attention
    inputs: dict[str, Tensor] = {}
    if "input_ids" in takes:
        inputs = _random_text(
            config.get_text_config(), min(24, most_tokens(model) or 24), generator
        )
        for name in ("image_token_id", "image_token_index", "video_token_id"):
            inputs["input_ids"][inputs["input_ids"] == getattr(config, name, None)] = 0
    # a model with only its language part cut is probed on text alone
    if "pixel_values" in takes and ("vision" in kinds or not inputs):
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        sides = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = torch.randn(2, vision.num_channels, *sides, generator=generator)
    if "input_features" in takes and not inputs:
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = torch.randn(shape, generator=generator)
    if "input_values" in takes and not inputs:
        inputs["input_values"] = torch.randn(2, 8000, generator=generator)
    if task_of(model) == "multiple-choice":
        inputs = {name: ids[None] for name, ids in inputs.items()}  # one example, two choices
    elif "input_ids" in inputs and task_of(model) in CLASSIFIERS and config.is_encoder_decoder:
        # it reads the class where its decoder, which makes its own inputs, has read the end
        inputs["input_ids"] = with_one_end(inputs["input_ids"], config, inputs["attention_mask"])
    elif "decoder_input_ids" in takes:
        length = min(17, most_tokens(model) or 17)
        text = _random_text(config.get_text_config(decoder=True), length, generator)
        inputs["decoder_input_ids"] = text["input_ids"]
    if not inputs:
        raise FamilyError(
            f"{type(model).__name__} takes {', '.join(sorted(takes))}, and a proof can make up "
            "none of these. Cut the model without its head (the class that AutoModel gives)."
        )
    return inputs


def with_one_end(ids: Tensor, config: PreTrainedConfig, mask: Tensor | None = None) -> Tensor:
    """Return texts with the end-of-sequence token as the last real one and nowhere else."""
    end = config.eos_token_id
    last = (torch.ones_like(ids) if mask is None else mask).sum(1, keepdim=True) - 1
    return ids.masked_fill(ids == end, end - 1 if end else 1).scatter(1, last, end)


def _random_text(
    text: PreTrainedConfig, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    if length <= max(_DECODED, sum(_CHUNKS)):
        raise FamilyError(
            f"The model's texts end after {length} tokens (max_position_embeddings), too few for a "
            "proof. If that is a mistake in its config.json, get it again."
        )
    ids = torch.randint(0, text.vocab_size, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def in_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs with their floating-point tensors in an element type."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@without_tf32()
@torch.no_grad()
def probe(model: PreTrainedModel, inputs: dict[str, Tensor], decoded: bool = True) -> Outputs:
    """Run a model on probe inputs; outputs at padded positions are zeroed.

    Args:
        model: The model.
        inputs: The inputs.
        decoded: Whether to decode from a language model too, which takes nine more passes.
    """
    with _recorded(model) as modules:
        outputs = _probe(model, inputs, decoded)
    outputs.modules = {path: torch.cat(r) if r else torch.empty(0) for path, r in modules.items()}
    return outputs


def _probe(model: PreTrainedModel, inputs: dict[str, Tensor], decoded: bool) -> Outputs:
    inputs = on_device(model, in_dtype(inputs, model.dtype))
    result, mask = model(**inputs), inputs.get("attention_mask")
    outputs = Outputs()
    # a backbone gives the feature maps of several layers
    maps = {f"feature_maps.{n}": part for n, part in enumerate(result.get("feature_maps") or ())}
    for name, value in {**result, **maps}.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            output = value.cpu().double()
            if mask is not None and output.dim() == 3 and output.shape[:2] == mask.shape:
                output *= mask.cpu()[..., None]
            outputs[name] = output
    if decoded and task_of(model) in ("causal-lm", "seq2seq-lm"):
        outputs["logits_decoded_with_cache"] = _decoded(model, inputs)
        outputs["logits_decoded_in_chunks"] = _decoded_in_chunks(model, inputs)
    if "input_ids" in inputs and _is_lone_decoder(model):
        outputs["logits_with_states"] = _with_states(model, inputs)
    return outputs


def _is_lone_decoder(model: PreTrainedModel) -> bool:
    """Return whether a decoder attends to an encoder that is no part of the model."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return False
    return any(attention.kind == "cross" for attention in attention_of(model))


def _with_states(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits with random states of an encoder: without them no cross-attention runs."""
    width = model.config.get_text_config(decoder=True).hidden_size
    states = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(PROBE_SEED))
    states = on_device(model, in_dtype({"": states}, model.dtype))[""]
    whole = {"encoder_outputs": BaseModelOutput(states), "encoder_hidden_states": states}
    takes = inspect.signature(model.forward).parameters
    name = next(name for name in whole if name in takes)
    logits: Tensor = model(input_ids=inputs["input_ids"][:, :4], **{name: whole[name]})[0]
    return logits.cpu().double()


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Keep the outputs of every W_O; of a model in another engine nothing."""

    def keep(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            modules[path].append(projected(module, some_rows(args[0])).cpu())

        return hook

    attentions = attention_of(model) if isinstance(model, PreTrainedModel) else []
    modules: dict[str, list[Tensor]] = {attention.path: [] for attention in attentions}
    with ExitStack() as stack:
        for a in attentions:
            hook = a.output_projection.register_forward_pre_hook(keep(a.path))
            stack.callback(hook.remove)
        yield modules


def some_rows(inputs: Tensor) -> Tensor:
    """Return evenly spaced positions of an input, at most 64."""
    rows = inputs.flatten(0, -2)
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).long()]


def projected(projection: nn.Module, rows: Tensor) -> Tensor:
    """Return the output of a projection without its bias, which could hide small weights."""
    weight = projection.get_parameter("weight")
    return rows @ (weight if input_dim(projection) == 0 else weight.T)


def _decoded(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits of the first example, the last positions decoded one by one."""
    first = {name: value[:1] for name, value in inputs.items()}
    if "decoder_input_ids" not in first:
        first = {"input_ids": first["input_ids"]}  # the first example has no padding
    return _through_cache(model, first, [1] * _DECODED)


def _decoded_in_chunks(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits of the batch through one cache: several positions at once, then one by one.

    Texts of a decoder are padded on the left, so that masks must be as long as the cache. The first
    position stays unmasked: one that sees nothing is NaN in float64.
    """
    if "decoder_input_ids" in inputs:
        return _through_cache(model, inputs, _CHUNKS)
    mask = inputs["attention_mask"].flip(1)
    mask[:, 0] = 1
    padded = {"input_ids": inputs["input_ids"], "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    logits = _through_cache(model, padded, _CHUNKS)
    return logits.masked_fill(mask.cpu()[..., None] == 0, 0.0)


def _through_cache(
    model: PreTrainedModel, inputs: dict[str, Tensor], last: Sequence[int]
) -> Tensor:
    """Return logits of all positions, the last ones through the cache in pieces of ``last``."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    rest: dict[str, Any] = dict(inputs)
    logits, cache = [], None
    for start, end in pairwise(accumulate([inputs[name].shape[1] - sum(last), *last], initial=0)):
        piece = {k: v[:, start:end] for k, v in rest.items() if k in (name, "position_ids")}
        if name == "input_ids" and "attention_mask" in rest:
            piece["attention_mask"] = rest["attention_mask"][:, :end]
        result = model(**{**rest, **piece}, past_key_values=cache, use_cache=True)
        if name == "decoder_input_ids":
            rest = {k: v for k, v in rest.items() if k in (name, "attention_mask")}
            rest["encoder_outputs"] = BaseModelOutput(result.encoder_last_hidden_state)
        logits.append(result.logits)
        cache = result.past_key_values
    return torch.cat(logits, dim=1).cpu().double()
