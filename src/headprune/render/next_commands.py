"""The next commands, with the settings so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.config import CalibrationConfig, DataConfig, Dtype
from headprune.io.shell import command
from headprune.io.writing import beside

if TYPE_CHECKING:
    from headprune.gates.train_gates import GatesRun
    from headprune.result.write import Pruned
    from headprune.schemas.scores import Scores, ScoresMetadata

_ON_TEXT = ("AutoModelForCausalLM", "AutoModelForMaskedLM")  # a text file alone will do
Given = tuple[Mapping[str, Any], Mapping[str, Any]]  # options and settings of the call before
KEEP = 0.75  # share of heads that an example of a cut keeps


def after_cut(result: Pruned, given: Given) -> str | None:
    """Return the evaluation of a result; None where no text measures it."""
    origin = result.manifest.provenance
    # what transformers 4 pruned cannot be loaded, to compare with
    if origin is None or origin.command == "migrate" or result.manifest.auto_class not in _ON_TEXT:
        return None
    original = origin.options.get("teacher", origin.options.get("model"))
    return _line("evaluate", [result.output], {"data": "TEXT", "against": original}, given)


def after_gates(run: GatesRun, model: str, given: Given) -> str:
    """Return the cut, or the windows, that gates were trained for."""
    if run.metadata.window is not None:
        return _line("convert-swa", [model, _free(run.output)], {"gates": run.output}, given)
    options = {"gates": run.output, "layout": "ragged" if run.ragged else None}
    return _line("prune", [model, _free(run.output)], options, given)


def after_scores(scores: Scores, output: Path, model: str, given: Given) -> str:
    """Return a cut by scores, or windows by scores of windows."""
    if scores.metadata.window is not None:
        return _line("convert-swa", [model, _free(output, "windows")], {"scores": output}, given)
    names, (refit, settings) = list(scores.scores), _as_scored(scores.metadata)
    options = {
        "scores": output,
        "criterion": names[0] if len(names) > 1 else None,
        "keep": KEEP,
        **refit,
    }
    return _line("prune", [model, _free(output)], options, given, settings)


def after_plan(scored: ScoresMetadata, output: Path, model: str, given: Given) -> str:
    """Return the cut of a plan from scores."""
    refit, settings = _as_scored(scored)
    if "refit" in given[0]:
        settings = {name: value for name, value in settings.items() if name == "dtype"}
    options = {"plan": output, **refit}
    return _line("prune", [model, _free(output.with_suffix(""))], options, given, settings)


def _line(
    name: str,
    arguments: Sequence[object],
    options: Mapping[str, Any],
    given: Given,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Return a command with its own options, and those of the call before."""
    config = {**(settings or {}), **given[1]}.items()
    settings_of = tuple(f"{each}={value}" for each, value in config)
    return command(name, *arguments, **{**options, **given[0]}, config=settings_of)


def _as_scored(scored: ScoresMetadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a refit on the text of the scores, and the settings of its sample and dtype."""
    options: dict[str, Any] = {"layout": "ragged" if scored.ragged else None}
    settings: dict[str, Any] = {}
    if scored.calibration.dtype is not Dtype.AUTO:
        settings["dtype"] = scored.calibration.dtype.value
    if scored.data is not None and scored.refits:
        used, usual = scored.calibration, CalibrationConfig()
        settings |= {
            name: getattr(used, name)
            for name in ("calibration_tokens", "seq_len")
            if getattr(used, name) != getattr(usual, name)
        }
        if scored.data.text_column is not None:
            settings["text_column"] = scored.data.text_column
        split = "" if scored.data.split == DataConfig(source="").split else f"@{scored.data.split}"
        options["refit"] = scored.data.source + split
    return options, settings


def _free(evidence: Path, what: str = "pruned") -> Path:
    path, number = beside(evidence, f"{{}}-{what}"), 2
    while path.exists():
        path, number = beside(evidence, f"{{}}-{what}-{number}"), number + 1
    return path
