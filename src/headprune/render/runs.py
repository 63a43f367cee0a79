"""Runs of a report, assembled from parts by their ids."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headprune.errors import CheckpointError, HeadpruneWarning
from headprune.evaluation.report import Report
from headprune.regression.check import CheckReport
from headprune.render import records
from headprune.render.blocks import Table
from headprune.render.folders import Place, Result
from headprune.render.head_map import HeadMap, Layer, PerHead, per_head
from headprune.render.records import short_name
from headprune.schemas.gates import TrainedGates
from headprune.schemas.manifest import Manifest
from headprune.schemas.roles import RolesRecord
from headprune.schemas.scores import Scores
from headprune.tensors.units import Unit

_UNIT = {
    Unit.HEAD: "one by one",
    Unit.KV_GROUP: "a KV head with its queries at a time",
    Unit.QUERY_SLOT: "a query of every KV head at a time",
    Unit.LAYER: "all heads of a layer at a time",
}


@dataclass
class ReportedRun:
    """A result with its parts."""

    path: Path
    manifest: Manifest
    summary: str
    head_map: HeadMap
    name: str = ""  # of its folder, made unique
    evaluations: Sequence[Report] = ()  # the result's come first
    checks: Sequence[CheckReport] = ()
    role_table: Table | None = None  # how many heads had each role, and kept it
    roles: RolesRecord | None = None  # for the pictures
    gates: TrainedGates | None = None  # that chose its heads

    @property
    def evaluation(self) -> Report | None:
        """The evaluation of the result."""
        return next((e for e in self.evaluations if e.model.id == self.manifest.id), None)

    def is_against_original(self, report: Report) -> bool:
        """Return whether an evaluation's base is the first model of the run."""
        return report.against is not None and is_original(self.manifest, report.against.id)

    def base_name(self, report: Report) -> str:
        """Return the name of an evaluation's base."""
        if report.against is None or self.is_against_original(report):
            return "original"
        short = short_name(report.against.name)
        return report.against.name if short == short_name(report.model.name) else short


def assemble(places: Sequence[Place]) -> list[ReportedRun]:
    """Return a run per result without a successor.

    Raises:
        CheckpointError: If there is none.
    """
    parts = _Parts(places)
    runs = [(place.path, parts.run_of(tip, place)) for place in places for tip in place.tips]
    if not runs:
        found = ", ".join(f"'{place.path}'" for place in places)
        raise CheckpointError(
            f"There is no result to report on in {found}: a report is on a model that headprune "
            "wrote. Give its folder, too."
        )
    if others := [f"'{path}'" for path in parts.unused()]:
        warnings.warn(
            f"The report leaves out what belongs to none of its results: {', '.join(others)}.",
            HeadpruneWarning,
            stacklevel=3,
        )
    names = [path.resolve().name for path, _ in runs]
    for paths in ([str(r.path) for _, r in runs], [str(r.path.resolve()) for _, r in runs]):
        count = Counter(names)
        names = [p if count[n] > 1 else n for n, p in zip(names, paths, strict=True)]
    return [replace(run, name=name) for name, (_, run) in zip(names, runs, strict=True)]


@dataclass
class _Parts:
    """All parts of all places; ``used`` holds the ids of shown ones."""

    places: Sequence[Place]
    used: set[str | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.results = {r.manifest.id: r for p in self.places for r in p.results.values()}
        self.gates = {g.id: g for p in self.places for g in p.gates.values()}
        self.scores = {s.id: s for p in self.places for s in p.scores.values()}
        self.evaluations = {e.id: e for p in self.places for e in p.evaluations.values()}.values()
        self.checks = {c.id: c for p in self.places for c in p.checks.values()}.values()
        self.roles = {path: r for p in self.places for path, r in p.roles.items()}
        self.tips = {tip.manifest.id for p in self.places for tip in p.tips}

    def unused(self) -> list[Path]:
        """Return the places of parts that no run shows."""
        ids = {path: str(path) for path in self.roles}
        for place in self.places:
            kinds: list[Mapping[Path, Any]] = [place.gates, place.scores]
            kinds += [place.evaluations, place.checks]
            ids |= {path: one.id for kind in kinds for path, one in kind.items()}
        return [path for path, id_ in ids.items() if id_ not in self.used]

    def run_of(self, tip: Result, place: Place) -> ReportedRun:
        manifest = tip.manifest
        chain = [self.results[s.id] for s in manifest.lineage if s.id in self.results] + [tip]
        ids = [step.evidence.id for step in manifest.steps if step.evidence is not None]
        gates = next((self.gates[id_] for id_ in ids if id_ in self.gates), None)
        scores = self._scores(manifest, place)
        drawn = _map_of_result(chain, gates, scores)
        run = ReportedRun(tip.path, manifest, records.what(manifest), drawn)
        run.summary += "".join(f" {lost.words}" for lost in records.windows(manifest))
        run.evaluations = self._evaluations(manifest)
        run.checks = [check for check in self.checks if check.measured == manifest.id]
        self.used |= {part.id for part in (*run.evaluations, *run.checks)}
        run.gates = gates
        if gates is not None:
            run.summary += f" {_gates_summary(gates)}"
            self.used.add(gates.id)
        if scores is not None:
            self.used.add(scores.id)
        self._add_roles(run)
        return run

    def _scores(self, manifest: Manifest, place: Place) -> Scores | None:
        evidence = [step.evidence for step in manifest.steps if step.evidence is not None]
        chosen = [one.id for one in evidence if one.kind == "scores"]
        if chosen:
            return next((self.scores[id_] for id_ in chosen if id_ in self.scores), None)
        models = {step.source.fingerprint for step in manifest.steps}
        near_first = [*place.scores.values(), *self.scores.values()]
        return next((s for s in near_first if s.metadata.model.fingerprint in models), None)

    def _evaluations(self, manifest: Manifest) -> list[Report]:
        """Those of a result, and then those of the models it was made of."""
        of_result = [e for e in self.evaluations if e.model.id == manifest.id]

        def rank(e: Report) -> tuple[bool, bool, str]:
            original = e.against is not None and is_original(manifest, e.against.id)
            return e.against is not None, original, e.provenance.created

        ids = {manifest.steps[0].parent, *_lineage(manifest)} - self.tips - {None}
        return [
            *sorted(of_result, key=rank, reverse=True),
            *(e for e in self.evaluations if e.model.id in ids),
        ]

    def _add_roles(self, run: ReportedRun) -> None:
        source, left = run.manifest.steps[0].source.fingerprint, run.manifest.layout

        def is_of_cut(record: RolesRecord) -> bool:
            heads = {m.path: tuple(head.head for head in m.heads) for m in record.modules}
            same = all(p in left and left[p].query_heads == ids for p, ids in heads.items())
            return record.against is not None and record.against.fingerprint == source and same

        known = self.roles.items() if left else ()
        original = next((one for one in known if one[1].model.fingerprint == source), None)
        cut = next((one for one in known if is_of_cut(one[1])), None)
        self.used |= {str(one[0]) for one in (original, cut) if one is not None}
        if cut is not None:
            run.roles, run.role_table = cut[1], records.roles(cut[1])
        elif original is not None:
            heads = {(m.path, head.head) for m in original[1].modules for head in m.heads}
            kept = {(p, h) for p, h in heads if p not in left or h in left[p].query_heads}
            run.roles, run.role_table = original[1], records.roles(original[1], kept)
        if (record := original or cut) is not None:
            by_head = {(m.path, h.head): h for m in record[1].modules for h in m.heads}
            run.head_map.tell("role", {key: head.role or "none" for key, head in by_head.items()})
            effects = {k: h.effect.zero.nats for k, h in by_head.items() if h.effect is not None}
            rises = {key: f"{nats:+.3f}" for key, nats in effects.items()}
            run.head_map.tell("loss without it, nats", rises)


def is_original(manifest: Manifest, base: str | None) -> bool:
    """Return whether the base of an evaluation is the first model of a chain."""
    start = manifest.steps[0].parent
    # ids are unknown where files are not at hand
    return base == start if base and start else base not in _lineage(manifest)


def _lineage(manifest: Manifest) -> set[str]:
    return {step.id for step in manifest.lineage}


def _gates_summary(gates: TrainedGates) -> str:
    about = gates.metadata
    what = "keep" if about.window is None else "leave the whole past to"
    return (
        f"Gates {what} {about.kept_heads} of {about.query_heads} query heads, "
        f"{_UNIT[about.unit]}; trained for {about.steps} steps on {short_name(about.data)}."
    )


def _map_of_result(
    chain: Sequence[Result], gates: TrainedGates | None, scores: Scores | None
) -> HeadMap:
    first, tip = chain[0], chain[-1]
    steps = first.manifest.lineage
    before, left = (steps[-1].layout if steps else {}), tip.manifest.layout
    layers = []
    for path, part in first.plan.attentions.items():
        ids = before[path].query_heads if path in before else range(part.query_heads)
        layers.append(Layer.of(path, ids, _even(part.query_heads, part.kv_heads)))
    drawn = HeadMap(layers)
    drawn.keep(
        {
            (path, head)
            for path, part in tip.plan.attentions.items()
            for head in (left[path].query_heads if path in left else part.keep)
        }
    )
    for result in chain:
        merged = {
            p: [group[0] for group in part.groups or () if len(group) > 1]
            for p, part in result.plan.attentions.items()
        }
        drawn.mark("merged", _queries(result, merged))
    near = _queries(tip, {path: heads.near for path, heads in left.items()})
    drawn.mark("window", near)
    drawn.tell("sees", dict.fromkeys(near, tip.manifest.window))
    drawn.tell_kv_heads({p: part.groups or () for p, part in first.plan.attentions.items()})
    if gates is not None:
        _show_gates(drawn, gates)
    if (
        scores is not None
        and scores.metadata.model.fingerprint == first.manifest.source.fingerprint
    ):
        # scores of another model of the chain would be of other heads
        _show_scores(drawn, scores)
    return drawn


def _queries(result: Result, kv_heads: Mapping[str, Collection[int]]) -> set[tuple[str, int]]:
    """Return the query heads of some KV heads of a result, by path and id."""
    layout = result.manifest.layout
    return {(p, h) for p, ids in kv_heads.items() if p in layout for h in layout[p].queries(ids)}


def _even(query_heads: int, kv_heads: int) -> tuple[int, ...]:
    group = query_heads // max(1, kv_heads)
    return (group,) * kv_heads if group * kv_heads == query_heads else ()


def _layers(evidence: TrainedGates | Scores) -> list[Layer]:
    about = evidence.metadata
    rows = zip(about.modules, about.heads, about.group_sizes, strict=True)
    return [Layer.of(path, ids, sizes) for path, ids, sizes in rows]


def _show_gates(drawn: HeadMap, gates: TrainedGates) -> None:
    layers, unit = _layers(gates), gates.metadata.unit

    def of(values: list[float]) -> PerHead:
        return per_head(layers, unit, values)

    chances = of(gates.open_probability().tolist())
    drawn.show("probability that the gate is open", chances)
    drawn.tell("gate open with probability", chances)


def _show_scores(drawn: HeadMap, scores: Scores) -> None:
    layers = _layers(scores)
    for name, values in scores.scores.items():
        numbers = per_head(layers, scores.metadata.unit, values.tolist())
        if drawn.evidence is None:
            drawn.show(f"score {name}", numbers)
        drawn.tell(f"score {name}", numbers)
