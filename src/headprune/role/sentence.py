"""The attention of every head on one sentence, small enough to be held whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import Dtype
from headprune.context import Context
from headprune.data.tokens import Seen
from headprune.errors import DataError, FamilyError, PlanError
from headprune.model.attention import attention_of, layer_names, of_kinds, refuse_unknown_kinds
from headprune.model.batch import Batch, decoder_inputs, most_tokens
from headprune.model.generation import generated, search_of
from headprune.model.loading import load_tokenizer, vocabulary_of
from headprune.model.open import load
from headprune.model.passes import run_model
from headprune.model.placement import on_device
from headprune.model.refusals import refuse_without_text
from headprune.role.watch import attention_weights

MOST_TOKENS = 40  # more lines than these cannot be told apart


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, as shown."""

    labels: tuple[str, ...]
    special: tuple[bool, ...]
    left_out: int = 0  # tokens at its end, for which there was no room


@dataclass(frozen=True)
class LayerWeights:
    """One attention module on the sentence.

    Attributes:
        heads: Their numbers in the original model.
        weights: After the softmax; the mean over the runs of a shared module.
    """

    name: str
    path: str
    kind: str
    heads: tuple[int, ...]
    weights: Float[Tensor, "heads queries keys"]
    queries: Tokens
    keys: Tokens

    def named(self) -> list[str]:
        return [f"{self.name}.{head}" for head in self.heads]


@dataclass(frozen=True)
class Sentence:
    """The attention of a model on a sentence; layers without heads are left out."""

    model: str
    text: str
    layers: tuple[LayerWeights, ...]

    def head(self, name: str) -> tuple[LayerWeights, int]:
        """Return the layer of a head, and its position there. Raise PlanError without one."""
        layer = next((n for n in self.layers if n.name == name.rpartition(".")[0]), None)
        if layer is None:
            names = [layer.name for layer in self.layers]
            some = names if len(names) < 5 else [*names[:2], "...", names[-1]]
            raise PlanError(
                f"--head {name}: there is no such layer. Layers: {', '.join(some)}; a head is "
                f"named as in {self.layers[0].named()[0]}."
            )
        if name not in layer.named():
            raise PlanError(
                f"--head {name}: there is no such head. '{layer.path}' has the heads "
                f"{', '.join(map(str, layer.heads))}, by their numbers in the original."
            )
        return layer, layer.named().index(name)

    def sharpest(self, count: int) -> tuple[str, ...]:
        """Return the heads with the largest weights on ordinary tokens.

        Idle heads rest on the first token or on special ones.
        """
        sharpness: dict[str, float] = {}
        for layer in self.layers:
            ordinary = ~torch.tensor(layer.keys.special)
            ordinary[0] = False
            largest = (layer.weights * ordinary).amax(-1)
            rows = ~torch.tensor(layer.queries.special) if not all(layer.queries.special) else ...
            sharpness |= zip(layer.named(), largest[:, rows].mean(-1).tolist(), strict=True)
        return tuple(sorted(sharpness, key=lambda name: -sharpness[name])[:count])


def read_sentence(
    model: str | Path,
    text: str,
    target: str | None = None,
    attention: Sequence[str] = (),
    context: Context = Context(),
) -> Sentence:
    """Read a sentence, and keep the attention of every head.

    Args:
        model: Folder or hub id.
        text: The sentence; it is cut after ``MOST_TOKENS`` tokens.
        target: Input of the decoder; None for the model's own output.
        attention: Kinds of attention; empty for all.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If model and text do not fit, or a module gives no attention weights.
    """
    refuse_unknown_kinds(attention)
    tokenizer = load_tokenizer(model, trust_remote_code=context.allowed.trust_remote_code)
    context.stage(f"loading '{model}'")
    net, identity = load(model, Dtype.AUTO, context.allowed)
    refuse_without_text(net, "attention")
    attentions = of_kinds(attention_of(net), attention)
    context.stage("reading the sentence")
    batch, source, written = _read(net, tokenizer, text, target)
    runs: dict[int, list[Tensor]] = {}

    def see(position: int, weights: Tensor) -> None:
        runs.setdefault(position, []).append(weights[0].float().cpu())

    with torch.no_grad(), attention_weights(net, attentions, see):
        run_model(net, batch)
    if not runs:
        raise FamilyError(f"'{model}' has no heads left to look at.")
    names = layer_names([(one.path, one.kind) for one in attentions])
    layers = []
    for position, parts in sorted(runs.items()):
        one = attentions[position]
        queries = written if written and one.kind in ("decoder", "cross") else source
        keys = source if one.kind == "cross" else queries
        weights = torch.stack(parts).mean(0)
        if weights.shape[1:] != (len(queries.labels), len(keys.labels)):
            raise FamilyError(
                f"'{one.path}' attends to other places than those of tokens, which no picture of a "
                "sentence shows. Choose other modules with attention."
            )
        layers.append(
            LayerWeights(names[one.path], one.path, one.kind, one.query_ids, weights, queries, keys)
        )
    return Sentence(identity.name, text, tuple(layers))


def _read(
    net: PreTrainedModel, tokenizer: Any, text: str, target: str | None
) -> tuple[Batch, Tokens, Tokens | None]:
    """Return the batch, the sentence's tokens and the decoder's."""
    ids, left_out = _ids(net, tokenizer, text, "--text")
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    source = _tokens(tokenizer, ids, left_out)
    if not net.config.is_encoder_decoder:
        if target is not None:
            raise DataError(f"target is for encoder-decoders, and this is a {type(net).__name__}.")
        return batch, source, None
    left_out = 0
    if target is not None:
        labels, left_out = _ids(net, tokenizer, target, "target", text_target=True)
        ids = decoder_inputs(net, labels)
    elif net.can_generate():
        search = search_of(net)
        search.num_beams = 1
        most = min(MOST_TOKENS, most_tokens(net, sides=["decoder"]) or MOST_TOKENS)
        written = generated(net, on_device(net, batch), search, most, tokenizer)
        ids = written[:, :-1].cpu()  # the last token was never read
    batch["decoder_input_ids"] = ids
    return batch, source, _tokens(tokenizer, ids, left_out)


def _ids(
    net: PreTrainedModel, tokenizer: Any, text: str, option: str, text_target: bool = False
) -> tuple[Tensor, int]:
    """Return token ids of shape (1, tokens), and the number left out."""
    most = min(MOST_TOKENS, most_tokens(net, tokenizer) or MOST_TOKENS)
    argument = {"text_target" if text_target else "text": text, "verbose": False}
    whole = tokenizer(**argument)["input_ids"]
    ids = tokenizer(**argument, truncation=True, max_length=most)["input_ids"]
    if not set(ids) - _special(tokenizer):
        raise DataError(
            f"{option} '{text}' has no token that the tokenizer knows. Give a sentence."
        )
    seen = Seen(tokenizer, vocabulary_of(net))
    seen.add(ids)
    seen.refuse([text])
    return torch.tensor([ids]), len(whole) - len(ids)


def _tokens(tokenizer: Any, ids: Tensor, left_out: int) -> Tokens:
    numbers, special = ids[0].tolist(), _special(tokenizer)
    labels = [  # white space is shown by the name of its token
        tokenizer.decode([number]).strip() or str(tokenizer.convert_ids_to_tokens(number))
        for number in numbers
    ]
    return Tokens(tuple(labels), tuple(number in special for number in numbers), left_out)


def _special(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that stand for no text."""
    around = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return set(tokenizer.all_special_ids) - ({tokenizer.unk_token_id} - around)
