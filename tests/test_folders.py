"""Files of a folder are known by their hashes, several of which are made at once."""

import hashlib
import threading

import pytest

from headprune.io import folders
from headprune.io.folders import hashes_of, sha256_of


def test_hashes_of_several_files(tmp_path):
    contents = {f"{n}.bin": bytes([n]) * (n << 20) for n in range(6)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = hashes_of(tmp_path, contents)
    assert found == {n: hashlib.sha256(c).hexdigest() for n, c in contents.items()}
    assert list(found) == list(contents)
    (tmp_path / "5.bin").write_bytes(contents["5.bin"][:-1] + b"x")
    changed = hashes_of(tmp_path, contents)
    assert [name for name in contents if changed[name] != found[name]] == ["5.bin"]
    with pytest.raises(FileNotFoundError):
        hashes_of(tmp_path, ["0.bin", "gone.bin"])


def test_an_interrupt_waits_for_no_file(tmp_path, monkeypatch):
    stopped = []
    begun = threading.Event()

    def hashed(file, stop):
        if file.name == "first":
            begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        stopped.append(stop.wait(60))
        return ""

    monkeypatch.setattr(folders, "sha256_of", hashed)
    with pytest.raises(KeyboardInterrupt):
        hashes_of(tmp_path, ["first", "second"])
    assert stopped == [True]


def test_a_file_is_read_no_further_when_it_is_to_stop(tmp_path):
    file, stop = tmp_path / "file", threading.Event()
    file.write_bytes(b"x")
    assert sha256_of(file, stop) == sha256_of(file)
    stop.set()
    assert sha256_of(file, stop) != sha256_of(file)
