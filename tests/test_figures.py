"""Figures: what is drawn is what was given, and the files are what their suffix says."""

from xml.etree import ElementTree

import pytest

from headprune.errors import CheckpointError
from headprune.io.figures import Series, curve, pareto, save


def texts(path):
    root = ElementTree.parse(path).getroot()
    return ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]


def every_figure():
    line = Series("gates $a$ <b>", [1, 2], [3.0, 4.0], [2.5, 3.5], [3.5, 4.5])
    return {
        "curve": curve([line], "Curve", "size", "perplexity", 2.5, higher_is_better=False),
        "empty curve": curve([], "Nothing", "size", "quality"),
    }


def test_files_are_what_their_suffix_says(tmp_path):
    for name, figure in every_figure().items():
        assert save(figure, tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        root = ElementTree.parse(save(figure, tmp_path / f"{name}.svg")).getroot()
        assert root.tag.endswith("svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Could not write .*figure.png"):
        save(figure, tmp_path / "file" / "figure.png")


def test_text_is_drawn_as_it_is(tmp_path):
    figure = curve([Series("$x^2$", [1], [1]), Series("<script>", [1], [2])], "100 $", "x", "y")
    drawn = texts(save(figure, tmp_path / "text.svg"))
    assert {"$x^2$", "<script>", "100 $"} <= set(drawn)


def test_pareto_front():
    points = [(1.0, 30.0), (2.0, 20.0), (2.0, 25.0), (3.0, 20.0), (4.0, 10.0), (4.0, 10.0)]
    assert pareto(points, higher_is_better=False) == [0, 1, 4, 5]
    assert pareto(points, higher_is_better=True) == [0]
    assert pareto([], higher_is_better=True) == []
