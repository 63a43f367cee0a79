"""The result as JUnit XML, which CI systems show: one test case per limit."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from headprune.io.markup import xml_safe
from headprune.regression.verdicts import Judged, Verdict

SUITE = "headprune check"
_TAGS = {Verdict.PASSED: "system-out", Verdict.BROKEN: "failure", Verdict.UNDECIDED: "error"}


def junit_xml(model: str, judged: Sequence[Judged], seconds: float) -> str:
    """Return the verdicts on a model; ``seconds`` is the time of the check."""
    return _suite(
        model, [(one.limit, _TAGS[one.verdict], one.sentence()) for one in judged], seconds
    )


def junit_error(model: str, why: str) -> str:
    """Return one error: why the check of a model could not run."""
    return _suite(model, [("could not run", "error", why)], 0.0)


def _suite(model: str, cases: Sequence[tuple[str, str, str]], seconds: float) -> str:
    """Render cases: name, tag and text."""
    tags = [tag for _, tag, _ in cases]
    counts = {"failures": tags.count("failure"), "errors": tags.count("error"), "skipped": 0}
    attributes = {"name": SUITE, "time": f"{seconds:.3f}", "tests": str(len(cases))}
    root = Xml.Element("testsuites")
    suite = Xml.SubElement(
        root, "testsuite", attributes | {name: str(count) for name, count in counts.items()}
    )
    for name, tag, text in cases:
        case = Xml.SubElement(suite, "testcase", classname=xml_safe(model), name=xml_safe(name))
        if tag == "system-out":
            Xml.SubElement(case, tag).text = xml_safe(text)
        else:
            Xml.SubElement(case, tag, message=xml_safe(text))
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
