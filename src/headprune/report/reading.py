"""From what was found in folders to the runs that are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from headprune.errors import CheckpointError, HeadpruneError
from headprune.report.discovery import (
    Found,
    GatesFolder,
    ResultFolder,
    ScoresFolder,
    gates_of,
)
from headprune.report.heads import Evidence, Row, head_map, known_sizes, rows_of, spread
from headprune.report.view import Evaluation, Facts, HeadMap, History, Run
from headprune.tensors.hard_concrete import open_probability
from headprune.tensors.units import Unit, members

POINTS = 250  # of a drawn history; a line has no room for more
_UNIT = {
    Unit.HEAD: "one by one",
    Unit.KV_GROUP: "a KV head with its queries at a time",
    Unit.QUERY_SLOT: "a query of every KV head at a time",
}


def assemble(found: Sequence[Found], evaluations: Mapping[Path, Evaluation]) -> list[Run]:
    """The runs: one per result that nothing else was made of, with the parts that belong to it.

    Gates, scores and evaluations of no result are runs of their own.

    Args:
        found: What lies in each place that was asked for, in order.
        evaluations: The evaluations in there, by their files.

    Raises:
        CheckpointError: If an evaluation is not of the result it names, or a part is damaged.
    """
    tips = [(place, tip) for place in found for tip in place.tips]
    measured = _owners(found, tips, evaluations)
    runs: list[tuple[Path, Run]] = []
    used: set[Path] = {file for files in measured.values() for file in files}
    for place in found:
        for tip in place.tips:
            chain = [*_steps(place, tip), tip]
            near = [*place.gates, *(g for f in found if f is not place for g in f.gates)]
            gates = next((g for r in chain if (g := gates_of(r, near))), None)
            scores = next((s for s in _scores(place, found) if _same_model(s, chain)), None)
            used |= {part.path for part in (gates, scores) if part is not None}
            mine = [evaluations[file] for file in measured.get(tip.path, ())]
            runs.append((place.place, _result_run(place, chain, gates, scores, mine)))
    for place in found:
        for gates in place.gates:
            if gates.path not in used:
                runs.append((gates.path, _gates_run(gates)))
        for scores in place.scores:
            if scores.path not in used:
                runs.append((scores.path, _scores_run(scores)))
        for file in place.reports:
            if file not in used:
                runs.append((file, _evaluation_run(evaluations[file])))
    return _named(runs)


def _named(runs: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Short names where they tell runs apart, and paths where they do not."""
    names = [place.resolve().name for place, _ in runs]
    for paths in ([str(run.folder) for _, run in runs], [str(r.folder.resolve()) for _, r in runs]):
        count = Counter(names)
        names = [p if count[n] > 1 else n for n, p in zip(names, paths, strict=True)]
    return [replace(run, name=name) for name, (_, run) in zip(names, runs, strict=True)]


def _owners(
    found: Sequence[Found],
    tips: Sequence[tuple[Found, ResultFolder]],
    evaluations: Mapping[Path, Evaluation],
) -> dict[Path, list[Path]]:
    """Per result, the evaluations that belong to it, its own first."""
    own: dict[Path, list[Path]] = {}
    more: dict[Path, list[Path]] = {}
    for place in found:
        for file in place.reports:
            evaluation = evaluations[file]
            named = [tip for _, tip in tips if _is(tip, evaluation)]
            here = [tip for tip in place.tips if tip.path.name == Path(evaluation.model).name]
            elsewhere = [t for _, t in tips if t.path.resolve().name == Path(evaluation.model).name]
            chosen = named or here or (elsewhere if len(elsewhere) == 1 else [])
            if chosen:
                _check_size(file, evaluation, chosen[0])
                own.setdefault(chosen[0].path, []).append(file)
            elif len(place.tips) == 1:  # the folder was renamed, or it measures a step before
                (tip,) = place.tips
                fits = evaluation.size.query_heads == tip.manifest.query_heads[1]
                (own if fits else more).setdefault(tip.path, []).append(file)
    newest = {path: sorted(files, key=_written, reverse=True) for path, files in own.items()}
    return {path: [*newest.get(path, ()), *more.get(path, ())] for path in {**newest, **more}}


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _is(tip: ResultFolder, evaluation: Evaluation) -> bool:
    return Path(evaluation.model).resolve() == tip.path.resolve()


def _check_size(file: Path, evaluation: Evaluation, tip: ResultFolder) -> None:
    heads = evaluation.size.query_heads
    if heads != tip.manifest.query_heads[1]:
        raise CheckpointError(
            f"'{file}' measured a model with {heads} query heads under the name "
            f"'{evaluation.model}', but '{tip.path}' has {tip.manifest.query_heads[1]}: evaluate "
            "it again, or remove the old report."
        )


def _steps(place: Found, tip: ResultFolder) -> list[ResultFolder]:
    """The results of the same place that it was made of, oldest first."""
    by_time = {result.manifest.created: result for result in place.results}
    before = [by_time.get(step.get("created", "")) for step in tip.manifest.lineage]
    return [result for result in before if result is not None]


def _scores(place: Found, found: Iterable[Found]) -> list[ScoresFolder]:
    return [*place.scores, *(s for other in found if other is not place for s in other.scores)]


def _same_model(scores: ScoresFolder, chain: Sequence[ResultFolder]) -> bool:
    fingerprint = scores.metadata["model"].get("fingerprint")
    return fingerprint in {result.manifest.source.fingerprint for result in chain}


def _result_run(
    place: Found,
    chain: Sequence[ResultFolder],
    gates: GatesFolder | None,
    scores: ScoresFolder | None,
    evaluations: Sequence[Evaluation],
) -> Run:
    tip = chain[-1]
    manifest, first = tip.manifest, chain[0]
    steps = manifest.lineage
    records = [*steps, manifest.model_dump(mode="json", exclude={"files", "probe", "lineage"})]
    histories = [*([_history(gates.path / "history.jsonl", "gates")] if gates else [])]
    histories += [_history(r.path / "heal.jsonl", "heal") for r in chain]
    source = records[0]["source"]["name"]
    return Run(
        name=place.place.name,
        folder=tip.path,
        source=source,
        asked=" ".join(_asked(record, gates) for record in records),
        manifest=manifest,
        steps=tuple(steps),
        settings=_settings(gates),
        head_map=_map_of_result(first, tip, gates, scores),
        histories=tuple(h for h in histories if h is not None),
        evaluations=tuple(evaluations),
        provenance=_provenance(tip),
    )


def _asked(record: Mapping[str, Any], gates: GatesFolder | None) -> str:
    """What one command was asked for, by the record it left."""
    if record.get("healing"):
        steps, teacher = record["healing"]["steps"], record["healing"]["teacher"]
        return f"Train for {steps} steps to match {teacher}."
    if record.get("sharing"):
        sharing, (before, after) = record["sharing"], record["kv_heads"]
        tokens = sharing.get("calibration_tokens")
        text = f", calibrated on {tokens:,} tokens" if tokens else ""
        share = "neighbours share" if sharing["grouping"] == "adjacent" else "similar ones share"
        return f"Merge {before} KV heads into {after} ({sharing['merge']}; {share}){text}."
    before, after = record["query_heads"]
    if gates is not None and gates.trained.metadata.query_heads == before:
        kept = gates.trained.metadata.kept_heads
        again = "" if kept == after else f" Cut to {after} of them instead."
        return asked_of_gates(gates) + again
    return f"Cut {before - after} of {before} query heads, as a plan names them."


def asked_of_gates(gates: GatesFolder) -> str:
    """What train-gates was asked for."""
    metadata, settings = gates.trained.metadata, gates.settings.get("train_gates") or {}
    target, penalty = settings.get("target_heads"), settings.get("l0_penalty")
    total, data = metadata.query_heads, Path(metadata.data).name or metadata.data
    if penalty is not None:
        goal = f"Remove of {total} query heads as many as a penalty of {penalty} per open head pays"
    elif isinstance(target, float):
        goal = f"Keep {100 * target:.4g}% of all query heads ({metadata.kept_heads} of {total})"
    else:
        goal = f"Keep {metadata.kept_heads} of {total} query heads"
    return (
        f"{goal}, {_UNIT[metadata.unit]}; gates trained for {metadata.steps} steps "
        f"({metadata.objective}) on {data}."
    )


def _settings(gates: GatesFolder | None) -> Facts:
    settings = (gates.settings.get("train_gates") or {}) if gates else {}
    return tuple((name.replace("_", " "), str(v)) for name, v in settings.items() if v is not None)


def _provenance(tip: ResultFolder) -> Facts:
    manifest = tip.manifest
    source = manifest.source
    return (
        ("written", manifest.created),
        ("source", f"{source.name} ({source.architecture}, fingerprint {source.fingerprint})"),
        *((f"{name} version", version) for name, version in manifest.versions.items()),
        ("files", f"{len(manifest.files)} with their SHA-256 in headprune.json"),
    )


def _map_of_result(
    first: ResultFolder,
    tip: ResultFolder,
    gates: GatesFolder | None,
    scores: ScoresFolder | None,
) -> HeadMap:
    plan, lineage = first.plan, first.manifest.lineage
    before: dict[str, Any] = lineage[-1].get("layout", {}) if lineage else {}
    rows = []
    for path, part in plan.attentions.items():
        ids = tuple(before.get(path, {}).get("query_heads", range(part.query_heads)))
        group = part.query_heads // max(1, part.kv_heads)
        even = (group,) * part.kv_heads if group * part.kv_heads == part.query_heads else ()
        rows.append(Row(path, ids, even, {}))
    left = tip.manifest.layout
    kept = {
        path: set(left[path]["query_heads"] if path in left else part.keep)
        for path, part in tip.plan.attentions.items()
    }
    groups = {path: part.groups or () for path, part in first.plan.attentions.items()}
    evidence = None
    if gates is not None:
        evidence = _gate_evidence(gates, spread(gates.trained.metadata, plan), scores)
    elif scores is not None:
        sizes = known_sizes(scores.metadata["modules"], plan)
        evidence = _score_evidence(scores, sizes) if sizes else None
    return head_map(rows, kept, groups, evidence)


def _gate_evidence(
    gates: GatesFolder, rows: Sequence[Row], scores: ScoresFolder | None = None
) -> Evidence:
    trained = gates.trained
    chances = open_probability(trained.log_alpha, trained.metadata.temperature).tolist()
    others: dict[str, Sequence[float]] = {
        "gate open with probability": chances,
        "gate factor": trained.value.tolist(),
    }
    same_units = scores is not None and (
        scores.metadata["unit"] == trained.metadata.unit.value
        and tuple(scores.metadata["modules"]) == trained.metadata.modules
    )
    if scores is not None and same_units:
        others |= {f"score {name}": values.tolist() for name, values in scores.scores.items()}
    frames = _frames(gates.path / "history.jsonl", len(chances))
    return Evidence("probability that the gate is open", tuple(rows), chances, others, frames)


def _score_evidence(scores: ScoresFolder, sizes: Sequence[Sequence[int]]) -> Evidence:
    modules, unit = scores.metadata["modules"], Unit(scores.metadata["unit"])
    ids = [range(sum(of_module)) for of_module in sizes]
    names: dict[str, list[float]] = {n: v.tolist() for n, v in scores.scores.items()}
    if not names or any(len(v) != _units(sizes, unit) for v in names.values()):
        raise CheckpointError(
            f"The scores in '{scores.path}' do not fit the {_units(sizes, unit)} units of their "
            "model; score it again."
        )
    first = next(iter(names))
    rows = rows_of(modules, unit, ids, sizes)
    others = {f"score {name}": values for name, values in names.items()}
    return Evidence(f"score {first}", rows, names[first], others)


def _units(sizes: Sequence[Sequence[int]], unit: Unit) -> int:
    return sum(len(members(unit, of_module)) for of_module in sizes)


def _gates_run(gates: GatesFolder) -> Run:
    metadata = gates.trained.metadata
    try:
        rows: tuple[Row, ...] = spread(metadata)
    except HeadpruneError:  # files of an older headprune do not say where the units are
        rows = ()
    kept = {
        row.path: {head for head, unit in row.units.items() if bool(gates.trained.kept[unit])}
        for row in rows
    }
    history = _history(gates.path / "history.jsonl", "gates")
    return Run(
        name=gates.path.name,
        folder=gates.path,
        source=metadata.model.name,
        asked=asked_of_gates(gates),
        manifest=None,
        steps=(),
        settings=_settings(gates),
        head_map=head_map(rows, kept, {}, _gate_evidence(gates, rows)) if rows else None,
        histories=(history,) if history is not None else (),
        evaluations=(),
        provenance=(
            ("source", f"{metadata.model.name} (fingerprint {metadata.model.fingerprint})"),
            ("headprune version", metadata.headprune_version),
        ),
    )


def _scores_run(scores: ScoresFolder) -> Run:
    metadata = scores.metadata
    modules = metadata["modules"]
    count = {len(values) for values in scores.scores.values()}
    drawn = None
    if len(count) == 1 and not max(count) % len(modules) and metadata["unit"] == Unit.HEAD.value:
        sizes = [(1,) * (max(count) // len(modules))] * len(modules)
        evidence = _score_evidence(scores, sizes)
        everything = {row.path: set(row.heads) for row in evidence.rows}
        drawn = head_map(evidence.rows, everything, {}, evidence)
    names = ", ".join(scores.scores)
    return Run(
        name=scores.path.name,
        folder=scores.path,
        source=metadata["model"]["name"],
        asked=f"Score the heads of {metadata['model']['name']} by {names}.",
        manifest=None,
        steps=(),
        settings=(),
        head_map=drawn,
        histories=(),
        evaluations=(),
        provenance=tuple((f"{n} version", v) for n, v in metadata.get("versions", {}).items()),
    )


def _evaluation_run(evaluation: Evaluation) -> Run:
    against = f" against {evaluation.base}" if evaluation.base else ""
    return Run(
        name=evaluation.file.name,
        folder=evaluation.file,
        source=evaluation.base or evaluation.model,
        asked=f"Measure {evaluation.model}{against} on {evaluation.data}.",
        manifest=None,
        steps=(),
        settings=(),
        head_map=None,
        histories=(),
        evaluations=(evaluation,),
        provenance=(),
    )


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        for record in records:
            float(record["loss"]), int(record["step"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"The history '{path}' is damaged: {error}.") from None
    return records


def _frames(path: Path, units: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The snapshots of all gates in a history."""
    snapshots = [(r["step"], r.get("open_percent")) for r in _records(path)]
    return tuple((step, tuple(p)) for step, p in snapshots if p and len(p) == units)


def _history(path: Path, kind: Literal["gates", "heal"]) -> History | None:
    records = _records(path)
    if not records:
        return None
    width = -(-len(records) // POINTS)
    buckets = [records[at : at + width] for at in range(0, len(records), width)]
    last = [bucket[-1] for bucket in buckets]
    phases = [
        (float(now["step"]), "heads chosen" if now.get("settled") else "next round")
        for before, now in pairwise(records)
        if bool(before.get("settled")) is not bool(now.get("settled"))
    ]
    targets = [r["target_heads"] for r in last if r.get("target_heads") is not None]
    return History(
        kind=kind,
        steps=tuple(int(r["step"]) for r in last),
        loss=tuple(fmean(float(r["loss"]) for r in bucket) for bucket in buckets),
        expected=tuple(float(r["expected_heads"]) for r in last if "expected_heads" in r),
        target=tuple(targets) if len(targets) == len(last) else (),
        phases=tuple(phases),
        records=len(records),
    )
