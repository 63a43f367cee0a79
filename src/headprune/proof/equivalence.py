"""The proof: gated original, cut model and reloaded model compute the same.

All three run on probe inputs (``model.probes``). Beside the differences stands a control: how
far the logits move when the gates are shifted by one head. A proof whose control is as small as
its differences would show nothing.

Outputs of every W_O are compared as well, relative to their largest value. Every cut module has a
control of its own: a wrong cut of small weights moves the logits by less than rounding.

Heads with a window have a mask per head in the gated original. They have three controls: a window
shorter by one token, no sinks, and forms shifted by one head.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import ProofError
from headprune.model.attention import attention_of
from headprune.model.gating import apply_gate, entering_outputs, fixed, gated
from headprune.model.precision import to_float32
from headprune.model.probes import (
    Outputs,
    positions_of,
    probe,
    projected,
    proof_inputs,
    some_rows,
    unreached,
)
from headprune.model.stored import StoredDtypes
from headprune.model.windows import Narrowed, windowed
from headprune.runtime.modeling_headprune import input_dim
from headprune.schemas.proofs import PROBE_SEED, Proof, Sample, StoredOutput
from headprune.surgery.cut import Cut, computing_as, fold_gates, narrowed, uncut, window_of
from headprune.tensors.dtypes import dtype_name

Named = Mapping[str, Tensor]

# Largest difference allowed, relative to the largest output, in a well-conditioned model. Summation
# order changes with the width of W_O's input: measured 1.8e-6 on SmolLM2-135M in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

# A model that lost many heads can amplify rounding: with a random half of them gone, SmolLM2-135M
# moves by 2.9e-5 when its gates move by one bit, and by 4.1e-5 from float32 to float64. So that is
# measured beside every proof, and this many times as much is allowed.
AMPLIFICATION = 4
_STORED = 256  # kept values of an output
CONCLUSIVE = 10  # a wrong cut must show this many times as much as is allowed


def explained(dtype: torch.dtype, rounding: float) -> float:
    """The largest difference that rounding explains, where one bit in the gates makes so much."""
    return max(TOLERANCE[dtype], AMPLIFICATION * rounding)


def probe_gated(
    model: PreTrainedModel, cuts: Sequence[Cut], inputs: dict[str, Tensor], decoded: bool = True
) -> Outputs:
    """Probes a model with the gates that a cut will make permanent; with controls of modules."""
    with _controlled(cuts) as controls, computing_as(cuts, [cut.gate() for cut in cuts]):
        outputs = probe(model, inputs, decoded)
    # zero outputs with right and wrong gates hide nothing: anything else is a difference
    outputs.controls = {c.path: c.share for c in controls if c.largest or not c.calls}
    return outputs


@dataclass
class _Control:
    """Measure how far wrong gates move the output of W_O of one module.

    Attributes:
        path: The module.
        apart: The largest difference.
        largest: The largest value, of both.
        calls: Calls of the module.
    """

    path: str
    apart: float = 0.0
    largest: float = 0.0
    calls: int = 0

    @property
    def share(self) -> float:
        """The difference relative to the largest value."""
        return self.apart / (self.largest or 1.0)


@contextmanager
def _controlled(cuts: Sequence[Cut]) -> Iterator[list[_Control]]:
    """Measure, in the passes of a model, the effect of wrong gates at each cut module.

    Without a cut module, it measures all modules.
    """
    heads = [cut for cut in cuts if cut.attention.query_heads]
    watched = [cut for cut in heads if _is_cut(cut)] or heads
    controls = [_Control(cut.attention.path) for cut in watched]

    def watch(position: int, x: Tensor) -> None:
        cut, control = watched[position], controls[position]
        projection = cut.attention.output_projection
        rows, gate = some_rows(x)[None], cut.gate()
        wrong = gate.roll(1)
        if torch.equal(wrong, gate):
            wrong = gate.clone()
            head = _strongest(projection, len(gate))
            wrong[head] = float(not gate[head])
        both = [projected(projection, apply_gate(rows, g[None])) for g in (gate, wrong)]
        right, other = (output.nan_to_num() for output in both)
        control.apart = max(control.apart, float((right - other).abs().max()))
        largest = max(float(right.abs().max()), float(other.abs().max()))
        control.largest = max(control.largest, largest)
        control.calls += 1

    with entering_outputs([cut.attention for cut in watched], watch):
        yield controls


def _is_cut(cut: Cut) -> bool:
    whole = uncut(cut.attention)
    parts = ((c.query_positions, c.kv_positions) for c in (cut, whole))
    return len(set(parts)) > 1


def _strongest(projection: nn.Module, heads: int) -> int:
    """The head with the largest weight in W_O; others may have been emptied."""
    weight = projection.get_parameter("weight").abs().amax(1 - input_dim(projection))
    return int(weight.view(heads, -1).amax(1).argmax())


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
    with computing_as(cuts, wrong):
        return probe(model, inputs, decoded=False)


def probe_windows(
    model: PreTrainedModel, cuts: Sequence[Cut], inputs: dict[str, Tensor], wanted: Outputs
) -> dict[str, float]:
    """Return how far wrong windows move a model, or a module in it; empty without windows."""
    right = narrowed(cuts)
    if not right:
        return {}
    size, sinks = right[0].window
    wrong = {
        "window shorter by one": [replace(each, window=(size - 1, sinks)) for each in right],
        "no sinks": [replace(each, window=(size, 0)) for each in right],
        "forms shifted by one head": [_shifted(each) for each in right],
    }
    controls, attentions = dict[str, float](), [cut.attention for cut in cuts]
    for name, each in wrong.items():
        if each == right or (name == "window shorter by one" and size == 1):
            continue
        with windowed(each), gated(attentions, fixed([cut.gate() for cut in cuts])):
            outputs = probe(model, inputs)
        modules = difference_by_module(wanted, outputs).values()
        controls[name] = max(difference(wanted, outputs), *modules)
    return controls


def _shifted(each: Narrowed) -> Narrowed:
    heads = each.attention.kv_heads
    return replace(each, kv_positions=tuple(sorted((p + 1) % heads for p in each.kv_positions)))


def _same(gates: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(gates, others, strict=True))


@dataclass(frozen=True)
class Rounding:
    """Measure how far a model moves when its gates move by one bit; the larger of two draws.

    Attributes:
        outputs: Its outputs.
        modules: What W_O of every attention module gives.
    """

    outputs: float = 0.0
    modules: Mapping[str, float] = field(default_factory=dict)


def probe_rounding(
    model: PreTrainedModel,
    cuts: Sequence[Cut],
    inputs: dict[str, Tensor],
    wanted: Outputs,
    decoded: bool = True,
) -> Rounding:
    """Measure rounding, in all compared outputs.

    SmolLM2-135M without a quarter of its heads moves by 6.5e-6 in one pass, and by 8.6e-5 where
    padded texts are decoded in chunks.
    """
    eps, draws = torch.finfo(model.dtype).eps, []
    for seed in range(2):
        generator, gates = torch.Generator().manual_seed(seed), []
        for cut in cuts:
            gate = cut.gate().to(model.dtype)
            bits = torch.randint(-1, 2, gate.shape, generator=generator)
            gates.append(gate * (1 + eps * bits))
        with computing_as(cuts, gates):
            draws.append(probe(model, inputs, decoded))
    modules = [difference_by_module(wanted, draw) for draw in draws]
    return Rounding(
        max(difference(wanted, draw) for draw in draws),
        {path: max(each[path] for each in modules) for path in modules[0]},
    )


def allowed(
    model: PreTrainedModel, inputs: dict[str, Tensor], outputs: Outputs, gap: float
) -> float:
    """The largest difference of outputs that rounding explains.

    Args:
        model: The model, run as it is.
        inputs: Probe inputs.
        outputs: Its outputs.
        gap: The difference in question; only a large one needs a measurement.
    """
    least = TOLERANCE[model.dtype]
    if gap <= least or not math.isfinite(gap):
        return least
    cuts = [uncut(attention) for attention in attention_of(model)]
    return explained(model.dtype, probe_rounding(model, cuts, inputs, outputs).outputs)


def difference(wanted: Named, got: Named) -> float:
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


def difference_in(wanted: Named, got: Named) -> float:
    """As ``difference``, of those outputs that there are."""
    return difference({name: wanted[name] for name in got}, got)


def difference_by_module(wanted: Outputs, got: Outputs) -> dict[str, float]:
    """As ``difference``, of what W_O of every module gives; relative to the larger of both.

    Modules stand in the order of the layers, as a result may have other names. Positions that are
    NaN in both, such as padded ones, count as equal.
    """
    if len(wanted.modules) != len(got.modules):
        return dict.fromkeys(wanted.modules, float("inf"))
    pairs = zip(wanted.modules.items(), got.modules.values(), strict=True)
    return {path: _apart(one, other) for (path, one), other in pairs}


def _apart(wanted: Tensor, got: Tensor) -> float:
    if not wanted.numel() or not got.numel():  # a module without heads need not be called
        return float(bool(wanted.any() or got.any()))
    if wanted.shape != got.shape:
        return float("inf")
    known = wanted.isfinite()
    wanted, got = wanted[known].double(), got[known].double()
    if not len(wanted):
        return 0.0
    largest = max(float(wanted.abs().max()), float(got.abs().max()))
    return float((wanted - got).abs().max()) / (largest or 1.0)


def _worst(shares: Sequence[float]) -> float:
    return float("nan") if any(share != share for share in shares) else max(shares)


def difference_from_stored(stored: Sample, outputs: Outputs) -> float:
    """Return ``difference`` at the kept positions; infinite if an output is missing."""
    shares = []
    for name, kept in stored.outputs.items():
        if name not in outputs or outputs[name].numel() != kept.size:
            return float("inf")
        got = outputs[name].flatten()[list(kept.positions)]
        gap = (got - torch.tensor(kept.values, dtype=torch.float64)).abs().max()
        shares.append(float(gap) / (kept.largest or 1.0))
    return _worst(shares)


def sample(inputs: dict[str, Tensor], outputs: Outputs) -> Sample:
    """Keeps a few values of every output, at random positions."""
    generator, kept = torch.Generator().manual_seed(PROBE_SEED), dict[str, StoredOutput]()
    for name, output in outputs.items():
        positions = torch.randint(0, output.numel(), (_STORED,), generator=generator)
        kept[name] = StoredOutput(
            size=output.numel(),
            largest=float(output.abs().max()),
            positions=tuple(positions.tolist()),
            values=tuple(output.flatten()[positions].tolist()),
        )
    return Sample(inputs_sha256=digest(inputs), outputs=kept, positions=positions_of(inputs))


def digest(inputs: dict[str, Tensor]) -> str:
    """SHA-256 of probe inputs."""
    total = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        total.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Expectation:
    """The outputs a cut model must give, measured on the gated original before the cut.

    Attributes:
        inputs: The probe inputs.
        wanted: Outputs of the gated original.
        control: Outputs of a wrong cut; None where no heads are left.
        rounding: How far a model moves when gates move by one bit.
        dtype: Element type that the original ran in.
        cast: The cost of rounding the weights to their stored type before that.
        unreached: Parts of the model that the inputs do not reach, in words.
        windows: How far wrong windows move the model, by their mistake.
    """

    inputs: dict[str, Tensor]
    wanted: Outputs
    control: Outputs | None
    rounding: Rounding
    dtype: torch.dtype
    cast: float = 0.0
    unreached: tuple[str, ...] = ()
    windows: Mapping[str, float] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """The largest difference of outputs that rounding explains."""
        return explained(self.dtype, self.rounding.outputs)

    def tolerance_at(self, path: str, rounding_factor: float = 1.0) -> float:
        """As ``tolerance``, at one attention module."""
        return explained(self.dtype, self.rounding.modules.get(path, 0.0) * rounding_factor)

    def inconclusive(self, rounding_factor: float = 1.0) -> str | None:
        """Say why a wrong cut would pass, also if rounding is ``rounding_factor`` times as large.

        At a module, its control is held against the tolerance. That of the outputs is held against
        rounding alone: one head of a thousand may move them by little, and the modules tell it.
        """
        for path, control in self.wanted.controls.items():
            if control < CONCLUSIVE * self.tolerance_at(path, rounding_factor):
                return (
                    f"at '{path}' a wrong cut would change what W_O gives by {control:.1e} of its "
                    f"largest value, and rounding explains {self.tolerance_at(path):.1e}"
                )
        for wrong, control in self.windows.items():
            if control < CONCLUSIVE * self.tolerance:
                return (
                    f"wrong windows ({wrong}) would change the outputs of modules by {control:.1e} "
                    f"of the largest value, and rounding explains {self.tolerance:.1e}"
                )
        amplified = AMPLIFICATION * self.rounding.outputs * rounding_factor
        if self.control is None or not amplified > TOLERANCE[self.dtype]:
            return None  # so is NaN: the comparison of outputs says that they are not finite
        control = difference_in(self.wanted, self.control)
        if control >= CONCLUSIVE * amplified:
            return None
        return (
            f"with these heads gone the model amplifies rounding in {dtype_name(self.dtype)} to "
            f"{self.rounding.outputs:.1e} of its largest output, and a wrong cut would change it "
            f"by no more than {control:.1e}"
        )

    def refuse_inconclusive(self) -> None:
        """Refuses a proof that a wrong cut would pass as well.

        Raises:
            ProofError: If rounding hides what one head contributes.
        """
        why = self.inconclusive()
        if why is not None:
            raise ProofError(
                f"A proof would show nothing, and nothing was written: {why}. Keep more heads, "
                "compute in float64, or compare tensors alone (prune --config proof=tensors)."
            )

    def apart(self, got: Outputs) -> str | None:
        """Say where a model differs from the expected outputs by more than rounding explains."""
        gap = difference(self.wanted, got)
        if not gap <= self.tolerance:
            return f"{gap:.2e} of the largest output; {self.tolerance:.2e} is allowed"
        for path, share in difference_by_module(self.wanted, got).items():
            if not share <= self.tolerance_at(path):
                return (
                    f"{share:.2e} of the largest value that W_O of '{path}' gives; "
                    f"{self.tolerance_at(path):.2e} is allowed"
                )
        return None


def expect(
    model: PreTrainedModel,
    cuts: Sequence[Cut],
    inputs: dict[str, Tensor] | None = None,
    decoded: bool = True,
) -> Expectation:
    """Measure the outputs a cut must lead to, in float32 at least (``precision.to_float32``).

    Args:
        model: The model, uncut.
        cuts: The planned cuts.
        inputs: Probe inputs; None to make them.
        decoded: Whether a language model is also decoded from: 31 passes instead of 4.
    """
    inputs = inputs or proof_inputs(model, window=window_of(cuts))
    wanted = probe_gated(model, cuts, inputs, decoded)
    control = probe_control(model, cuts, inputs)
    rounding = probe_rounding(model, cuts, inputs, wanted, decoded)
    return Expectation(
        inputs,
        wanted,
        control,
        rounding,
        model.dtype,
        unreached=unreached(model, inputs),
        windows=probe_windows(model, cuts, inputs, wanted) if decoded else {},
    )


def expect_stored(
    model: PreTrainedModel, cuts: Sequence[Cut], stored: StoredDtypes
) -> tuple[Expectation, list[Cut]]:
    """Measure the outputs of a stored cut; the model is rounded to its stored types.

    Args:
        model: The model, uncut; afterwards its gates are folded in.
        cuts: The planned cuts.
        stored: The element types to write.

    Returns:
        What must come out, and the cuts without gates.

    Raises:
        ProofError: If a proof would show nothing.
    """
    inputs = proof_inputs(to_float32(model), window=window_of(cuts))
    exact = probe_gated(model, cuts, inputs) if stored.narrows(model) else None
    folded = fold_gates(cuts)
    changed = stored.round(model)
    expected = expect(model, folded, inputs)
    expected.refuse_inconclusive()
    if exact is not None and changed:
        expected = replace(expected, cast=difference(exact, expected.wanted))
    return expected, folded


def conclude(expected: Expectation, reloaded: Outputs) -> Proof:
    """Compare a result with its expected outputs.

    Args:
        expected: Outputs of the gated original.
        reloaded: Outputs of the model read back from disk.

    Raises:
        ProofError: If they do not agree, or rounding hides whether they do.
    """
    expected.refuse_inconclusive()
    wanted, control = expected.wanted, expected.control
    apart = expected.apart(reloaded)
    if apart is not None:
        raise ProofError(
            "The proof failed, and nothing was written: the gated original and the result differ "
            f"by {apart}. Please report this model and plan; computing in float64 rules out "
            "rounding."
        )
    return Proof(
        gated_vs_reloaded=difference(wanted, reloaded),
        control=None if control is None else difference_in(wanted, control),
        rounding=expected.rounding.outputs,
        tolerance=expected.tolerance,
        dtype=dtype_name(expected.dtype),
        cast=expected.cast,
        probes=tuple(wanted),
        unreached=expected.unreached,
        windows=dict(expected.windows),
    )
