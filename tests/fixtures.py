"""Tiny models of every family, made on the spot; jaxtyping and beartype check every call."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads only wait for each other

from tests import checking

# what computes; the command line, the page and the figures hand on what they are given
CHECKED = ["tensors", "runtime", "config", "family", "schemas", "model", "data"]
CHECKED += ["surgery", "training", "gates", "evidence", "planning", "result", "formats"]
CHECKED += ["distillation", "evaluation", "regression"]
CHECKED += ["processes", "io.outputs", "io.ownership", "io.folders", "io.tensors", "io.streaming"]
checking.install([f"headprune.{name}" for name in CHECKED])

import functools
import gc

import hypothesis  # noqa: F401  (it looks through what gc.freeze() hides)
import pytest
import torch
import typer.main
from transformers.utils import logging

from tests import tiny

torch.set_num_threads(1)
# the commands and their options, which would be made anew for every command that a test runs
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collection_modifyitems(items):
    """Whoever takes the fixture needs a browser."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


def pytest_collection_finish():
    """Hides what is imported from the collector, which every training calls: millions of objects.

    They stay until the end, and to look through them takes longer than a step of training.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # what is built and forgotten here is small


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)


@pytest.fixture(params=tiny.CASES)
def model(request):
    """A tiny model of every case: families x MHA, GQA, MQA."""
    return tiny.model(request.param)


@pytest.fixture
def llama_folder(tmp_path):
    """A tiny Llama with its tokenizer, on disk."""
    return tiny.save(tiny.model("llama-gqa"), tmp_path / "llama")


@pytest.fixture
def text_file(tmp_path):
    """2,000 words of the tiny tokenizer's language."""
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(2_000))
    return path


@pytest.fixture(scope="session")
def browser():
    from tests.browser import started  # selenium is for these tests alone

    with started() as chromium:
        yield chromium
