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
KEEP = 0.75  # share of heads that an example of a cut keeps


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
    """Cuts what gates were trained for."""
    return command(
        "prune",
        model,
        gates=run.output,
        output=_free(run.output),
        layout="ragged" if run.ragged else None,
        dtype=_chosen(dtype),
        **vars(allowed),
    )


def after_scores(scores: Scores, output: Path, model: str, allowed: Allowed) -> str:
    """Cuts by scores."""
    names = list(scores.scores)
    return command(
        "prune",
        model,
        scores=output,
        criterion=names[0] if len(names) > 1 else None,
        keep=KEEP,
        output=_free(output),
        **_as_scored(scores.metadata),
        **vars(allowed),
    )


def after_plan(planned: Planned, output: Path, model: str, allowed: Allowed) -> str:
    """Cuts by a plan that was made from scores."""
    made = planned.scores
    return command(
        "prune",
        model,
        plan=output,
        output=_free(output.with_suffix("")),
        **_as_scored(made),
        **vars(allowed),
    )


def _as_scored(made: ScoresMetadata) -> dict[str, Any]:
    """Options of prune that go with scores: a refit on the same text, the same dtype."""
    options: dict[str, Any] = {"layout": "ragged" if made.ragged else None}
    if made.data is not None and made.refits:
        used, usual = made.calibration, CalibrationConfig()
        options |= {
            "refit": made.data.source,
            "calibration_tokens": used.calibration_tokens
            if used.calibration_tokens != usual.calibration_tokens
            else None,
            "seq_len": used.seq_len if used.seq_len != usual.seq_len else None,
            **columns(made.data),
        }
    return {**options, "dtype": _chosen(made.calibration.dtype)}


def columns(data: DataConfig) -> dict[str, Any]:
    """Options that say which part of the data is meant."""
    usual = DataConfig(source="").split
    return {
        "split": data.split if data.split != usual else None,
        "text_column": data.text_column,
        "label_column": data.label_column,
    }


def _chosen(dtype: Dtype) -> Dtype | None:
    return None if dtype is Dtype.AUTO else dtype


def _free(evidence: Path) -> Path:
    """A name for the result, of nothing that is there."""
    path, number = beside(evidence, "{}-pruned"), 2
    while path.exists():
        path, number = beside(evidence, f"{{}}-pruned-{number}"), number + 1
    return path
