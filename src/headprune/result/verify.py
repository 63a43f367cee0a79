"""headprune verify: is a folder still the model that it says it is?"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from headprune import devices
from headprune.config import Dtype
from headprune.context import Allowed
from headprune.errors import CheckpointError, HeadpruneError, PlanError, ProofError
from headprune.io.folders import sha256_of, source_folder
from headprune.io.markup import sentence
from headprune.io.parsing import read_json
from headprune.model import probes
from headprune.model.attention import attention_of, identity
from headprune.model.loading import auto_class_of, from_pretrained
from headprune.model.open import open_model, read_model
from headprune.model.placement import move_to_device
from headprune.model.probes import Outputs
from headprune.model.refusals import quantised_by
from headprune.model.residency import residency_of
from headprune.model.skeleton import below_base
from headprune.model.stored import stored_dtypes, stored_tensors
from headprune.proof import equivalence, left_alone, tensors
from headprune.result.write import cut_again
from headprune.runtime import MANIFEST, RUNTIME, modeling_headprune
from headprune.schemas.manifest import Manifest, contents, read_manifest
from headprune.schemas.plan import Shape, read_plan
from headprune.schemas.proofs import Proof, Sample
from headprune.schemas.records import Healing
from headprune.surgery.cut import fold_gates, resolve, window_of

Stage = Callable[[str], None]

_OURS = Path(modeling_headprune.__file__)
_SHOWN = 5  # files by name


@dataclass(frozen=True)
class Check:
    """One check of a folder.

    Attributes:
        name: Subject of the check.
        passed: The verdict.
        found: The finding.
    """

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Verification:
    """All checks of a folder.

    Attributes:
        folder: The folder.
        checks: All checks.
        not_run: Reason why a planned check did not run, if one did not.
    """

    folder: str
    checks: tuple[Check, ...]
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """True if every check passed."""
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
    """Re-run the proof of a result: hashes, load routes, outputs against the stored ones.

    Args:
        folder: A folder that headprune wrote.
        against: The model it was made from: compares settings and tensors with what stays of it,
            and outputs with its gated form.
        trust_remote_code: Load the folder's own code even where it is not what headprune wrote.
        on_stage: Called with a few words before every stage.

    Raises:
        HeadpruneError: If the folder is none of headprune's, or ``against`` is another model.
    """
    manifest = read_manifest(folder)
    if against is not None and manifest.changed_weights is not None:
        # no outputs are compared that would tell
        _refuse_stranger(folder, manifest, against, trust_remote_code)
    on_stage("hashing the files")
    checks = [_files(folder, manifest)]
    if manifest.proof is None or manifest.probe is None:
        on_stage("comparing tensors")
        checks += _headers(folder, trust_remote_code)
        if against is not None and checks[-1].passed:
            checks += _left_alone(folder, manifest, against, trust_remote_code)
        said = "No outputs were stored: the result was proven by its tensors, as it is verified."
        return Verification(str(folder), tuple(checks), said)
    stored, dtype = manifest.probe, _proof_dtype(manifest.proof)
    window = None
    if manifest.window is not None and (manifest.shape is Shape.RUNTIME or manifest.proof.windows):
        window = (manifest.window.size, manifest.window.sinks)

    def compare(route: str, load: Callable[[], PreTrainedModel]) -> _Probed | None:
        on_stage(f"loading by {route}")
        check, probed = _compared(route, load, stored, window)
        checks.append(check)
        return probed

    allowed = Allowed(trust_remote_code)
    probed = compare(
        "headprune.from_pretrained", lambda: read_model(folder, dtype, allowed).weighted()
    )
    not_run = None
    with nullcontext(folder) if trust_remote_code else _bare_copy(folder) as place:
        if not (trust_remote_code or _runs_only_ours(folder, place)):
            not_run = (
                "Loading with transformers alone was not tried: the folder's config names code "
                f"that is not the {RUNTIME} of this headprune (another version, or edited); "
                "--trust-remote-code runs it."
            )
        elif probed is not None and probed.by_layers:
            not_run = "transformers alone was not tried: it loads no model layer by layer."
        elif probed is not None:
            auto = getattr(transformers, probed.auto_class)
            remote = trust_remote_code or manifest.shape is Shape.RUNTIME
            extra = {"trust_remote_code": True} if remote else {}
            compare(
                f"{probed.auto_class}.from_pretrained" + ", trust_remote_code=True" * remote,
                lambda: auto.from_pretrained(place, dtype=dtype, **extra).eval(),
            )
    if against is not None and manifest.changed_weights is not None:
        because = f"{manifest.changed_weights}, so it is not the gated form of '{against}'"
        said = f"Outputs were not compared with --against: {because}."
        not_run = " ".join(filter(None, [not_run, said]))
    elif against is not None and probed is not None:
        on_stage("gating the model it was made from")
        of_outputs = (probed.outputs, dtype, stored.positions, trust_remote_code)
        checks.append(_against(folder, manifest, against, *of_outputs))
    if against is not None and probed is not None:
        on_stage("comparing tensors")
        checks += _left_alone(folder, manifest, against, trust_remote_code)
    return Verification(str(folder), tuple(checks), not_run)


@dataclass(frozen=True)
class _Probed:
    """Outputs of a model, the Auto class that leads to it, and whether it ran layer by layer."""

    outputs: Outputs
    auto_class: str
    by_layers: bool


def _compared(
    route: str, load: Callable[[], PreTrainedModel], stored: Sample, window: tuple[int, int] | None
) -> tuple[Check, _Probed | None]:
    """Compare the outputs of a load route with the stored ones."""
    try:
        net = move_to_device(load())
        inputs = probes.proof_inputs(net, stored.seed, stored.positions, window)
        outputs = probes.probe(net, inputs)
    except Exception as error:  # whatever a damaged model raises as it is built, or as it runs
        if devices.is_device_failure(error):
            raise  # which says nothing of the model
        said = error if isinstance(error, HeadpruneError) else f"{type(error).__name__}: {error}"
        return Check(route, False, sentence(str(said))), None
    gap = equivalence.difference_from_stored(stored, outputs)
    allowed = equivalence.allowed(net, inputs, outputs, gap)
    same_inputs = equivalence.digest(inputs) == stored.inputs_sha256
    found = f"{gap:.1e} from the stored outputs, {allowed:.0e} allowed"
    if not same_inputs:
        found = "this torch makes other probe inputs from the same seed"
    probed = _Probed(outputs, auto_class_of(net), residency_of(net) is not None)
    return Check(route, same_inputs and gap <= allowed, found), probed


@contextmanager
def _bare_copy(folder: Path) -> Iterator[Path]:
    """Yields a copy with the config and the weights of a folder, and the runtime of this headprune.

    transformers runs more of a folder than its config names, once code is allowed.

    Raises:
        CheckpointError: If there is no place for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headprune-") as above:
            copy = Path(above) / (folder.resolve().name or "model")  # what modules are named after
            copy.mkdir()
            for name in ("config.json", SAFE_WEIGHTS_INDEX_NAME):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, copy / name)
            for file in folder.glob("*.safetensors"):
                (copy / file.name).symlink_to(file.resolve())
            shutil.copyfile(_OURS, copy / RUNTIME)
            yield copy
    except OSError as error:
        raise CheckpointError(f"No temporary copy can be made: {error}. Set TMPDIR.") from None


def _refuse_ancestor(
    folder: Path, manifest: Manifest, against: str | Path, base: PreTrainedModel
) -> None:
    """Refuses a model that the folder goes back to by more than one step.

    Raises:
        PlanError: Naming the model that it was made from last.
    """
    steps = [step.source for step in manifest.lineage]
    asked, last = identity(base, against).fingerprint, manifest.source
    if asked == last.fingerprint or asked not in (step.fingerprint for step in steps):
        return
    line = " -> ".join(f"'{name}'" for name in (*(s.name for s in steps), last.name, folder.name))
    raise PlanError(
        f"--against {against}: '{folder}' goes back to this model by several steps ({line}), and "
        f"its proof is about the last of them. Give --against '{last.name}' (fingerprint "
        f"{last.fingerprint})."
    )


def _refuse_stranger(
    folder: Path, manifest: Manifest, against: str | Path, trust_remote_code: bool
) -> None:
    """Refuses a model that the folder was not made from, in any of its steps.

    Raises:
        CheckpointError: If there is no such model.
        PlanError: Naming the model that it was made from.
    """
    allowed = {"trust_remote_code": trust_remote_code, "drop_unexpected": True}
    base = from_pretrained(against, weights=False, **allowed)
    asked, steps = identity(base, against).fingerprint, [step.source for step in manifest.steps]
    if asked in (step.fingerprint for step in steps):
        return
    made_from = " and ".join(f"'{step.name}' ({step.fingerprint})" for step in steps)
    last = ", the last of them" if len(steps) > 1 else ""
    raise PlanError(
        f"--against {against}: '{folder}' was not made from this model, whose fingerprint is "
        f"{asked}, but from {made_from}. Give that{last}: its "
        "folder, or its id on the hub."
    )


def _runs_only_ours(folder: Path, copy: Path) -> bool:
    """Return whether all code that a folder's config names is our own runtime, to the byte."""
    try:
        named = (read_json(copy / "config.json").get("auto_map") or {}).values()
    except (FileNotFoundError, CheckpointError, AttributeError):
        return True  # nothing that can be loaded
    if not named:
        return True
    module, runtime = RUNTIME.removesuffix(".py"), folder / RUNTIME
    own = all(re.fullmatch(rf"{module}\.\w+", str(name)) for name in named)
    return own and runtime.is_file() and sha256_of(runtime) == sha256_of(_OURS)


def _files(folder: Path, manifest: Manifest) -> Check:
    """Compare the files of a folder with the manifest."""
    found = []
    for name, digest in manifest.files.items():
        try:
            same = sha256_of(folder / name) == digest
        except (OSError, ValueError):  # a name that no file system takes is a ValueError
            found.append(f"{name} is missing")
        else:
            found += [] if same else [f"{name} was changed"]
    unlisted = (name for name in contents(folder) if name not in manifest.files)
    found += [f"{name} is not in {MANIFEST}" for name in unlisted]
    if manifest.id != manifest.digest():
        found.append(f"{MANIFEST} was changed: its id is that of other content")
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    if manifest.proof is not None:
        found += _doubts(manifest.proof)
    listed = "; ".join([*found[:_SHOWN], *more])
    return Check("hashes", not found, listed or f"{len(manifest.files)} files unchanged")


def _proof_dtype(proof: Proof) -> torch.dtype:
    """The element type of a proof: no half precision, whatever the record says."""
    given: torch.dtype = getattr(torch, proof.dtype)
    return torch.promote_types(given, torch.float32)


def _doubts(proof: Proof) -> Iterator[str]:
    """Say where the numbers of a recorded proof break the rules of proofs."""
    allowed = equivalence.explained(_proof_dtype(proof), proof.rounding)
    if not proof.gated_vs_reloaded <= allowed:
        worst = proof.gated_vs_reloaded
        yield f"{MANIFEST} records a proof that failed: {worst:.1e}, and {allowed:.0e} is allowed"
    if not proof.tolerance <= allowed * (1 + 1e-6):
        yield f"{MANIFEST} was changed: it allows {proof.tolerance:.0e}, a proof {allowed:.0e}"
    control = float("inf") if proof.control is None else proof.control
    if allowed > equivalence.explained(_proof_dtype(proof), 0.0) and not (
        control >= equivalence.CONCLUSIVE * allowed
    ):
        yield f"{MANIFEST} records a proof that shows nothing: a wrong cut makes {control:.1e}"


def _headers(folder: Path, trust_remote_code: bool) -> Iterator[Check]:
    """Check that the weights fit the class."""
    try:
        result = read_model(folder, allowed=Allowed(trust_remote_code))
        result.packed = quantised_by(result.config) is not None
        result.check_tensors()
    except HeadpruneError as error:
        yield Check("headers", False, sentence(str(error)))
        return
    count = len(result.tensors)
    packed = ", or packed" if result.packed else ""
    yield Check("headers", True, f"{count} tensors of the sizes that the config describes{packed}")


def _left_alone(
    folder: Path, manifest: Manifest, against: str | Path, trust_remote_code: bool
) -> Iterator[Check]:
    """Compare settings, files and tensors with what stays of the model it was made from."""
    options = manifest.provenance.options if manifest.provenance else {}
    dtype = Dtype(options.get("dtype", "auto"))
    packed = manifest.proof is None
    allowed = Allowed(trust_remote_code, drop_unexpected=True)
    original = open_model(against, dtype, allowed, packed=packed)
    if manifest.changed_weights is None:
        _refuse_ancestor(folder, manifest, against, original.any_net)
        wanted = f"The heads in '{folder}'"
        manifest.source.refuse_other(original.identity, wanted, "Give --against that model.")
    elif original.identity.fingerprint != manifest.source.fingerprint:
        return
    name = f"what stays of {against}"
    try:
        result = read_model(folder, allowed=Allowed(trust_remote_code))
        result.packed = original.packed
        plan, stored = read_plan(folder / "plan.json", {}), result.tensors
        packed, base = original.packed, original.any_net
        dtypes = original.result_dtypes() if packed else stored_dtypes(base, stored)
        net, pieces = cut_again(original, plan, dtypes)
        source = source_folder(against)
        left_alone.refuse_other_settings(source, original.config, net.config, folder)
        left_alone.refuse_other_files(source, folder)
        proven = tensors.compare(result, pieces, changed=_changed(manifest, net))
    except ProofError as error:
        yield Check(name, False, sentence(str(error)))
        return
    yield Check(name, True, f"settings, files and {proven.tensors} tensors equal")


def _changed(manifest: Manifest, net: PreTrainedModel) -> Callable[[str], bool]:
    """Return whether a step that changed weights may have changed a tensor."""
    everything = isinstance(manifest.done, Healing) or getattr(
        manifest.done, "trained_weights", False
    )
    parts = {f".{below_base(net, attention.path)}." for attention in attention_of(net)}
    some = manifest.changed_weights is not None
    return lambda name: some and (everything or any(part in f".{name}" for part in parts))


def _against(
    folder: Path,
    manifest: Manifest,
    against: str | Path,
    outputs: Outputs,
    dtype: torch.dtype,
    positions: int,
    trust_remote_code: bool,
) -> Check:
    # what no class takes is in neither: outputs are compared
    allowed = Allowed(trust_remote_code, drop_unexpected=True)
    base = move_to_device(read_model(against, dtype, allowed).weighted())
    _refuse_ancestor(folder, manifest, against, base)
    cuts = fold_gates(resolve(read_plan(folder / "plan.json", {}), base, ragged=True))
    stored_dtypes(base, stored_tensors(folder)).round(base)
    inputs = probes.proof_inputs(base, positions=positions, window=window_of(cuts))
    expected = equivalence.expect(base, cuts, inputs)
    gap = equivalence.difference(expected.wanted, outputs)
    found = f"{gap:.1e} from its gated form, {expected.tolerance:.0e} allowed"
    wrong = expected.inconclusive() or expected.apart(outputs)
    if wrong and gap <= expected.tolerance:
        found = wrong
    return Check(f"against {against}", wrong is None, found)
