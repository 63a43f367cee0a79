"""What a command is: its options, said once, and what it does with them.

From one declaration come the command line, the settings of ``--config``, the step of a recipe, the
function in ``headprune`` and the page of the reference.
"""

from headprune.declaration.command import (
    COMMANDS,
    Chapter,
    Command,
    Context,
    InRecipe,
    Made,
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
    option,
    takes_several,
    warn_of_old_names,
)

__all__ = [
    "COMMANDS",
    "Appearance",
    "Chapter",
    "Choice",
    "Command",
    "Context",
    "Door",
    "InRecipe",
    "Made",
    "Options",
    "Panel",
    "Slot",
    "appearance",
    "build",
    "declare",
    "flags",
    "option",
    "retold",
    "takes_several",
    "warn_of_old_names",
]
