"""headprune attention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Loading, OneModel, Placed, output
from headprune.config import Names, Replacing
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.render.attention import AttentionPicture


class AttentionOptions(OneModel, Replacing, Loading, Placed):
    """Show what every head attends to in a sentence, on one page."""

    text: str = option("The sentence; at most 40 tokens of it are shown.", panel=Panel.MAIN)
    output: Path = output("The page to write (.html).")
    head: Names = option(
        "A head to show first, as in 18.6: head 6 of layer 18, or cross.2.5 (repeatable). Default: "
        "the three that look most sharply at some token.",
        (),
        Panel.MAIN,
    )
    target: str | None = option(
        "What the decoder of an encoder-decoder reads. Default: what the model writes.",
        None,
        Panel.MAIN,
    )
    layer: Names = option(
        "Only the heads of this layer, as in 18 or cross.2 (repeatable).", (), Panel.MAIN
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable).",
        (),
        Panel.MAIN,
    )


def run(options: AttentionOptions, context: Context) -> AttentionPicture:
    """Reads the sentence and writes the page."""
    from headprune.io.outputs import claimed_file
    from headprune.io.ownership import REPORT
    from headprune.render.attention import AttentionPicture, refuse_other_suffix
    from headprune.role.sentence import read_sentence

    refuse_other_suffix(options.output)
    with claimed_file(options.output, REPORT, options.overwrite, [options.model]):
        sentence = read_sentence(
            options.model,
            options.text,
            options.target,
            options.attention,
            context,
        )
        picture = AttentionPicture.of(sentence, options.head, options.layer)
        context.stage("drawing")
        picture.save(options.output, overwrite=True)
    return picture


def show(result: AttentionPicture, options: AttentionOptions, console: Console) -> None:
    """Prints which heads it shows first."""
    from rich.markup import escape

    count = sum(len(layer.heads) for layer in result.sentence.layers)
    console.print(
        f"{count} heads, of which {', '.join(result.heads)} shown first. Written to "
        f"{escape(str(options.output))}."
    )


def _warnings(result: AttentionPicture) -> Iterable[str]:
    return result.left_out()


declare(Command("attention", Chapter.CHOOSE, AttentionOptions, run, show, warnings=_warnings))
