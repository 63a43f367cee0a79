"""The result as JUnit XML, which CI systems show: one test case per limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from headprune.regression.verdicts import Judged, Verdict

# what XML 1.0 cannot hold, not even escaped
_CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(model: str, judged: Sequence[Judged], strict: bool, seconds: float) -> str:
    """Renders the verdicts.

    Args:
        model: Name of the model.
        judged: The limits.
        strict: Whether too close to call is a failure; else it is a skipped test.
        seconds: How long the check took.
    """
    failing = {Verdict.BROKEN, *((Verdict.TOO_CLOSE,) if strict else ())}
    failed = sum(one.verdict in failing for one in judged)
    skipped = sum(one.verdict is Verdict.TOO_CLOSE for one in judged) if not strict else 0
    counts = {"tests": len(judged), "failures": failed, "errors": 0, "skipped": skipped}
    attributes = {"name": "headprune check", "time": f"{seconds:.3f}"}
    attributes |= {name: str(count) for name, count in counts.items()}
    root = Xml.Element("testsuites")
    suite = Xml.SubElement(root, "testsuite", attributes)
    for one in judged:
        case = Xml.SubElement(suite, "testcase", classname=_text(model), name=_text(one.limit))
        if one.verdict in failing:
            Xml.SubElement(case, "failure", message=_text(one.sentence()))
        elif one.verdict is Verdict.TOO_CLOSE:
            Xml.SubElement(case, "skipped", message=_text(one.sentence()))
        else:
            Xml.SubElement(case, "system-out").text = _text(one.sentence())
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _text(value: str) -> str:
    return _CONTROL.sub("\ufffd", value)
