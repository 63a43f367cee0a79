"""Goals of a compression, and the budgets that they leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.config import CompressConfig, LayoutOption, PlanConfig
from headprune.errors import PlanError
from headprune.model.cost import KVCache, stated_context, usual_window
from headprune.model.windows import no_windows
from headprune.planning.budgets import Prices, cache_prices, parameter_prices
from headprune.planning.constraints import constraints_of
from headprune.planning.targets import LAYER_WINDOWS
from headprune.render.blocks import at_context
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.records import Contender, Window
from headprune.tensors.dtypes import dtype_name
from headprune.tensors.units import Unit

_SINKS, _LEAST_WINDOW = 4, 64  # tokens
_NEAR_SHARE = 0.6  # of a budget that the windows of all KV heads may take


@dataclass(frozen=True)
class SizeGoal:
    """The size to reach.

    Attributes:
        said: In a line.
        budget: What may stay when heads are removed.
        units: What may be removed as one piece.
        kv_share: The share of KV heads that may stay when they are merged; None where merging
            does not meet the goal.
        context: Tokens at which KV caches are compared.
        window: The window that meets it where KV heads get one; None without a given context.
    """

    said: str
    budget: PlanConfig
    units: tuple[Unit, ...]
    kv_share: float | None
    context: int = 1
    window: Window | None = None

    def missed(self, found: Contender) -> str | None:
        """Why a model does not meet a goal in bytes or parameters; None if it does."""
        cached, parameters = found.kv_cache_bytes, found.parameters
        for most, size, what in (
            (self.budget.max_kv_bytes, cached, f"bytes of KV cache {at_context(self.context)}"),
            (self.budget.max_params, parameters, "parameters"),
        ):
            if most is not None and size > most:
                return f"It has {size:,} {what}, and {most:,} were asked for."
        return None


def goal_of(
    config: CompressConfig,
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    stored: torch.dtype,
) -> SizeGoal:
    """The goal that some settings are for a model.

    Args:
        config: The settings.
        net: The model.
        attentions: Its attention modules.
        stored: The element type of its weights on disk, which its cache has.

    Raises:
        PlanError: If the model has no heads, or no cache where bytes of it are asked for.
    """
    heads, kv_heads = sum(a.query_heads for a in attentions), sum(a.kv_heads for a in attentions)
    if not heads:
        raise PlanError("The model has no heads left, so there is nothing to compress.")
    grouped = kv_heads < heads
    whole = Unit.KV_GROUP if grouped else Unit.HEAD
    context = config.context_tokens or stated_context(net)
    if config.max_kv_bytes is not None:
        prices = cache_prices(net, attentions, stored, context)
        present = prices.total([(a.query_heads, a.kv_heads) for a in attentions])
        unit = f" bytes {at_context(context)} in {dtype_name(stored)}"
        _refuse_out_of_reach("--max-kv-bytes", config.max_kv_bytes, prices.rest, present, unit)
        budget = config.part(PlanConfig)
        said = f"KV cache of at most {config.max_kv_bytes:,}{unit}, of {present:,.0f}"
        fit = _mergeable(prices, config.max_kv_bytes)
        share = min(fit, kv_heads) / kv_heads if fit else None
        window = _window(config, net, stored)
        return SizeGoal(said, budget, (whole,), share, context, window)
    if config.max_params is not None:
        least = parameter_prices(net, attentions).rest
        _refuse_out_of_reach("--max-params", config.max_params, least, net.num_parameters())
        budget = config.part(PlanConfig)
        said = f"at most {config.max_params:,} parameters, of {net.num_parameters():,}"
        return SizeGoal(said, budget, (whole,), None, context)
    assert config.keep is not None  # one goal is set
    said = f"{config.keep:.4g} of the {'KV heads, as queries share them' if grouped else 'heads'}"
    budget = config.part(PlanConfig)
    return SizeGoal(said, budget, (whole,), config.keep if grouped else None, context)


def _window(config: CompressConfig, net: PreTrainedModel, stored: torch.dtype) -> Window | None:
    """Return the widest window that leaves a part of the budget to heads with a whole past."""
    context = config.context_tokens
    if context is None or all(no_windows(net).values()):
        return None
    engines = constraints_of(net, LayoutOption.PER_LAYER, config.targets)
    if config.targets and LAYER_WINDOWS not in engines.shapes:
        return None
    size, sinks, cache = usual_window(context), 0 if config.targets else _SINKS, KVCache.of(net)
    assert config.max_kv_bytes is not None
    if config.targets and cache.windows:  # a plain config has one size
        most = max(cache.windows.values())
        fits = cache.elements(most) * stored.itemsize <= config.max_kv_bytes
        return Window(size=most + 1, sinks=0) if fits else None
    room = _NEAR_SHARE * config.max_kv_bytes / stored.itemsize
    while size > _LEAST_WINDOW and cache.elements(size + sinks) > room:
        size //= 2
    return Window(size=size, sinks=sinks) if cache.elements(size + sinks) <= room else None


def _refuse_out_of_reach(
    name: str, asked: int, least: float, present: float, unit: str = ""
) -> None:
    if asked >= present:
        raise PlanError(
            f"{name} {asked:,}: the model has {present:,.0f}{unit}, so there is nothing to do."
        )
    if asked < least:
        raise PlanError(
            f"{name} {asked:,}: without any head, {least:,.0f}{unit} are left. Give at least as "
            "many."
        )


def _mergeable(prices: Prices, max_kv_bytes: int) -> int:
    """The KV heads that a merge may leave, which keeps one at least in every module.

    0 where it cannot tell: a merge counts heads, whose costs differ between modules.
    """
    per_head = {price.kv_head for price in prices.modules}
    if len(per_head) > 1 or not min(per_head):
        return 0
    fixed = prices.rest + math.fsum(price.module for price in prices.modules)
    return max(0, math.floor((max_kv_bytes - fixed) / min(per_head)))
