"""What a command is: its options, said once, and what it does with them.

From one declaration come the command line, the settings of ``--config``, the function in
``headprune`` and the page of the reference.
"""

from headprune.declaration.command import (
    COMMANDS,
    Chapter,
    Command,
    declare,
    retold,
)
from headprune.declaration.options import (
    Appearance,
    Door,
    Options,
    Panel,
    appearance,
    build,
    flags,
    option,
)

__all__ = [
    "COMMANDS",
    "Appearance",
    "Chapter",
    "Command",
    "Door",
    "Options",
    "Panel",
    "appearance",
    "build",
    "declare",
    "flags",
    "option",
    "retold",
]
