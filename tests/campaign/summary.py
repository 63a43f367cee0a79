"""What came of a campaign: by cause at the terminal, in numbers as a page."""

import os
import platform
import re
from collections import Counter

_PARTS = {
    "kill": "interruptions",
    "faults": "faults of disks, permissions, names, places; two writers",
}
_RULES = {
    "kill": "Every command that writes is stopped at a random moment, by SIGKILL or Ctrl-C, and "
    "before its n-th file operation. It writes over nothing and over a good old output. Then the "
    "output is absent, the complete old one or the complete new one; the same command again ends "
    "with the numbers of an unbroken run and leaves nothing beside its output.",
    "faults": "File-size limits, full disks, closed folders, environments without HOME, names of "
    "all kinds, two writers of one output. Outputs that are links, files, somebody's folder, or "
    "the input. They end with a sentence: nothing is half-written, nothing of anybody's changed.",
}


def by_cause(results, most=3):
    """What broke, alike together, with the commands that run a few of each again."""
    causes = {}
    for result in results:
        if result.broken:
            alike = re.sub(r"0x[0-9a-f]+|'[^']*'|\"[^\"]*\"|\[.*\]|\d{3,}", "…", result.broken)
            causes.setdefault((result.case.part, alike[:150]), []).append(result)
    lines = []
    for (part, cause), found in sorted(causes.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"{len(found):5} {part}: {cause}")
        lines += [f"        {result.case.again()}" for result in found[:most]]
    skipped = Counter(r.skipped for r in results if r.skipped)
    lines += [f"{count:5} skipped: {why}" for why, count in skipped.items()]
    return "\n".join(lines) or "Nothing broke."


def page(results, seeds):
    """The report, as Markdown."""
    import torch
    import transformers

    from headprune import __version__

    broken = [result for result in results if result.broken]
    lines = [
        "# Reliability",
        "",
        f'`make campaign SEEDS="{" ".join(map(str, seeds))}"` tries to break headprune '
        "(`tests/campaign`). Every case is a function of its seed and number, and runs alone with "
        "the command printed where it breaks something.",
        "",
        "| what | tried | how it ended | broken |",
        "|---|---:|---|---:|",
    ]
    for part, name in _PARTS.items():
        found = [result for result in results if result.case.part == part]
        if not found:
            continue
        endings = Counter(result.ending for result in found if not result.skipped)
        told = ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common())
        skipped = sum(bool(result.skipped) for result in found)
        told += f", not possible here {skipped}" if skipped else ""
        wrong = sum(bool(result.broken) for result in found)
        lines.append(f"| {name} | {len(found):,} | {told} | {wrong} |")
    lines += ["", f"{len(results):,} cases, {len(broken)} broken.", ""]
    for part in _PARTS:
        lines += [f"**{part}** {_RULES[part]}", ""]
    lines += [
        "Damaged files (`test_fuzz.py`), strange numbers (`test_strange_numbers.py`), code and "
        "paths of strangers (`test_strange_code.py`) and strings that are commands "
        "(`test_injection.py`) are tests of the suite.",
        "",
        f"Machine: {platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. headprune {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Models: two layers of Llama and GPT-2, "
        "random, made on the spot.",
    ]
    if broken:
        lines += ["", "## Broken", "", "```", by_cause(broken), "```"]
    return "\n".join(lines) + "\n"
