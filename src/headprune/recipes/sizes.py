"""What estimates are made of: the sizes of a recipe's model, and the speed of this machine."""

from __future__ import annotations

import time
from functools import cache

import torch

from headprune import devices
from headprune.estimates import Sizes
from headprune.exporting.source import built
from headprune.model.attention import attention_of
from headprune.model.cost import attention_parameters
from headprune.model.loading import load_config, task_of
from headprune.recipes.recipe import Recipe


def sizes_of(recipe: Recipe) -> Sizes:
    """Measures the recipe's model without its weights, and how fast this machine is."""
    config = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code)
    net = built(config)
    text = config.get_text_config()
    attentions = attention_of(net)
    return Sizes(
        parameters=net.num_parameters(),
        attention_parameters=sum(map(attention_parameters, attentions)),
        layers=len(attentions),
        hidden=text.hidden_size,
        vocabulary=getattr(text, "vocab_size", 0),  # models of images have none
        causal=task_of(net) == "causal-lm",
        itemsize=(getattr(config, "dtype", None) or torch.float32).itemsize,
        flops=_flops(devices.chosen()),
    )


@cache
def _flops(device: torch.device, seconds: float = 0.3) -> float:
    """FLOP/s that matrix products reach on a device."""
    width = 1024 if device.type == "cpu" else 8192
    a = torch.ones(width, width, device=device)  # what most steps compute in is float32
    float((a @ a)[0, 0])  # the first one is slow
    start, count = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < seconds:
        float((a @ a)[0, 0])
        count += 1
    return 2 * width**3 * count / took
