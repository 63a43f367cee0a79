"""Packages that only some of the work needs."""

from __future__ import annotations

from importlib.util import find_spec

from headprune.errors import HeadpruneError


def missing(*modules: str) -> list[str]:
    """Return the packages of missing modules; each has its module's name, with - for _."""
    return [name.replace("_", "-") for name in modules if find_spec(name) is None]


def refuse_missing(what: str, *modules: str) -> None:
    """Refuse work with missing packages.

    Args:
        what: The option or the work that needs them.
        modules: Names of modules, as for ``missing``.

    Raises:
        HeadpruneError: Saying how to install them.
    """
    absent = missing(*modules)
    if absent:
        raise HeadpruneError(
            f"{what} needs {' and '.join(absent)}: pip install {' '.join(absent)}."
        )
