"""What the campaign itself must see; make campaign-short runs a few cases of each part."""

import signal
import sys
import time

import pytest

from tests.campaign.facts import facts
from tests.campaign.trap import Trap
from tests.campaign.watched import Outcome, Strike, flaw, watched

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are watched by Linux's own means"
)
SAID = """Traceback (most recent call last):
  File "/x/headprune/schemas/plan.py", line 7, in read
KeyError: 1
"""


@pytest.mark.parametrize(
    ("outcome", "seen"),
    [
        (Outcome(0, "fine", "", 1, 1), ""),
        (Outcome(2, "", "loading ...\nerror: There is no file 'x'.\n", 1, 1), ""),
        (Outcome(1, "", SAID, 1, 1), "traceback: schemas/plan.py:7 read: KeyError: 1"),
        (Outcome(2, "", "error: one\nand two\n", 1, 1), "several lines"),
        (Outcome(2, "", "what?\n", 1, 1), "no sentence"),
        (Outcome(2, "", f"error: {'x' * 401}\n", 1, 1), "401 characters"),
        (Outcome(0, "a\x1b[2Jb", "", 1, 1), "control character"),
        (Outcome(0, "a\n ::error ::b", "", 1, 1), "workflow command"),
        (Outcome(0, "", "##[error]b", 1, 1), "workflow command"),
        (Outcome(-11, "", "", 1, 1), "ended with -11"),
        (Outcome(-9, "", "", 31, 1, "hang"), "hang"),
    ],
)
def test_flaws_are_seen(outcome, seen):
    found = flaw(outcome)
    assert seen in found and bool(found) == bool(seen)


@pytest.mark.process
def test_processes_are_stopped_where_they_should_be(tmp_path, monkeypatch):
    def write():
        Trap(tmp_path, 3).set()
        for name in "abc":
            (tmp_path / name).write_text(name)

    died = watched(write, tmp_path)
    assert died.code == -signal.SIGKILL
    assert facts(tmp_path).keys() == {"a", "b"}

    def sleep():
        time.sleep(60)

    assert watched(sleep, tmp_path, strike=Strike(signal.SIGINT, 0.05)).code == 1
    assert watched(sleep, tmp_path, limit_s=0.05).stopped == "hang"
    monkeypatch.setattr("tests.campaign.watched.MOST_BYTES", 50 << 20)

    def fill():
        kept = b"x" * (200 << 20)  # until it is seen, however late that is on a busy machine
        time.sleep(60)
        print(len(kept))

    assert watched(fill, tmp_path).stopped == "memory"


def test_half_a_file_is_no_whole_one(tmp_path):
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    page.write_text("<html>made at 12:00</html>\n")
    record.write_text('{"created": "12:00", "loss": 1.5}')
    sound = facts(tmp_path)
    page.write_text("<html>made at 13:00</html>\n")
    record.write_text('{"created": "13:00", "loss": 1.5}')
    assert facts(tmp_path) == sound
    page.write_text("<html>made")
    assert facts(page) != {"page.html": sound["page.html"]}
    for content in ('{"created": "12:00", "loss": 1.25}', '{"created": "12:0'):
        record.write_text(content)
        assert facts(record) != {"record.json": sound["record.json"]}
