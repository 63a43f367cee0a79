"""Try every model type of transformers on a tiny twin, and write docs/reference/recognised.md.

    python scripts/docs/recognised_types.py [TYPE ...]

Every type that generates text, fills in masks or answers to images is built from its default
config. Its heads are recognised, gated, cut and read back; a wrong cut must fail. With names, only
these are tried and nothing is written.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from headprune.family import FAMILIES
from headprune.model.attention import attention_of
from headprune.model.skeleton import without_weights
from headprune.proof.twins import prove

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recognised.md"
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
SECONDS = 90  # for one type
# for settings that some classes leave at None
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 4, "intermediate_size": 256, "vocab_size": 256, "pad_token_id": 0},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 8},
    **{"num_experts": 8, "moe_intermediate_size": 64, "default_language": "en_XX"},
    **{"n_shared_experts": 1, "vocabulary_map": {"<image>": 3}},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_GLM4V = {"text_config": {"head_dim": 128, "rope_parameters": _HALF_ROPE}}
_MARKS = ("vision_start", "vision_end", "audio_start", "audio_end")
_OMNI = {f"{mark}_token_id": number for number, mark in enumerate(_MARKS, 5)}
_EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
_INDEXER |= {"indexer_budget": 16, "indexer_compress_ratio": 4}
# for defaults that do not fit together, as in checkpoints of these types
SETTINGS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}
    },
    "cohere_compass": {"text_config": _TWO_ROPES},
    "cohere_compass_text": _TWO_ROPES,
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5}},
    "deepseek_ocr2": {"text_config": {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": _EXPERTS},
    "hunyuan_vl": {
        "text_config": {"head_dim": 64, "rope_parameters": {**_ROPE, "mrope_section": [8] * 4}}
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": {**_OMNI, "text_config": {"head_dim": 128}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "xmod": {"default_language": "en_XX"},
    "step3p7": {"text_config": {"sliding_window": 16}},
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), _GLM4V),
}
WITHOUT = "no attention with heads"


class TooLong(BaseException):
    """The time of one type is up."""


def stop(*_: Any) -> None:
    """Raise ``TooLong``."""
    raise TooLong


def default(name: str, task: str) -> PreTrainedModel:
    """Return a model of a type for a task, by its default config and without weights."""
    settings = SETTINGS.get(name, {})
    try:
        return built(name, task, settings)
    except Exception:  # some defaults are None
        config = CONFIG_MAPPING[name](**settings)
        parts = {}
        if "text_config" in config.sub_configs:
            parts["text_config"] = _sizes(config.text_config) | settings.get("text_config", {})
        return built(name, task, {**_sizes(config), **settings, **parts})


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return values for the settings of a config that are None."""
    sizes = {key: SIZES[key] for key in SIZES if vars(config).get(key, 0) is None}
    if hasattr(config, "qk_rope_head_dim"):  # latent attention has its own
        sizes = {key: sizes[key] for key in sizes.keys() - {"head_dim", "num_key_value_heads"}}
    return sizes


def built(name: str, task: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Return a model of a type for a task, by a config and without weights."""
    cls: Any = CONFIG_MAPPING[name]
    if task == "CAUSAL_LM" and hasattr(cls(), "is_decoder") and not cls().is_encoder_decoder:
        settings = {**settings, "is_decoder": True}
    config = cls(**settings)
    model: Any = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    if model.config_class is not type(config):
        text = config.get_text_config()
        other = SETTINGS.get(model.config_class.model_type, {})
        config = text if isinstance(text, model.config_class) else model.config_class(**other)
    config.architectures = [model.__name__]
    return without_weights(model, config)


def tried(job: tuple[str, str]) -> tuple[str, str]:
    """Return a type, and "" if it is proven, or else the reason."""
    name, task = job
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        skeleton = default(name, task)
        attention_of(skeleton)
        prove(skeleton)
    except TooLong:
        return name, f"its twin takes more than {SECONDS} s on one core"
    except Exception as error:  # whatever a class does to itself
        said = " ".join(str(error).split())
        missing = "no module of its" in said or "no class for it" in said
        return name, WITHOUT if missing else f"{type(error).__name__}: {said}"
    finally:
        signal.alarm(0)
    return name, ""


def page(results: dict[str, str]) -> str:
    """Return the page: how many, which, and why the others are not."""
    proven = [name for name, why in results.items() if not why]
    without = [name for name, why in results.items() if why == WITHOUT]
    others = {n: why for n, why in results.items() if why and why != WITHOUT}
    rows = "\n".join(f"| {name} | {_short(why)} |" for name, why in sorted(others.items()))
    read = _block(name for name in proven if name not in FAMILIES)
    share = f"{len(proven)} of {len(proven) + len(others)}"
    return f"""# Model types that were tried

`python scripts/docs/recognised_types.py` takes every type of
transformers {transformers.__version__} that generates text, fills in masks or answers to images. It
builds the default config, and proves a tiny twin: gated = cut = reloaded, with a cache, padded, and
with a wrong cut that must fail.

{share} types with heads are proven. {len(FAMILIES)} types have a [row](families.md).
These are recognised by structure:

{read}

These are not proven:

| type | reason |
| --- | --- |
{rows}

{len(without)} types have no attention with heads that headprune knows:

{_block(without)}
"""


def _block(names: Iterable[str]) -> str:
    lines = textwrap.fill(" ".join(sorted(names)), 100, break_on_hyphens=False)
    return f"```text\n{lines}\n```"


def _short(why: str) -> str:
    for long in ("FamilyError: ", "CheckpointError: ", "It needs a row in headprune's table."):
        why = why.replace(long, "")
    _, _, why = why.rpartition("no tiny twin of it could be cut ")
    return why.strip("( )").replace("|", "\\|")[:200]


def main() -> None:
    """Try the types, and write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    only = sys.argv[1:]
    jobs = [
        (name, task)
        for task in TASKS
        for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if not only or name in only
    ]
    results: dict[str, str] = {}
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=20) as pool:
        for number, (name, why) in enumerate(pool.imap_unordered(tried, jobs), 1):
            print(f"{number} of {len(jobs)}  {name}: {why or 'proven'}", flush=True)
            # one task of a type is enough
            if results.get(name, WITHOUT) and (why != WITHOUT or name not in results):
                results[name] = why
    if not only:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
