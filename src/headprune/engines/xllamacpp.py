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

import gguf
import numpy as np
import torch
from torch import Tensor

from headprune.engines import llama_server
from headprune.errors import CheckpointError
from headprune.model.speed import Once

Use = Literal["exact", "states", "as served"]
"""Generates with everything in float32; gives hidden states so; generates as llama-server does."""
_local = build_opener(ProxyHandler({}))
_CACHE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells")


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
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by close
        self._process = subprocess.Popen(
            [sys.executable, llama_server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.close = weakref.finalize(self, _end, self._process, self._log)
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

    def peak_memory(self) -> int:
        """The most bytes that were resident."""
        return int(self._line(""))

    def cache_bytes_per_token(self) -> float | None:
        """What it says that its KV cache takes."""
        self._log.seek(0)
        found = _CACHE.search(self._log.read())
        return None if found is None else float(found[1]) * 2**20 / int(found[2])

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
        self._log.seek(0)
        lines = re.findall(r".*(?:ASSERT|[Ee]rror).*", self._log.read())
        why = why or next((line.strip() for line in lines), "it said nothing")
        return CheckpointError(f"llama.cpp cannot run '{self._file}': {why}.")


def _end(process: subprocess.Popen[str], log: Any) -> None:
    process.communicate()  # it ends with its input
    log.close()


class LlamaCppGraph:
    """A GGUF file, read as a whole every time: it gives hidden states and not its cache.

    The engine gives the logits of what it generates alone. So the last product, of hidden states
    and the output matrix of the file, is torch's.
    """

    def __init__(self, file: Path) -> None:
        self.inputs: dict[str, tuple[int | None, ...]] = {"input_ids": (None, None)}
        self._file = file
        self._servers: dict[Use, tuple[int, Server]] = {}
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        output = tensors.get("output.weight", tensors["token_embd.weight"])
        numbers = gguf.dequantize(output.data, output.tensor_type).astype(np.float32)
        self._output = torch.from_numpy(numbers).view(*map(int, output.shape[::-1]))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its logits."""
        ids = inputs["input_ids"]
        server = self._server("states", ids.shape[1])
        asked = {"input": ids.tolist(), "embd_normalize": -1}
        rows = [row["embedding"] for row in server.ask("/embeddings", asked)]
        return {"logits": torch.tensor(rows) @ self._output.T}

    def times(self, ids: Tensor, decoded: int) -> Once:
        """Reads a prompt and generates greedily, as llama-server does; its rows one by one."""
        asked = {"n_predict": decoded + 1, "temperature": 0, "ignore_eos": True}
        server = self._server("as served", ids.shape[1] + decoded + 1)
        prefill = decode = 0.0
        for row in ids.tolist():
            question = {**asked, "prompt": row, "cache_prompt": False}
            told = server.ask("/completion", question)["timings"]
            prefill += told["prompt_ms"] / 1000
            decode += told["predicted_ms"] / 1000  # the first token comes of the prompt
        return Once(prefill, decode, server.peak_memory(), server.cache_bytes_per_token())

    def _server(self, use: Use, context: int) -> Server:
        room, server = self._servers.get(use, (0, None))
        if server is None or room < context:
            if server is not None:
                server.close()
            server = Server(self._file, context, use)
            self._servers[use] = context, server
        return server


open_graph = LlamaCppGraph
