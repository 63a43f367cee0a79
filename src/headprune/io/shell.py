"""Command lines to be printed, which do what they say when they are pasted."""

from __future__ import annotations

import shlex
from enum import Enum


def command(name: str, *arguments: object, **options: object) -> str:
    """A command of headprune, quoted as a shell needs it.

    Args:
        name: The command.
        *arguments: Its arguments.
        **options: Its options, named as in Python: True stands for a flag, a tuple for an option
            that is repeated; one that is None or False is left out.
    """
    words = ["headprune", name, *map(str, arguments)]
    for option, value in options.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is None or each is False:
                continue
            words.append(f"--{option.replace('_', '-')}")
            if each is not True:
                words.append(str(each.value if isinstance(each, Enum) else each))
    return shlex.join(words)
