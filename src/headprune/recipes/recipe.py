"""A recipe: the whole job as named steps, in order.

    model: HuggingFaceTB/SmolLM2-135M      a folder or a hub id
    output: smaller                        one folder per step, the recipe and the versions
    data:                                  named sources; steps refer to them
      train: text.txt
      test: {source: wikitext:wikitext-2-raw-v1, split: test}
    steps:
      train-gates: {target_heads: 0.75}    a step's name says which it is, and its settings are
      prune:                               those of the command of that name;
      again: {step: evaluate}              or ``step`` says which it is

A step works on the model that the step before it made, and takes the evidence that was made for
that model; ``model``, ``gates``, ``plan`` and so on name another step, ``original`` the recipe's
own model. A command that can be a step says so in its own file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
)

from headprune.config import DataConfig, Place, domain_name, possible_place
from headprune.declaration import (
    Door,
    Options,
    Slot,
    build,
    takes_several,
)
from headprune.errors import RecipeError
from headprune.recipes.steps import LOADING, ORIGINAL, Step


def _possible(path: Path) -> Path:
    possible_place(str(path))
    try:
        return path.expanduser()  # as no shell does in a file
    except RuntimeError:
        raise ValueError(f"there is no home folder for '{path}'") from None


class Recipe(Options):
    """The whole job.

    Attributes:
        name: What tells its output from that of another recipe; by default the file's name.
        model: The original: a folder or a hub id.
        output: Folder for everything that it makes.
        data: Named sources of examples.
        trust_remote_code: The model needs code that comes with it. That allows none: whoever runs
            the recipe does, with --trust-remote-code.
        assume_supported: Go on where the model's config has settings that are not in the table.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        steps: The steps by name, in order.
    """

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[Place, Field(min_length=1)]
    output: Annotated[Path, AfterValidator(_possible)]
    data: dict[str, DataConfig] = Field(default_factory=dict)
    trust_remote_code: bool = False
    assume_supported: bool = False
    drop_unexpected: bool = False
    steps: dict[str, SerializeAsAny[Step]]

    def trusted(self, trust_remote_code: bool) -> Recipe:
        """The recipe as it is run by one who allows code that comes with the model, or does not.

        Raises:
            RecipeError: If the model needs it, and it is not allowed.
        """
        if self.trust_remote_code and not trust_remote_code:
            raise RecipeError(
                "The recipe asks to run code that comes with its model (trust_remote_code: true), "
                "which a file cannot allow. If you trust that code, give --trust-remote-code "
                "(in Python: run(recipe, trust_remote_code=True))."
            )
        return self.model_copy(update={"trust_remote_code": trust_remote_code})

    def as_yaml(self) -> str:
        """The recipe with all its settings; it runs like the one that was read."""
        # but for those whose default evidence decides, or the command that reads the data
        left_open: Any = {
            "data": {name: {"split"} - data.model_fields_set for name, data in self.data.items()},
            "steps": {name: step.left_open() for name, step in self.steps.items()},
        }
        return yaml.safe_dump(self.model_dump(mode="json", exclude=left_open), sort_keys=False)


def options_of(recipe: Recipe, name: str, output: Path, resume: bool = False) -> Options:
    """The options of a step's command.

    Args:
        recipe: The recipe.
        name: The step.
        output: Folder that it writes.
        resume: Whether it goes on from what lies there.

    Raises:
        HeadpruneError: If they do not go together.
    """
    step = recipe.steps[name]
    options, kind = step.command.options, step.kind()
    settings = step.settings()  # those that were given, as some commands tell that from defaults
    values = {name: settings[name] for name in settings if name in step.model_fields_set}
    for slot, input_kind in step.slots().items():
        source = getattr(step, slot)
        if source and input_kind is Slot.DATA:
            # what was given of each, so that for the rest the command's own defaults hold
            read = {
                one: recipe.data[one].model_dump(exclude_unset=True) for one in step.sources(slot)
            }
            if takes_several(options.model_fields[slot]):
                values[slot] = [{"name": domain_name(one), **data} for one, data in read.items()]
            else:
                (data,) = read.values()
                values[slot] = data.pop("source")
                if slot != "trees":  # which have no columns, and are read beside a text
                    values |= data
        elif source:
            values[slot] = place_of(recipe, source)
    if kind.about_all is not None:
        values[kind.about_all] = (recipe.output,)
    given = {
        **{option: output / file for option, file in kind.outputs.items()},
        **{name: getattr(recipe, name) for name in LOADING},
        "overwrite": True,
        "resume": resume,
    }
    values |= {name: value for name, value in given.items() if name in options.model_fields}
    made: Options = build(options, values, Door.KEY)
    return made


def place_of(recipe: Recipe, source: str) -> str:
    """Where a model, or evidence, lies that a step names."""
    step = recipe.steps.get(source)
    if step is not None:
        return str(recipe.output / source / step.kind().file)
    return recipe.model if source == ORIGINAL else source
