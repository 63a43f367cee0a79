"""From what was found in folders to the runs that are shown; ids say what belongs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from headprune.context import MadeBy
from headprune.exporting.card import chosen_by
from headprune.reports.charts import short_name
from headprune.reports.discovery import (
    Found,
    GatesFolder,
    ResultFolder,
    ScoresFolder,
)
from headprune.reports.evidence import map_of_gates, map_of_result, map_of_scores
from headprune.reports.histories import history
from headprune.reports.roles import roles_told
from headprune.reports.view import (
    Facts,
    ShownCheck,
    ShownEvaluation,
    ShownRun,
)
from headprune.schemas.manifest import HISTORY, LineageStep, Manifest
from headprune.schemas.records import Healing, Merging, Migration
from headprune.schemas.roles import RolesRecord
from headprune.tensors.units import Unit

_UNIT = {
    Unit.HEAD: "one by one",
    Unit.KV_GROUP: "a KV head with its queries at a time",
    Unit.QUERY_SLOT: "a query of every KV head at a time",
}


def assemble(
    found: Sequence[Found],
    evaluations: Mapping[Path, ShownEvaluation],
    checks: Mapping[Path, ShownCheck],
) -> list[ShownRun]:
    """The runs: one per result that nothing else was made of, with the parts that belong to it.

    Parts of no result are runs of their own.

    Args:
        found: What lies in each place that was asked for, in order.
        evaluations: The evaluations in there, by their files.
        checks: The checks in there, by their files.

    Raises:
        CheckpointError: If a part is damaged.
    """
    parts = _Parts(
        results={part.manifest.id: part for place in found for part in place.results},
        gates={part.trained.id: part for place in found for part in place.gates},
        scores={part.scored.id: part for place in found for part in place.scores},
        evaluations=list({part.id: part for part in evaluations.values()}.values()),
        checks=list({part.id: part for part in checks.values()}.values()),
        roles={folder: part for place in found for folder, part in place.roles.items()},
        shown={tip.manifest.id for place in found for tip in place.tips},
    )
    runs = [(place.place, parts.of(tip, place)) for place in found for tip in place.tips]
    for place in found:
        for gates in place.gates:
            if parts.are_new(gates.trained.id):
                runs.append((gates.path, _gates_run(gates)))
        for scores in place.scores:
            if parts.are_new(scores.scored.id):
                runs.append((scores.path, _scores_run(scores)))
        for folder, roles in place.roles.items():
            if parts.are_new(str(folder)):
                runs.append((folder, _roles_run(folder, roles)))
        for file in place.reports:
            if parts.are_new(evaluations[file].id):
                runs.append((file, _evaluation_run(evaluations[file])))
        for file in place.checks:
            if parts.are_new(checks[file].id):
                runs.append((file, _check_run(checks[file])))
    return _named(runs)


def _named(runs: Sequence[tuple[Path, ShownRun]]) -> list[ShownRun]:
    """Short names where they tell runs apart, and paths where they do not."""
    names = [place.resolve().name for place, _ in runs]
    for paths in ([str(run.folder) for _, run in runs], [str(r.folder.resolve()) for _, r in runs]):
        count = Counter(names)
        names = [p if count[n] > 1 else n for n, p in zip(names, paths, strict=True)]
    return [replace(run, name=name) for name, (_, run) in zip(names, runs, strict=True)]


@dataclass
class _Parts:
    """Everything that was found, by id.

    Attributes:
        results: The results.
        gates: The gates.
        scores: The scores.
        evaluations: What ``evaluate`` measured.
        checks: What ``check`` found.
        roles: What heads do, by its folder.
        shown: Ids of the results that get runs of their own.
        used: Ids of the parts that belong to a run.
    """

    results: Mapping[str | None, ResultFolder]
    gates: Mapping[str, GatesFolder]
    scores: Mapping[str, ScoresFolder]
    evaluations: Sequence[ShownEvaluation]
    checks: Sequence[ShownCheck]
    roles: Mapping[Path, RolesRecord]
    shown: set[str | None]
    used: set[str | None] = field(default_factory=set)

    def are_new(self, id_: str) -> bool:
        """Whether a part belongs to no run yet; it does from now on."""
        new = id_ not in self.used
        self.used.add(id_)
        return new

    def of(self, tip: ResultFolder, place: Found) -> ShownRun:
        """The run of a result."""
        manifest = tip.manifest
        folders = [self.results[s.id] for s in manifest.lineage if s.id in self.results] + [tip]
        chosen = [step.evidence.id for step in manifest.steps if step.evidence is not None]
        gates = next((self.gates[id_] for id_ in chosen if id_ in self.gates), None)
        scores = self._scores(manifest, place)
        evaluations = self._evaluations(manifest)
        checks = tuple(check for check in self.checks if check.measured == manifest.id)
        self.used |= {part.id for part in evaluations} | {part.id for part in checks}
        self.used |= {gates.trained.id} if gates is not None else set()
        self.used |= {scores.scored.id} if scores is not None else set()
        histories = [history(folder.path / HISTORY, "heal") for folder in folders]
        if gates is not None:
            histories.insert(0, history(gates.path / "history.jsonl", "gates"))
        head_map = map_of_result(folders[0], tip, gates, scores)
        told = roles_told(manifest, self.roles)
        self.used |= {str(folder) for folder in told.folders}
        head_map = told.on(head_map)
        return ShownRun(
            name=place.place.name,
            folder=tip.path,
            source=manifest.steps[0].source.name,
            asked=" ".join(_asked(step, self.gates) for step in manifest.steps),
            manifest=manifest,
            settings=_settings(gates),
            head_map=head_map,
            histories=tuple(h for h in histories if h is not None),
            evaluations=evaluations,
            provenance=_provenance(manifest),
            checks=checks,
            roles=told.rows(),
            role_record=told.pictured,
        )

    def _scores(self, manifest: Manifest, place: Found) -> ScoresFolder | None:
        """The scores that chose heads of a result; if none did, what scores say of its model."""
        evidence = [step.evidence for step in manifest.steps if step.evidence is not None]
        chosen = [one.id for one in evidence if one.kind == "scores"]
        if chosen:
            return next((self.scores[id_] for id_ in chosen if id_ in self.scores), None)
        models = {step.source.fingerprint for step in manifest.steps}
        of_model = [
            s for s in self.scores.values() if s.scored.metadata.model.fingerprint in models
        ]
        here = {scores.path for scores in place.scores}
        return next(iter(sorted(of_model, key=lambda scores: scores.path not in here)), None)

    def _evaluations(self, manifest: Manifest) -> tuple[ShownEvaluation, ...]:
        """Those of a result, the newest first, and then those of what it was made of.

        What is compared with the original comes first, then what is compared with another model.
        """
        steps, start = {step.id for step in manifest.lineage} - {None}, manifest.steps[0].parent
        told = [
            replace(e, of_original=_is_start(e.measured_base, start, steps))
            for e in self.evaluations
        ]
        own = [e for e in told if e.measured == manifest.id]
        own.sort(key=lambda e: (e.base is not None, e.of_original, e.created), reverse=True)
        ids = {start, *steps} - self.shown - {None}
        return (*own, *(e for e in told if e.measured in ids))


def _is_start(base: str | None, start: str | None, steps: Set[str | None]) -> bool:
    """Whether a base is what a chain began with; ids are unknown where files are not at hand."""
    return base == start if base and start else base not in steps


def _asked(step: LineageStep, known: Mapping[str, GatesFolder]) -> str:
    """What one command was asked for, by the record it left."""
    done = step.done
    if isinstance(done, Healing):
        return f"Train for {done.steps} steps to match {short_name(done.teacher)}."
    if isinstance(done, Merging):
        before, after = step.kv_heads
        tokens = done.calibration_tokens
        text = f", calibrated on {tokens:,} tokens" if tokens else ""
        share = "neighbours share" if done.grouping == "adjacent" else "similar ones share"
        return f"Merge {before} KV heads into {after} ({done.merge}; {share}){text}."
    if isinstance(done, Migration):
        return "Rewrite a folder of transformers 4."
    (before, after), evidence = step.query_heads, done.evidence
    refit = f" Refit W_O on {short_name(step.refit.data)}." if step.refit is not None else ""
    gates = known.get(evidence.id)
    if gates is not None:
        trained = gates.trained.metadata
        wanted = before - trained.query_heads + trained.kept_heads
        again = "" if wanted == after else f" Cut to {after} of {before} instead."
        return asked_of_gates(gates) + again + refit
    cut = f"Cut {before - after or 'none'} of {before} query heads"
    by = "as a plan says" if evidence.kind == "plan" else f"chosen by {chosen_by(evidence)}"
    return f"{cut}, {by}.{refit}"


def asked_of_gates(gates: GatesFolder) -> str:
    """What train-gates was asked for."""
    metadata, settings = gates.trained.metadata, gates.settings
    target, penalty, kinds = settings.target_heads, settings.l0_penalty, settings.attention
    total, data = metadata.query_heads, short_name(metadata.data)
    if penalty is not None:
        goal = f"Remove of {total} query heads as many as a penalty of {penalty} per open head pays"
    elif isinstance(target, float):
        goal = f"Keep {100 * target:.4g}% of all query heads ({metadata.kept_heads} of {total})"
    else:
        goal = f"Keep {metadata.kept_heads} of {total} query heads"
    goal += f" of the {' and '.join(kinds)}" if kinds else ""
    return (
        f"{goal}, {_UNIT[metadata.unit]}; gates trained for {metadata.steps} steps "
        f"({metadata.objective}) on {data}."
    )


def _settings(gates: GatesFolder | None) -> Facts:
    if gates is None:
        return ()
    settings = gates.settings.model_dump(exclude={"schema_version"}, exclude_unset=True)
    return tuple((name.replace("_", " "), str(v)) for name, v in settings.items() if v is not None)


def _provenance(manifest: Manifest) -> Facts:
    source, evidence, made_by = manifest.source, manifest.evidence, manifest.made_by
    rows = {
        "written": manifest.created,
        "id": manifest.id,
        "made by": None if made_by is None else _command(made_by),
        "source": f"{source.name} ({source.architecture}, fingerprint {source.fingerprint})",
        "source id": manifest.parent,
        "heads chosen by": None if evidence is None else chosen_by(evidence),
        **{f"{name} version": version for name, version in manifest.versions.items()},
        "files": f"{len(manifest.files)} with their SHA-256 in headprune.json",
    }
    return tuple((name, value) for name, value in rows.items() if value is not None)


def _command(made_by: MadeBy) -> str:
    options = (f"{name} {value}" for name, value in made_by.options.items() if value is not None)
    return ", ".join([f"headprune {made_by.command}", *options])


def _gates_run(gates: GatesFolder) -> ShownRun:
    metadata = gates.trained.metadata
    trained = history(gates.path / "history.jsonl", "gates")
    return ShownRun(
        name=gates.path.name,
        folder=gates.path,
        source=metadata.model.name,
        asked=asked_of_gates(gates),
        settings=_settings(gates),
        head_map=map_of_gates(gates),
        histories=(trained,) if trained is not None else (),
        provenance=(
            ("id", gates.trained.id),
            ("source", f"{metadata.model.name} (fingerprint {metadata.model.fingerprint})"),
            ("headprune version", metadata.headprune_version),
        ),
    )


def _scores_run(scores: ScoresFolder) -> ShownRun:
    metadata = scores.scored.metadata
    return ShownRun(
        name=scores.path.name,
        folder=scores.path,
        source=metadata.model.name,
        asked=f"Score the heads of {metadata.model.name} by {', '.join(metadata.criteria)}.",
        head_map=map_of_scores(scores),
        provenance=(
            ("id", scores.scored.id),
            *((f"{name} version", version) for name, version in metadata.versions.items()),
        ),
    )


def _roles_run(folder: Path, record: RolesRecord) -> ShownRun:
    against = f" against {record.against.name}" if record.against is not None else ""
    return ShownRun(
        name=folder.name,
        folder=folder,
        source=record.model.name,
        asked=f"Say what the heads of {record.model.name} do{against}, on "
        f"{short_name(record.data.source)}.",
        provenance=tuple((f"{name} version", version) for name, version in record.versions.items()),
        role_record=record,
    )


def _evaluation_run(evaluation: ShownEvaluation) -> ShownRun:
    against = f" against {evaluation.base}" if evaluation.base else ""
    return ShownRun(
        name=evaluation.file.name,
        folder=evaluation.file,
        source=evaluation.base or evaluation.model,
        asked=f"Measure {evaluation.model}{against} on {short_name(evaluation.data)}."
        + _unlinked(evaluation.measured),
        evaluations=(evaluation,),
    )


def _check_run(check: ShownCheck) -> ShownRun:
    return ShownRun(
        name=check.file.name,
        folder=check.file,
        source=check.model,
        asked=f"Hold {check.model} to {len(check.rows)} limits." + _unlinked(check.measured),
        checks=(check,),
    )


def _unlinked(measured: str | None) -> str:
    if measured is not None:
        return ""
    return " The result is unknown: its files were not at hand."
