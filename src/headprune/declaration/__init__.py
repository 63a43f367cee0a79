"""What a command is: its options, said once, and what it does with them.

From one declaration come the command line, the settings of ``--config``, the step of a recipe, the
function in ``headprune`` and the page of the reference.
"""

from headprune.declaration.command import (
    COMMANDS,
    Allowed,
    Chapter,
    Command,
    Context,
    InRecipe,
    Made,
    MadeBy,
    declare,
    retold,
)
from headprune.declaration.options import (
    Appearance,
    Choice,
    Door,
    Options,
    Panel,
    Slot,
    appearance,
    build,
    flags,
    location,
    option,
    takes_several,
    warn_of_old_names,
)

__all__ = [
    "COMMANDS",
    "Allowed",
    "Appearance",
    "Chapter",
    "Choice",
    "Command",
    "Context",
    "Door",
    "InRecipe",
    "Made",
    "MadeBy",
    "Options",
    "Panel",
    "Slot",
    "appearance",
    "build",
    "declare",
    "flags",
    "location",
    "option",
    "retold",
    "takes_several",
    "warn_of_old_names",
]
