"""roles.json: what the heads of a model do, as ``headprune roles`` saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headprune.config import DataConfig, RolesConfig
from headprune.errors import CheckpointError, PlanError
from headprune.io.parsing import read_as
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.values import Count, Digest

ROLES_FILE = "roles.json"
State = Literal["over", "nearly", "under"]


class RoleFacts(BaseModel):
    """A role as it was measured.

    Attributes:
        definition: What its score is.
        line: The score from which on a head has it.
        sign: Its letter in the table.
        source: Where definition and line are taken from.
        on: The input: the text, random tokens that come twice, or parsed sentences.
        control: What scores are held against.
        attribute: Whether it is told beside the role.
        beyond: Whether the line is on how far a score is over its control.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    definition: str
    line: float
    sign: str
    source: str
    on: str
    control: str | None
    attribute: bool
    beyond: bool = False


class RoleScore(BaseModel):
    """The score of a head for a role.

    Attributes:
        score: On all sequences.
        low: Lower end of its interval.
        high: Upper end.
        control: The score of the control; None where the role has none.
        state: over: the interval is over the line, and the control under it. nearly: the interval
            straddles the line. under: everything else.
        variant: The offset, the kind of token, or the relation and direction, with that score.
        others: Further relations over their line, and their scores.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: float
    low: float
    high: float
    control: float | None
    state: State
    variant: str = ""
    others: dict[str, float] = {}


class Rise(BaseModel):
    """By how much the loss rises.

    Attributes:
        nats: On all sequences; below 0 where it falls.
        low: Lower end of its interval.
        high: Upper end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nats: float
    low: float
    high: float


class HeadEffect(BaseModel):
    """What the loss says of a head.

    Attributes:
        zero: With its output set to zero, as a cut does.
        mean: With its output set to its mean over the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    zero: Rise
    mean: Rise


class HeadRoles(BaseModel):
    """What a head does.

    Attributes:
        head: Its id: its number in the original model.
        role: The role whose line it passes by the largest factor; None if there is none.
        nearly: Roles whose line its interval straddles.
        attributes: What else is over its line.
        scores: By role; those that the module cannot have are left out.
        effect: What the loss says of it; None where that was not asked for.
        contribution: Norm of what it writes, as a share of that of what its layer reads; None where
            that is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: Count
    role: str | None
    nearly: tuple[str, ...]
    attributes: tuple[str, ...]
    scores: dict[str, RoleScore]
    effect: HeadEffect | None = None
    contribution: float | None = None

    def has(self, role: str) -> bool:
        """Whether it is over the line of a role."""
        return role in self.scores and self.scores[role].state == "over"


class ModuleRoles(BaseModel):
    """The heads of an attention module.

    Attributes:
        path: Its path.
        kind: Its kind.
        heads: Those that it has.
        kv_groups: Of every KV head that several of them share, their ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    kind: str
    heads: tuple[HeadRoles, ...]
    kv_groups: tuple[tuple[Count, ...], ...] = ()


class RoleHead(BaseModel):
    """A head that a change is about.

    Attributes:
        path: Path of its attention module.
        head: Its id.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    head: Count


class RoleChange(BaseModel):
    """A role in the original and now.

    Attributes:
        kept: Heads that were over the line and are.
        lost: Heads that were over it and are gone, or no longer surely over it.
        moved: Heads that were under it and are over it now.
        is_lost: Whether the original had heads with the role, and none is left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kept: tuple[RoleHead, ...]
    lost: tuple[RoleHead, ...]
    moved: tuple[RoleHead, ...]
    is_lost: bool


class SetEffect(BaseModel):
    """What the loss says of all heads with a role at once, set to their means.

    Attributes:
        heads: How many they are.
        rise: Of the loss without them.
        random: Without as many random heads of the same layers, draw by draw, in nats; empty where
            these layers have no others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: Count
    rise: Rise
    random: tuple[float, ...]


class RolesRecord(BaseModel):
    """What the heads of a model do.

    Attributes:
        created: UTC time.
        versions: Of headprune, torch and transformers.
        model: The model.
        data: Where the text came from.
        data_sha256: Digest of these files; None of data of the hub.
        trees_sha256: Digest of the file of trees; None without one.
        settings: How it was measured.
        tokens: Tokens of the text that were read.
        roles: Every role that was measured.
        modules: The attention modules, first layer first.
        sets: By role, what the loss says of its heads together; empty where it was not asked.
        against: The original that it was compared with.
        original: What its heads do; empty without one.
        changes: By role, what became of it; empty without an original.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    sets: dict[str, SetEffect] = {}
    against: ModelIdentity | None = None
    original: tuple[ModuleRoles, ...] = ()
    changes: dict[str, RoleChange] = {}

    def heads(self, role: str) -> set[tuple[str, int]]:
        """Paths and ids of the heads that are over the line of a role."""
        return {
            (module.path, head.head)
            for module in self.modules
            for head in module.heads
            if head.has(role)
        }


def read_roles(place: Path, model: ModelIdentity | None = None) -> RolesRecord:
    """Reads the record that ``headprune roles`` wrote.

    Args:
        place: The file, or the folder that it lies in.
        model: The model that it must be of; None for any.

    Raises:
        CheckpointError: If there is no record, or a damaged one.
        PlanError: If it is of another model.
    """
    path = place / ROLES_FILE if place.is_dir() else place
    if not path.is_file():
        raise CheckpointError(f"There is no '{path}'; headprune roles writes one.")
    record = read_as(RolesRecord, path)
    if model is not None and record.model.fingerprint != model.fingerprint:
        raise PlanError(
            f"The roles in '{place}' are of '{record.model.name}' (fingerprint "
            f"{record.model.fingerprint}), not of '{model.name}' (fingerprint "
            f"{model.fingerprint}). Measure the roles of this model."
        )
    return record
