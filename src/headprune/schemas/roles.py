"""roles.json: roles of a model's heads, as ``headprune roles`` measured them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headprune.config import DataConfig, RolesConfig
from headprune.errors import CheckpointError
from headprune.io.parsing import read_as
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.values import Count, Digest, Record

ROLES_FILE = "roles.json"
State = Literal["over", "nearly", "under"]


class RoleFacts(Record):
    """A role as it was measured; the attributes are those of ``Role``."""

    definition: str
    threshold: float
    sign: str
    source: str
    on: str
    control: str | None
    attribute: bool
    beyond: bool = False


class RoleScore(Record):
    """The score of a head for a role.

    Attributes:
        score: On all sequences, with the ends of its interval.
        control: The score of the control; None where the role has none.
        state: over: the interval is above the threshold, the control below it. nearly: the interval
            straddles the threshold. under: all others.
        variant: The offset, kind of token, or relation and direction with that score.
        others: Further relations above their threshold, and their scores.
    """

    score: float
    low: float
    high: float
    control: float | None
    state: State
    variant: str = ""
    others: dict[str, float] = Field({})


class Rise(Record):
    """The rise of the loss in nats, with its interval; below 0 where the loss falls."""

    nats: float
    low: float
    high: float


class HeadEffect(Record):
    """The rise with a head's output set to zero, as by a cut, and to its mean over the text."""

    zero: Rise
    mean: Rise


class HeadRoles(Record):
    """The roles of a head.

    Attributes:
        head: Its number in the original model.
        role: The role whose threshold it passes by the largest factor.
        nearly: Roles whose threshold its interval straddles.
        attributes: Attributes that are above their threshold.
        scores: By role; impossible ones are left out.
        effect: Rise of the loss without it; None where unmeasured.
        contribution: Norm of its output, as a fraction of the residual's.
    """

    head: Count
    role: str | None
    nearly: tuple[str, ...]
    attributes: tuple[str, ...]
    scores: dict[str, RoleScore]
    effect: HeadEffect | None = None
    contribution: float | None = None

    def has(self, role: str) -> bool:
        """Return whether it is above the threshold of a role."""
        return role in self.scores and self.scores[role].state == "over"


class ModuleRoles(Record):
    """The heads of an attention module, and the groups of ids that share a KV head."""

    path: str
    kind: str
    heads: tuple[HeadRoles, ...]
    kv_groups: tuple[tuple[Count, ...], ...] = ()


class RoleHead(Record):
    """A head: the path of its attention module, and its id."""

    path: str
    head: Count


class RoleChange(Record):
    """A role in the original and in the cut model.

    Attributes:
        kept: Heads above the threshold in both.
        lost: Heads that were above it and are gone, or no longer surely above it.
        moved: Heads above it now only.
        is_lost: True if the original had heads with the role, and none is left.
    """

    kept: tuple[RoleHead, ...]
    lost: tuple[RoleHead, ...]
    moved: tuple[RoleHead, ...]
    is_lost: bool


class SetEffect(Record):
    """The rise with all heads of a role set to their means.

    Attributes:
        heads: Number of heads.
        rise: Without them.
        random: Per draw, in nats, without an equal number of random heads of the same layers; empty
            where these layers have no others.
    """

    heads: Count
    rise: Rise
    random: tuple[float, ...]


class RolesRecord(Record):
    """The roles of a model's heads.

    Attributes:
        created: UTC time.
        versions: Of headprune, torch and transformers.
        model: The model.
        data: Source of the text.
        data_sha256: Digest of its files; None for data of the hub.
        trees_sha256: Digest of the treebank; None without one.
        settings: Settings of the measurement.
        tokens: Number of tokens read.
        roles: Every measured role.
        modules: The attention modules, first layer first.
        sets: By role, the effect of its heads together; empty without ablation.
        against: The original that it was compared with.
        original: Roles of its heads; empty without one.
        changes: By role, its change; empty without an original.
    """

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    model: ModelIdentity
    data: DataConfig
    data_sha256: Digest | None
    trees_sha256: Digest | None = None
    settings: RolesConfig
    tokens: Count
    roles: Annotated[dict[str, RoleFacts], Field(min_length=1)]
    modules: Annotated[tuple[ModuleRoles, ...], Field(min_length=1)]
    sets: dict[str, SetEffect] = Field({})
    against: ModelIdentity | None = None
    original: tuple[ModuleRoles, ...] = ()
    changes: dict[str, RoleChange] = Field({})

    def heads(self, role: str) -> set[tuple[str, int]]:
        """Return paths and ids of the heads above the threshold of a role."""
        return {(m.path, head.head) for m in self.modules for head in m.heads if head.has(role)}


def read_roles(place: Path, model: ModelIdentity | None = None) -> RolesRecord:
    """Read the record that ``headprune roles`` wrote.

    Args:
        place: The file, or its folder.
        model: The model that it must be of; None for any.

    Raises:
        CheckpointError: If there is no record, or a damaged one.
        PlanError: If it is of another model.
    """
    path = place / ROLES_FILE if place.is_dir() else place
    if not path.is_file():
        raise CheckpointError(f"There is no '{path}'; headprune roles writes one.")
    record = read_as(RolesRecord, path)
    if model is not None:
        instead = "Measure the roles of this model."
        record.model.refuse_other(model, f"The roles in '{place}'", instead)
    return record
