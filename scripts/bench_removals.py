"""How long the costs of removing heads take: ``python scripts/bench_removals.py [WIDTH]``.

Times ``removal_costs``, which downdates one inverse, beside the plain way, which inverts what is
left anew after every removal, on one thread; and prints how far the two are apart.
"""

from __future__ import annotations

import sys
import time

import torch

from headprune.tensors.least_squares import removal_costs

RIDGE = 1e-2


def plainly(gram: torch.Tensor, weight: torch.Tensor, blocks: list[list[int]]) -> list[float]:
    """The same costs, with an inverse for every removal."""
    weight, left, costs, highest = weight.clone(), dict(enumerate(blocks)), [0.0] * len(blocks), 0.0
    gram = gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).double()
    while left:
        every = [column for columns in left.values() for column in columns]
        inverse = torch.linalg.inv(gram[every][:, every])
        removed, start = {}, 0
        for block, own in left.items():
            place = slice(start, start := start + len(own))
            part = torch.linalg.solve(inverse[place, place], weight[:, own].T)
            removed[float((weight[:, own] * part.T).sum())] = block, part.T @ inverse[place]
        cost, (block, change) = min(removed.items(), key=lambda item: item[0])
        weight[:, every] -= change
        costs[block] = highest = max(highest, cost)
        del left[block]
    return costs


def main() -> None:
    """Prints a row for heads of 64 and of 128."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    x = torch.randn(2 * width, width).double() * torch.linspace(0.1, 2, width)
    gram, weight = x.T @ x, torch.randn(width, width).double()
    for head_dim in (64, 128):
        blocks = [list(range(at, at + head_dim)) for at in range(0, width, head_dim)]
        found = []
        for way in (removal_costs, plainly):
            start = time.process_time()
            found.append(
                (
                    torch.tensor(way(gram, weight, blocks), dtype=torch.float64),
                    time.process_time() - start,
                )
            )
        (ours, quick), (theirs, slow) = found
        apart = float(((ours - theirs) / theirs).abs().max())
        print(
            f"{len(blocks)} heads of {head_dim}: {quick:.1f} s, anew {slow:.1f} s, "
            f"{slow / quick:.1f} times; {apart:.0e} apart"
        )


if __name__ == "__main__":
    main()
