"""No class name stands for two things."""

import ast
from pathlib import Path

import pytest

import headprune


def classes_defined_twice(root):
    """Names of classes that more than one place below a folder defines, with the places."""
    places = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where = f"{path.relative_to(root)}:{node.lineno}"
                places.setdefault(node.name, []).append(where)
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.quick
def test_no_class_name_is_defined_twice():
    found = classes_defined_twice(Path(headprune.__file__).parent)
    assert not found, f"Give one of each another name: {found}"


def test_a_name_in_two_files_or_twice_in_one_is_found(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("class Step: ...\nclass Run:\n    class Inner: ...\n")
    (tmp_path / "inner" / "b.py").write_text("x = 1\nclass Inner: ...\n")
    (tmp_path / "c.py").write_text("class One: ...\ndef f():\n    class One: ...\n")
    assert classes_defined_twice(tmp_path) == {
        "Inner": ["a.py:3", "inner/b.py:2"],
        "One": ["c.py:1", "c.py:3"],
    }
