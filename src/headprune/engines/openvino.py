"""OpenVINO, on the CPU and in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import openvino
import torch
from torch import Tensor


class OpenVinoGraph:
    """A graph in the two files of OpenVINO."""

    def __init__(self, file: Path) -> None:
        # where the processor has bfloat16, it would be computed in that
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        model = openvino.Core().compile_model(str(file), "CPU", settings)
        self.inputs = {
            port.get_any_name(): tuple(
                size.get_length() if size.is_static else None for size in port.get_partial_shape()
            )
            for port in model.inputs
        }
        self._outputs = [port.get_any_name() for port in model.outputs]
        self._model = model

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its outputs by name."""
        given = {name: value.contiguous().numpy() for name, value in inputs.items()}
        found = self._model(given, share_inputs=True)
        return {name: torch.from_numpy(found[name]) for name in self._outputs}


open_graph = OpenVinoGraph
