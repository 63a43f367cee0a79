"""What a command is: its options, said once, and what it does with them.

From one declaration come the command line, the settings of ``--config``, the function in
``headprune`` and the page of the reference.
"""

from headprune.declaration.command import (
    COMMANDS,
    Allowed,
    Chapter,
    Command,
    Context,
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
    appearance,
    build,
    flags,
    option,
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
    "MadeBy",
    "Options",
    "Panel",
    "appearance",
    "build",
    "declare",
    "flags",
    "option",
    "retold",
    "warn_of_old_names",
]
