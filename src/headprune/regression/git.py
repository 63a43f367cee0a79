"""Which commit a baseline was made from."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GitState:
    """Where a repository stands.

    Attributes:
        commit: The commit that is checked out.
        changed: Tracked files that differ from it.
    """

    commit: str
    changed: tuple[str, ...]


def git_state(besides: Path) -> GitState | None:
    """The state of the repository around a file, which itself may differ.

    Returns:
        None outside a repository, before its first commit, or without git.
    """
    folder = next(p for p in besides.absolute().parents if p.is_dir())

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        others = ("--", ":/", f":(exclude,literal){besides.absolute()}")
        lines = git("status", "--porcelain", "--untracked-files=no", *others).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return GitState(commit, tuple(line[3:] for line in lines))
