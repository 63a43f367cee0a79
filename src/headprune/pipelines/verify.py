"""headprune verify: is a folder still the model that it says it is?"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headprune.checkpoint.folders import sha256_of
from headprune.checkpoint.manifest import Manifest, read_manifest
from headprune.errors import HeadpruneError, PlanError
from headprune.models import proof
from headprune.models.attention import identity
from headprune.models.loading import auto_class_of, from_pretrained, parse_dtype
from headprune.models.proof import Outputs, Sample
from headprune.models.stored import stored_dtypes, stored_tensors
from headprune.models.surgery import fold_gates, resolve
from headprune.plan import ModelIdentity, Shape, read_plan
from headprune.runtime import RUNTIME

Stage = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        passed: Whether it is as it should be.
        found: What was found.
    """

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Verification:
    """All checks of a folder.

    Attributes:
        folder: The folder.
        checks: What was looked at.
        not_run: Why a check that would have run did not, if one did not.
    """

    folder: str
    checks: tuple[Check, ...]
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"schema_version": 1, "passed": self.passed, **asdict(self)}


def verify(
    folder: Path,
    against: str | Path | None = None,
    trust_remote_code: bool = False,
    on_stage: Stage = lambda stage: None,
) -> Verification:
    """Re-runs the proof of a result: hashes, load routes, outputs against those that were stored.

    Args:
        folder: A folder that headprune wrote.
        against: The model it was made from: compares with its gated form in full.
        trust_remote_code: Load the folder's own code even where it is not what headprune wrote.
        on_stage: Called with a few words before every stage.

    Raises:
        HeadpruneError: If the folder is none of headprune's, or ``against`` is another model.
    """
    manifest = read_manifest(folder)
    on_stage("hashing the files")
    checks = [_files(folder, manifest)]
    dtype = parse_dtype(manifest.proof["dtype"])
    assert isinstance(dtype, torch.dtype)
    stored, allowed = Sample(**manifest.probe), float(manifest.proof["tolerance"])

    def compare(route: str, load: Callable[[], PreTrainedModel]) -> Outputs | None:
        on_stage(f"loading by {route}")
        try:
            net = load()
            inputs = proof.probe_inputs(net, stored.seed)
            outputs = proof.probe(net, inputs)
        except (HeadpruneError, OSError, ValueError, RuntimeError) as error:
            checks.append(Check(route, False, str(error).splitlines()[0]))
            return None
        gap = stored.difference(outputs)
        same_inputs = proof.digest(inputs) == stored.inputs_sha256
        found = f"{gap:.1e} from the stored outputs, {allowed:.0e} allowed"
        if not same_inputs:
            found = "this torch makes other probe inputs from the same seed"
        checks.append(Check(route, same_inputs and gap <= allowed, found))
        return outputs

    trust = {"trust_remote_code": True} if trust_remote_code else {}
    outputs = compare(
        "headprune.from_pretrained", lambda: from_pretrained(folder, dtype=dtype, **trust)
    )
    ours = importlib.import_module("headprune.runtime.modeling_headprune").__file__
    not_run = None
    if not (trust_remote_code or _runs_only(folder, Path(str(ours)))):
        not_run = (
            "Loading with transformers alone was not tried: the folder's config names code that is "
            f"not the {RUNTIME} of this headprune (another version, or edited); "
            "--trust-remote-code runs it."
        )
    elif outputs is not None:
        net = from_pretrained(folder, dtype=dtype, **trust)
        name, remote = auto_class_of(net), manifest.shape is Shape.RUNTIME
        auto = getattr(transformers, name)
        extra = {"trust_remote_code": True} if remote else {}
        compare(
            f"{name}.from_pretrained" + (", trust_remote_code=True" if remote else ""),
            lambda: auto.from_pretrained(folder, dtype=dtype, **extra).eval(),
        )
    if against is not None and manifest.trained_weights:
        why = "its KV heads were merged" if manifest.sharing else "its weights were trained"
        because = f"{why}, so it is not the gated form of '{against}'"
        not_run = " ".join(filter(None, [not_run, f"--against was not tried: {because}."]))
    elif against is not None and outputs is not None:
        on_stage("gating the model it was made from")
        checks.append(_against(folder, manifest, against, outputs, dtype))
    return Verification(str(folder), tuple(checks), not_run)


def _refuse_ancestor(
    folder: Path, manifest: Manifest, against: str | Path, base: PreTrainedModel
) -> None:
    """Refuses a model that the folder goes back to by more than one step.

    Raises:
        PlanError: Naming the model that it was made from last.
    """
    steps = [ModelIdentity(**entry["source"]) for entry in manifest.lineage]
    asked, last = identity(base, against).fingerprint, manifest.source
    if asked == last.fingerprint or asked not in (step.fingerprint for step in steps):
        return
    line = " -> ".join(f"'{name}'" for name in (*(s.name for s in steps), last.name, folder.name))
    raise PlanError(
        f"--against {against}: '{folder}' goes back to this model by several steps ({line}), and "
        f"its proof is about the last of them. Give --against '{last.name}' (fingerprint "
        f"{last.fingerprint})."
    )


def _runs_only(folder: Path, ours: Path) -> bool:
    """Whether all code that the folder's config names is our own runtime, to the byte."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = [str(name) for name in (config.get("auto_map") or {}).values()]
    if not named:
        return True
    module = RUNTIME.removesuffix(".py")
    own = all(re.fullmatch(rf"{module}\.\w+", name) for name in named)
    runtime = folder / RUNTIME
    return own and runtime.is_file() and sha256_of(runtime) == sha256_of(ours)


def _files(folder: Path, manifest: Manifest) -> Check:
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    changed = [
        name
        for name, digest in manifest.files.items()
        if name not in missing and sha256_of(folder / name) != digest
    ]
    found = [f"{name} is missing" for name in missing] + [f"{name} was changed" for name in changed]
    return Check("hashes", not found, "; ".join(found) or f"{len(manifest.files)} files unchanged")


def _against(
    folder: Path, manifest: Manifest, against: str | Path, outputs: Outputs, dtype: torch.dtype
) -> Check:
    # what no class takes is in neither: outputs are compared
    base = from_pretrained(against, dtype=dtype, drop_unexpected=True)
    _refuse_ancestor(folder, manifest, against, base)
    cuts = fold_gates(resolve(read_plan(folder / "plan.json", {}), base, ragged=True))
    stored_dtypes(base, stored_tensors(folder)).round(base)
    wanted = proof.probe_gated(base, cuts, proof.probe_inputs(base))
    gap = proof.difference(wanted, outputs)
    allowed = float(manifest.proof["tolerance"])
    found = f"{gap:.1e} from its gated form, {allowed:.0e} allowed"
    return Check(f"against {against}", gap <= allowed, found)
