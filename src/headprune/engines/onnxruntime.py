"""ONNX Runtime, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor


class OnnxGraph:
    """A graph in a file of ONNX."""

    def __init__(self, file: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(str(file), options, providers)
        self.inputs = {
            one.name: tuple(size if isinstance(size, int) else None for size in one.shape)
            for one in self._session.get_inputs()
        }
        self._outputs = [one.name for one in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its outputs by name."""
        given = {name: value.contiguous().numpy() for name, value in inputs.items()}
        found = self._session.run(self._outputs, given)
        return dict(zip(self._outputs, map(torch.from_numpy, found), strict=True))


open_graph = OnnxGraph
