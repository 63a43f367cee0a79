"""Every class of transformers that its auto mappings give for a supported family."""

import json

import torch
import transformers
from transformers.models.auto import modeling_auto

from headprune.model.attention import attention_of
from tests import tiny


def classes_of(families):
    """Pairs of a family and the name of one of its classes."""
    pairs = set()
    for mapping in dir(modeling_auto):
        if not mapping.startswith("MODEL") or not mapping.endswith("MAPPING_NAMES"):
            continue
        names = getattr(modeling_auto, mapping)
        for family in families:
            named = names.get(family, ())
            pairs |= {(family, name) for name in ((named,) if isinstance(named, str) else named)}
    return sorted(pairs)


def build(family, name, **settings):
    """A tiny model of a class."""
    torch.manual_seed(0)
    config = tiny.config(family, **settings)
    config.architectures = [name]
    model = getattr(transformers, name)(config)
    return model.eval()


def plan_of_one_unit(model, file):
    """A plan that removes the first unit of the first module."""
    first = attention_of(model)[0]
    file.write_text(json.dumps({first.path: list(range(first.query_heads // first.kv_heads))}))
    return file
