"""Temporary files leave nothing behind, however their process ends."""

import os
import tempfile

import pytest

from headprune.io.temporary import temporary_file


def test_a_temporary_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, path = temporary_file()
    os.pwrite(file, b"numbers", 0)
    assert path.read_bytes() == b"numbers"
    assert [*tmp_path.iterdir()] == []  # so a kill leaves nothing
    os.close(file)
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
