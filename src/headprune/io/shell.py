"""Command lines to print, quoted so that they can be pasted."""

from __future__ import annotations

import shlex
from enum import Enum


def command(name: str, *arguments: object, **options: object) -> str:
    """Return a command of headprune, quoted for a shell.

    Args:
        name: The command.
        *arguments: Its arguments.
        **options: Its options by Python name: True for a flag, a tuple for a repeated option; None
            and False are left out.
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
