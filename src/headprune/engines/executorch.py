"""ExecuTorch's own runtime."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that its interface is experimental
    from executorch.runtime import Runtime

NAMES = ("input_names", "output_names")
"""Methods of a program that give the names of the tensors, separated by spaces."""


class ExecuTorchGraph:
    """A program: its sequences are run one by one."""

    def __init__(self, file: Path) -> None:
        self._program = Runtime.get().load_program(str(file))
        self._forward = self._program.load_method("forward")
        names = (self._program.load_method(name).execute([])[0].split() for name in NAMES)
        self._inputs, self._outputs = names
        self.inputs: dict[str, tuple[int | None, ...]] = dict.fromkeys(self._inputs, (None, None))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its outputs by name."""
        rows = []
        for i in range(len(inputs[self._inputs[0]])):
            one = [inputs[name][i : i + 1].contiguous() for name in self._inputs]
            # the runtime gives the same memory again at the next run
            rows.append([output.clone() for output in self._forward.execute(one)])
        columns = map(torch.cat, zip(*rows, strict=True))
        return dict(zip(self._outputs, columns, strict=True))


open_graph = ExecuTorchGraph
