"""Outputs of heads: |W_O,h z_h| / |residual|, and logits of the tokens that they make likelier.

z_h is the head's output, the residual enters its layer (Kobayashi et al. 2020, arXiv 2004.10102).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune import devices
from headprune.model.attention import layer_of
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.heads import output_rows, read_output
from headprune.model.loading import task_of
from headprune.model.passes import run_model
from headprune.model.residency import present
from headprune.role.inputs import Reading
from headprune.runtime.modeling_headprune import Attention


class Contributions:
    """Sums of the contributions of heads during a pass."""

    batch: Batch

    def __init__(self, net: PreTrainedModel, attentions: Sequence[Attention]) -> None:
        self._net, self._attentions = net, attentions
        self._residual: dict[str, Tensor] = {}
        self._sums: list[Tensor] = [torch.zeros(a.query_heads).double() for a in attentions]
        self._tokens = [0 for _ in attentions]

    def attach(self, stack: ExitStack) -> None:
        for position, attention in enumerate(self._attentions):
            if attention.query_heads:
                weight = read_output(attention)[0]
                gram = torch.einsum("hod,hoe->hde", weight, weight)
                hook = partial(self._writes, position, gram)
                handle = attention.output_projection.register_forward_pre_hook(hook)
                stack.callback(handle.remove)
        for path in {layer_of(a.path): None for a in self._attentions if a.query_heads}:
            layer, hook = self._net.get_submodule(path), partial(self._enters, path)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def of(self, position: int) -> list[float | None]:
        """Return the contribution of every head of a module; None without tokens."""
        tokens = self._tokens[position]
        return [total / tokens if tokens else None for total in self._sums[position].tolist()]

    def _enters(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self._residual[path] = states.float().norm(dim=-1, keepdim=True)

    def _writes(self, position: int, gram: Tensor, module: nn.Module, args: Any) -> None:
        attention = self._attentions[position]
        residual = self._residual.get(layer_of(attention.path))
        heads = args[0].float().unflatten(-1, (attention.query_heads, -1))
        squares = torch.einsum("...hd,hde,...he->...h", heads, gram.to(heads), heads)
        if residual is None or residual.shape[:-1] != squares.shape[:-1]:
            return  # a module outside of layers, or one that lays tokens out otherwise
        share = squares.clamp(min=0).sqrt() / residual.clamp(min=1e-12)
        tokens = real_tokens(share, token_mask(self.batch, attention.kind))
        self._sums[position] += tokens.sum(0).cpu().double()
        self._tokens[position] += len(tokens)


class Written:
    """Logits of the first run's tokens by what heads write of them."""

    def __init__(
        self, net: PreTrainedModel, attentions: Sequence[Attention], reading: Reading
    ) -> None:
        self._net, self._attentions = net, attentions
        self._run = slice(reading.start, reading.start + reading.period)
        self._values: dict[str, Tensor] = {}
        self._scale = _final_scale(net, reading.batches[0])

    def attach(self, stack: ExitStack) -> None:
        if task_of(self._net) != "causal-lm" or self._net.get_output_embeddings() is None:
            return
        for attention in self._attentions:
            for projection in attention.projections if attention.query_heads else ():
                rows = output_rows(attention, projection).get("v")
                if rows is not None:
                    hook = partial(self._keep, attention.path, rows.to(devices.chosen()))
                    stack.callback(projection.module.register_forward_hook(hook).remove)

    def _keep(self, path: str, rows: Tensor, module: nn.Module, args: Any, output: Tensor) -> None:
        self._values[path] = output[:, self._run].float()[..., rows.to(output.device)]

    def logits(self, attention: Attention, ids: Tensor) -> Tensor | None:
        """Return logits of shape (sequences, heads, tokens of the run, tokens of the run)."""
        values = self._values.pop(attention.path, None)
        if values is None:
            return None
        with present(head := self._net.get_output_embeddings()):
            weight = head.get_parameter("weight")
            rows = weight[ids[:, self._run].to(weight.device)]
        output = read_output(attention)[0]
        if rows.shape[-1] != output.shape[1]:  # with a projection between
            return None
        likely = rows.to(values) * self._scale.to(values)
        values = values - values.mean(1, keepdim=True)
        sizes = torch.tensor(attention.group_sizes, device=values.device)
        values = values.repeat_interleave(sizes, 2)  # of every query head
        # of W_U W_O: rows of the head's width and not of the model's
        reads = torch.einsum("sto,hod->shtd", likely, output.to(values))
        return torch.einsum("snhd,shtd->shnt", values, reads)


@torch.no_grad()
def _final_scale(net: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the factors of the last norm; 1 without one."""
    outputs: list[tuple[nn.Module, Any]] = []
    with ExitStack() as stack:
        for module in net.base_model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 1:
                hook = module.register_forward_hook(
                    lambda m, a, output: outputs.append((m, output))
                )
                stack.callback(hook.remove)
        states = run_model(net, batch)[0]
    norms = [module for module, output in outputs if output is states]
    if not norms:
        return torch.ones(1)
    # of mean 0 and variance 1, which no norm changes
    signs = torch.tensor([1, -1]).to(states).repeat(states.shape[-1] // 2)
    with present(norms[-1]):
        factors: Tensor = (norms[-1](signs) - norms[-1](-signs)) / 2 * signs
    return factors
