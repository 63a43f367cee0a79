"""Packages that only some of the work needs."""

from __future__ import annotations

from importlib.util import find_spec

from headprune.errors import HeadpruneError


def missing(*modules: str) -> list[str]:
    """Return the packages that are not installed, of modules that are called alike."""
    return [name.replace("_", "-") for name in modules if find_spec(name) is None]


def refuse_missing(what: str, *modules: str) -> None:
    """Refuse work whose packages are not installed.

    Args:
        what: The option or the work that needs them.
        modules: Names of modules; their packages are called alike.

    Raises:
        HeadpruneError: Saying how to install them.
    """
    absent = missing(*modules)
    if absent:
        raise HeadpruneError(
            f"{what} needs {' and '.join(absent)}: pip install {' '.join(absent)}."
        )
