"""What an output is, apart from the times in it; and what lies beside it."""

import hashlib
import json
import re
import shlex

# of records: when something was, how long it took, and hashes of files and steps that hold such
_TIMES = {"created", "started", "seconds", "evaluate_s", "judge_s", "files", "inputs", "key"}
_JUNIT_TIME = re.compile(rb'time="[\d.]+"')
_TELLS_TIME = (".md", ".html", ".svg", ".png", ".lock")  # of these it counts that they are whole


def facts(out):
    """Digests of a file, or of the files of a folder, by name; times are left out."""
    if out.is_file():
        return {out.name: _digest(out)}
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {str(file.relative_to(out)): _digest(file) for file in files}


def _digest(file):
    content = file.read_bytes()
    try:
        if file.suffix == ".json":
            content = json.dumps(_timeless(json.loads(content))).encode()
        elif file.suffix == ".jsonl":
            lines = [_timeless(json.loads(line)) for line in content.splitlines()]
            content = json.dumps(lines).encode()
    except ValueError:
        return f"half a file of {len(content)} bytes"
    if file.suffix in _TELLS_TIME:
        return "whole" if content.rstrip().endswith(_END.get(file.suffix, b"")) else "half"
    return hashlib.sha256(_JUNIT_TIME.sub(b"", content)).hexdigest()


_END = {".html": b"</html>", ".svg": b"</svg>", ".png": b"IEND\xaeB`\x82"}


def _timeless(node):
    if isinstance(node, dict):
        return {key: _timeless(value) for key, value in node.items() if key not in _TIMES}
    return [_timeless(value) for value in node] if isinstance(node, list) else node


def link_originals(place, originals):
    """Puts what commands take into a folder."""
    for source in originals.iterdir():
        if not source.name.startswith((".", "kill-", "resume-", "run")):
            (place / source.name).symlink_to(source)


def litter(place, out):
    """What lies beside an output and is no link to an original."""
    return sorted(f.name for f in place.iterdir() if f.name != out and not f.is_symlink())


def takes_overwrite(line):
    """Whether the command of a line has the option --overwrite."""
    from headprune.commands.command import named

    return "overwrite" in named(shlex.split(line)[0]).options()
