"""Pictures of roles: every head is drawn as what the record says of it, in files and in reports."""

import shutil

import numpy as np
import pytest
from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.colors import to_hex

from headprune.config import DataConfig, RolesConfig
from headprune.errors import CheckpointError, HeadpruneWarning
from headprune.io.figures import MUTED, SERIES
from headprune.model.attention import attention_of, identity
from headprune.planning.choose import CutRequest
from headprune.render.report import report
from headprune.result.prune import prune
from headprune.role import ROLES
from headprune.role.pictures import roles_figure, roles_table, scores_figure
from headprune.schemas.plan import AttentionPlan, ModelIdentity, Plan
from headprune.schemas.roles import (
    HeadEffect,
    HeadRoles,
    ModuleRoles,
    Rise,
    RoleFacts,
    RoleScore,
    RolesRecord,
)
from headprune.tensors.units import Unit
from tests import tiny

PATHS = [f"model.layers.{layer}.self_attn" for layer in range(tiny.LAYERS)]
MODEL = ModelIdentity(
    name="small", model_type="llama", architecture="LlamaForCausalLM", fingerprint="a"
)


def head(number, role, rise):
    scores = {}
    for name in ("previous-token", "induction"):
        score, state = (0.95, "over") if name == role else (0.25, "under")
        scores[name] = RoleScore(score=score, low=0.2, high=1.0, control=0.1, state=state)
    nats = None if rise is None else Rise(nats=rise, low=rise, high=rise)
    effect = None if nats is None else HeadEffect(zero=nats, mean=nats)
    return HeadRoles(head=number, role=role, nearly=(), attributes=(), scores=scores, effect=effect)


def modules(roles, rise=None):
    """Four layers of six heads, in pairs."""
    return tuple(
        ModuleRoles(
            path=path,
            kind="self",
            heads=tuple(head(h, roles.get((layer, h)), rise) for h in range(6)),
            kv_groups=((0, 1), (2, 3), (4, 5)),
        )
        for layer, path in enumerate(PATHS)
    )


def record(**changes):
    whole = RolesRecord(
        created="2026-01-01",
        versions={"headprune": "0.1.0"},
        model=MODEL,
        data=DataConfig(source="text.txt"),
        data_sha256=None,
        settings=RolesConfig(),
        tokens=100,
        roles={n: RoleFacts.model_validate(r, from_attributes=True) for n, r in ROLES.items()},
        modules=modules({(0, 1): "previous-token", (3, 2): "induction", (3, 4): "induction"}),
    )
    return whole.model_copy(update=changes)


def cut(whole, left=(1, 2, 3)):
    """The same after all layers lost the other heads."""
    there = [[h for h in m.heads if h.head in left] for m in whole.modules]
    smaller = [
        m.model_copy(update={"heads": tuple(heads), "kv_groups": ()})
        for m, heads in zip(whole.modules, there, strict=True)
    ]
    return whole.model_copy(
        update={"modules": tuple(smaller), "original": whole.modules, "against": whole.model}
    )


def marks(figure, panel):
    """Places of marks by colour."""
    found = {}
    for drawn in figure.axes[panel].collections:
        if isinstance(drawn, PathCollection):
            places = np.asarray(drawn.get_offsets()).tolist()
            found.setdefault(to_hex(drawn.get_facecolor()[0]), []).extend(map(tuple, places))
    return {colour: sorted(places) for colour, places in found.items()}


def squares(figure, panel):
    """How many heads each set of squares is of."""
    several = figure.axes[panel].collections
    return [len(one.get_paths()) for one in several if isinstance(one, PatchCollection)]


def test_marks_are_the_roles():
    drawn = marks(roles_figure(record()), 0)
    assert drawn[SERIES[0]] == [(1, 0)]
    assert drawn[SERIES[1]] == [(2, 3), (4, 3)]
    assert len(drawn[MUTED]) == 21
    other = marks(roles_figure(record(modules=modules({(0, 1): "induction"}))), 0)
    assert other == {SERIES[0]: [(1, 0)], MUTED: other[MUTED]}


def test_cut_heads_are_hollow_and_groups_framed_beside_the_original():
    figure = roles_figure(cut(record()))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["before", "after"]
    assert marks(figure, 0) == marks(roles_figure(record()), 0)
    assert marks(figure, 1)[SERIES[1]] == [(2, 3)]  # 3.4 was cut
    assert (squares(figure, 0), squares(figure, 1)) == ([24, 0], [12, 12])
    # frames are those of the original
    assert [len(axes.patches) for axes in figure.axes] == [12, 12]
    assert len(roles_figure(record(modules=record().modules[:1])).axes[0].patches) == 3

    # without the original, heads below the largest are known to be cut
    alone = cut(record()).model_copy(update={"original": (), "against": None})
    assert squares(roles_figure(alone), 0) == [12, 4]  # head 0 of each; 4 and 5 nobody knows of


def test_a_score_has_its_place_on_one_scale():
    shown = [axes for axes in scores_figure(record()).axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") for axes in shown]
    assert titles == ["previous-token\n≥ 0.5", "induction\n≥ 0.4"]
    for axes, over in zip(shown, ([(0, 1)], [(3, 2), (3, 4)]), strict=True):
        (image,) = axes.images
        assert image.get_clim() == (0, 1)
        places = np.argwhere(np.asarray(image.get_array()) > 0.9)
        assert [tuple(place) for place in places] == over
        assert len(axes.collections[1].get_paths()) == len(over)


def test_the_table_has_the_same():
    columns, rows = roles_table(cut(record()))
    assert columns == ("layer", "before", "after", "cut")
    assert rows[3] == ("3", "induction: 2, 4", "induction: 2", "0, 4, 5")
    assert roles_table(record())[1][0] == ("0", "previous-token: 1", "-")


def write(one, folder):
    folder.mkdir(parents=True)
    (folder / "roles.json").write_text(one.model_dump_json())
    return folder


def test_roles_belong_to_the_result_with_these_heads(browser, llama_folder, tmp_path):
    model = tiny.model("llama-gqa")
    parts = {
        a.path: AttentionPlan(query_heads=6, kv_heads=3, keep=(0, 1, 2, 3))
        for a in attention_of(model)
    }
    plan = Plan(unit=Unit.KV_GROUP, attentions=parts)
    result = prune(llama_folder, tmp_path / "run" / "small", CutRequest(plan=plan)).output
    whole = record(model=identity(model, llama_folder))
    own = cut(whole, (0, 1, 2, 3)).model_copy(update={"model": MODEL})
    roles = write(own, tmp_path / "run" / "roles")
    (run,) = (done := report([tmp_path / "run"], tmp_path / "page.html")).runs
    assert run.roles == own
    for width, dark in ((380, False), (1280, True)):
        browser.open(done.output, width, dark)
        browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
        assert (browser.complaints(), browser.fetched()) == ([], [])
        assert browser.overflow() <= 0
        assert browser.low_contrast()[1] == []
    assert "induction: 2" in done.output.read_text()
    # those of the original are shown where there are none of the result
    shutil.rmtree(roles)
    write(whole, tmp_path / "run" / "roles")
    (run,) = report([tmp_path / "run"], tmp_path / "b.html").runs
    assert run.roles == whole
    # those of another cut are left out
    other = write(cut(record(), (0, 1)), tmp_path / "other")
    with pytest.warns(HeadpruneWarning, match="belongs to none of its results: '.*other'"):
        (run,) = report([result, other], tmp_path / "c.html").runs
    assert run.roles is None
    (other / "roles.json").write_text('{"schema_version": 1}')
    with pytest.raises(CheckpointError, match=r"roles.json' is not valid"):
        report([other], tmp_path / "d.html")
