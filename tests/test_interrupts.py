"""Ctrl-C at the worst moments, and a config that loads and cannot be written."""

import json
import signal
import sys

import pytest
from pydantic_core import SchemaError

import headprune
from headprune import terminal
from headprune.errors import CheckpointError
from tests import tiny


@pytest.fixture
def heard(monkeypatch):
    """Ctrl-C raises, also where the tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_that_a_library_makes_another_error_of_is_one():
    def command():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SchemaError("Error building `model` validator:") from None

    with pytest.raises(SystemExit) as stopped:
        terminal.run(command)
    assert stopped.value.code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heard")
def test_such_an_error_alone_is_a_bug():
    def command():
        raise SchemaError("Error building `model` validator:")

    with pytest.raises(SchemaError):
        terminal.run(command)


def test_a_config_that_loads_and_cannot_be_written_is_refused(tmp_path):
    tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_attentions": True}))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.1.self_attn": [0, 1]}))
    with pytest.raises(CheckpointError, match="does not write the config .*output_attentions"):
        headprune.prune(tmp_path / "m", plan=plan, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
