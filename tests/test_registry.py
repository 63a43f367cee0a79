"""The registry and the family table."""

import json

import pytest

from headprune.errors import FamilyError, HeadpruneError
from headprune.family import FAMILIES, Family, Projection
from headprune.registry import Registry, did_you_mean

pytestmark = pytest.mark.quick


def test_names_are_unique_and_fixed_after_import():
    registry = Registry("thing")
    registry.add("a", 1)
    with pytest.raises(ValueError, match="thing 'a' is registered twice"):
        registry.add("a", 2)
    registry.freeze()
    with pytest.raises(ValueError, match="frozen"):
        registry.add("b", 2)
    assert (list(registry), len(registry), "a" in registry, "b" in registry) == (
        ["a"],
        1,
        True,
        False,
    )
    with pytest.raises(ValueError, match="frozen"):
        FAMILIES.add("x", FAMILIES["gpt2"])


def test_a_wrong_name_is_told_the_nearest_one():
    with pytest.raises(FamilyError, match="No family named 'lama'. Did you mean 'llama'"):
        FAMILIES["lama"]
    with pytest.raises(HeadpruneError, match=r"No thing named 'q'. Supported: \."):
        Registry[int]("thing")["q"]
    assert did_you_mean("zzz", ["llama"]) == ""


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_row_travels_as_json(name):
    row = FAMILIES[name]
    travelled = json.loads(json.dumps(row.for_runtime()))
    assert travelled == row.for_runtime()
    roles = "".join(p["holds"] for p in travelled["projections"])
    assert set(roles) <= set("qkvo")
    assert roles.count("o") == 1
    assert row.model_type == name


def test_rows_cannot_be_changed():
    row = Family(model_type="x", attention={"self": "a.*"}, projections=(Projection("o", "o"),))
    with pytest.raises(AttributeError):
        row.head_dim = "b"  # type: ignore[misc]
