"""What headprune does not load or train on, each said in one sentence with what to do."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from headprune.errors import CheckpointError, FamilyError
from headprune.family import FAMILIES, Family
from headprune.io.parsing import first_problem
from headprune.model.attention import family_of
from headprune.model.base_names import below_base
from headprune.model.batch import own_padding_id
from headprune.model.stored import find_file, weight_files
from headprune.model.tasks import CLASSIFIERS, task_of
from headprune.runtime import MANIFEST, modeling_headprune
from headprune.schemas.records import Description, Recorded

# what becomes of a quantised model
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


def refuse_pickles(model: str | Path) -> None:
    """Refuses a folder without the safetensors that transformers reads.

    Raises:
        CheckpointError: Naming the pickles or other safetensors that are there, if any.
    """
    path = Path(model)
    if not path.is_dir() or weight_files(path):
        return
    files = sorted(path.iterdir())
    refuse_pickles_among(file for file in files if "model" in file.name)
    others = [file.name for file in files if file.suffix == ".safetensors"]
    if others:
        raise CheckpointError(
            f"'{model}' has no model.safetensors, the file that transformers reads, but "
            f"'{others[0]}'. If that holds the whole model, rename it."
        )
    refuse_pickles_among(files)
    raise CheckpointError(f"'{model}' has a config.json but no *.safetensors weights beside it.")


def refuse_adapter(model: str | Path, ask: bool = True, **where: Any) -> None:
    """Refuses an adapter, alone or beside a model: transformers applies it where peft is installed.

    Args:
        model: Folder or hub id.
        ask: Whether the hub may be asked for one.
        **where: ``subfolder``, ``revision``, ``cache_dir`` and ``token``.

    Raises:
        CheckpointError: Saying how to merge it.
    """
    if find_file(model, ADAPTER_CONFIG_NAME, **where, ask=ask) is None:
        return
    where_it_is, instead = "without its model", "give the result"
    if find_file(model, "config.json", **where):
        where_it_is = "beside the model, which transformers applies where peft is installed"
        instead = "move its files away"
    raise CheckpointError(
        f"'{model}' holds an adapter ({ADAPTER_CONFIG_NAME}) {where_it_is}. Merge it into the "
        f"model with PeftModel.merge_and_unload, and {instead}."
    )


def refuse_foreign_layers(model: str | Path, content: Mapping[str, Any]) -> None:
    """Refuses settings of single layers that headprune did not write, and would not carry.

    Args:
        model: The folder.
        content: Its config.json.

    Raises:
        CheckpointError: Naming the settings.
    """
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    layers = [part["per_layer_config"] for part in parts if part.get("per_layer_config")]
    if not layers or "headprune" in content:
        return
    entries = layers[0].values() if isinstance(layers[0], dict) else ()
    names = sorted({name for entry in entries if isinstance(entry, dict) for name in entry})
    raise CheckpointError(
        f"The config.json of '{model}' sets layers apart (per_layer_config: "
        f"{', '.join(names[:4])}), which no supported family reads and no result would keep. Take "
        "the entry out if the model computes the same without it."
    )


def quantised_by(config: PreTrainedConfig) -> str | None:
    """The method that packed a checkpoint's weights; None where they are plain numbers."""
    packed = getattr(config, "quantization_config", None)
    if packed is None:
        return None
    settings = packed if isinstance(packed, dict) else packed.to_dict()
    method = settings.get("quant_method") or "an unknown method"
    return str(getattr(method, "value", method))


def refuse_quantised(model: str | Path, config: PreTrainedConfig) -> None:
    """Refuses a checkpoint whose weights are packed.

    Raises:
        CheckpointError: Naming the method.
    """
    method = quantised_by(config)
    if method is not None:
        raise CheckpointError(f"'{model}' is quantised ({method}): {PACKED}")


def checked_description(
    model: str | Path, config: PreTrainedConfig, record: Recorded | None
) -> dict[str, Any]:
    """The description of heads in a config, with headprune's own row of the family.

    Args:
        model: Folder or hub id.
        config: Its config.
        record: What its manifest says; None without one.

    Raises:
        CheckpointError: If it is damaged, of a later schema, or not what the manifest says.
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
        differing = sorted(
            path
            for path in {*record.layout, *sound.layout}
            if record.layout.get(path) != sound.layout.get(path)
        )
        raise CheckpointError(
            f"The config of '{model}' and its {MANIFEST} describe other heads of "
            f"'{differing[0]}': one of them is damaged. Get the folder again."
        )
    if config.model_type not in FAMILIES:
        return sound.model_dump()
    row = FAMILIES[config.model_type]
    _refuse_unknown_ids(model, config, row, sound)
    return {**sound.model_dump(), "family": row.for_runtime()}


def _refuse_unknown_ids(
    model: str | Path, config: PreTrainedConfig, row: Family, description: Description
) -> None:
    """Refuses ids of heads that the original cannot have had.

    A plain config says how many heads are left, and not which: a model of such a family may have
    been cut before, and its ids go beyond what its config says.
    """
    names = (row.query_heads_key, "encoder_attention_heads", "decoder_attention_heads")
    counts = [getattr(config.get_text_config(), name, None) for name in names]
    counts += [getattr(config, name, None) for name in names]
    known = [count for count in counts if isinstance(count, int)]
    for path, heads in description.layout.items():
        largest = max((*heads.query_heads, *heads.kv_heads), default=0)
        if known and not row.native and largest >= max(known):
            raise CheckpointError(
                f"The config of '{model}' names head {largest} of '{path}', and the model had "
                f"{max(known)} heads: it is damaged. Get the folder again."
            )


def refuse_unexpected(model: str | Path, net: PreTrainedModel, names: Collection[str]) -> None:
    """Refuses to throw away tensors of a checkpoint that the model's class does not take.

    Args:
        model: Folder or hub id.
        net: The model as it was loaded.
        names: The tensors left over.

    Raises:
        CheckpointError: Naming them, and the class that takes them if there is one.
    """
    names = [name for name in names if not _is_computed(name, names)]
    if not names:
        return
    taking = _classes_that_take(net, names)
    shown = [name if len(name) <= 48 else f"...{name[-45:]}" for name in sorted(names)[:2]]
    listed = ", ".join(f"'{name}'" for name in shown) + ", ..." * (len(names) > 2)
    if not taking:
        where = f"No class of transformers for {net.config.model_type} takes them; "
        where += "if the result can do without them, Allowed(drop_unexpected=True) leaves them out."
    else:
        where = f"They belong to {' or '.join(taking[:2])}: put "
        where += f'"architectures": ["{taking[0]}"] into its config.json, or leave them out with '
        where += "Allowed(drop_unexpected=True)."
    raise CheckpointError(
        f"'{model}' holds {len(names)} tensors that {type(net).__name__} does not take, and the "
        f"result would lack them: {listed}. {where}"
    )


# What old checkpoints hold beside weights: masks and tables that are computed from the config.
_COMPUTED = re.compile(
    r"inv_freq$|position_ids$|relative_position_index$|\.version$|\.causal_mask$"
    r"|\.(attn|attention)\.(masked_)?bias$"
)


def _is_computed(name: str, names: Collection[str]) -> bool:
    """Whether a name is that of a mask or table, and not of the bias of a projection."""
    weight = name.removesuffix("bias") + "weight"
    return bool(_COMPUTED.search(name)) and weight not in names


def passed_over(net: PreTrainedModel, names: Collection[str]) -> list[str]:
    """The weights of a checkpoint that its class ignores by design, of those with some names.

    Layers that predict several tokens at once are such: DeepSeek-V3 has one as its last.
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


def _classes_that_take(net: PreTrainedModel, names: Collection[str]) -> list[str]:
    """The classes for this kind of config that take these tensors as well, and miss none.

    Some have the same tensors, as those for sequences and for tokens do; the likelier comes first.
    """
    there = {below_base(net, name) for name in (*net.state_dict(), *names)}
    known, found = modeling_headprune.auto_classes(type(net.config)), []
    likely = ("AutoModelForMaskedLM", "AutoModelForSequenceClassification")
    for auto in (*(name for name in likely if name in known), *known):
        cls = known[auto]
        try:
            with torch.device("meta"):
                other = cls(copy.deepcopy(net.config))
        except (ValueError, TypeError, AttributeError, LookupError, RuntimeError):
            continue  # needs settings that this config lacks
        tensors, tied = set(other.state_dict()), set(other.all_tied_weights_keys)
        missing = {n for n in tensors - tied if below_base(net, n) not in there}
        if set(names) <= tensors and all("pooler" in name for name in missing):
            found.append(cls.__name__)
    return list(dict.fromkeys(found))


def refuse_without_text(model: PreTrainedModel, what: str) -> None:
    """Refuses a model of images or sound where text is needed.

    Raises:
        FamilyError: Saying what can be done with it.
    """
    takes = set(inspect.signature(model.forward).parameters)
    other = takes & {"pixel_values", "input_features", "input_values"}
    if "input_ids" not in takes or "vision" in family_of(model.config).attention:
        raise FamilyError(
            f"{type(model).__name__} takes {', '.join(sorted(other)) or 'no text'}, and {what} "
            "reads text. Choose its heads in Python and cut them with 'headprune prune --plan'."
        )
    task = task_of(model)
    if task == "multiple-choice" or (task == "features" and "decoder_input_ids" in takes):
        reads = "several texts at once" if task == "multiple-choice" else "a text and its beginning"
        raise FamilyError(
            f"{type(model).__name__} reads {reads}, and {what} gives it one text. Score another "
            "class of the same weights, and cut this one with 'headprune prune --plan'."
        )


def refuse_without_padding(model: PreTrainedModel, task: str) -> None:
    """Refuses a classifier that is to read several texts at once and cannot tell where one ends.

    One on a decoder reads its class from the last token that is no padding.

    Raises:
        CheckpointError: Saying what its config lacks.
    """
    if task in CLASSIFIERS and own_padding_id(model.config) is None:
        raise CheckpointError(
            f"The config.json of this {type(model).__name__} has no pad_token_id, so that it "
            "cannot tell where a padded text ends. Write one into it: the id of a token that no "
            "text ends with."
        )
