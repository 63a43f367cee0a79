"""Roles in plans: heads are held for them, what is lost is said, and what cannot be is refused."""

import json
from pathlib import Path

import pytest

from headprune.config import DataConfig, ScoreConfig
from headprune.evidence.score import score
from headprune.planning.choose import CutRequest
from headprune.render.report import report
from headprune.result.card import rewrite_card, roles_section
from headprune.result.prune import prune
from headprune.role.measure import roles
from headprune.schemas.roles import read_roles
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import chosen
from tests.test_cli import refuses, run, succeeds
from tests.test_roles import SMALL, measured, whole

LOST = ("self-token", "duplicate-token", "induction")  # of 0.2 and 1.0
FIRST, SECOND = "transformer.h.0.attn", "transformer.h.1.attn"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A planted model, its roles, and scores by which 0.0, the only head that writes, stays."""
    root = tmp_path_factory.mktemp("planned")
    measured(whole(), root)
    score(root / "model", root / "scores", ScoreConfig(criterion=["magnitude"]))
    return root


def planned(place, *held, **budget):
    of_roles = {"roles": place / "roles", "keep_roles": held}
    return chosen(place / "model", place / "scores", **of_roles, **budget)


def kept(made):
    return [made.plan.attentions[path].keep for path in (FIRST, SECOND)]


def test_heads_of_a_role_stay_whatever_their_scores(place):
    free = planned(place, keep=2)
    assert kept(free) == [(0, 1), ()]
    assert free.roles_lost == LOST  # "broad" is lost as well, which is an attribute
    held = planned(place, "induction", "duplicate-token", keep=2)
    assert kept(held) == [(2,), (0,)]
    assert set(held.roles_lost or ()) == {"previous-token", "positional"}
    assert planned(place, "induction", keep=2).roles_lost == LOST[:2]
    assert planned(place, keep=8).roles_lost == ()
    assert chosen(place / "model", place / "scores", keep=2).roles_lost is None


def test_they_stay_under_every_budget(place):
    most = 1_900_000  # of two heads
    held = planned(place, "duplicate-token", "induction", max_params=most)
    assert kept(held) == [(2,), (0,)] and held.spent["--max-params 1,900,000"][1] <= most
    assert 0 in kept(planned(place, max_params=most))[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--keep", 1, "--keep-roles", "induction,previous-token"),
            "--keep-roles induction,previous-token holds 2 of 8 heads, and the budgets leave 1",
        ),
        (("--keep", 2, "--keep-roles", "inductoin"), "Did you mean 'induction'?"),
        (("--keep", 2, "--keep-roles", "next-token"), "no head has that role"),
        (("--keep", 2, "--roles", "{other}"), "not of 'model'"),
        (("--keep", 2, "--roles", "{empty}"), "headprune roles writes one"),
        (("--max-params", 1, "--keep-roles", "induction"), "--keep-roles (query heads held: 1)"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_written(arguments, said, place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    record = json.loads((place / "roles" / "roles.json").read_text())
    record["model"]["fingerprint"] = "0" * 16
    (tmp_path / "other.json").write_text(json.dumps(record))
    places = {"{other}": tmp_path / "other.json", "{empty}": tmp_path / "empty"}
    given = [places.get(str(one), one) for one in arguments]
    given += [] if "--roles" in given else ["--roles", place / "roles"]
    words = ("prune", place / "model", "--scores", place / "scores", *given)
    code, _, err = run(capsys, *words, "--dry-run", "--save-plan", tmp_path / "plan.json")
    assert (code, (tmp_path / "plan.json").exists()) == (2, False)
    assert said in err


def test_a_dry_run_names_the_roles_that_go(place, capsys):
    words = ("prune", place / "model", "--scores", place / "scores", "--dry-run")
    roles = ("--roles", place / "roles")
    out = succeeds(capsys, *words, "--keep", 2, *roles)
    assert f"No head stays of these roles: {', '.join(LOST)}." in " ".join(out.split())
    _, out, _ = run(capsys, *words, "--keep", 8, *roles, "--json")
    assert json.loads(out)["roles_lost"] == []
    others = ("--keep", 2, "--keep-roles", "induction")
    refuses(capsys, "--keep-roles has no effect without --roles", *words, *others)


def test_a_report_shows_what_became_of_roles(place, tmp_path):
    runs = [tmp_path, place / "roles"]
    prune(place / "model", tmp_path / "small", CutRequest(plan=planned(place, keep=2).plan))
    page = report(runs, tmp_path / "page.html").output.read_text()
    row = '<tr><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td>-</td><td>{}</td></tr>'
    assert row.format("induction", 1, 0, "-", "lost") in page
    assert row.format("previous-token", 1, 1, "-", "") in page
    assert '"role"' in page and '"induction"' in page  # told of the heads of the map
    data = DataConfig(source=str(place / "text.txt"))
    small, original = str(tmp_path / "small"), str(place / "model")
    roles(small, tmp_path / "after", data, SMALL, against=original)
    text = report(runs, tmp_path / "after.html").output.read_text()
    assert row.format("induction", 1, 0, 0, "lost") in text
    rewrite_card(Path(small), [("perplexity", "-", "9.5", "-")])
    rewrite_card(Path(small), record=read_roles(tmp_path / "after"))
    card = (Path(small) / "README.md").read_text()
    assert "| perplexity | - | 9.5 | - |" in card  # what is not measured anew stays
    assert "| induction | 1 | 0 | 0 | - | lost |" in card
    nothing = read_roles(tmp_path / "after").model_copy(update={"roles": {}})
    assert roles_section(nothing) == "## Roles\n\nNo head has a role."
    other = report([tmp_path / "small"], tmp_path / "none.html").output.read_text()
    assert "Roles of heads" in text and "Roles of heads" not in other


def test_a_group_is_held_for_one_of_its_heads():
    from headprune.model.attention import attention_of
    from headprune.planning.roles import held_units
    from headprune.schemas.roles import RolesRecord

    model = tiny.model("llama-gqa")
    attentions = attention_of(model)

    class Record(RolesRecord):
        def heads(self, role):
            return {(attentions[1].path, 3)}

    record = Record.model_construct()
    assert held_units(record, ["induction"], attentions, Unit.KV_GROUP) == {3 + 1}
    assert held_units(record, ["induction"], attentions, Unit.HEAD) == {6 + 3}
