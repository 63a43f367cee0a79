"""Types are checked as the suite runs: shapes by jaxtyping, all else by beartype alone.

jaxtyping's import hook decorates every function. At each call its decorator binds the arguments and
remembers the sizes of axes, which takes longer than most functions; those whose signature names no
axes need none of it, but for modules with names that only mypy sees, which jaxtyping passes over.
Functions within functions are decorated whenever the outer one runs: those
with shapes are checked by what checked the first of them, the others by mypy.
"""

import dataclasses
import functools
import inspect
import re

import beartype
import jaxtyping

_KNOWN = {}
_AXES = re.compile(r"\b(Bool|Complex|Float|Inexact|Int|Num|Real|Shaped|UInt)\d*\[")
_with_shapes = jaxtyping.jaxtyped


def install(modules):
    """Has the functions of modules that are imported from now on checked."""
    jaxtyping.jaxtyped = _decorator  # which the hook asks for by name
    jaxtyping.install_import_hook(modules, f"{__name__}.checked")


def checked(function):
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


def _decorator(*, typechecker):
    return functools.partial(_decorated, typechecker)


def _decorated(typechecker, thing):
    function = thing.__init__ if dataclasses.is_dataclass(thing) else thing
    if not inspect.isfunction(function):
        return thing
    shapes = any(_AXES.search(str(hint)) for hint in function.__annotations__.values())
    if shapes or "TYPE_CHECKING" in function.__globals__:
        return _with_shapes(thing, typechecker=typechecker)
    if "<locals>" in function.__qualname__:
        return thing
    if function is thing:
        return beartype.beartype(function)
    thing.__init__ = beartype.beartype(function)
    return thing
