"""Where a command draws to that draws several figures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from headprune.errors import HeadpruneError
from headprune.registry import did_you_mean


@contextmanager
def claimed_figures(
    path: Path, names: Collection[str], overwrite: bool
) -> Iterator[dict[str, Path]]:
    """The file of every figure, claimed: the path as it is for one, with its name for several.

    Raises:
        HeadpruneError: If the suffix is none that can be drawn, or a file exists and must not be
            replaced.
    """
    from headprune.io.figures import SUFFIXES
    from headprune.io.outputs import claimed_files
    from headprune.io.ownership import FIGURE

    if path.suffix not in SUFFIXES:
        raise HeadpruneError(
            f"--figure {path}: give a file name that ends in {' or '.join(SUFFIXES)}."
            f"{did_you_mean(path.suffix, list(SUFFIXES))}"
        )
    parts = {name: re.sub(r"[^\w-]", "_", name) for name in names}
    files = {
        name: path if len(parts) == 1 else path.with_stem(f"{path.stem}-{part}")
        for name, part in parts.items()
    }
    with claimed_files(files.values(), FIGURE, overwrite):
        yield files
