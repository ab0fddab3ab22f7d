"""Is it still the same step? Baseline and candidate tensor by tensor; every verdict is derived, none is stored."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from explorer.record.base import Record, to_plain
from explorer.record.measurement import Failure, Measurement, ratio_with_spread

Verdict = Literal["bitwise equal", "rounding", "different", "not comparable"]
Presence = Literal["both", "baseline only", "candidate only", "neither"]

ROUNDING_FACTOR = 10.0
"""A candidate may be this many times further from float64 than the baseline (or its own rerun) is."""


class TensorDiff(Record):
    """One gradient, buffer or parameter of both runs. Distances are None where one side has nothing to compare."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    presence: Presence
    bitwise: bool
    """Every bit, NaN payloads included; two absent tensors are equal."""
    n_nonfinite_mismatch: int = 0
    """Elements that are finite on one side only."""
    n_nonfinite: int = 0
    """Elements that are not finite on the candidate's side."""
    max_abs: float | None = None
    relative_norm: float | None = None
    """|candidate - baseline| / |baseline|, L2; None where the baseline is all zero."""
    max_ulp: int | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    """|candidate| / |baseline|, L2."""
    baseline_error: float | None = None
    """|baseline - float64 reference|, L2; None: no reference could run."""
    candidate_error: float | None = None
    noise: float | None = None
    """|baseline - its own rerun|, L2."""
    tiny: float | None = None
    """Floor that scales with the run: float32 epsilon times the median gradient norm of the reference."""

    @property
    def verdict(self) -> Verdict:
        """Bitwise equal; or rounding: as near to float64 as the baseline is, up to ROUNDING_FACTOR; else different."""
        if self.presence in ("baseline only", "candidate only") or self.n_nonfinite_mismatch:
            return "different"
        if self.bitwise:
            return "bitwise equal"
        if self.n_nonfinite or self.candidate_error is None or self.baseline_error is None:
            return "different"
        allowed = ROUNDING_FACTOR * max(self.baseline_error, self.noise or 0.0, self.tiny or 0.0)
        return "rounding" if self.candidate_error <= allowed else "different"


class GradientDiff(TensorDiff):
    """A parameter's gradient after one backward."""

    @property
    def verdict(self) -> Verdict:
        """As for every tensor; but two equal gradients with NaN or infinity prove nothing: those absorb any error."""
        said = super().verdict
        return "not comparable" if said == "bitwise equal" and self.n_nonfinite else said


class BufferDiff(TensorDiff):
    """A buffer after one step; integers compare exactly."""


class ParameterDiff(TensorDiff):
    """A parameter after `Comparison.n_steps` optimizer steps."""


class RngDiff(Record):
    """Where one random generator stands after the step."""

    generator: str
    """`torch cpu`, `torch cuda:0`, `python`, `numpy`, or the dotted path of a generator in the model."""
    equal: bool


class MaskDiff(Record):
    """Random numbers of one module: those of forward, a dropout mask say, against those drawn again at recompute."""

    block: str
    n_elements: int
    n_mismatched: int
    n_not_drawn_again: int = 0
    """Elements drawn in forward that the recompute left out: early stop ended it before, or the result was kept."""
    is_mask: bool = True
    """False: numbers of another kind than keep or drop."""

    @property
    def mismatch_share(self) -> float:
        return self.n_mismatched / self.n_elements if self.n_elements else 0.0


class StateChange(Record):
    """A buffer or plain attribute of a module that the recompute changed once more."""

    block: str
    name: str
    kind: Literal["buffer", "attribute"]
    after_forward: str
    """Short form of the value when forward ended."""
    after_backward: str


class Comparison(Record):
    """Two runs from identical state: what the candidate buys, what it costs, whether it is the same."""

    baseline: Measurement
    candidate: Measurement
    gradients: tuple[GradientDiff, ...] = ()
    buffers: tuple[BufferDiff, ...] = ()
    parameters: tuple[ParameterDiff, ...] = ()
    n_steps: int = 0
    """Optimizer steps behind `parameters`; 0: not taken."""
    rng: tuple[RngDiff, ...] = ()
    eval_output: TensorDiff | None = None
    masks: tuple[MaskDiff, ...] = ()
    state_changes: tuple[StateChange, ...] = ()
    loss_equal: bool | None = None
    """Shown, never part of the verdict."""
    reproducible: bool | None = None
    """Whether the baseline equals its own rerun bit by bit; None: not checked."""
    not_reproducible_because: str = ""
    reference: Literal["float64", "none"] = "none"
    no_reference_because: str = ""
    """Why the float64 run is no reference, where it was tried; then every difference counts as different."""
    causes: tuple[str, ...] = ()
    """Likely causes of a difference, most likely first, each one sentence that names its blocks."""
    failure: Failure | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """Over gradients, buffers, parameters, eval output and RNG positions; the worst one decides."""
        if self.failure or self.reproducible is False or not self.gradients:
            return "not comparable"
        if all(diff.presence == "neither" for diff in self.gradients):
            return "not comparable"
        said = {diff.verdict for diff in self.all_diffs}
        if "different" in said or not all(diff.equal for diff in self.rng):
            return "different"
        if "not comparable" in said:
            return "not comparable"
        return "rounding" if "rounding" in said else "bitwise equal"

    @property
    def comparable(self) -> bool:
        """Whether both runs went to their end: only then is there anything bought, any cost, any evidence."""
        return self.failure is None and self.baseline.complete and self.candidate.complete

    @cached_property
    def all_diffs(self) -> tuple[TensorDiff, ...]:
        last = (self.eval_output,) if self.eval_output else ()
        return (*self.gradients, *self.buffers, *self.parameters, *last)

    @property
    def n_bitwise_equal(self) -> int:
        """Gradients that agree in every bit, of `len(gradients)`."""
        return sum(diff.verdict == "bitwise equal" for diff in self.gradients)

    @cached_property
    def worst(self) -> TensorDiff | None:
        """The tensor furthest from equal; None when all are bitwise equal."""
        wrong = [diff for diff in self.all_diffs if diff.verdict != "bitwise equal"]
        return max(wrong, key=_badness) if wrong else None

    def headlines(self) -> dict[str, Any]:
        """The derived figures `--json` prints beside the record, under these very names."""
        base, cand = self.baseline, self.candidate
        times = (base.times, cand.times) if self.comparable else (None, None)
        time_ratio = ratio_with_spread(times[1].step, times[0].step) if times[0] and times[1] else None
        flops = (base.total_flops, cand.total_flops) if self.comparable else (None, None)
        return {
            "comparable": self.comparable,
            "verdict": self.verdict,
            "n_bitwise_equal": self.n_bitwise_equal,
            "n_gradients": len(self.gradients),
            "worst": to_plain(self.worst) if self.worst else None,
            "baseline": base.headlines(),
            "candidate": cand.headlines(),
            "flop_ratio": flops[1] / flops[0] if flops[0] and flops[1] is not None else None,
            "time_ratio": time_ratio[0] if time_ratio else None,
            "time_ratio_spread": time_ratio[1] if time_ratio else None,
        }


def _badness(diff: TensorDiff) -> tuple[int, float]:
    rank = 3 if diff.presence != "both" else 2 if diff.n_nonfinite_mismatch else int(diff.verdict == "different")
    return rank, diff.relative_norm if diff.relative_norm is not None else (diff.max_abs or 0.0)
