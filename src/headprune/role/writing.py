"""What heads would write of the tokens of a run, as logits of these tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.model.heads import output_rows, read_output
from headprune.model.loading import task_of
from headprune.model.passes import run_model
from headprune.model.residency import present
from headprune.role.inputs import Input
from headprune.runtime.modeling_headprune import Attention


class Written:
    """Keeps the values of a module until its attention is known.

    Args:
        net: A language model.
        given: The input, whose first run is looked at.
    """

    def __init__(self, net: PreTrainedModel, given: Input) -> None:
        self._net, self._given = net, given
        self._values: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._looked_up: tuple[Tensor, Tensor] | None = None
        self._scale = _final_scale(net, given)

    def attach(self, stack: ExitStack, attention: Attention) -> None:
        """Puts a hook on the projection that makes the values, where the model copies to logits."""
        embedding = self._net.get_output_embeddings()
        if task_of(self._net) != "causal-lm" or embedding is None or not attention.query_heads:
            return
        for projection in attention.projections:
            rows = output_rows(attention, projection).get("v")
            if rows is not None:
                self._rows[attention.path] = rows
                handle = projection.module.register_forward_hook(self._hook(attention.path))
                stack.callback(handle.remove)

    def _hook(self, path: str) -> Any:
        run = slice(self._given.start, self._given.start + self._given.period)

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = self._rows[path].to(output.device)
            self._values[path] = output[:, run].float()[..., rows]

        return hook

    def logits(self, attention: Attention, ids: Tensor) -> Tensor | None:
        """Shape (sequences, heads, tokens of the run, tokens of the run); None without values.

        Args:
            attention: The module.
            ids: Token ids of the input.
        """
        values = self._values.pop(attention.path, None)
        if values is None:
            return None
        rows, output = self._embedded(ids), read_output(attention)[0]
        if rows.shape[-1] != output.shape[1]:  # with a projection between
            return None
        likely = rows.to(values) * self._scale.to(values)
        values = values - values.mean(1, keepdim=True)
        sizes = torch.tensor(attention.group_sizes, device=values.device)
        values = values.repeat_interleave(sizes, 2)  # of every query head
        # of W_U W_O: rows of the head's width and not of the model's
        reads = torch.einsum("sto,hod->shtd", likely, output.to(values))
        return torch.einsum("snhd,shtd->shnt", values, reads)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Rows of the head for the tokens of a run, which is the same for all modules of a pass."""
        run = ids[:, self._given.start : self._given.start + self._given.period]
        if self._looked_up is None or not torch.equal(self._looked_up[0], run):
            with present(head := self._net.get_output_embeddings()):
                weight = head.get_parameter("weight")
                self._looked_up = run, weight[run.to(weight.device)]
        return self._looked_up[1]


@torch.no_grad()
def _final_scale(net: PreTrainedModel, given: Input) -> Tensor:
    """The factors of the norm in front of W_U, whatever it makes of its weights; 1 without one."""
    made: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made.append((module, output))

    with ExitStack() as stack:
        for module in net.base_model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 1:
                stack.callback(module.register_forward_hook(keep).remove)
        states = run_model(net, given.batches[0])[0]
    norms = [module for module, output in made if output is states]
    if not norms:
        return torch.ones(1)
    # of mean 0 and variance 1, which no norm changes
    signs = torch.ones_like(states[0, 0]).unflatten(0, (-1, 2)) * torch.tensor([1, -1]).to(states)
    signs = signs.flatten()
    with present(norms[-1]):
        factors: Tensor = (norms[-1](signs) - norms[-1](-signs)) / 2 * signs
    return factors
