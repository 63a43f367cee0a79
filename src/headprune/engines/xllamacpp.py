"""llama.cpp on the CPU, by the package xllamacpp."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from headprune.engines import llama_server
from headprune.errors import CheckpointError

Use = Literal["exact", "states", "as served"]
"""Generates with everything in float32; gives hidden states so; generates as llama-server does."""
_local = build_opener(ProxyHandler({}))


class Server:
    """A file that llama.cpp serves until it is closed.

    Args:
        file: The file.
        context: How many tokens it must hold.
        use: What for.

    Raises:
        CheckpointError: If it does not load the file.
    """

    def __init__(self, file: Path, context: int, use: Use) -> None:
        self._file = file
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by close
        self._process = subprocess.Popen(
            [sys.executable, llama_server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.close = weakref.finalize(self, _end, self._process, self.log)
        threads = torch.get_num_threads()
        asked = {"file": str(file), "context": context, "threads": threads, "use": use}
        self._address = self._line(json.dumps(asked))

    def ask(self, path: str, question: Mapping[str, Any]) -> Any:
        """What it answers.

        Raises:
            CheckpointError: If it cannot, or dies of it.
        """
        content = json.dumps(question).encode()
        request = Request(self._address + path, content, {"Content-Type": "application/json"})
        try:
            with _local.open(request) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise self._failed(error.read().decode(errors="replace")) from None
        except OSError:
            raise self._failed() from None

    def _line(self, said: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(said, file=self._process.stdin, flush=True)
        except OSError:  # it is gone, and the log says why
            raise self._failed() from None
        found = self._process.stdout.readline().strip()
        if not found:
            raise self._failed()
        return found

    def _failed(self, why: str = "") -> CheckpointError:
        self.log.seek(0)
        lines = re.findall(r".*(?:ASSERT|[Ee]rror).*", self.log.read())
        why = why or next((line.strip() for line in lines), "it said nothing")
        return CheckpointError(f"llama.cpp cannot run '{self._file}': {why}.")


def _end(process: subprocess.Popen[str], log: Any) -> None:
    process.communicate()  # it ends with its input
    log.close()
