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
from headprune.model.loading import load_tokenizer, vocabulary_of
from headprune.model.open import load
from headprune.model.passes import run_model
from headprune.model.placement import on_device
from headprune.model.refusals import refuse_without_text
from headprune.role.collection import weights_told
from headprune.runtime.modeling_headprune import Attention

MOST_TOKENS = 40  # more lines than these cannot be told apart


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it.

    Attributes:
        labels: Its tokens, as they are shown.
        special: Which of them stand for no text.
        left_out: Tokens at its end for which there was no room.
    """

    labels: tuple[str, ...]
    special: tuple[bool, ...]
    left_out: int = 0


@dataclass(frozen=True)
class LayerWeights:
    """One attention module on the sentence.

    Attributes:
        name: What the layer is called.
        path: Path of the module.
        kind: Its kind.
        heads: Ids of its heads: their numbers in the original model.
        weights: After the softmax; of a module that runs more than once, the mean of its runs.
        queries: The tokens that look.
        keys: The tokens that are looked at.
    """

    name: str
    path: str
    kind: str
    heads: tuple[int, ...]
    weights: Float[Tensor, "heads queries keys"]
    queries: Tokens
    keys: Tokens

    def named(self) -> list[str]:
        """What its heads are called."""
        return [f"{self.name}.{head}" for head in self.heads]


@dataclass(frozen=True)
class Sentence:
    """What a model attends to in a sentence.

    Attributes:
        model: Its name.
        text: The sentence.
        layers: The attention modules that have heads, first layer first.
    """

    model: str
    text: str
    layers: tuple[LayerWeights, ...]

    def head(self, name: str) -> tuple[LayerWeights, int]:
        """A head by its name: its layer, and its position there.

        Raises:
            PlanError: If there is no such head.
        """
        layer = next((n for n in self.layers if n.name == name.rpartition(".")[0]), None)
        if layer is None:
            raise PlanError(f"--head {name}: there is no such layer. {self._what_there_is()}")
        if name not in layer.named():
            raise PlanError(
                f"--head {name}: there is no such head. '{layer.path}' has the heads "
                f"{', '.join(map(str, layer.heads))}, by their numbers in the original."
            )
        return layer, layer.named().index(name)

    def sharpest(self, count: int) -> tuple[str, ...]:
        """The heads that look most sharply at some ordinary token.

        Most heads rest on the first token or on special ones where they find nothing else.
        """
        found: list[tuple[float, str]] = []
        for layer in self.layers:
            ordinary = ~torch.tensor(layer.keys.special)
            ordinary[0] = False
            largest = (layer.weights * ordinary).amax(-1)
            rows = ~torch.tensor(layer.queries.special) if not all(layer.queries.special) else ...
            found += zip(largest[:, rows].mean(-1).tolist(), layer.named(), strict=True)
        best = sorted(found, key=lambda one: -one[0])[:count]
        return tuple(name for _, name in best)

    def _what_there_is(self) -> str:
        names = [layer.name for layer in self.layers]
        some = names if len(names) < 5 else [*names[:2], "...", names[-1]]
        return f"Layers: {', '.join(some)}; a head is named as in {self.layers[0].named()[0]}."


def read_sentence(
    model: str | Path,
    text: str,
    target: str | None = None,
    attention: Sequence[str] = (),
    context: Context = Context(),
) -> Sentence:
    """Reads a sentence, and keeps what every head attends to.

    Args:
        model: Folder or hub id.
        text: The sentence; what is longer than ``MOST_TOKENS`` tokens is cut.
        target: What the decoder of an encoder-decoder reads; None for what the model writes.
        attention: Kinds of attention to look at; empty for all.
        context: What it runs in.

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
    seen: dict[int, list[Tensor]] = {}

    def see(position: int, weights: Tensor) -> None:
        seen.setdefault(position, []).append(weights[0].float().cpu())

    with torch.no_grad(), weights_told(net, attentions, see):
        run_model(net, batch)
    names = layer_names([(one.path, one.kind) for one in attentions])
    layers = []
    for position, runs in sorted(seen.items()):
        one = attentions[position]
        queries, keys = _sides(one, source, written)
        weights = torch.stack(runs).mean(0)
        if weights.shape[1:] != (len(queries.labels), len(keys.labels)):
            raise FamilyError(
                f"'{one.path}' attends to other places than those of tokens, which no picture of a "
                "sentence shows. Choose other modules with --attention."
            )
        layers.append(
            LayerWeights(names[one.path], one.path, one.kind, one.query_ids, weights, queries, keys)
        )
    if not layers:
        raise FamilyError(f"'{model}' has no heads left to look at.")
    return Sentence(identity.name, text, tuple(layers))


def _sides(attention: Attention, source: Tokens, written: Tokens | None) -> tuple[Tokens, Tokens]:
    """The tokens that look in a module, and those looked at."""
    if written is None or attention.kind not in ("decoder", "cross"):
        return source, source
    return written, source if attention.kind == "cross" else written


def _read(
    net: PreTrainedModel, tokenizer: Any, text: str, target: str | None
) -> tuple[Batch, Tokens, Tokens | None]:
    """What the model is given, the tokens of the sentence, and those that its decoder reads."""
    ids, left_out = _ids(net, tokenizer, text, "--text")
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    source = _tokens(tokenizer, ids, left_out)
    if not net.config.is_encoder_decoder:
        if target is not None:
            raise DataError(
                f"--target is for encoder-decoders, and this is a {type(net).__name__}."
            )
        return batch, source, None
    if target is not None:
        labels, left_out = _ids(net, tokenizer, target, "--target", text_target=True)
        read = decoder_inputs(net, labels)
    elif net.can_generate():
        inputs = on_device(net, {**batch})
        written = net.generate(**inputs, max_new_tokens=MOST_TOKENS, num_beams=1, do_sample=False)
        read, left_out = written[:, :-1].cpu(), 0  # the last token was never read
    else:
        read, left_out = ids, 0
    batch["decoder_input_ids"] = read
    return batch, source, _tokens(tokenizer, read, left_out)


def _ids(
    net: PreTrainedModel, tokenizer: Any, text: str, option: str, text_target: bool = False
) -> tuple[Tensor, int]:
    """Token ids of a text, shape (1, tokens), and how many were left out.

    Raises:
        DataError: If there are none, or most are of words that the tokenizer does not know.
    """
    most = min(MOST_TOKENS, most_tokens(net.config, tokenizer) or MOST_TOKENS)
    given = {"text_target" if text_target else "text": text, "verbose": False}
    whole = tokenizer(**given)["input_ids"]
    ids = tokenizer(**given, truncation=True, max_length=most)["input_ids"]
    if not set(ids) - _special(tokenizer):
        raise DataError(
            f"{option} '{text}' has no token that the tokenizer knows. Give a sentence."
        )
    seen = Seen(tokenizer, vocabulary_of(net))
    seen.add(ids)
    seen.refuse([text])
    return torch.tensor([ids]), len(whole) - len(ids)


def _tokens(tokenizer: Any, ids: Tensor, left_out: int) -> Tokens:
    """Tokens as they are shown: their text, or their name where that is white space."""
    numbers, special = ids[0].tolist(), _special(tokenizer)
    names = tokenizer.convert_ids_to_tokens(numbers)
    labels = [
        tokenizer.decode([number]).strip() or str(name)
        for number, name in zip(numbers, names, strict=True)
    ]
    return Tokens(tuple(labels), tuple(number in special for number in numbers), left_out)


def _special(tokenizer: Any) -> set[int]:
    """Ids of the tokens that stand for no text; that for unknown text stands for some."""
    around = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    unknown = {tokenizer.unk_token_id} - around
    return set(tokenizer.all_special_ids) - unknown
