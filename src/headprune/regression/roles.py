"""Roles of its original that a model no longer has."""

from __future__ import annotations

from headprune.config import CheckConfig, RolesConfig
from headprune.context import Context, Progress
from headprune.evaluation.comparison import Interval
from headprune.evaluation.loaded import Loaded
from headprune.model.placement import alone_on_device
from headprune.regression.limits import Limit
from headprune.regression.verdicts import Judged, judge
from headprune.role import ROLES
from headprune.role.measure import roles_of
from headprune.role.scores import changes


def judge_roles(
    limits: list[Limit], loaded: Loaded, config: CheckConfig, progress: Progress
) -> dict[Limit, Judged]:
    """Measure the roles of a model and of its original on the same tokens, and judge the limits.

    A role is lost if no head has it for sure; it is surely lost if no head has it nearly, either.
    """
    if not limits:
        return {}
    # a needle is a limit of its own
    settings = {"sequences": config.role_sequences, "resamples": 1000, "needle_lengths": ()}
    how, measured = config.part(RolesConfig, **settings), []
    for net in loaded.nets:
        with alone_on_device(net):
            data, context = loaded.domains[0].data, Context(step=progress)
            measured.append(roles_of(net, loaded.tokenizer, data, how, context))
    now, original = (one.modules for one in measured)
    compared = changes(original, now)
    names = [name for name in ROLES if compared[name].is_lost and not ROLES[name].attribute]
    nearly = {name for module in now for head in module.heads for name in head.nearly}
    low, high = float(len(set(names) - nearly)), float(len(names))
    interval = Interval(high, low, high, config.confidence, measured[0].sequences)
    # the ends of a count do not say how many sequences would tell
    told = {"n_needed": None, "names": tuple(names)}
    return {limit: judge(limit, interval).model_copy(update=told) for limit in limits}
