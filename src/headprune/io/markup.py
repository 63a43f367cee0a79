"""Text of unknown origin on its way to a terminal, a log of CI, or XML."""

from __future__ import annotations

import json
import re

# what XML 1.0 cannot hold; other controls; and those that turn the direction of a text around
_NOT_XML = re.compile(
    r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)
# "::error ..." at the start of a line, "##[error]" anywhere: what GitHub Actions takes for commands
_COMMAND = re.compile(r"^\s*:(?=:)|##(?=\[)", re.MULTILINE)


def xml_safe(text: str) -> str:
    """The text, with a mark for every character that XML 1.0 cannot hold, and every control."""
    return _NOT_XML.sub("\ufffd", text)


def printable(text: str) -> str:
    """The text on one line, with everything that a terminal would act on made visible."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def inert(text: str) -> str:
    """As ``printable``, but of several lines, none of which is a command to a CI runner."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    return _COMMAND.sub(lambda found: f"{found[0]}\\", lines)


def json_safe(text: str) -> str:
    """JSON with escapes for what a terminal or a CI runner would act on; it says the same."""
    escaped = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return escaped.replace("##[", "\\u0023#[")


def sentence(text: str, most: int = 400) -> str:
    """As ``printable``, with the middle left out where it is longer than ``most`` characters.

    What was asked stands at the start of a message, and what to do at its end.
    """
    return shortened(printable(" ".join(text.split("\n"))), most)


def shortened(text: str, most: int) -> str:
    """The text, with the middle left out where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 5]} ... {text[-tail:]}"
