"""beartype for jaxtyping's import hook, without writing a check anew that it wrote before.

A function within a function is decorated whenever the outer one runs. jaxtyping then hands over
two new functions with the same parameters, annotations and defaults as before, whose bodies do
nothing: what checks the first ones checks all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import beartype

_KNOWN: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks its arguments and what it returns."""
    module, name = function.__module__, function.__qualname__
    if "<locals>" not in name:
        return beartype.beartype(function)
    kept = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
    key = (module, name, function.__code__, tuple(function.__annotations__.items()), kept)
    try:
        if key not in _KNOWN:
            _KNOWN[key] = beartype.beartype(function)
    except TypeError:  # a default that has no hash
        return beartype.beartype(function)
    return _KNOWN[key]
