"""The head maps of runs: which folder's numbers speak for which head."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import CheckpointError
from headprune.reports.discovery import GatesFolder, ResultFolder, ScoresFolder
from headprune.reports.heads import HeadEvidence, Row, head_map, known_sizes, rows_of
from headprune.reports.view import HeadMap
from headprune.tensors.units import Unit, members


def map_of_result(
    first: ResultFolder,
    tip: ResultFolder,
    gates: GatesFolder | None,
    scores: ScoresFolder | None,
) -> HeadMap:
    """The heads of a result: those of the first step, and which the last one left.

    Scores of a model before that step speak of heads that are not there.
    """
    plan, earlier = first.plan, first.manifest.lineage
    before = earlier[-1].layout if earlier else {}
    rows = []
    for path, part in plan.attentions.items():
        ids = before[path].query_heads if path in before else tuple(range(part.query_heads))
        group = part.query_heads // max(1, part.kv_heads)
        even = (group,) * part.kv_heads if group * part.kv_heads == part.query_heads else ()
        rows.append(Row(path, ids, even, {}))
    left = tip.manifest.layout
    kept = {
        path: set(left[path].query_heads if path in left else part.keep)
        for path, part in tip.plan.attentions.items()
    }
    groups = {path: part.groups or () for path, part in first.plan.attentions.items()}
    evidence = None
    source = first.manifest.source.fingerprint
    if gates is not None:
        evidence = _gate_evidence(gates, scores)
    elif scores is not None and scores.scored.metadata.model.fingerprint == source:
        sizes = known_sizes(scores.scored.metadata.modules, plan)
        evidence = _score_evidence(scores, sizes) if sizes else None
    return head_map(rows, kept, groups, evidence)


def _gate_evidence(gates: GatesFolder, scores: ScoresFolder | None = None) -> HeadEvidence:
    trained, about = gates.trained, gates.trained.metadata
    rows = rows_of(about.modules, about.unit, about.heads, about.group_sizes)
    chances = trained.open_probability().tolist()
    others: dict[str, Sequence[float]] = {
        "gate open with probability": chances,
        "gate factor": trained.value.tolist(),
    }
    if scores is not None:
        scored = scores.scored.metadata
        if (scored.unit, scored.modules) == (about.unit, about.modules):
            others |= {f"score {n}": values.tolist() for n, values in scores.scored.scores.items()}
    return HeadEvidence("probability that the gate is open", rows, chances, others)


def _score_evidence(scores: ScoresFolder, sizes: Sequence[Sequence[int]]) -> HeadEvidence:
    modules, unit = scores.scored.metadata.modules, scores.scored.metadata.unit
    ids = [range(sum(of_module)) for of_module in sizes]
    names: dict[str, list[float]] = {n: v.tolist() for n, v in scores.scored.scores.items()}
    if not names or any(len(v) != _units(sizes, unit) for v in names.values()):
        raise CheckpointError(
            f"The scores in '{scores.path}' do not fit the {_units(sizes, unit)} units of their "
            "model; score it again."
        )
    first = next(iter(names))
    rows = rows_of(modules, unit, ids, sizes)
    others = {f"score {name}": values for name, values in names.items()}
    return HeadEvidence(f"score {first}", rows, names[first], others)


def _units(sizes: Sequence[Sequence[int]], unit: Unit) -> int:
    return sum(len(members(unit, of_module)) for of_module in sizes)


def map_of_gates(gates: GatesFolder) -> HeadMap:
    """The heads that gates were trained for."""
    evidence = _gate_evidence(gates)
    kept = {
        row.path: {head for head, unit in row.units.items() if bool(gates.trained.kept[unit])}
        for row in evidence.rows
    }
    return head_map(evidence.rows, kept, {}, evidence)


def map_of_scores(scores: ScoresFolder) -> HeadMap | None:
    """All heads with their scores; None where the file does not say which head is in which unit."""
    metadata = scores.scored.metadata
    counts, unit = metadata.units, metadata.unit
    if not sum(counts) or unit is Unit.QUERY_SLOT:
        return None
    size, rest = divmod(metadata.query_heads, sum(counts))
    if rest or (unit is Unit.HEAD and size != 1):
        return None
    evidence = _score_evidence(scores, [(size,) * count for count in counts])
    return head_map(evidence.rows, None, {}, evidence)
