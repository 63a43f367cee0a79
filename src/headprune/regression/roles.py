"""Which roles of its original a model no longer has."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.config import CheckConfig, RolesConfig
from headprune.context import Context
from headprune.evaluation.comparison import Interval
from headprune.evaluation.loaded import Loaded
from headprune.evaluation.quality import Progress
from headprune.model.placement import alone_on_device
from headprune.regression.limits import Limit
from headprune.regression.verdicts import Judged, judge
from headprune.role import ROLES
from headprune.role.measure import roles_of
from headprune.role.scores import changes
from headprune.schemas.roles import ModuleRoles


@dataclass(frozen=True)
class LostRoles:
    """Roles of the original that no head is sure to have any more.

    Attributes:
        names: All of them.
        surely: Those that no head has nearly, either.
        sequences: Sequences of text that said so.
    """

    names: tuple[str, ...]
    surely: tuple[str, ...]
    sequences: int

    def judge(self, limit: Limit, config: CheckConfig) -> Judged:
        """Judges how many they are."""
        low, high = float(len(self.surely)), float(len(self.names))
        found = judge(limit, Interval(high, low, high, config.confidence, self.sequences))
        # the ends of a count do not say how many sequences would tell
        return found.model_copy(update={"n_needed": None, "names": self.names})


def lost_roles(loaded: Loaded, config: CheckConfig, progress: Progress) -> LostRoles:
    """Measures the roles of a model and of its original, on the same tokens."""
    # a needle is a limit of its own
    settings = {"sequences": config.role_sequences, "resamples": 1000, "needle_lengths": ()}
    asked = config.part(RolesConfig, **settings)
    found = []
    for net in loaded.nets:
        with alone_on_device(net):
            data, context = loaded.domains[0].data, Context(step=progress)
            found.append(roles_of(net, loaded.tokenizer, data, asked, context))
    now, original = (one.modules for one in found)
    compared = changes(original, now)
    names = [name for name in ROLES if compared[name].is_lost and not ROLES[name].attribute]
    surely = [name for name in names if not _nearly(now, name)]
    return LostRoles(tuple(names), tuple(surely), found[0].sequences)


def _nearly(modules: tuple[ModuleRoles, ...], name: str) -> bool:
    return any(name in head.nearly for module in modules for head in module.heads)
