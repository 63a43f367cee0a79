"""The best units under several budgets at once: an integer programme, solved exactly.

    maximise    sum of the scores of the units that stay
    so that     the number of heads is the requested one
                parameters and KV bytes, as sums over the kept heads, keep to their limits

A KV head stays with any of its queries. The fixed cost of a module goes with its last head. So
heads, KV groups and layers compete under one budget. HiGHS solves it (Huangfu and Hall 2018),
through scipy.optimize.milp.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from headprune.errors import PlanError
from headprune.model.units import unit_sizes
from headprune.planning.budgets import Prices
from headprune.runtime.modeling_headprune import Attention, kv_owners
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit, members

_Row = tuple[dict[int, float], float, float]
"""Coefficients, and the bounds of their sum."""
Floats = NDArray[np.float64]
_GAIN = 1e6  # the solver cannot tell gains apart that differ by less than 1e-6


@dataclass(frozen=True)
class BudgetLimit:
    """A budget.

    Attributes:
        prices: Summed prices.
        most: Their sum, at most.
        option: The option and its value, for messages.
    """

    prices: Prices
    most: float
    option: str


def allocate(
    attentions: Sequence[Attention],
    unit: Unit,
    scores: Sequence[float],
    heads: int | None = None,
    limits: Sequence[BudgetLimit] = (),
    filled: Collection[int] = (),
) -> list[int]:
    """Return the positions of the units to keep.

    Args:
        attentions: The attention modules, in order.
        unit: Unit of removal.
        scores: One score per unit, in order. Without a number of heads, the least score counts
            slightly above zero, so that budgets are used up. A unit with an infinite score stays.
        heads: Query heads to keep, exactly; None for the most that the limits allow.
        limits: Budgets.
        filled: Positions of the modules that keep a head at least.

    Raises:
        PlanError: If no choice meets all of them.
    """
    units = [members(unit, a.group_sizes) for a in attentions]
    if not limits and heads is not None and not filled:
        return keep_best(scores, unit_sizes(attentions, unit), heads)  # exact by itself
    flat = [(m, u) for m, of_module in enumerate(units) for u in of_module]
    sizes = np.array([len(u) for _, u in flat], dtype=float)
    kv = [(m, k) for m, a in enumerate(attentions) for k in range(a.kv_heads)]
    count, modules = len(flat), len(attentions)
    width = count + len(kv) + modules
    kv_at = {key: count + i for i, key in enumerate(kv)}
    module_at = {m: count + len(kv) + m for m in range(modules)}
    rows: list[_Row] = []
    owners = [kv_owners(a.group_sizes) for a in attentions]
    for at, (m, u) in enumerate(flat):
        # a unit needs its KV heads, and a KV head its module
        for owner in {owners[m][query] for query in u}:
            rows.append(({kv_at[m, owner]: 1, at: -1}, 0, np.inf))
    for (m, _), at in kv_at.items():
        rows.append(({module_at[m]: 1, at: -1}, 0, np.inf))
    for m, at in module_at.items():  # without KV heads it goes, even at a negative cost
        its_kv = {kv_at[m, k]: -1.0 for k in range(attentions[m].kv_heads)}
        rows.append(({at: 1, **its_kv}, -np.inf, 0))
    if heads is not None:
        rows.append((dict(enumerate(sizes)), heads, heads))
    for m in filled:
        queries = {at: sizes[at] for at, (module, _) in enumerate(flat) if module == m}
        if queries:
            rows.append((queries, 1, np.inf))
    for limit in limits:
        spent = _spent(limit.prices, flat, sizes, kv_at, module_at)
        scale = max(map(abs, spent.values()), default=0.0) or 1.0  # the solver's tolerance is 1e-6
        scaled = {at: value / scale for at, value in spent.items()}
        rows.append((scaled, -np.inf, (limit.most - limit.prices.rest) / scale))
    matrix = lil_array((len(rows), width))
    for number, (row, _, _) in enumerate(rows):
        for at, value in row.items():
            matrix[number, at] = value
    gain, stays, most = np.zeros(width), np.zeros(width), np.ones(width)
    values = np.asarray(scores, dtype=float)
    stays[:count] = held = np.isinf(values)
    gain[:count] = _gains(
        np.where(held, values[~held].max(initial=0.0), values),
        sizes,
        fixed=heads is not None,
    )
    solved = milp(
        -gain * _GAIN,
        integrality=np.ones(width),
        bounds=Bounds(stays, most),
        constraints=LinearConstraint(
            matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows]
        ),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        stay = int(sizes[held].sum())
        raise PlanError(_impossible(heads, filled, limits, stay))
    return [at for at in range(count) if solved.x[at] > 0.5]


def _spent(
    prices: Prices,
    flat: Sequence[tuple[int, Sequence[int]]],
    sizes: Floats,
    kv_at: dict[tuple[int, int], int],
    module_at: dict[int, int],
) -> dict[int, float]:
    spent = {at: prices.modules[m].query_head * sizes[at] for at, (m, _) in enumerate(flat)}
    spent |= {at: prices.modules[m].kv_head for (m, _), at in kv_at.items()}
    return spent | {at: prices.modules[m].module for m, at in module_at.items()}


def _gains(scores: Floats, sizes: Floats, fixed: bool) -> Floats:
    """Return scores scaled to at most 1; all above 0 where the number of heads is free."""
    if not len(scores):
        return scores
    if not fixed:
        scores = scores - scores.min()
    largest = float(np.abs(scores).max())
    gains: Floats = scores / largest if largest else scores
    return gains if fixed else gains + 1e-3 * sizes


def _impossible(
    heads: int | None,
    filled: Collection[int],
    limits: Sequence[BudgetLimit],
    held: int,
) -> str:
    demands = [] if heads is None else [f"{heads} query heads in all"]
    demands += [f"a head in each of {len(filled)} modules (--for, or the model)"] if filled else []
    demands += [f"--keep-roles (query heads held: {held})"] if held else []
    demands += [limit.option for limit in limits]
    floors = [
        f"{each.option}, {each.most:.6g} at most, {each.prices.rest:.6g} are left without any head"
        for each in limits
    ]
    return (
        f"No plan keeps to all of this at once: {'; '.join(demands)}."
        + (f" Of {'; of '.join(floors)}." if floors else "")
        + " Loosen one of them."
    )
