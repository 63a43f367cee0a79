"""What a compression saves, and what that leaves room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.config import BudgetConfig, CompressConfig
from headprune.errors import PlanError
from headprune.planning.budgets import cache_prices
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.units import Unit


@dataclass(frozen=True)
class SizeGoal:
    """What may stay.

    Attributes:
        said: In a line.
        budget: What may stay when heads are removed.
        units: What may be removed as one piece.
        kv_share: The share of KV heads that may stay when they are merged; None where merging
            does not meet the goal.
    """

    said: str
    budget: BudgetConfig
    units: tuple[Unit, ...]
    kv_share: float | None


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
    if config.max_kv_bytes is not None:
        prices = cache_prices(net, attentions, stored)
        present = prices.total([(a.query_heads, a.kv_heads) for a in attentions])
        room = (config.max_kv_bytes - prices.rest) / max(present - prices.rest, 1.0)
        share = math.floor(min(max(room, 0.0), 1.0) * kv_heads) / kv_heads
        budget = BudgetConfig(max_kv_bytes=config.max_kv_bytes)
        said = f"KV cache of at most {config.max_kv_bytes:,} bytes per token, of {present:,.0f}"
        return SizeGoal(said, budget, (whole,), share or None)
    if config.max_params is not None:
        budget = BudgetConfig(max_params=config.max_params)
        said = f"at most {config.max_params:,} parameters, of {net.num_parameters():,}"
        return SizeGoal(said, budget, (whole,), None)
    if config.min_speedup is not None:
        budget = BudgetConfig(min_speedup=config.min_speedup)
        return SizeGoal(f"prefill {config.min_speedup:g} times as fast", budget, (whole,), None)
    if config.kv_budget is not None:
        share, saved = config.kv_budget, "KV heads"
    else:
        assert config.keep is not None  # one goal is set
        share, saved = config.keep, "KV heads, as queries share them" if grouped else "heads"
    merged = share if grouped or config.kv_budget is not None else None
    said = f"{share:.4g} of the {saved}"
    return SizeGoal(said, BudgetConfig(keep=float(share)), (whole,), merged)
