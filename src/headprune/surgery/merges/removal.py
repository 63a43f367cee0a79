"""KV heads left out with their queries, and W_O of the others fitted to what all of them gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headprune.model.heads import HeadWeights
from headprune.surgery.merges.reading import read_of, with_fitted_outputs
from headprune.surgery.merges.spec import MergeActivations


def without(heads: HeadWeights, kept: Sequence[int], activations: MergeActivations) -> HeadWeights:
    """Weights in which only the queries of some KV heads write; with all of them, W_O refitted.

    Args:
        heads: The weights.
        kept: Positions of the KV heads that stay.
        activations: What calibration showed.
    """
    queries, width = heads.queries_of(kept), heads.o.shape[2]
    columns = [query * width + d for query in queries for d in range(width)]
    read = read_of(heads, activations)[..., columns]
    fitted = with_fitted_outputs(replace(heads, o=heads.o[queries]), read, activations.outputs)
    o = torch.zeros_like(heads.o)
    o[queries] = fitted.o
    return replace(fitted, o=o)
