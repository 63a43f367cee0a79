"""Shapes of a plan for the engines of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from headprune.config import LayoutOption, Target
from headprune.errors import PlanError
from headprune.model.attention import family_of
from headprune.model.batch import is_remote
from headprune.planning.targets import (
    EMPTY,
    HEAD_WINDOWS,
    KV_COUNTS,
    LAYER_WINDOWS,
    NO,
    QUERY_COUNTS,
    RAGGED,
    SHAPES,
    TARGETS,
    shapes_of,
)
from headprune.schemas.plan import Shape
from headprune.surgery.cut import Cut, result_shape, window_of, windows_layers
from headprune.surgery.layer_windows import no_layer_windows


@dataclass(frozen=True)
class Constraints:
    """Shapes of a plan.

    Attributes:
        net: The model.
        layout: The requested layout.
        targets: Engines of the result.
        shapes: Shapes that every target holds.
    """

    net: PreTrainedModel
    layout: LayoutOption = LayoutOption.PER_LAYER
    targets: tuple[Target, ...] = ()
    shapes: frozenset[str] = frozenset(SHAPES)

    @property
    def even(self) -> bool:
        """True if every layer keeps the same heads."""
        return self.layout is LayoutOption.UNIFORM or QUERY_COUNTS not in self.shapes

    @property
    def even_kv_heads(self) -> bool:
        """True if every layer keeps the same number of KV heads, without a cut of query heads."""
        return self.layout is LayoutOption.UNIFORM or KV_COUNTS not in self.shapes

    @property
    def said(self) -> str:
        """The options behind them."""
        engines = [f"--for {target.value}" for target in self.targets]
        return " ".join(engines) or f"--layout {self.layout.value}"

    def allows(self, layer: int, kept: int, present: int) -> bool:
        """Return whether a layer may keep the queries of some of its KV heads."""
        if not kept:
            return not self.keeps_a_head(layer)
        return kept == present or QUERY_COUNTS in self.shapes

    def keeps_a_head(self, layer: int) -> bool:
        """Return whether a layer must keep a head: for an engine, or for other layers."""
        if EMPTY not in self.shapes or family_of(self.net.config).keeps_a_head:
            return True
        filled = {TARGETS[target].zero_heads for target in self.targets}
        return "every" in filled or ("first" in filled and layer == 0)

    def refuse_windows(self, size: int) -> None:
        """Refuse targets that hold no windows of whole layers of a size, before long work.

        Raises:
            PlanError: Naming the first.
        """
        for target in self.targets:
            why = no_layer_windows(self.net.config, size)
            why = TARGETS[target].limits(self.net).get(LAYER_WINDOWS, why)
            if TARGETS[target].cells[LAYER_WINDOWS] == NO:
                why = f"it holds no {LAYER_WINDOWS}."
            if why is not None:
                raise PlanError(f"--for {target.value}: {why}")

    def check(self, cuts: Sequence[Cut]) -> None:
        """Refuse cuts that a target or the layout does not hold.

        Raises:
            PlanError: Naming the target and others that would hold them.
        """
        plain = result_shape(cuts, self.net.config) is Shape.NATIVE
        windows = None if window_of(cuts) is None else HEAD_WINDOWS
        windows = LAYER_WINDOWS if windows_layers(cuts) else windows
        shapes = shapes_of([cut.group_sizes for cut in cuts], plain, windows)
        for target in self.targets:
            engine = TARGETS[target]
            if windows is LAYER_WINDOWS and not plain:
                size, _ = window_of(cuts) or (0, 0)
                why = no_layer_windows(self.net.config, size) or (
                    "windows of layers need all heads of the model, and the plan removes some."
                )
                raise PlanError(f"--for {target.value}: {why}")
            unheld = [s for s in SHAPES if s in shapes and s not in engine.holds(self.net)]
            if unheld:
                why = engine.limits(self.net).get(unheld[0], "")
                raise PlanError(
                    f"--for {target.value}: the plan has {unheld[0]}, which {target.value} cannot "
                    f"hold{': ' + why.rstrip('.') if why else ''}. {_instead(self.net, shapes)}"
                )
        if self.layout is LayoutOption.UNIFORM and not plain:
            raise PlanError(
                "--layout uniform: this plan does not fit a plain config. That needs the same "
                "counts in every layer, and a family that holds them ('headprune families'; for "
                "Llama, the number of heads divides hidden_size). With --gates or --scores, "
                "headprune chooses such a plan; leave out --layout for the runtime."
            )


def constraints_of(
    net: PreTrainedModel,
    layout: LayoutOption,
    targets: Sequence[Target],
    empty_layers: bool = True,
) -> Constraints:
    """Return the constraints of targets and a layout; ``empty_layers`` may lose all their heads.

    Raises:
        PlanError: If one takes no such model, or not the layout.
    """
    if is_remote(type(net.config)):  # the runtime knows classes of transformers alone
        layout = LayoutOption.UNIFORM
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
    return Constraints(net, layout, tuple(targets), shapes if empty_layers else shapes - {EMPTY})


def _others(net: PreTrainedModel) -> str:
    held = [t.value for t, engine in TARGETS.items() if engine.refusal(net) is None]
    return f"Of this model there are plans for {', '.join(held)}."


def _instead(net: PreTrainedModel, shapes: frozenset[str]) -> str:
    if shapes == {HEAD_WINDOWS}:
        return "Choose layers: score --form window --unit layer --sinks 0."
    chosen = "With --gates or --scores, headprune chooses a plan that fits"
    held = [t.value for t, engine in TARGETS.items() if shapes <= engine.holds(net)]
    return f"{chosen}; --for {' and '.join(held)} would take this one." if held else f"{chosen}."
