"""headprune attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.render.attention import AttentionPicture


def _show(console: Console, result: AttentionPicture, values: Mapping[str, Any]) -> None:
    from rich.markup import escape

    count = sum(len(layer.heads) for layer in result.sentence.layers)
    console.print(
        f"{count} heads; shown first: {', '.join(result.heads)}. Written to "
        f"{escape(str(values['output']))}."
    )


@command(Panel.CHOOSE, _show, as_json=None, warnings=lambda result: result.left_out())
def attention(
    model: o.Model,
    output: Annotated[o.File, o.argument("OUTPUT", "The page to write (.html).")],
    *,
    text: Annotated[str, o.option("The sentence; at most 40 tokens of it are shown.")],
    target: str | None = None,
    head: Annotated[
        o.Names, o.option("Head to show first, as in 18.6 or cross.2.5 (repeatable).")
    ] = (),
    layer: o.Names = (),
    attention: o.Kinds = (),
    overwrite: o.Overwrite = False,
    device: str = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> AttentionPicture:
    """Show what every head attends to in a sentence, on one page."""
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import REPORT
    from headprune.render.attention import AttentionPicture
    from headprune.render.html import refuse_other_suffix
    from headprune.role.sentence import read_sentence

    output = Path(output)
    refuse_other_suffix(output)
    with claimed_file(output, REPORT, overwrite, [model]):
        sentence = read_sentence(str(model), text, target, tuple(attention), context)
        picture = AttentionPicture.of(sentence, tuple(head), tuple(layer))
        context.stage("drawing")
        picture.save(output, overwrite=True)
    return picture
