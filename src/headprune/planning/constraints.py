"""Shapes of a plan for the engines of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from headprune.config import LayoutOption, Target
from headprune.errors import PlanError
from headprune.planning.targets import (
    EMPTY,
    KV_COUNTS,
    QUERY_COUNTS,
    RAGGED,
    SHAPES,
    TARGETS,
    shapes_of,
)
from headprune.schemas.plan import Shape
from headprune.surgery.cut import Cut, result_shape


@dataclass(frozen=True)
class Constraints:
    """Shapes of a plan.

    Attributes:
        net: The model.
        layout: The layout that was asked for.
        targets: Where the result is to run.
        shapes: What every target holds.
    """

    net: PreTrainedModel
    layout: LayoutOption = LayoutOption.PER_LAYER
    targets: tuple[Target, ...] = ()
    shapes: frozenset[str] = frozenset(SHAPES)

    @property
    def free(self) -> Constraints:
        """The same for no engine."""
        return Constraints(self.net, self.layout)

    @property
    def even(self) -> bool:
        """True if every layer keeps the same heads."""
        return self.layout is LayoutOption.UNIFORM or QUERY_COUNTS not in self.shapes

    @property
    def even_kv_heads(self) -> bool:
        """True if every layer keeps the same number of KV heads, where no query heads go."""
        return self.layout is LayoutOption.UNIFORM or KV_COUNTS not in self.shapes

    @property
    def said(self) -> str:
        """The options behind them."""
        asked = [f"--for {target.value}" for target in self.targets]
        return " ".join(asked) or f"--layout {self.layout.value}"

    def allows(self, layer: int, kept: int, present: int) -> bool:
        """Return whether a layer may keep the queries of some of its KV heads."""
        if not kept:
            return EMPTY in self.shapes and not self.keeps_a_head(layer)
        return kept == present or QUERY_COUNTS in self.shapes

    def keeps_a_head(self, layer: int) -> bool:
        """True if a layer keeps a head, as an engine would give it a zero head otherwise."""
        filled = {TARGETS[target].zero_heads for target in self.targets}
        return "every" in filled or ("first" in filled and layer == 0)

    def check(self, cuts: Sequence[Cut]) -> None:
        """Refuses cuts whose result is not as it was asked for.

        Raises:
            PlanError: Naming what cannot hold it, and what would do.
        """
        plain = result_shape(cuts, self.net.config) is Shape.NATIVE
        found = shapes_of([cut.group_sizes for cut in cuts], plain)
        for target in self.targets:
            engine = TARGETS[target]
            unheld = [s for s in SHAPES if s in found and s not in engine.holds(self.net)]
            if unheld:
                why = engine.limits(self.net).get(unheld[0], "")
                raise PlanError(
                    f"--for {target.value}: the plan has {unheld[0]}, which {target.value} cannot "
                    f"hold{': ' + why.rstrip('.') if why else ''}. {_instead(self.net, found)}"
                )
        if self.layout is LayoutOption.UNIFORM and not plain:
            raise PlanError(
                "--layout uniform: this plan does not fit a plain config, which needs the same "
                "counts in every layer and a family that can hold them ('headprune families'; "
                "Llama's wants a number of heads that divides hidden_size). With --gates or "
                "--scores, headprune chooses such a plan; leave out --layout for the runtime."
            )


def constraints_of(
    net: PreTrainedModel,
    layout: LayoutOption,
    targets: Sequence[Target],
) -> Constraints:
    """Return the constraints of targets and a layout.

    Raises:
        PlanError: If one takes no such model, or not the layout.
    """
    shapes = frozenset(SHAPES)
    for target in targets:
        engine = TARGETS[target]
        reason = engine.refusal(net)
        if reason is not None:
            raise PlanError(f"--for {target.value}: {reason} {_others(net)}")
        held = engine.holds(net)
        if layout is LayoutOption.RAGGED and RAGGED not in held:
            raise PlanError(
                f"--for {target.value} holds no {RAGGED}, which --layout ragged asks for. Leave "
                "out one of the two."
            )
        shapes &= held
    return Constraints(net, layout, tuple(targets), shapes)


def _others(net: PreTrainedModel) -> str:
    held = [t.value for t, engine in TARGETS.items() if engine.refusal(net) is None]
    return f"Of this model there are plans for {', '.join(held)}."


def _instead(net: PreTrainedModel, found: frozenset[str]) -> str:
    chosen = "With --gates or --scores, headprune chooses a plan that fits"
    held = [t.value for t, engine in TARGETS.items() if found <= engine.holds(net)]
    return f"{chosen}; --for {' and '.join(held)} would take this one." if held else f"{chosen}."
