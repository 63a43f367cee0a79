"""The task of a model, the length of its sequences, and the inputs that it gets at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError, FamilyError, HeadpruneWarning
from headprune.runtime import modeling_headprune

Task = Literal[
    "causal-lm",
    "seq2seq-lm",
    "masked-lm",
    "classification",
    "multi-label",
    "regression",
    "features",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "next-sentence",
    "pre-training",
    "ctc",
]
Modality = Literal["text", "images", "sound"]
CLASSIFIERS: tuple[Task, ...] = ("classification", "multi-label", "regression")
# tasks without a loss here; their heads can be matched to a teacher
WITHOUT_LOSS: tuple[Task, ...] = (
    "question-answering",
    "multiple-choice",
    "next-sentence",
    "pre-training",
)

BOTH_SIDES = ("encoder", "decoder")

_TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "causal-lm",
    "AutoModelForImageTextToText": "causal-lm",
    "AutoModelForSeq2SeqLM": "seq2seq-lm",
    "AutoModelForSpeechSeq2Seq": "seq2seq-lm",
    "AutoModelForMaskedLM": "masked-lm",
    "AutoModelForSequenceClassification": "classification",
    "AutoModelForImageClassification": "classification",
    "AutoModelForAudioClassification": "classification",
    "AutoModelForCTC": "ctc",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForNextSentencePrediction": "next-sentence",
    "AutoModelForPreTraining": "pre-training",
}


@dataclass(frozen=True)
class SpeechProcessor:
    """The feature extractor of a model of speech, and the tokenizer of one that writes."""

    feature_extractor: Any
    tokenizer: Any = None


def task_of(model: PreTrainedModel) -> Task:
    """Return the task of a model's head; "features" for a model without one.

    ``problem_type`` decides for sequence classifiers, as in transformers: one output without a
    problem type is a regression.

    Raises:
        FamilyError: If it is a language model that sees the tokens it predicts.
    """
    native = native_class(type(model))
    known = _auto_classes(model)
    task: Task = next(
        (task for auto, task in _TASKS.items() if known.get(auto) is native), "features"
    )
    both_ways = not getattr(model.config, "is_decoder", True)
    if task == "causal-lm" and both_ways and "AutoModelForMaskedLM" in known:
        raise FamilyError(
            f"This {native.__name__} attends to later tokens too, as its config.json lacks "
            '"is_decoder": true. Add that, or name '
            f"{known['AutoModelForMaskedLM'].__name__} as its architecture."
        )
    problem = getattr(model.config, "problem_type", None)
    if task != "classification":
        return task
    if problem == "multi_label_classification":
        return "multi-label"
    if problem == "regression" or (problem is None and model.config.num_labels == 1):
        return "regression"
    return task


def modality_of(net: PreTrainedModel) -> Modality:
    """Return the kind of a model's inputs; images or sound, if it reads nothing else."""
    inputs: dict[str, Modality] = {"pixel_values": "images"}
    inputs |= dict.fromkeys(("input_features", "input_values"), "sound")
    return inputs.get(net.main_input_name, "text")


def _auto_classes(model: PreTrainedModel) -> dict[str, type[PreTrainedModel]]:
    """Return the Auto classes of a model; code that comes with one has several config classes."""
    config = type(model.config)
    known = config if is_remote(config) else native_class(type(model)).config_class
    return modeling_headprune.auto_classes(known)


def class_ids(config: PreTrainedConfig) -> dict[str, int]:
    """Return the number of each class of a classifier by name."""
    known = config.label2id or {name: number for number, name in (config.id2label or {}).items()}
    return {name: int(number) for name, number in known.items()}


def is_remote(cls: type) -> bool:
    """Return whether a class comes as code with a model."""
    package, *_, module = cls.__module__.split(".")
    return package == "transformers_modules" and module != modeling_headprune.MODULE


def native_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of transformers behind a pruned or sharded one."""
    # sharding makes classes such as FSDPLlamaForCausalLM
    known = (
        base
        for base in cls.__mro__
        if getattr(transformers, base.__name__, None) is base or is_remote(base)
    )
    native: type[PreTrainedModel] = next(known, cls)
    return native


def auto_class_of(model: PreTrainedModel) -> str:
    """Return the Auto class that leads to a model's class; "AutoModel" if none does."""
    native = native_class(type(model))
    known = _auto_classes(model)
    # of several, one of a task comes before AutoModelForPreTraining
    return next((auto for auto in (*_TASKS, *known) if known.get(auto) is native), "AutoModel")


def most_tokens(
    model: PreTrainedModel, tokenizer: Any = None, sides: Sequence[str] = BOTH_SIDES
) -> int | None:
    """Return the longest sequence that a model and its tokenizer take; None if neither says.

    Args:
        model: The model.
        tokenizer: Its tokenizer; None to ask the model alone.
        sides: Those of an encoder-decoder that read the sequence.
    """
    text = model.config.get_text_config()
    names = ["max_position_embeddings", "max_seq_len"]
    names += [f"max_{side}_position_embeddings" for side in sides]
    names += ["max_target_positions"] if "decoder" in sides else []
    stated = [getattr(text, name, None) for name in names]
    # RoBERTa and its like count positions from the row after that of padding
    stated += [
        len(module.weight) - module.padding_idx - 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    stated.append(getattr(tokenizer, "model_max_length", None))
    return min((int(number) for number in stated if number), default=None)


def usable_length(
    model: PreTrainedModel,
    tokenizer: Any,
    asked: int,
    sides: Sequence[str] = BOTH_SIDES,
) -> int:
    """Return ``asked`` tokens, or with a warning the most that model and tokenizer take."""
    most = most_tokens(model, tokenizer, sides)
    if most is None or asked <= most:
        return asked
    warnings.warn(
        f"Sequences of {asked} tokens were asked for (--seq-len), and model and tokenizer take "
        f"{most} at most: sequences are cut at {most}.",
        HeadpruneWarning,
        stacklevel=2,
    )
    return most


class Batch(TypedDict, total=False):
    """Inputs of a model by the names of its forward, and labels if there are any.

    Attributes:
        input_ids: Token ids, of text.
        pixel_values: Images.
        input_features: Sound, as bins of frequencies.
        input_values: Sound, as samples.
        attention_mask: 0 where there is padding.
        token_type_ids: Which of two texts a token belongs to.
        decoder_input_ids: Inputs of the decoder of an encoder-decoder.
        decoder_attention_mask: 0 where that is padding.
        labels: A class per sequence, or a token per position, -100 where none is scored.
        use_cache: Whether to keep keys and values.
    """

    input_ids: Int[Tensor, "sequences length"]
    pixel_values: Float[Tensor, "sequences channels height width"]
    input_features: Float[Tensor, "sequences bins frames"]
    input_values: Float[Tensor, sequences * samples]
    attention_mask: Int[Tensor, "sequences length"]
    token_type_ids: Int[Tensor, "sequences length"]
    decoder_input_ids: Int[Tensor, "sequences target_length"]
    decoder_attention_mask: Int[Tensor, "sequences target_length"]
    labels: Int[Tensor, " sequences *length"]
    use_cache: bool


def padded(rows: Sequence[Mapping[str, Any]], padding: int, side: str = "right") -> Batch:
    """Return rows of unequal length as one batch, whatever side their tokenizer pads on.

    On the right no padding moves a token to another position or hides the last one of a text; a
    model that continues texts needs it on the left.

    Args:
        rows: Token ids, what belongs to each of them, and labels.
        padding: The id to pad with; see ``padding_id``.
        side: Where the padding is.
    """
    fill = {"input_ids": padding, "labels": -100}
    rows = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in rows]
    columns = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
    batch = {
        name: pad_sequence(column, True, fill.get(name, 0), side)
        if column[0].dim()
        else torch.stack(column)
        for name, column in columns.items()
    }
    return cast(Batch, batch)


def inputs_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the token ids, the images or the sound of a batch."""
    names = ("input_ids", "pixel_values", "input_features", "input_values")
    inputs: Tensor = next(batch[name] for name in names if name in batch)
    return inputs


def size_of(batch: Mapping[str, Any]) -> int:
    """Return the tokens of a batch, padding included, or its images or recordings."""
    inputs = inputs_of(batch)
    return inputs.numel() if "input_ids" in batch else len(inputs)


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs alone."""
    return {name: value for name, value in batch.items() if name != "labels"}


def doubled(batch: Batch) -> Batch:
    """Return a batch with every sequence twice: all of them, and then all of them again."""
    both: dict[str, Any] = {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    return cast(Batch, both)


def padding_id(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Return the id to pad with.

    Any id does where the attention mask is 0, except that a classifier on a decoder recognises
    padding by the id in its config.
    """
    known = (own_padding_id(config), tokenizer.pad_token_id, 0)
    return next(each for each in known if each is not None)


def own_padding_id(config: PreTrainedConfig) -> int | None:
    """Return the padding id of a config; some write -1 for none."""
    written: int | None = getattr(config.get_text_config(), "pad_token_id", None)
    return None if written is None or written < 0 else written


def decoder_inputs(
    model: PreTrainedModel, labels: Int[Tensor, "sequences target_length"]
) -> Int[Tensor, "sequences target_length"]:
    """Return the inputs by which a decoder predicts the labels: these, one place later.

    Raises:
        CheckpointError: If its config does not name the first token.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        read: Tensor = prepare(labels)
        return read
    # not get_text_config(decoder=True), which has its class's first token
    first = getattr(model.config, "decoder_start_token_id", None)
    pad = getattr(model.config, "pad_token_id", None)
    if first is None:
        raise CheckpointError(
            f"The config of this {type(model).__name__} has no decoder_start_token_id, the token "
            "that its decoder begins with. Add it to its config.json."
        )
    before = labels.masked_fill(labels == -100, first if pad is None else pad)[:, :-1]
    return torch.cat([torch.full_like(labels[:, :1], first), before], dim=1)


def token_mask(batch: Batch, kind: str) -> Bool[Tensor, "sequences length"] | None:
    """Return which tokens are real at the queries of a kind of attention."""
    if kind in ("decoder", "cross") and "decoder_input_ids" in batch:
        labels = batch.get("labels")
        return None if labels is None else labels != -100
    mask = batch.get("attention_mask")
    return None if mask is None else mask != 0


def real_tokens(
    x: Float[Tensor, "*positions width"], mask: Tensor | None
) -> Float[Tensor, "tokens width"]:
    """Return the positions that are no padding, one after the other.

    Raises:
        CheckpointError: If padding is masked, and the module lays its positions out otherwise.
    """
    rows = x.flatten(0, -2)
    if mask is None or bool(mask.all()):
        return rows
    if mask.numel() != len(rows):
        raise CheckpointError(
            f"An attention module reads {len(rows)} positions, and the padded texts have "
            f"{mask.numel()}, so the padding cannot be left out. Use --batch-size 1."
        )
    return rows[mask.flatten().nonzero()[:, 0].to(rows.device)]  # of a mask on the host, no sync
