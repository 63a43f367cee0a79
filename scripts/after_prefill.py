r"""Losses of what follows a context whose cache was made smaller, of headprune or of kvpress.

    python scripts/after_prefill.py MODEL SEQUENCES.json RESULT.json \
        SnapKVPress '{"compression_ratio": 0.4}'

As a program it runs a press of kvpress, in an environment of its own: kvpress 0.5.5 needs
transformers < 5.3. ``protocol.py`` starts it so, and uses ``continued`` for models of headprune.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

CHUNK = 16  # tokens after a context: DuoAttentionPress looks for a key that none of them sees
TEXTS = 50  # that the scores of DuoAttentionPress read


@torch.no_grad()
def continued(
    net: Any,
    sequences: Sequence[tuple[list[int], list[int]]],
    press: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
) -> list[tuple[list[float], list[bool]]]:
    """Return the loss of each token that follows a context, and whether it was the likeliest one.

    Args:
        net: A causal language model.
        sequences: Tokens of a context, and those that follow.
        press: Returns the context in which the cache of a context gets smaller.
    """
    results = []
    for number, (context, rest) in enumerate(sequences, 1):
        with press(net):
            out = net(torch.tensor([context]), use_cache=True, logits_to_keep=1)
        logits, cache = [out.logits], out.past_key_values
        for start in range(0, len(rest) - 1, CHUNK):
            ids = torch.tensor([rest[start : min(start + CHUNK, len(rest) - 1)]])
            places = len(context) + start + torch.arange(ids.shape[1])[None]
            logits.append(net(ids, past_key_values=cache, position_ids=places).logits)
        of_rest, wanted = torch.cat(logits, 1)[0].float(), torch.tensor(rest)
        nats = F.cross_entropy(of_rest, wanted, reduction="none")
        results.append((nats.tolist(), (of_rest.argmax(-1) == wanted).tolist()))
        print(f"\r{number}/{len(sequences)} contexts", end="", file=sys.stderr, flush=True)
    return results


def main(model: str, sequences: str, result: str, press: str, settings: str) -> None:
    """Run a press over contexts of a file, and write the losses to another."""
    import kvpress
    import pandas
    from kvpress.presses import duo_attention_press
    from transformers import AutoModelForCausalLM

    given = json.loads(Path(sequences).read_text())
    # its scores read BookSum from the hub: here they read the text of the other methods
    texts = pandas.DataFrame({"chapter": given["texts"]})
    duo_attention_press.load_dataset = lambda *args, **kwargs: texts
    pandas.DataFrame.to_pandas = lambda self: self
    net = AutoModelForCausalLM.from_pretrained(model, dtype=given["dtype"]).eval()
    made = getattr(kvpress, press)(**json.loads(settings))
    Path(result).write_text(json.dumps(continued(net, given["sequences"], made)))


if __name__ == "__main__":
    main(*sys.argv[1:])
