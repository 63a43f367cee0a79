"""Text that goes into XML."""

from __future__ import annotations

import re

_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml_safe(text: str) -> str:
    """The text, with a mark for every character that XML 1.0 cannot hold, not even escaped."""
    return _FORBIDDEN.sub("\ufffd", text)
