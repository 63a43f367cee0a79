"""Models that headprune does not open or train: one short sentence each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from headprune.errors import CheckpointError, FamilyError
from headprune.io.parsing import first_problem
from headprune.model.attention import family_of
from headprune.model.batch import CLASSIFIERS, modality_of, own_padding_id, task_of
from headprune.model.recognition import row_of
from headprune.model.skeleton import below_base
from headprune.model.stored import find_file, weight_files
from headprune.runtime import MANIFEST, modeling_headprune
from headprune.schemas.records import Description, Recorded

# why a quantised model is refused
PACKED = (
    "packed weights cannot be cut, merged or exported. Give the unquantised model that it was made "
    "from, and quantise the result."
)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def refuse_pickles_among(files: Iterable[Path]) -> None:
    """Refuse the first pickle among files.

    Raises:
        CheckpointError: With a line of Python that makes safetensors of it.
    """
    for file in files:
        if file.suffix in _PICKLES:
            raise CheckpointError(
                f"'{file}' is a pickle, which can run code. Run in Python in its folder: "
                f"{conversion(file.name)}"
            )


def conversion(pickle: str) -> str:
    """Return the line of Python that makes safetensors of a pickled state dict."""
    files = "glob.glob('*-of-*')" if "-of-" in pickle else f"[{pickle!r}]"  # of one of several, all
    return (
        "import glob, torch, safetensors.torch as st; "
        f"st.save_file({{k: v.contiguous().clone() for f in {files} for k, v in "
        "torch.load(f, weights_only=True).items()}, 'model.safetensors', {'format': 'pt'})"
    )


def refuse_pickles(path: Path) -> None:
    """Refuse a folder without the safetensors that transformers reads.

    Raises:
        CheckpointError: With the pickle or the other safetensors that are there.
    """
    if not path.is_dir() or weight_files(path):
        return
    files = sorted(path.iterdir())
    refuse_pickles_among(file for file in files if "model" in file.name)
    others = [file.name for file in files if file.suffix == ".safetensors"]
    if others:
        raise CheckpointError(
            f"'{path}' has no model.safetensors, the file that transformers reads, but "
            f"'{others[0]}'. If that holds the whole model, rename it."
        )
    refuse_pickles_among(files)
    raise CheckpointError(f"'{path}' has a config.json but no *.safetensors weights beside it.")


def refuse_adapter(model: str | Path, ask: bool = True, **where: Any) -> None:
    """Refuse an adapter: transformers would apply it where peft is installed.

    Args:
        model: Folder or hub id.
        ask: Whether the hub may be asked for one.
        **where: ``subfolder``, ``revision``, ``cache_dir`` and ``token``.

    Raises:
        CheckpointError: If there is one.
    """
    if find_file(model, ADAPTER_CONFIG_NAME, **where, ask=ask) is not None:
        raise CheckpointError(
            f"'{model}' holds an adapter ({ADAPTER_CONFIG_NAME}). Merge it into its model with "
            "PeftModel.merge_and_unload and give the result, or move its files away."
        )


def quantised_by(config: PreTrainedConfig) -> str | None:
    """Return the method that packed a checkpoint's weights; None for plain numbers."""
    packed = getattr(config, "quantization_config", None)
    if packed is None:
        return None
    settings = packed if isinstance(packed, dict) else packed.to_dict()
    method = settings.get("quant_method") or "an unknown method"
    return str(getattr(method, "value", method))


def refuse_quantised(model: str | Path, config: PreTrainedConfig) -> None:
    """Refuse a checkpoint with packed weights.

    Raises:
        CheckpointError: With the method.
    """
    method = quantised_by(config)
    if method is not None:
        raise CheckpointError(f"'{model}' is quantised ({method}): {PACKED}")


def checked_description(
    model: str | Path, config: PreTrainedConfig, record: Recorded | None
) -> dict[str, Any]:
    """Return the description of heads in a config, with headprune's row of the family.

    Args:
        model: Folder or hub id.
        config: Its config.
        record: Its manifest; None without one.

    Raises:
        CheckpointError: If it is damaged, of a later schema, or not that of the manifest.
    """
    description, known = config.headprune, modeling_headprune.SCHEMA
    version = description.get("schema_version") if isinstance(description, dict) else None
    if isinstance(version, int) and version > known:
        raise CheckpointError(
            f"The config of '{model}' describes heads in schema {version}; this headprune reads "
            f"{known}. Upgrade headprune."
        )
    try:
        sound = Description.model_validate(description)
    except ValidationError as problem:
        raise CheckpointError(
            f"The description of heads in the config of '{model}' ('headprune') is damaged "
            f"({first_problem(problem)}). Get the folder again."
        ) from None
    if record is not None and record.layout != sound.layout:
        paths = sorted({*record.layout, *sound.layout})
        path = next(path for path in paths if record.layout.get(path) != sound.layout.get(path))
        raise CheckpointError(
            f"The config of '{model}' and its {MANIFEST} describe other heads of '{path}': one of "
            "them is damaged. Get the folder again."
        )
    row = row_of(config)
    return sound.model_dump() | ({"family": row.for_runtime()} if row else {})


def refuse_unexpected(model: str | Path, net: PreTrainedModel, names: Collection[str]) -> None:
    """Refuse to throw away tensors of a checkpoint that the model's class does not take.

    Raises:
        CheckpointError: With their names.
    """
    names = sorted(name for name in names if not _is_computed(name, names))
    if names:
        shown = [name if len(name) <= 48 else f"...{name[-45:]}" for name in names[:2]]
        listed = ", ".join(f"'{name}'" for name in shown) + ", ..." * (len(names) > 2)
        raise CheckpointError(
            f"'{model}' holds {len(names)} tensors that {type(net).__name__} does not take, and "
            f"the result would lack them: {listed}. Name the class that takes them as "
            '"architectures" in config.json, or leave them out with Allowed(drop_unexpected=True).'
        )


_OF_SENSES = ("score", "--refit", "train-gates", "heal", "evaluate")  # as well as text
# masks and tables of old checkpoints, computed from the config
_COMPUTED = re.compile(
    r"inv_freq$|position_ids$|relative_position_index$|\.version$|\.causal_mask$"
    r"|\.(attn|attention)\.(masked_)?bias$"
)


def _is_computed(name: str, names: Collection[str]) -> bool:
    """Return whether a name is that of a mask or table, and not of the bias of a projection."""
    weight = name.removesuffix("bias") + "weight"
    return bool(_COMPUTED.search(name)) and weight not in names


def ignored_tensors(net: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the weights of a checkpoint that its class ignores by design.

    An example is the last layer of DeepSeek-V3, which predicts several tokens at once.
    """
    patterns = [re.compile(pattern) for pattern in net._keys_to_ignore_on_load_unexpected or ()]
    taken = {below_base(net, name) for name in net.state_dict()}
    return sorted(
        name
        for name in names
        if any(pattern.search(name) for pattern in patterns)
        and below_base(net, name) not in taken
        and not _is_computed(name, names)
    )


def refuse_without_text(model: PreTrainedModel, what: str) -> None:
    """Refuse a model of images or sound, unless its class and the command read them.

    Raises:
        FamilyError: With another way to cut it.
    """
    takes = set(inspect.signature(model.forward).parameters)
    kind, task = modality_of(model), task_of(model)
    read = {"images": (*CLASSIFIERS, "features"), "sound": (*CLASSIFIERS, "seq2seq-lm", "ctc")}
    if task in read.get(kind, ()) and what in _OF_SENSES:
        return
    if "input_ids" not in takes or "vision" in family_of(model.config).attention:
        inputs = takes & {"pixel_values", "input_features", "input_values"}
        raise FamilyError(
            f"{type(model).__name__} takes {', '.join(sorted(inputs)) or 'no text'}, and {what} "
            "reads text, images of classifiers and encoders, and speech of classifiers and of "
            "models that write. Choose its heads in Python and cut them with 'headprune prune "
            "--plan'."
        )
    if task == "multiple-choice" or (task == "features" and "decoder_input_ids" in takes):
        reads = "several texts at once" if task == "multiple-choice" else "a text and its beginning"
        raise FamilyError(
            f"{type(model).__name__} reads {reads}, and {what} gives it one text. Score another "
            "class of the same weights, and cut this one with 'headprune prune --plan'."
        )


def refuse_without_padding(model: PreTrainedModel, task: str) -> None:
    """Refuse a batch for a classifier that cannot tell where a padded text ends.

    One on a decoder reads its class from the last token that is no padding.

    Raises:
        CheckpointError: With the missing entry of its config.
    """
    if task in CLASSIFIERS and own_padding_id(model.config) is None:
        raise CheckpointError(
            f"The config.json of this {type(model).__name__} has no pad_token_id, so that it "
            "cannot tell where a padded text ends. Add one: a token that no text ends with."
        )
