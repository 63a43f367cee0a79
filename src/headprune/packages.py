"""Packages that only some of the work needs."""

from __future__ import annotations

from importlib.util import find_spec

from headprune.errors import HeadpruneError


def refuse_missing(what: str, *modules: str) -> None:
    """Refuse work whose packages are not installed.

    Args:
        what: The option or the work that needs them.
        modules: Names of modules; their packages are called alike.

    Raises:
        HeadpruneError: Saying how to install them.
    """
    missing = [name.replace("_", "-") for name in modules if find_spec(name) is None]
    if missing:
        raise HeadpruneError(
            f"{what} needs {' and '.join(missing)}: pip install {' '.join(missing)}."
        )
