"""What a killed run leaves of its temporary files goes with the next run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from headprune.io.temporary import temporary_file


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_is_open_stays_and_what_is_not_goes(tmp_path: Path) -> None:
    file, path = temporary_file()
    others = tmp_path / "headprune-notes.txt"
    others.write_text("no file of this kind")
    again, other = temporary_file()
    assert path.exists()
    os.close(file)  # as when its process was killed
    third, last = temporary_file()
    assert not path.exists()
    assert sorted(tmp_path.iterdir()) == sorted([other, last, others])
    os.close(again)
    os.close(third)


def test_no_link_is_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("a user's")
    link = tmp_path / "headprune-link.spool"
    link.symlink_to(kept)
    file, _ = temporary_file()
    os.close(file)
    assert kept.read_text() == "a user's"
    assert link.is_symlink()


def test_one_that_another_process_took_for_abandoned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkstemp, []

    def taken_once(*args: str) -> tuple[int, str]:
        file, name = make(*args)
        made.append(Path(name))
        if len(made) == 1:
            made[0].unlink()
        return file, name

    monkeypatch.setattr(tempfile, "mkstemp", taken_once)
    file, path = temporary_file()
    assert path == made[1]
    assert path.exists()
    os.close(file)
