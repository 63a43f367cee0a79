"""How many directions a head uses of those that it has, on a text.

    values   what a head writes:    W_O W_V (x - E x)       ranked by E|.|^2
    scores   what it compares:      x_q^T W_Q^T W_K (x_k - E x_k), of any two tokens

One pass sums up what the projections give. What all keys have in common is left out: as the
attention of a query sums to one, it adds a constant to what is written, which a bias of W_O would
hold, and one to all scores of a query, which the softmax does not see. Scores are those before any
rotation, and before any norm of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Objective, RanksConfig
from headprune.context import Context
from headprune.data.batches import batches
from headprune.data.read import refuse_missing_file
from headprune.data.text import Text
from headprune.errors import FamilyError
from headprune.model.attention import attention_of
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.heads import output_rows, read_output
from headprune.model.loading import load_tokenizer
from headprune.model.open import open_model
from headprune.model.passes import run_model
from headprune.model.refusals import refuse_without_text
from headprune.runtime.modeling_headprune import Attention, input_dim, width
from headprune.schemas.ranks import SHARES, HeadRanks, ModuleRanks, Ranks, Widths
from headprune.tensors.spectra import energies
from headprune.tensors.spectra import ranks as ranks_of


def ranks(model: str, data: DataConfig, config: RanksConfig, context: Context) -> Ranks:
    """Measures how many directions every head uses.

    Args:
        model: Folder or hub id.
        data: Where the text comes from.
        config: How much of it is read.
        context: What it runs in.

    Raises:
        HeadpruneError: If model and data do not fit, or heads have no projections of their own.
    """
    refuse_missing_file(data.source)
    tokenizer = load_tokenizer(model, trust_remote_code=context.allowed.trust_remote_code)
    context.stage(f"loading '{model}'")
    net = open_model(model, config.dtype, context.allowed).net
    refuse_without_text(net, "ranks")
    taken = config.part(CalibrationConfig)
    rows, collate, _ = batches(Objective.DISTILL, net, tokenizer, data, taken)
    sample = Text.calibration(
        rows, collate, config.calibration_tokens, batch_size=config.batch_size
    ).fit
    context.stage("reading text")
    found = module_ranks(net, attention_of(net), sample.batches(), context.step)
    return Ranks(tokens=sample.tokens, modules=found)


@torch.no_grad()
def module_ranks(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    given: Sequence[Batch],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ModuleRanks, ...]:
    """The ranks of a loaded model's heads, module by module.

    Args:
        net: The model.
        attentions: The modules; those without heads are left out.
        given: What the model reads.
        progress: Called with batches done and in all.

    Raises:
        FamilyError: If a module has no Q, K and V for every head.
    """
    watched = [_Moments(attention) for attention in attentions if attention.query_heads]
    with ExitStack() as stack:
        for moments in watched:
            moments.attach(stack)
        for number, batch in enumerate(given):
            for moments in watched:
                moments.batch = batch
            run_model(net, batch)
            progress(number + 1, len(given))
    return tuple(moments.ranks() for moments in watched)


class _Moments:
    """First and second moments of the queries, keys and values of a module."""

    batch: Batch

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.rows = {
            role: (projection.module, rows)
            for projection in attention.projections
            for role, rows in output_rows(attention, projection).items()
        }
        if not set("qkvo") <= set(self.rows):
            raise FamilyError(
                f"'{attention.path}' has no Q, K and V for every head, so that --ranks cannot tell "
                "how wide heads are. Leave it out."
            )
        self._tokens = dict.fromkeys("qkv", 0)
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def attach(self, stack: ExitStack) -> None:
        """Puts hooks on its projections."""
        for role in "qkv":
            module, rows = self.rows[role]
            stack.callback(module.register_forward_hook(self._hook(role, rows)).remove)

    def _hook(self, role: str, rows: Tensor) -> Callable[[nn.Module, Any, Tensor], None]:
        kind = self.attention.kind
        stands_at = "encoder" if kind == "cross" and role != "q" else kind

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            tokens = real_tokens(output, token_mask(self.batch, stands_at))
            heads = tokens[:, rows.to(tokens.device)].double()
            self._tokens[role] += len(heads)
            squares = torch.einsum("thd,the->hde", heads, heads).cpu()
            self._squares[role] = self._squares.get(role, 0) + squares
            self._sums[role] = self._sums.get(role, 0) + heads.sum(0).cpu()

        return hook

    def ranks(self) -> ModuleRanks:
        """What was found.

        Raises:
            FamilyError: If the module never ran.
        """
        if not all(self._tokens.values()):
            raise FamilyError(
                f"'{self.attention.path}' did not run on the text, so that --ranks cannot tell how "
                "wide its heads are. Leave it out."
            )
        output = read_output(self.attention)[0].double().cpu()
        written = torch.einsum("hod,hoe->hde", output, output)
        values, keys, queries = self._varying("v"), self._varying("k"), self._moment("q")
        sizes = self.attention.group_sizes
        of_query = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        of_heads = {
            "values": energies(values[of_query], written),
            "scores": energies(keys[of_query], queries),
        }
        together = torch.stack([part.sum(0) for part in written.split(sizes)])
        grouped = ranks_of(energies(values, together), SHARES[-1])
        module, _ = self.rows["v"]
        reads, writes = width(module, input_dim(module)), output.shape[1]
        free = [values.shape[-1] - rank for rank in grouped.tolist()]
        return ModuleRanks(
            path=self.attention.path,
            kind=self.attention.kind,
            value_dim=values.shape[-1],
            key_dim=keys.shape[-1],
            heads=tuple(
                HeadRanks(head=head, **{name: _widths(e[at]) for name, e in of_heads.items()})
                for at, head in enumerate(self.attention.query_ids)
            ),
            group_values=tuple(grouped.tolist()),
            saved=sum(d * (reads + n * writes) for d, n in zip(free, sizes, strict=True)),
        )

    def _moment(self, role: str) -> Tensor:
        moment: Tensor = self._squares[role] / self._tokens[role]
        return moment

    def _varying(self, role: str) -> Tensor:
        """The second moment without what all tokens have in common."""
        mean = self._sums[role] / self._tokens[role]
        return self._moment(role) - mean[:, :, None] * mean[:, None]


def _widths(energy: Tensor) -> Widths:
    low, middle, high = (int(ranks_of(energy, share)) for share in SHARES)
    return low, middle, high
