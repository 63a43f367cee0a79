"""Records of a result: the change, the remaining heads, the proof.

They stand in ``config.headprune`` and headprune.json, and are checked as these are read.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from headprune.runtime import MANIFEST
from headprune.runtime.modeling_headprune import check_heads, kv_owners, layout_entry
from headprune.schemas.values import Count, Difference, Digest, Finite, Record


class Window(Record):
    """The view of window heads: the first tokens, and the latest with the current one.

    Attributes:
        size: Latest tokens.
        sinks: First tokens; the scores that a softmax must spend somewhere go there (Xiao et al.
            2023, arXiv 2309.17453).
    """

    size: Annotated[int, Field(ge=1, strict=True)]
    sinks: Count = 4

    def __str__(self) -> str:
        first = f" and the first {self.sinks}" if self.sinks else ""
        return f"the latest {self.size:,} tokens{first}"


class Heads(Record):
    """The remaining heads of one attention module.

    Attributes:
        query_heads: Ids of its query heads, in order; ids are those of the model before any cut.
        kv_heads: Ids of its KV heads.
        group_sizes: Query heads of every KV head; None where these are equal.
        window_heads: How many of the last KV heads see a window only; None for none.
    """

    query_heads: tuple[Count, ...]
    kv_heads: tuple[Count, ...]
    group_sizes: tuple[Count, ...] | None = None
    window_heads: Count | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Heads:
        check_heads(self.as_json())
        return self

    @property
    def near(self) -> tuple[int, ...]:
        """Ids of the KV heads that see a window only."""
        return self.kv_heads[len(self.kv_heads) - (self.window_heads or 0) :]

    @property
    def groups(self) -> tuple[int, ...]:
        """Query heads of every KV head."""
        count = len(self.kv_heads)
        equal = (len(self.query_heads) // max(1, count),) * count
        return equal if self.group_sizes is None else self.group_sizes

    def queries(self, kv_heads: Collection[int]) -> set[int]:
        """Return the ids of the query heads of some KV heads."""
        owners = (self.kv_heads[place] for place in kv_owners(self.groups))
        pairs = zip(self.query_heads, owners, strict=False)
        return {query for query, owner in pairs if owner in kv_heads}

    @model_serializer
    def as_json(self) -> dict[str, Any]:
        """Return the entry of the layout."""
        entry = layout_entry(self.query_heads, self.kv_heads, (), self.window_heads or 0)
        return entry if self.group_sizes is None else {**entry, "group_sizes": [*self.group_sizes]}


class Description(Record):
    """``config.headprune`` of an uneven model.

    Attributes:
        schema_version: The latest that the runtime reads.
        family: The row of the model's family, as the runtime takes it.
        layout: Per attention module, the remaining heads.
        window: What window heads see; None without any.
    """

    schema_version: Literal[1]
    family: dict[str, Any]
    layout: dict[str, Heads]
    window: Window | None = None


class Evidence(Record):
    """The evidence of a choice of heads.

    Attributes:
        kind: "gates", "scores" or "plan".
        id: Its id.
        criterion: The criterion of scores.
        keep: The requested fraction or count of heads; None where gates or a plan decide.
        seed: Seed of the scores or the gates.
    """

    kind: Literal["gates", "scores", "plan"]
    id: Digest
    criterion: str | None = None
    keep: Annotated[int, Field(strict=True)] | Finite | None = None
    seed: Count | None = None


class RefitWorth(Record):
    """Distance of a cut model to the original on sequences that nothing was fitted to.

    Attributes:
        measure: Its name; lower is nearer.
        tokens: Tokens of the sequences.
        without: With W_O as it was.
        refitted: With W_O refitted.
    """

    measure: str
    tokens: Count
    without: Finite
    refitted: Finite


class Pruning(Record):
    """Heads were removed.

    Attributes:
        evidence: The evidence of the choice.
        trained_weights: True if the gates came with weights, trained or refitted.
        refit_left_out: Worth of a refit of W_O, left out as it did not help.
    """

    kind: Literal["pruning"] = "pruning"
    evidence: Evidence
    trained_weights: bool
    refit_left_out: RefitWorth | None = None


class KvWay(Record):
    """The way of one attention module to its number of KV heads.

    Attributes:
        way: The way.
        cost: Its expected cost: the squared error of the attention's output, weighted
            with the curvature of the loss.
        others: Expected costs of the other measured ways.
    """

    way: str
    cost: Finite
    others: dict[str, Finite]


class Merging(Record):
    """KV heads were merged.

    Attributes:
        merge: Name of the merge.
        grouping: Name of the grouping of heads.
        calibration_tokens: Tokens of the calibration; 0 without one.
        sharpness: Factor of scores on shared keys, chosen on held-out text.
        seed: Random seed.
        ways: Per module path, the way under a budget; None where none was weighed.
    """

    kind: Literal["merging"] = "merging"
    merge: str
    grouping: str
    calibration_tokens: Count
    sharpness: float = 1.0
    seed: Count
    ways: dict[str, KvWay] | None = None


class Windowing(Record):
    """KV heads got a window.

    Attributes:
        evidence: The evidence of the choice.
        window: Their view.
        heads: Their number.
    """

    kind: Literal["windowing"] = "windowing"
    evidence: Evidence
    window: Window
    heads: Count


class Healing(Record):
    """Weights were trained to match another model.

    Attributes:
        teacher: The folder or hub id of that model.
        teacher_id: Its id; None where its files are not at hand.
        steps: Optimiser steps.
        before: Loss of the objective on held-out text, before.
        after: The same, of the weights of the result.
        own_share: Weight of the model's own loss in it; the divergence from the teacher has the
            rest.
        taken_after: Step of the weights in the result; 0 for the initial ones.
        seed: Seed of the order of the data.
        optimizer: Name of the optimiser.
        objective: Name of the loss.
        learning_rate: The highest.
        conversion: Changes of the export that it began with, as of convert-mla, a sentence each.
        sink_logits: Query heads that got a sink logit, which makes it a granite_swa.
    """

    kind: Literal["healing"] = "healing"
    teacher: str
    teacher_id: Digest | None = None
    steps: Count
    before: Finite
    after: Finite
    own_share: Finite
    taken_after: Count
    seed: Count
    optimizer: str
    objective: str
    learning_rate: Finite
    conversion: tuple[str, ...] = ()
    sink_logits: Count = 0


class Migration(Record):
    """A folder of transformers 4 was rewritten; no weight and no head changed."""

    kind: Literal["migration"] = "migration"


Done = Annotated[Pruning | Merging | Windowing | Healing | Migration, Field(discriminator="kind")]


class Refit(Record):
    """W_O was fitted anew, to make up for the removed heads.

    Attributes:
        data: Source of the text.
        tokens: Number of tokens used.
        modules: Number of attention modules with a fitted W_O.
        error_before: Mean squared error of their outputs with the old W_O, relative to the goal of
            the refit (see ``surgery.refit``).
        error_after: The same, with the new one.
        seed: Seed of the sample.
        held_out: Its worth on other text; None where the text had no more sequences.
    """

    data: str
    tokens: Count
    modules: Count
    error_before: Finite
    error_after: Finite
    seed: Count
    held_out: RefitWorth | None = None


class Contender(Record):
    """A measured candidate.

    Attributes:
        name: Its name.
        chosen_by: Its nearness to the original on the half of the held-out text that chooses;
            the original itself has 1.
        held_out: The same on the other half, of the original and the chosen one alone.
        by_text: The same, for each of the texts.
        passage_words: Share of the words that the original needs the passage for, on the half
            that chooses; None where there are too few.
        held_out_words: The same on the other half, of the original and the chosen one alone.
        far_nats: Loss of answers far back in a context beyond the original's, in nats, on the half
            that chooses; None without a context.
        held_out_far_nats: The same on the other half, of the original and the chosen one alone.
        parameters: Its parameters.
        kv_cache_bytes: Its KV cache of ``kv_cache_tokens``; 0 where it generates nothing.
        query_heads: Its query heads.
        kv_heads: Its KV heads.
        seconds: Time of its making, with all it was the first to need, such as scores.
    """

    name: str
    chosen_by: Finite
    held_out: Finite | None = None
    by_text: dict[str, Finite] = Field({})
    passage_words: Finite | None = None
    held_out_words: Finite | None = None
    far_nats: Finite | None = None
    held_out_far_nats: Finite | None = None
    parameters: Count
    kv_cache_bytes: Count
    query_heads: Count
    kv_heads: Count
    seconds: Difference


class ModelChoice(Record):
    """The choice of a result among candidates.

    Attributes:
        goal: The size to reach.
        measure: Name of the nearness.
        higher_is_better: Its direction.
        held_out_tokens: Tokens of both halves.
        passage_words: Passage words of the half that chooses, and of the other.
        kv_cache_tokens: The context of KV caches: 1, or with windows up to 8,192.
        original: The model before.
        contenders: The candidates, the best by the choosing half first; this result is
            the first of them.
        left_out: Candidates that are not among them, with the reason.
    """

    goal: str
    measure: str
    higher_is_better: bool
    held_out_tokens: Count
    passage_words: tuple[Count, Count] = (0, 0)
    kv_cache_tokens: Count = 1
    original: Contender
    contenders: Annotated[tuple[Contender, ...], Field(min_length=1)]
    left_out: dict[str, str] = Field({})

    @property
    def chosen(self) -> Contender:
        """The chosen candidate."""
        return self.contenders[0]


class Recorded(BaseModel):
    """The part of headprune.json that loading needs; the rest is for ``schemas.manifest``.

    Attributes:
        id: Id of the result.
        files: SHA-256 of every other file of the folder, but for the model card.
        layout: Per attention module, the remaining heads.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    id: Digest
    files: dict[str, Digest]
    layout: dict[str, Heads]

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or name == MANIFEST:
                raise ValueError(f"'{name}' is no file that it can vouch for")
        return files
