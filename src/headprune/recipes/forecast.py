"""headprune run --dry-run: which steps would run, and about what they would take."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from headprune.estimates import Estimate
from headprune.recipes.needs import Needs, needs_of
from headprune.recipes.recipe import Recipe, options_of
from headprune.recipes.run import UNKNOWN, digest_of_model, look, open_run
from headprune.recipes.sizes import sizes_of


@dataclass(frozen=True)
class StepForecast:
    """What is ahead of a step.

    Attributes:
        name: The step.
        cached: Whether its output is there already.
        why: Why it has to run.
        estimate: What it would take.
        needs: Where, and in what memory.
    """

    name: str
    cached: bool
    why: str
    estimate: Estimate
    needs: Needs


@dataclass(frozen=True)
class Forecast:
    """What is ahead of a recipe.

    Attributes:
        steps: Its steps, in order.
        free_bytes: Free disk space where the output would lie.
        rule: What the estimates stand on.
    """

    steps: tuple[StepForecast, ...]
    free_bytes: int
    rule: str

    @property
    def ahead(self) -> list[Estimate]:
        """The estimates of the steps that would run."""
        return [step.estimate for step in self.steps if not step.cached]

    @property
    def seconds(self) -> float | None:
        """Time of all steps that would run."""
        times = [estimate.seconds for estimate in self.ahead]
        return None if None in times else math.fsum(t for t in times if t is not None)

    @property
    def disk_bytes(self) -> int:
        """Disk of all steps that would run."""
        return sum(estimate.disk_bytes for estimate in self.ahead)

    @property
    def warnings(self) -> list[str]:
        """Of steps that do not fit into memory."""
        ahead = [step for step in self.steps if not step.cached and step.needs.short]
        return [f"Step '{step.name}' {step.needs.short}" for step in ahead]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        total = {"seconds": self.seconds, "disk_bytes": self.disk_bytes}
        return {"schema_version": 1, **asdict(self), "total": total}


def forecast(recipe: Recipe, trust_remote_code: bool = False) -> Forecast:
    """Says which steps of a recipe would run, and about what they would take; writes nothing.

    Args:
        recipe: The recipe.
        trust_remote_code: Allow code that comes with the model, as for ``run``.

    Raises:
        RecipeError: If the recipe's model needs code that is not allowed.
        HeadpruneError: If there is no such model, or the output folder belongs to another recipe.
    """
    recipe = recipe.trusted(trust_remote_code)
    record, sizes = open_run(recipe), sizes_of(recipe)
    original, steps = digest_of_model(recipe), []
    for name, step in recipe.steps.items():
        outlook = look(recipe, name, record, original)
        waits = next((s for s, d in outlook.inputs.items() if d == UNKNOWN), None)
        why = outlook.why
        if waits is not None:
            why = f"takes the {waits} of '{getattr(step, waits)}'"
        elif UNKNOWN in outlook.inputs.get("steps", {}).values():
            why = "takes all of the others"
        if not outlook.cached:  # so that what stands on it counts as unknown
            left = {n: s for n, s in record.steps.items() if n != name}
            record = record.model_copy(update={"steps": left})
        options = options_of(recipe, name, recipe.output / name)
        estimate = step.kind().estimate(options, sizes)
        layered = estimate.layers_bytes is not None and "placement" in type(options).model_fields
        needs = needs_of(estimate, layered)
        steps.append(StepForecast(name, outlook.cached, why, estimate, needs))
    above = next(p for p in recipe.output.absolute().parents if p.exists())
    return Forecast(tuple(steps), shutil.disk_usage(above).free, sizes.rule())
