"""Runs of a report, assembled from parts by their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headprune.evaluation.report import Report
from headprune.regression.check import CheckReport
from headprune.render import records
from headprune.render.blocks import Table
from headprune.render.folders import History, Place, Result, history
from headprune.render.head_map import HeadMap, Layer, PerHead, per_head
from headprune.render.records import short_name
from headprune.schemas.gates import TrainedGates
from headprune.schemas.manifest import HISTORY, Manifest
from headprune.schemas.roles import RolesRecord
from headprune.schemas.scores import Scores
from headprune.tensors.units import Unit

_UNIT = {
    Unit.HEAD: "one by one",
    Unit.KV_GROUP: "a KV head with its queries at a time",
    Unit.QUERY_SLOT: "a query of every KV head at a time",
}


@dataclass
class ReportedRun:
    """A result with its parts, or a part without a result."""

    path: Path
    source: str  # the model it began with
    summary: str
    name: str = ""  # of its folder, made unique
    manifest: Manifest | None = None
    head_map: HeadMap | None = None
    histories: Sequence[History] = ()
    evaluations: Sequence[Report] = ()  # the result's come first
    checks: Sequence[CheckReport] = ()
    role_table: Table | None = None  # how many heads had each role, and kept it
    roles: RolesRecord | None = None  # for the pictures

    @property
    def evaluation(self) -> Report | None:
        """The evaluation of the result; without a result, the first."""
        id_ = self.manifest.id if self.manifest is not None else None
        of_result = (e for e in self.evaluations if id_ is None or e.model.id == id_)
        return next(of_result, None)

    def is_against_original(self, report: Report) -> bool:
        """Return whether an evaluation's base is the first model of the run."""
        if report.against is None or self.manifest is None:
            return report.against is not None
        base, start = report.against.id, self.manifest.steps[0].parent
        # ids are unknown where files are not at hand
        return base == start if base and start else base not in _lineage(self.manifest)

    def base_name(self, report: Report) -> str:
        """Return the name of an evaluation's base."""
        if report.against is None or self.is_against_original(report):
            return "original"
        short = short_name(report.against.name)
        return report.against.name if short == short_name(report.model.name) else short


def assemble(places: Sequence[Place]) -> list[ReportedRun]:
    """Return a run per tip, and per part that belongs to none."""
    parts = _Parts(places)
    runs = [(place.path, parts.run_of(tip, place)) for place in places for tip in place.tips]
    for place in places:
        runs += [(run.path, run) for run in parts.others(place)]
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
        self.gates = {g.id: (path, g) for p in self.places for path, g in p.gates.items()}
        self.scores = {s.id: s for p in self.places for s in p.scores.values()}
        self.evaluations = {e.id: e for p in self.places for e in p.evaluations.values()}.values()
        self.checks = {c.id: c for p in self.places for c in p.checks.values()}.values()
        self.roles = {path: r for p in self.places for path, r in p.roles.items()}
        self.tips = {tip.manifest.id for p in self.places for tip in p.tips}

    def new(self, id_: str) -> bool:
        is_new = id_ not in self.used
        self.used.add(id_)
        return is_new

    def run_of(self, tip: Result, place: Place) -> ReportedRun:
        manifest = tip.manifest
        chain = [self.results[s.id] for s in manifest.lineage if s.id in self.results] + [tip]
        ids = [step.evidence.id for step in manifest.steps if step.evidence is not None]
        path, gates = next((self.gates[id_] for id_ in ids if id_ in self.gates), (None, None))
        scores = self._scores(manifest, place)
        run = ReportedRun(
            tip.path, manifest.steps[0].source.name, records.what(manifest), manifest=manifest
        )
        run.evaluations = self._evaluations(manifest)
        run.checks = [check for check in self.checks if check.measured == manifest.id]
        run.histories = [*_histories((one.path / HISTORY for one in chain), "heal")]
        self.used |= {part.id for part in (*run.evaluations, *run.checks)}
        if gates is not None and path is not None:
            run.summary += f" {_gates_summary(gates)}"
            run.histories = [*_histories([path / "history.jsonl"], "gates"), *run.histories]
            self.used.add(gates.id)
        if scores is not None:
            self.used.add(scores.id)
        run.head_map = _map_of_result(chain[0], tip, gates, scores)
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
        probe, lineage = ReportedRun(Path(), "", "", manifest=manifest), _lineage(manifest)
        of_result = [e for e in self.evaluations if e.model.id == manifest.id]

        def rank(e: Report) -> tuple[bool, bool, str]:
            return e.against is not None, probe.is_against_original(e), e.provenance.created

        ids = {manifest.steps[0].parent, *lineage} - self.tips - {None}
        return [
            *sorted(of_result, key=rank, reverse=True),
            *(e for e in self.evaluations if e.model.id in ids),
        ]

    def _add_roles(self, run: ReportedRun) -> None:
        assert run.manifest is not None
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
        if run.head_map is not None and (record := original or cut) is not None:
            by_head = {(m.path, h.head): h for m in record[1].modules for h in m.heads}
            run.head_map.tell("role", {key: head.role or "none" for key, head in by_head.items()})
            effects = {k: h.effect.zero.nats for k, h in by_head.items() if h.effect is not None}
            rises = {key: f"{nats:+.3f}" for key, nats in effects.items()}
            run.head_map.tell("loss without it, nats", rises)

    def others(self, place: Place) -> Iterator[ReportedRun]:
        """Yield runs of parts without a result."""
        for path, gates in place.gates.items():
            if self.new(gates.id):
                yield ReportedRun(
                    path,
                    gates.metadata.model.name,
                    _gates_summary(gates),
                    head_map=_map_of_gates(gates),
                    histories=[*_histories([path / "history.jsonl"], "gates")],
                )
        for path, scores in place.scores.items():
            if self.new(scores.id):
                name, criteria = scores.metadata.model.name, ", ".join(scores.metadata.criteria)
                summary = f"Heads of {name} scored by {criteria}."
                yield ReportedRun(path, name, summary, head_map=_map_of_scores(scores))
        for path, record in place.roles.items():
            if self.new(str(path)):
                against = f" against {record.against.name}" if record.against is not None else ""
                text = f"Roles of the heads of {record.model.name}{against}, on "
                text += f"{short_name(record.data.source)}."
                yield ReportedRun(path, record.model.name, text, roles=record)
        for path, report in place.evaluations.items():
            if self.new(report.id):
                base = report.against.name if report.against is not None else None
                against = f" against {base}" if base else ""
                data = short_name(str(report.provenance.data.get("source", "")))
                text = f"{report.model.name} measured{against} on {data}."
                text += _unknown(report.model.id)
                yield ReportedRun(path, base or report.model.name, text, evaluations=[report])
        for path, check in place.checks.items():
            if self.new(check.id):
                text = f"{check.model} held to {len(check.limits)} limits."
                text += _unknown(check.measured)
                yield ReportedRun(path, check.model, text, checks=[check])


def _lineage(manifest: Manifest) -> set[str]:
    return {step.id for step in manifest.lineage}


def _histories(paths: Iterable[Path], kind: str) -> Iterator[History]:
    for path in paths:
        if path.is_file() and (read := history(path, kind)) is not None:
            yield read


def _unknown(measured: str | None) -> str:
    return "" if measured else " The result is unknown: its files were not at hand."


def _gates_summary(gates: TrainedGates) -> str:
    about = gates.metadata
    return (
        f"Gates keep {about.kept_heads} of {about.query_heads} query heads, {_UNIT[about.unit]}; "
        f"trained for {about.steps} steps ({about.objective}) on {short_name(about.data)}."
    )


def _map_of_result(
    first: Result, tip: Result, gates: TrainedGates | None, scores: Scores | None
) -> HeadMap:
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


def _even(query_heads: int, kv_heads: int) -> tuple[int, ...]:
    group = query_heads // max(1, kv_heads)
    return (group,) * kv_heads if group * kv_heads == query_heads else ()


def _map_of_gates(gates: TrainedGates) -> HeadMap:
    drawn = HeadMap(_layers(gates))
    kept = per_head(drawn.layers, gates.metadata.unit, gates.kept.tolist())
    drawn.keep({head for head, stays in kept.items() if stays})
    drawn.tell_kv_heads({})
    _show_gates(drawn, gates)
    return drawn


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
    drawn.tell("gate factor", of(gates.value.tolist()))


def _map_of_scores(scores: Scores) -> HeadMap:
    drawn = HeadMap(_layers(scores))
    drawn.tell_kv_heads({})
    _show_scores(drawn, scores)
    return drawn


def _show_scores(drawn: HeadMap, scores: Scores) -> None:
    layers = _layers(scores)
    for name, values in scores.scores.items():
        numbers = per_head(layers, scores.metadata.unit, values.tolist())
        if drawn.evidence is None:
            drawn.show(f"score {name}", numbers)
        drawn.tell(f"score {name}", numbers)
