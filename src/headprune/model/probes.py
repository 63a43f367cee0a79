"""Random inputs of whatever a model takes, and its outputs on them.

A language model is probed three times: one forward over a padded batch, and two decodings with a KV
cache, of one text and of a padded batch in pieces: wrong caches show only there. Outputs of W_O are
kept too, as a module with small weights changes the model's outputs by less than rounding.

Where a model computes otherwise after some positions, a proof adds a text that goes beyond them, if
that takes little; where it has a vision tower, an image.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from headprune import devices
from headprune.errors import FamilyError
from headprune.model.attention import attention_of, family_of
from headprune.model.batch import CLASSIFIERS, most_tokens, task_of
from headprune.model.placement import on_device, without_tf32
from headprune.runtime.modeling_headprune import input_dim
from headprune.schemas.proofs import PROBE_SEED

_DECODED = 4
_CHUNKS = (4, 1, 1)
_ROWS = 64  # of one call of a module
_LENGTH = 24  # of a text
_BEYOND = 8  # positions after the last that a window or a rotary embedding tells apart
_PADDING = 12  # tokens on the left of the second text beyond a window of heads
_WORK = 4e12  # parameters times positions of the long text, at most: half a minute of a few cores
_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_chunk_size")
_LONG, _IMAGE = "long_text", "image."
_Result = TypeVar("_Result")


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
        length = min(_LENGTH, most_tokens(model) or _LENGTH)
        inputs = _random_text(config.get_text_config(), length, generator)
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


def proof_inputs(
    model: PreTrainedModel,
    seed: int = PROBE_SEED,
    positions: int | None = None,
    window: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return probe inputs, a text beyond windows and the like, and an image with a text.

    Args:
        model: The model.
        seed: Seed of the inputs.
        positions: Length of the long text, 0 for none; None for the length that the model needs.
        window: Size and sinks of heads with a window. Two texts then go beyond it: one as it is
            read, one, padded on the left, as it is decoded.
    """
    inputs, generator = probe_inputs(model, seed), torch.Generator().manual_seed(seed + 1)
    if "input_ids" not in inputs or task_of(model) == "multiple-choice":
        return inputs
    length = _reached(model) if positions is None else positions
    if window is not None:
        most = most_tokens(model) or sys.maxsize
        length = min(max(length, sum(window) + 2 * _BEYOND), most)
    if length:
        rows = 1 if window is None else 2
        first = inputs["input_ids"][:1].expand(rows, -1)
        picked = torch.randint(0, first.shape[1], (rows, length), generator=generator)
        inputs[_LONG] = first.gather(1, picked)
    return inputs | _with_image(model, inputs, generator)


def positions_of(inputs: Mapping[str, Tensor]) -> int:
    """Return the length of the long text among inputs; 0 without one."""
    return inputs[_LONG].shape[1] if _LONG in inputs else 0


def unreached(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the parts of a model that these inputs do not reach, in words."""
    longest = max((inputs[n].shape[-1] for n in (_LONG, "input_ids") if n in inputs), default=0)
    ends = _ends(model) if "input_ids" in inputs else {}
    parts = [
        f"positions after {end:,} ({name})" for name, (end, _) in ends.items() if end >= longest
    ]
    if _sees(model) and not any(name.startswith(_IMAGE) for name in inputs):
        parts += [] if "pixel_values" in inputs else ["images"]
    return tuple(parts)


def _ends(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return positions after which a model computes otherwise, by the setting that says so.

    Beside them stands the length of a text that goes beyond. A window as wide as the longest text
    ends with it: a narrower one shows there.
    """
    text, most = model.config.get_text_config(), most_tokens(model) or sys.maxsize
    found: dict[str, Any] = {}
    if set(getattr(text, "layer_types", None) or [""]) != {"full_attention"}:
        found = {name: getattr(text, name, None) for name in _WINDOWS}
    ropes: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    parts = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
    kinds = {f"{part.get('rope_type')} rope": part for part in parts}
    found |= {kind: part.get("original_max_position_embeddings") for kind, part in kinds.items()}
    ends = {name: min(end, most - 1) for name, end in found.items() if isinstance(end, int) and end}
    lengths = {name: (end, min(end + _BEYOND, most)) for name, end in ends.items()}
    if "dynamic rope" in kinds:
        lengths["dynamic rope"] = (most, most + _BEYOND)
    return lengths


def _reached(model: PreTrainedModel) -> int:
    """Return the length of the long text, as long as a pass of little work allows; 0 for none."""
    affordable = _WORK / max(model.num_parameters(), 1)
    lengths = (length for _, length in _ends(model).values())
    return max((n for n in lengths if _LENGTH < n <= affordable), default=0)


def _sees(model: PreTrainedModel) -> bool:
    """Return whether a model of text has a vision tower."""
    return hasattr(model, "get_image_features") and hasattr(model.config, "vision_config")


@torch.no_grad()
def _with_image(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Return an image in the first layout that the model's class takes, and a text with it."""
    config = model.config
    if not _sees(model) or "pixel_values" in inputs:
        return {}
    for pixels in _pixels(config.vision_config, generator):
        image = on_device(model, in_dtype(pixels, model.dtype))
        features = _taken(partial(_features, model, image))
        if features is None:
            continue
        named = {_IMAGE + name: value for name, value in pixels.items()}
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if token is None or not 0 <= token < config.get_text_config().vocab_size:
            return named
        ids, width = inputs["input_ids"][:1].cpu(), config.get_text_config().hidden_size
        text = torch.cat(
            [ids[:, :4], torch.full((1, features.numel() // width), token), ids[:, 4:8]], 1
        )
        whole = {"input_ids": on_device(model, {"": text})[""], **image}
        taken = _taken(partial(model, **whole)) is not None
        return {**named, f"{_IMAGE}input_ids": text} if taken else named
    return {}


def _taken(call: Callable[[], _Result]) -> _Result | None:
    """Return the result of a call; None where a class refuses the inputs, in its own way."""
    try:
        return call()
    except Exception as error:
        if devices.is_device_failure(error):
            raise
        return None


def _features(model: PreTrainedModel, image: dict[str, Tensor]) -> Tensor:
    """Return the output of the vision tower and its projector for an image."""
    found = model.get_image_features(**image, return_dict=True)
    parts = getattr(found, "pooler_output", found)
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return torch.cat([part.flatten() for part in parts])


def _pixels(vision: PreTrainedConfig, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield an image in the layouts that there are."""
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if size is not None:
        sides = size if isinstance(size, list | tuple) else (size, size)
        image = torch.randn(1, channels, *sides, generator=generator)
        yield {"pixel_values": image}
        if isinstance(patch, int):  # Pixtral takes any size, and its largest is very large
            small = torch.randn(1, channels, 4 * patch, 4 * patch, generator=generator)
            yield {"pixel_values": small, "image_sizes": torch.tensor([small.shape[-2:]])}
        yield {"pixel_values": image[None]}
        for tiles in (2, 3):  # of LLaVA-NeXT and OneVision, the whole image among them
            tiled = image[None].repeat(1, tiles, 1, 1, 1)
            yield {"pixel_values": tiled, "image_sizes": torch.tensor([sides])}
    if isinstance(patch, int):
        width = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        rows = torch.randn(16, width, generator=generator)
        yield {"pixel_values": rows, "image_grid_thw": torch.tensor([[1, 4, 4]])}


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
    image = {n.removeprefix(_IMAGE): v for n, v in inputs.items() if n.startswith(_IMAGE)}
    inputs = {name: v for name, v in inputs.items() if not name.startswith(_IMAGE)}
    long = inputs.pop(_LONG, None)
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
    if decoded and image:
        if "input_ids" in image:
            outputs["with_image"] = _last(model(**image)[0])
        pixels = {name: value for name, value in image.items() if name != "input_ids"}
        outputs["image_features"] = _features(model, pixels).cpu().double()
    if decoded and long is not None:
        outputs["beyond"] = _beyond(model, long, inputs)
    if "input_ids" in inputs and _is_lone_decoder(model):
        outputs["logits_with_states"] = _with_states(model, inputs)
    return outputs


def _last(output: Tensor) -> Tensor:
    """Return an output at the last positions, where it has positions."""
    last = output[:, -_BEYOND:] if output.dim() == 3 else output
    return last.cpu().double()


def _beyond(model: PreTrainedModel, long: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return outputs at the end of a long text; of a decoder the last ones through its cache."""
    takes = inspect.signature(model.forward).parameters
    fewer = {"logits_to_keep": _BEYOND} if "logits_to_keep" in takes else {}
    target = {n: v[:1] for n, v in inputs.items() if n == "decoder_input_ids"}
    if task_of(model) != "causal-lm":
        outputs = [_last(model(input_ids=long, **target)[0])]
    else:
        # a window of heads is also crossed while tokens come one by one, and by several at once
        chunks = [1] * _DECODED + [_BEYOND] * (len(long) - 1)
        mask = torch.ones_like(long)
        mask[1:, :_PADDING] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0)
        result, outputs = None, []
        for start, end in pairwise(accumulate([long.shape[1] - sum(chunks), *chunks], initial=0)):
            own = dict[str, Tensor]()
            if len(long) > 1:
                own["attention_mask"] = mask[:, :end]
                own |= {"position_ids": places[:, start:end]} if "position_ids" in takes else {}
            cache = None if result is None else result.past_key_values
            piece = long[:, start:end]
            result = model(input_ids=piece, past_key_values=cache, use_cache=True, **fewer, **own)
            outputs.append(_last(result.logits))
    # some rotary embeddings stay stretched until a short text comes
    model(input_ids=long[:, :_DECODED], **target)
    return torch.cat(outputs, 1)


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
