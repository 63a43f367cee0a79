"""What heads are called: ``18.6`` is head 6 of layer 18; ``cross.2.5`` looks across."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def layer_names(modules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """A short name of every attention module, by its path.

    That is the first number in its path, or its position where paths have none or share one; and
    before it the kind, where the family has several, also if all of these are of one: a head always
    has the same name.

    Args:
        modules: Path and kind of each, first layer first.
    """
    numbers = [re.search(r"(?<=\.)\d+(?=\.)", path) for path, _ in modules]
    told = [
        (kind, found[0] if found else "") for found, (_, kind) in zip(numbers, modules, strict=True)
    ]
    unclear = {kind for (kind, number), times in Counter(told).items() if times > 1 or not number}
    several = {kind for _, kind in modules} != {"self"}
    names: dict[str, str] = {}
    seen = Counter[str]()
    for (path, _), (kind, number) in zip(modules, told, strict=True):
        name = str(seen[kind]) if kind in unclear else number
        seen[kind] += 1
        names[path] = f"{kind}.{name}" if several else name
    return names
