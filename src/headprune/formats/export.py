"""headprune export: a model as an engine takes it, proven before it appears."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.config import ExportConfig, ExportDtype, ExportProofBy
from headprune.context import Context
from headprune.errors import CheckpointError, HeadpruneError, PlanError, ProofError
from headprune.formats import gguf, onnx, openvino, pad, vllm
from headprune.formats.format import ExportProof, ExportRecord, Format
from headprune.formats.source import open_source
from headprune.io.folders import hashing
from headprune.io.outputs import claims_output, whole_folder
from headprune.io.ownership import EXPORTED
from headprune.model.stored import identifying
from headprune.packages import refuse_missing
from headprune.registry import Registry
from headprune.schemas.manifest import utc_now, versions

FORMATS: Registry[Format] = Registry("format", PlanError)
FORMATS.add("gguf", gguf.FORMAT)
FORMATS.add("vllm", vllm.FORMAT)
FORMATS.add("onnx", onnx.FORMAT)
FORMATS.add("openvino", openvino.FORMAT)
FORMATS.freeze()


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        output: The folder.
        record: The record in it.
        bytes: Bytes of its files, without the record.
        serve: The command that serves it; "" where there is none.
    """

    output: Path
    record: ExportRecord
    bytes: int
    serve: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the record, the size and the command, for ``--json``."""
        return {**self.record.model_dump(mode="json"), "bytes": self.bytes, "serve": self.serve}


def export(
    model: str | Path,
    output: Path,
    config: ExportConfig,
    overwrite: bool = False,
    context: Context = Context(),
) -> Exported:
    """Write a model folder for an engine, and prove the files.

    The output appears whole or not at all.

    Raises:
        HeadpruneError: If the format cannot hold the model, or a package is missing.
        ProofError: If the files compute something else.
    """
    form = FORMATS[config.to] if config.multiple_of is None else pad.FORMAT
    refuse_missing(f"--to {config.to}", *form.modules)
    dtypes = (ExportDtype.AUTO, *form.dtypes)
    if config.out_dtype not in dtypes:
        raise HeadpruneError(
            f"--to {config.to} has no weights in {config.out_dtype.value}. Give --out-dtype one of "
            f"{', '.join(dtype.value for dtype in dtypes)}."
        )
    option = (
        f"--to {config.to}" if config.multiple_of is None else f"--multiple-of {config.multiple_of}"
    )
    return export_as(form, option, model, output, config, overwrite, context)


@claims_output("model")
def export_as(
    form: Format,
    option: str,
    model: str | Path,
    output: Path,
    config: ExportConfig,
    overwrite: bool = False,
    context: Context = Context(),
) -> Exported:
    """Write a model folder in a format, as ``export``; errors name ``option``."""
    if not Path(model).is_dir():
        raise CheckpointError(f"There is no folder '{model}'. Give the folder of a model.")
    context.stage("reading the config")
    source = open_source(Path(model), context.allowed.trust_remote_code)
    reason = form.refusal(source, config)
    if reason is not None:
        raise PlanError(f"{option} cannot hold '{model}': {reason}")
    with identifying(model) as identity, whole_folder(output) as folder:
        context.stage(f"writing {config.to}")
        changes = form.write(source, folder, config, context.step)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        context.stage("proving the files")
        with hashing(folder, (file.relative_to(folder).as_posix() for file in files)) as hashes:
            proof = form.prove(source, folder, config)
            _refuse_unproven(model, option, config, proof)
            record = ExportRecord(
                created=utc_now(),
                versions=versions(),
                provenance=context.provenance,
                format=config.to,
                model=Path(model).name,
                id=identity(),
                changes=changes,
                proof=proof,
                files=hashes(),
            )
        (folder / EXPORTED).write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in files)
    return Exported(output, record, size, form.serve.format(shlex.quote(str(output))))


def _refuse_unproven(
    model: str | Path, option: str, config: ExportConfig, proof: ExportProof
) -> None:
    if not proof.passed:
        raise ProofError(
            f"{option}: the files compute something else than '{model}': {proof}. "
            "Nothing was left there."
        )
    if config.prove is ExportProofBy.ENGINE and proof.how != "engine":
        raise HeadpruneError(
            f"prove engine: no engine ran '{model}' as {config.to}, as {proof.why_not}. "
            "Nothing was left there; leave out prove."
        )
