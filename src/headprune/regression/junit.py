"""The result as JUnit XML, which CI systems show: one test case per limit."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from headprune.io.markup import xml_safe
from headprune.regression.verdicts import Judged, Verdict

SUITE = "headprune check"


def junit_xml(model: str, judged: Sequence[Judged], seconds: float) -> str:
    """Renders the verdicts.

    Args:
        model: Name of the model.
        judged: The limits.
        seconds: How long the check took.
    """
    found = [one.verdict for one in judged]
    counts = {
        "tests": len(judged),
        "failures": found.count(Verdict.BROKEN),
        "errors": found.count(Verdict.UNDECIDED),
        "skipped": 0,
    }
    attributes = {"name": SUITE, "time": f"{seconds:.3f}"}
    attributes |= {name: str(count) for name, count in counts.items()}
    root = Xml.Element("testsuites")
    suite = Xml.SubElement(root, "testsuite", attributes)
    for one in judged:
        case = Xml.SubElement(
            suite, "testcase", classname=xml_safe(model), name=xml_safe(one.limit)
        )
        if one.verdict is Verdict.PASSED:
            Xml.SubElement(case, "system-out").text = xml_safe(one.sentence())
        else:
            tag = "failure" if one.verdict is Verdict.BROKEN else "error"
            Xml.SubElement(case, tag, message=xml_safe(one.sentence()))
    return _text(root)


def junit_error(model: str, why: str) -> str:
    """Renders that there are no verdicts, and why.

    Args:
        model: Name of the model.
        why: What kept the check from running.
    """
    counts = {"tests": "1", "failures": "0", "errors": "1", "skipped": "0"}
    root = Xml.Element("testsuites")
    suite = Xml.SubElement(root, "testsuite", {"name": SUITE, "time": "0.000"} | counts)
    case = Xml.SubElement(suite, "testcase", classname=xml_safe(model), name="could not run")
    Xml.SubElement(case, "error", message=xml_safe(why))
    return _text(root)


def _text(root: Xml.Element) -> str:
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
