"""Attention of heads on a sentence, as a page or in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headprune.context import Allowed, Context
from headprune.errors import PlanError
from headprune.io.outputs import claimed_file
from headprune.io.ownership import REPORT
from headprune.io.writing import write_whole
from headprune.render.html import page, refuse_other_suffix, template
from headprune.role.sentence import LayerWeights, Sentence, read_sentence

FIRST = 3  # heads to show where none is named
FULL = 65_535  # a weight of 1, as the page holds it
_COLOUR = (11, 83, 148)


@dataclass(frozen=True)
class AttentionPicture:
    """Attention of heads on a sentence, for a notebook or a page."""

    sentence: Sentence
    heads: tuple[str, ...]  # shown first

    @staticmethod
    def of(
        sentence: Sentence, heads: Sequence[str] = (), layers: Sequence[str] = ()
    ) -> AttentionPicture:
        """Return the picture of some layers of a sentence; of all by default.

        Raises:
            PlanError: If there is no such head or layer.
        """
        for name in heads:
            sentence.head(name)
        known = [layer.name for layer in sentence.layers]
        for name in layers:
            if name not in known:
                raise PlanError(
                    f"layer {name}: there is no such layer with heads. Layers: {', '.join(known)}."
                )
        wanted = {*layers, *(name.rpartition(".")[0] for name in heads)} if layers else {*known}
        kept = tuple(layer for layer in sentence.layers if layer.name in wanted)
        part = replace(sentence, layers=kept)
        return AttentionPicture(part, tuple(dict.fromkeys(heads)) or part.sharpest(FIRST))

    def html(self) -> str:
        """Return the self-contained page."""
        kinds = dict.fromkeys(layer.kind for layer in self.sentence.layers)
        by_kind = [[one for one in self.sentence.layers if one.kind == kind] for kind in kinds]
        return page(
            "attention.html.jinja",
            style=template("page.css") + template("attention.css"),
            script=template("attention.js"),
            sentence=self.sentence,
            left_out=list(self.left_out()),
            grids=[*map(_grid, by_kind)],
            data=self._data(),
        )

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the page to an ``.html`` file; ``overwrite`` replaces one of headprune's only.

        Raises:
            HeadpruneError: If it cannot be written.
        """
        output = Path(path)
        refuse_other_suffix(output)
        with claimed_file(output, REPORT, overwrite):
            write_whole(output, self.html())
        return output

    def _repr_html_(self) -> str:
        # in a frame, so that neither the page nor the notebook restyles the other
        return (
            f'<iframe srcdoc="{escape(self.html())}" title="What heads attend to" '
            'style="width:100%;height:760px;border:0"></iframe>'
        )

    def left_out(self) -> Iterator[str]:
        """Yield a sentence per text about tokens left out."""
        sides = {
            side.labels: side for one in self.sentence.layers for side in (one.queries, one.keys)
        }
        for side in sides.values():
            if side.left_out:
                shown = len(side.labels)
                yield (
                    f"The text has {shown + side.left_out} tokens; the model read the first "
                    f"{shown}, and the page shows these."
                )

    def _data(self) -> dict[str, Any]:
        return {
            "full": FULL,
            "shown": self.heads,
            "layers": [
                {
                    **{"name": layer.name, "path": layer.path, "heads": layer.heads},
                    "queries": layer.queries.labels,
                    "keys": layer.keys.labels,
                    "weights": base64.b64encode(
                        (layer.weights.clamp(0, 1) * FULL).round().numpy().astype("<u2").tobytes()
                    ).decode(),
                }
                for layer in self.sentence.layers
            ],
        }


def attention_picture(
    model: str | Path,
    text: str,
    heads: Sequence[str] = (),
    layers: Sequence[str] = (),
    target: str | None = None,
    attention: Sequence[str] = (),
    **loading: bool,
) -> AttentionPicture:
    """Return the attention of heads on a sentence, as a picture for a notebook.

    Args:
        model: Folder or hub id.
        text: The sentence; at most 40 tokens of it are shown.
        heads: Heads to show first, as in ``["18.6"]``; by default the sharpest.
        layers: Layers to show; by default all.
        target: Input of an encoder-decoder's decoder; by default the model's own output.
        attention: Kinds of attention: encoder, decoder or cross; by default all.
        **loading: ``trust_remote_code`` and ``drop_unexpected``.

    Raises:
        HeadpruneError: If model, text and heads do not fit together.
    """
    context = Context(allowed=Allowed(**loading))
    sentence = read_sentence(model, text, target, attention, context)
    return AttentionPicture.of(sentence, heads, layers)


def _grid(layers: Sequence[LayerWeights]) -> dict[str, Any]:
    rows = []
    for layer in layers:
        maps = dict(zip(layer.heads, map(_map, layer.weights), strict=True))
        rows.append((layer, [maps.get(head) for head in range(max(layer.heads) + 1)]))
    return {
        "kind": layers[0].kind,
        "heads": max(len(maps) for _, maps in rows),
        "rows": rows,
        "cut": any(None in maps for _, maps in rows),
    }


def _map(weights: Tensor) -> str:
    from matplotlib.image import imsave

    pixels = np.empty((*weights.shape, 4), np.uint8)
    pixels[..., :3] = _COLOUR
    pixels[..., 3] = (weights.clamp(0, 1) * 255).round().numpy()
    buffer = BytesIO()
    imsave(buffer, pixels, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
