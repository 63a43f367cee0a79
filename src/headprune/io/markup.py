"""Text of unknown origin on its way to a terminal, a log of CI, or XML."""

from __future__ import annotations

import json
import re

# characters that XML 1.0 cannot hold; other controls; and changes of the text's direction
_NOT_XML = re.compile(
    r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)
# "::error ..." at the start of a line, "##[error]" anywhere: what GitHub Actions takes for commands
_COMMAND = re.compile(r"^\s*:(?=:)|##(?=\[)", re.MULTILINE)


def xml_safe(text: str) -> str:
    """Return text with a mark for every control and every character outside XML 1.0."""
    return _NOT_XML.sub("\ufffd", text)


def printable(text: str) -> str:
    """Return text on one line, with controls made visible."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def inert(text: str) -> str:
    """Return printable lines without commands to a CI runner."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    return _COMMAND.sub(lambda match: f"{match[0]}\\", lines)


def json_safe(text: str) -> str:
    """Return equal JSON with controls and commands to a CI runner escaped."""
    escaped = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return escaped.replace("##[", "\\u0023#[")


def sentence(text: str, most: int = 400) -> str:
    """Return text on one line, shortened in the middle to ``most`` characters."""
    return shortened(printable(" ".join(text.split("\n"))), most)


def shortened(text: str, most: int) -> str:
    """Return text without its middle where longer than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 5]} ... {text[-tail:]}"
