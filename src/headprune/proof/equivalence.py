"""The proof: gated original, cut model and reloaded model compute the same.

All three run on probe inputs (``model.probes``). Beside the differences stands a control: how
far the logits move when the gates are shifted by one head. A proof whose control is as small as
its differences would show nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.errors import ProofError
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.model.precision import widened
from headprune.model.probes import Outputs, probe, probe_inputs
from headprune.model.stored import StoredDtypes
from headprune.schemas.proofs import PROBE_SEED, Proof, Sample, StoredOutput
from headprune.surgery.cut import Cut, fold_gates, uncut
from headprune.tensors.dtypes import dtype_name

# Largest difference allowed, relative to the largest output, in a well-conditioned model. Summation
# order changes with the width of W_O's input: measured 1.8e-6 on SmolLM2-135M in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

# A model that lost many heads can amplify rounding: with a random half of them gone, SmolLM2-135M
# moves by 2.9e-5 when its gates move by one bit, and by 4.1e-5 from float32 to float64. So that is
# measured beside every proof, and this many times as much is allowed.
AMPLIFICATION = 4
# results from before the proof ran in float32 say what a model in half precision gave
HALF_PRECISION = {torch.float16: 1e-2, torch.bfloat16: 6e-2}
_CONCLUSIVE = 10  # a wrong cut must show this many times as much as is allowed


def probe_gated(
    model: PreTrainedModel, cuts: Sequence[Cut], inputs: dict[str, Tensor], decoded: bool = True
) -> Outputs:
    """Probes a model with the gates that a cut will make permanent."""
    gates = [cut.gate() for cut in cuts]
    with gated([cut.attention for cut in cuts], fixed(gates)):
        return probe(model, inputs, decoded)


def probe_control(
    model: PreTrainedModel, cuts: Sequence[Cut], inputs: dict[str, Tensor]
) -> Outputs | None:
    """Probes a model with gates of a wrong cut: one head off, or one head short; one pass."""
    gates = [cut.gate() for cut in cuts]
    wrong = [gate.roll(1) for gate in gates]
    if _same(gates, wrong):
        wrong = [gate * (torch.arange(len(gate)) > 0) for gate in gates]
    if _same(gates, wrong):
        return None
    with gated([cut.attention for cut in cuts], fixed(wrong)):
        return probe(model, inputs, decoded=False)


def _same(gates: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(gates, others, strict=True))


def probe_rounding(
    model: PreTrainedModel,
    cuts: Sequence[Cut],
    inputs: dict[str, Tensor],
    wanted: Outputs,
    decoded: bool = True,
) -> float:
    """How far the gated outputs move when gates move by one bit; the larger of two draws.

    Of all outputs that are compared: SmolLM2-135M without a quarter of its heads moves by 6.5e-6 in
    one pass, and by 8.6e-5 where padded texts are decoded in chunks.
    """
    eps, found = torch.finfo(model.dtype).eps, []
    for seed in range(2):
        generator, gates = torch.Generator().manual_seed(seed), []
        for cut in cuts:
            gate = cut.gate().double()
            bits = torch.randint(-1, 2, gate.shape, generator=generator)
            gates.append(gate * (1 + eps * bits))
        with gated([cut.attention for cut in cuts], fixed(gates)):
            found.append(difference(wanted, probe(model, inputs, decoded)))
    return max(found)


def allowed(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    outputs: Outputs,
    gap: float,
    cuts: Sequence[Cut] | None = None,
) -> float:
    """The largest difference that rounding explains.

    Args:
        model: The model.
        inputs: Probe inputs.
        outputs: What it makes of them.
        gap: The difference in question; only a large one needs a measurement.
        cuts: With the gates of these; None for a model that is run as it is.
    """
    least = {**TOLERANCE, **HALF_PRECISION}[model.dtype]
    if gap <= least or not math.isfinite(gap):
        return least
    cuts = cuts or [uncut(attention) for attention in attention_of(model)]
    return max(least, AMPLIFICATION * probe_rounding(model, cuts, inputs, outputs))


def difference(wanted: Outputs, got: Outputs) -> float:
    """Largest absolute difference over the largest value, of the output where that is worst.

    NaN if any output is NaN, infinite if one is missing.
    """
    shares = []
    for name, output in wanted.items():
        if name not in got or got[name].shape != output.shape:
            return float("inf")
        largest = float(output.abs().max())
        shares.append(float((output - got[name]).abs().max()) / (largest or 1.0))
    return _worst(shares)


def difference_in(wanted: Outputs, got: Outputs) -> float:
    """As ``difference``, of those outputs that there are."""
    return difference({name: wanted[name] for name in got}, got)


def _worst(shares: Sequence[float]) -> float:
    return float("nan") if any(share != share for share in shares) else max(shares)


def largest_output(outputs: Outputs) -> float:
    """Largest absolute output."""
    return max(float(output.abs().max()) for output in outputs.values())


def difference_from_stored(stored: Sample, outputs: Outputs) -> float:
    """As ``difference``, at the positions that were kept; infinite if an output is missing."""
    shares = []
    for name, kept in stored.outputs.items():
        if name not in outputs or outputs[name].numel() != kept.size:
            return float("inf")
        got = outputs[name].flatten()[list(kept.positions)]
        gap = (got - torch.tensor(kept.values, dtype=torch.float64)).abs().max()
        shares.append(float(gap) / (kept.largest or 1.0))
    return _worst(shares)


def sample(inputs: dict[str, Tensor], outputs: Outputs, count: int = 256) -> Sample:
    """Keeps ``count`` values of every output, at random positions."""
    generator, kept = torch.Generator().manual_seed(PROBE_SEED), dict[str, StoredOutput]()
    for name, output in outputs.items():
        positions = torch.randint(0, output.numel(), (count,), generator=generator)
        kept[name] = StoredOutput(
            size=output.numel(),
            largest=float(output.abs().max()),
            positions=tuple(positions.tolist()),
            values=tuple(output.flatten()[positions].tolist()),
        )
    return Sample(inputs_sha256=digest(inputs), outputs=kept)


def digest(inputs: dict[str, Tensor]) -> str:
    """SHA-256 of probe inputs."""
    total = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        total.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Expectation:
    """What a cut model must compute, measured on the gated original before the cut.

    Attributes:
        inputs: The probe inputs.
        wanted: Outputs of the gated original.
        control: Outputs of a wrong cut; None where no heads are left.
        rounding: How far the outputs move when gates move by one bit.
        dtype: Element type that the original ran in.
        cast: What rounding the weights to what is stored of them cost before that.
    """

    inputs: dict[str, Tensor]
    wanted: Outputs
    control: Outputs | None
    rounding: float
    dtype: torch.dtype
    cast: float = 0.0

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return max(TOLERANCE[self.dtype], AMPLIFICATION * self.rounding)

    def conclusive(self, spare: float = 1.0) -> bool:
        """Whether a wrong cut shows, also if rounding is amplified so many times as much."""
        amplified = AMPLIFICATION * self.rounding * spare
        if self.control is None or not amplified > TOLERANCE[self.dtype]:
            return True  # so is NaN: the comparison of outputs says that they are not finite
        return difference_in(self.wanted, self.control) >= _CONCLUSIVE * amplified

    def refuse_inconclusive(self) -> None:
        """Refuses a proof that a wrong cut would pass as well.

        Raises:
            ProofError: If rounding hides what one head contributes.
        """
        if self.control is not None and not self.conclusive():
            control = difference_in(self.wanted, self.control)
            raise ProofError(
                "A proof would show nothing, and nothing was written: with these heads gone the "
                f"model amplifies rounding in {dtype_name(self.dtype)} to {self.rounding:.1e} of "
                f"its largest output, and a wrong cut would change it by no more than "
                f"{control:.1e}. Keep more heads, or compute in float64."
            )


def expect(
    model: PreTrainedModel,
    cuts: Sequence[Cut],
    inputs: dict[str, Tensor] | None = None,
    decoded: bool = True,
) -> Expectation:
    """Measures what a cut must lead to; the model is in float32 at least (``precision.widened``).

    Args:
        model: The model, uncut.
        cuts: What is going to be cut.
        inputs: Probe inputs; None to make them.
        decoded: Whether a language model is also decoded from: 31 passes instead of 4.
    """
    inputs = inputs or probe_inputs(model)
    wanted = probe_gated(model, cuts, inputs, decoded)
    control = probe_control(model, cuts, inputs)
    rounding = probe_rounding(model, cuts, inputs, wanted, decoded)
    return Expectation(inputs, wanted, control, rounding, model.dtype)


def expect_stored(
    model: PreTrainedModel, cuts: Sequence[Cut], stored: StoredDtypes
) -> tuple[Expectation, list[Cut]]:
    """Measures what a cut must lead to once it is stored, which the model is rounded to.

    Args:
        model: The model, uncut; afterwards its gates are folded in.
        cuts: What is going to be cut.
        stored: The element types that are written.

    Returns:
        What must come out, and the cuts without gates.

    Raises:
        ProofError: If a proof would show nothing.
    """
    inputs = probe_inputs(widened(model))
    exact = probe_gated(model, cuts, inputs) if stored.narrows(model) else None
    folded = fold_gates(cuts)
    changed = stored.round(model)
    expected = expect(model, folded, inputs)
    expected.refuse_inconclusive()
    if exact is not None and changed:
        expected = replace(expected, cast=difference(exact, expected.wanted))
    return expected, folded


def conclude(expected: Expectation, cut: Outputs | None, reloaded: Outputs) -> Proof:
    """Compares a result with what was expected of it.

    Args:
        expected: What the gated original computes.
        cut: Outputs of the cut model in memory; None where it was cut on disk.
        reloaded: Outputs of the model read back from disk.

    Raises:
        ProofError: If they do not agree, or rounding hides whether they do.
    """
    expected.refuse_inconclusive()
    wanted, control = expected.wanted, expected.control
    proof = Proof(
        gated_vs_cut=None if cut is None else difference(wanted, cut),
        gated_vs_reloaded=difference(wanted, reloaded),
        largest_output=largest_output(wanted),
        control=None if control is None else difference_in(wanted, control),
        rounding=expected.rounding,
        tolerance=expected.tolerance,
        dtype=dtype_name(expected.dtype),
        cast=expected.cast,
        probes=tuple(wanted),
    )
    if not proof.passed:
        raise ProofError(
            "The proof failed, and nothing was written: the gated original and the cut model "
            f"differ by {_worst(proof.differences):.2e} of the largest output; "
            f"{proof.tolerance:.2e} is allowed. Please report this model and plan; computing in "
            "float64 rules out rounding."
        )
    return proof
