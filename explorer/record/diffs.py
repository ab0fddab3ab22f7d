"""How far a tensor, a generator, a mask or a piece of state of one run is from its twin of another.

Every verdict is derived from the distances, none is stored.
"""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Count, Record

Verdict = Literal["bitwise equal", "rounding", "state moved", "different", "not comparable"]
Presence = Literal["both", "baseline only", "candidate only", "neither"]

ROUNDING_FACTOR = 10.0
"""A candidate may be this many times further from float64 than the baseline (or its own rerun) is."""


class TensorDiff(Record):
    """One gradient, buffer or parameter of both runs. Distances are None where one side has nothing to compare."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    presence: Presence
    bitwise: bool
    """Every bit, NaN payloads included; two absent tensors are equal."""
    n_nonfinite_mismatch: Count = 0
    """Elements that are finite on one side only."""
    n_nonfinite: Count = 0
    """Elements that are not finite on the candidate's side."""
    max_abs: float | None = None
    relative_norm: float | None = None
    """|candidate - baseline| / |baseline|, L2; None where the baseline is all zero."""
    max_ulp: int | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    """|candidate| / |baseline|, L2."""
    baseline_norm: float | None = None
    """|baseline|, L2."""
    baseline_error: float | None = None
    """|baseline - float64 reference|, L2; None: no reference could run."""
    candidate_error: float | None = None
    noise: float | None = None
    """|baseline - its own rerun|, L2."""
    tiny: float | None = None
    """Floor that scales with the run: float32 epsilon times the median gradient norm of the reference. Of a parameter
    that both optimizers moved with equal gradients: a quarter of its own type's epsilon times its own norm."""

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

    @property
    def place(self) -> str:
        """`n of blocks.0`"""
        block, _, name = self.name.rpartition(".")
        return f"{name} of {block}" if block else name


class GradientDiff(TensorDiff):
    """A parameter's gradient after one backward."""

    @property
    def verdict(self) -> Verdict:
        """As for every tensor; but two equal gradients with NaN or infinity prove nothing: those absorb any error."""
        own = super().verdict
        return "not comparable" if own == "bitwise equal" and self.n_nonfinite else own


class BufferDiff(TensorDiff):
    """A buffer after one step; integers compare exactly."""


class ParameterDiff(TensorDiff):
    """A parameter after `Comparison.n_steps` steps, trained or not."""

    trained: bool = True
    gradients_round: bool = False
    """Its gradients of every step lie within rounding, and nothing but the optimizer moved it."""
    step_distance: float | None = None
    """|candidate - baseline| / |how far the baseline's last step moved it|, L2; the three are None of equal ones."""
    step_ratio: float | None = None
    """|how far the candidate's last step moved it| / |the baseline's|."""
    step_cosine: float | None = None
    """Between the two moves."""
    decay_cosine: float | None = None
    """Between candidate - baseline and the parameter as it stood before: 1 or -1 where weight decay differs."""

    @property
    def verdict(self) -> Verdict:
        """As for every tensor; but what an optimizer makes of rounding is rounding.

        AdamW divides a gradient by its own size: one that is zero in exact arithmetic becomes a whole step.
        """
        own = super().verdict
        if own != "different" or self.presence != "both" or self.n_nonfinite or self.n_nonfinite_mismatch:
            return own
        return "rounding" if self.gradients_round else own


class StateDiff(TensorDiff, kw_only=True):
    """Something that the model carries on to its next step and that is not equal: its furthest part stands here."""

    block: str
    kind: Literal["parameter", "frozen parameter", "buffer", "attribute", "gradient"]
    """`gradient`: of a tensor that the model holds in an attribute. Parameters: moved by forward or backward."""
    step: Count
    """After which step, from 1."""
    baseline_value: str = ""
    """Short form."""
    candidate_value: str = ""

    @property
    def is_training(self) -> bool:
        """Whether it is what is trained, not what is remembered beside."""
        return self.kind in ("parameter", "gradient")

    @property
    def place(self) -> str:
        """`cache.step of blocks.0`: an attribute of a block may have dots of its own."""
        name = self.name.removeprefix(f"{self.block}.")
        return f"{name} of {self.block}" if self.block else name


class RngDiff(Record):
    """Where one random generator stands after the step."""

    generator: str
    """`torch cpu`, `torch cuda:0`, `python`, `numpy`, or the dotted path of a generator in the model."""
    equal: bool


class MaskDiff(Record):
    """Random numbers of one module: those of forward, a dropout mask say, against those drawn again at recompute."""

    block: str
    n_elements: Count
    n_mismatched: Count
    n_not_drawn_again: Count = 0
    """Elements drawn in forward that the recompute left out: early stop ended it before, or the result was kept."""
    is_mask: bool = True
    """False: numbers of another kind than keep or drop."""

    @property
    def mismatch_share(self) -> float:
        return self.n_mismatched / self.n_elements if self.n_elements else 0.0


class ForwardDiff(Record):
    """One forward of each program, block by block."""

    n_calls: tuple[int, int]
    """How often a step calls the model, of the baseline and of the candidate."""
    n_compared: int
    """Calls of blocks that both programs make."""
    order: tuple[str, ...]
    """Blocks in the order in which the baseline enters them."""
    same: bool
    """Whether all compared calls return the same, to the last digit of norms and projections."""
    block: str | None = None
    """The first to return another output for the same input; the empty string is the model, None: there is none."""
    in_baseline: str = ""
    """Kind, settings and mode of that block."""
    in_candidate: str = ""


class StateChange(Record):
    """A buffer or plain attribute of a module that the recompute changed once more."""

    block: str
    name: str
    kind: Literal["buffer", "attribute"]
    after_forward: str
    """Short form of the value when forward ended."""
    after_backward: str
