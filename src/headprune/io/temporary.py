"""A temporary file that cannot be left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary_file() -> tuple[int, Path]:
    """Return the descriptor of a file that has no name, and a path by which this process opens it.

    Its space is free once the descriptor is closed, by a kill too.

    Raises:
        OSError: If it cannot be made.
    """
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    return descriptor, Path(f"/dev/fd/{descriptor}")
