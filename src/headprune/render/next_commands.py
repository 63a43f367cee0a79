"""The next commands, with the settings so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.config import CalibrationConfig, DataConfig, Dtype
from headprune.context import Allowed
from headprune.io.shell import command
from headprune.io.writing import beside

if TYPE_CHECKING:
    from headprune.gates.train_gates import GatesRun
    from headprune.planning.plan import Planned
    from headprune.result.write import Pruned
    from headprune.schemas.scores import Scores, ScoresMetadata

_ON_TEXT = ("AutoModelForCausalLM", "AutoModelForMaskedLM")  # a text file alone will do
KEEP = 0.75  # share of heads that an example of a cut keeps


def after_cut(result: Pruned) -> str | None:
    """Return the evaluation of a result; None where no text measures it."""
    origin = result.manifest.made_by
    # what transformers 4 pruned cannot be loaded, to compare with
    if origin is None or origin.command == "migrate" or result.manifest.auto_class not in _ON_TEXT:
        return None
    original = origin.options.get("teacher", origin.options.get("model"))
    remote = origin.options.get("trust_remote_code") or None
    return command(
        "evaluate", result.output, data="TEXT", against=original, trust_remote_code=remote
    )


def after_gates(run: GatesRun, model: str, dtype: Dtype, allowed: Allowed) -> str:
    """Return the cut that gates were trained for."""
    return command(
        "prune",
        model,
        _free(run.output),
        gates=run.output,
        layout="ragged" if run.ragged else None,
        config=_chosen(dtype),
        trust_remote_code=allowed.trust_remote_code,
    )


def after_scores(scores: Scores, output: Path, model: str, allowed: Allowed) -> str:
    """Return a cut by scores."""
    names = list(scores.scores)
    return command(
        "prune",
        model,
        _free(output),
        scores=output,
        criterion=names[0] if len(names) > 1 else None,
        keep=KEEP,
        **_as_scored(scores.metadata),
        trust_remote_code=allowed.trust_remote_code,
    )


def after_plan(
    planned: Planned, output: Path, model: str, allowed: Allowed, out_dtype: str = "auto"
) -> str:
    """Return the cut of a plan from scores."""
    options = _as_scored(planned.scores)
    options["config"] += _chosen(Dtype(out_dtype), "out_dtype")
    return command(
        "prune",
        model,
        _free(output.with_suffix("")),
        plan=output,
        **options,
        trust_remote_code=allowed.trust_remote_code,
    )


def _as_scored(scored: ScoresMetadata) -> dict[str, Any]:
    """Return a refit on the text of the scores, and their dtype."""
    options: dict[str, Any] = {"layout": "ragged" if scored.ragged else None}
    settings = _chosen(scored.calibration.dtype)
    if scored.data is not None and scored.refits:
        used, usual = scored.calibration, CalibrationConfig()
        same = {
            name: getattr(used, name)
            for name in ("calibration_tokens", "seq_len")
            if getattr(used, name) != getattr(usual, name)
        }
        if scored.data.text_column is not None:
            same["text_column"] = scored.data.text_column
        settings += tuple(f"{name}={value}" for name, value in same.items())
        split = "" if scored.data.split == DataConfig(source="").split else f"@{scored.data.split}"
        options["refit"] = scored.data.source + split
    return {**options, "config": settings}


def _chosen(dtype: Dtype, name: str = "dtype") -> tuple[str, ...]:
    return () if dtype is Dtype.AUTO else (f"{name}={dtype.value}",)


def _free(evidence: Path) -> Path:
    path, number = beside(evidence, "{}-pruned"), 2
    while path.exists():
        path, number = beside(evidence, f"{{}}-pruned-{number}"), number + 1
    return path
