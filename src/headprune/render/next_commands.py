"""The commands that come next, with the settings that were used so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.config import CalibrationConfig, DataConfig, Dtype
from headprune.context import Allowed
from headprune.io.shell import command
from headprune.io.writing import beside

if TYPE_CHECKING:
    from headprune.exporting.write import Pruned
    from headprune.gates.train_gates import GatesRun
    from headprune.planning.plan import Planned
    from headprune.schemas.scores import Scores, ScoresMetadata

_ON_TEXT = ("AutoModelForCausalLM", "AutoModelForMaskedLM")  # a text file alone will do
KEEP = 0.75  # fraction of heads that an example of a cut keeps


def after_cut(result: Pruned) -> str | None:
    """Measures a result against its original; None where nothing measures it on text."""
    made = result.manifest.made_by
    # what transformers 4 pruned cannot be loaded, to compare with
    if made is None or made.command == "migrate" or result.manifest.auto_class not in _ON_TEXT:
        return None
    original = made.options.get("teacher", made.options.get("model"))
    allowed = {
        name: made.options.get(name) or None for name in ("trust_remote_code", "drop_unexpected")
    }
    return command("evaluate", result.output, data="TEXT", against=original, **allowed)


def after_gates(run: GatesRun, model: str, dtype: Dtype, allowed: Allowed) -> str:
    """Cuts by gates."""
    options = {"layout": "ragged" if run.ragged else None, "dtype": _chosen(dtype)}
    return _prune(model, run.output, allowed, {"gates": run.output}, options)


def after_scores(scores: Scores, output: Path, model: str, allowed: Allowed) -> str:
    """Cuts by scores."""
    names = list(scores.scores)
    criterion = names[0] if len(names) > 1 else None
    evidence = {"scores": output, "criterion": criterion, "keep": KEEP}
    return _prune(model, output, allowed, evidence, _as_scored(scores.metadata))


def after_plan(planned: Planned, output: Path, model: str, allowed: Allowed) -> str:
    """Cuts by a plan that was made from scores."""
    options = _as_scored(planned.scores)
    return _prune(model, output.with_suffix(""), allowed, {"plan": output}, options)


def _prune(
    model: str, beside_: Path, allowed: Allowed, evidence: dict[str, Any], options: dict[str, Any]
) -> str:
    return command("prune", model, **evidence, output=_free(beside_), **options, **vars(allowed))


def _as_scored(scores: ScoresMetadata) -> dict[str, Any]:
    """Options of prune that go with scores: a refit on the same text, the same dtype."""
    options: dict[str, Any] = {"layout": "ragged" if scores.ragged else None}
    if (data := scores.data) is not None and scores.refits:
        options["refit"] = data.source
        usual: Any = CalibrationConfig()
        for name in ("calibration_tokens", "seq_len"):
            used = getattr(scores.calibration, name)
            options[name] = used if used != getattr(usual, name) else None
        options["split"] = data.split if data.split != DataConfig(source="").split else None
        options |= {"text_column": data.text_column, "label_column": data.label_column}
    return {**options, "dtype": _chosen(scores.calibration.dtype)}


def _chosen(dtype: Dtype) -> Dtype | None:
    return None if dtype is Dtype.AUTO else dtype


def _free(evidence: Path) -> Path:
    """A name for the result, of nothing that is there."""
    path, number = beside(evidence, "{}-pruned"), 2
    while path.exists():
        path, number = beside(evidence, f"{{}}-pruned-{number}"), number + 1
    return path
