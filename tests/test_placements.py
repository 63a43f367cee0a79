"""Where models run, and how much of one is there at once."""

from headprune import devices, placements
from headprune.placements import Placement, asked_placement, placing, too_large


def test_the_inner_placement_wins_unless_it_is_auto():
    for asked in (Placement.LAYERS, Placement.WHOLE):
        with placing(asked), placing(Placement.AUTO):
            assert asked_placement() is asked
    with placing(Placement.AUTO), placing(Placement.LAYERS):
        assert asked_placement() is Placement.LAYERS


def test_the_fuller_place_decides(monkeypatch):
    with devices.running_on("cpu"):
        monkeypatch.setattr(placements, "available", lambda: 100)
        assert too_large(80) is None
        assert too_large(81) == "cpu"
        monkeypatch.setattr(placements, "available", lambda: None)
        assert too_large(10**15) is None
