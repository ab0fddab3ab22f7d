"""The comparison of a step under two policies: baseline and candidate, tensor by tensor.

Diffs hold distances between two runs. Verdicts are derived from the distances and never stored.
"""

from __future__ import annotations

import statistics
from functools import cached_property
from typing import Any, Literal

from explorer.record.base import Count, Record, to_plain
from explorer.record.checkpointing import WithoutCheckpoint
from explorer.record.failure import Failure
from explorer.record.late_read import Departure, LateRead
from explorer.record.measurement import Measurement, ratio_with_spread

Verdict = Literal["bitwise equal", "rounding", "state moved", "different", "not comparable"]
Presence = Literal["both", "baseline only", "candidate only", "neither"]

ROUNDING_FACTOR = 10.0
"""A candidate may be this many times further from float64 than the baseline (or its own rerun) is."""


class TensorDiff(Record):
    """A gradient, buffer or parameter of both runs. Distances are None if one side has no tensor to compare."""

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
    """Floor that scales with the run: float32 epsilon times the median gradient norm of the reference. For a parameter
    that both optimizers moved with equal gradients: a quarter of the epsilon of its type times its norm."""
    never_rounds: str = ""
    """Why a difference of this tensor is not judged as rounding, whatever the errors are; empty: the errors decide."""

    @property
    def verdict(self) -> Verdict:
        """Bitwise equal; or rounding: as near to float64 as the baseline is, up to ROUNDING_FACTOR; else different."""
        if self.presence in ("baseline only", "candidate only") or self.n_nonfinite_mismatch:
            return "different"
        if self.bitwise:
            return "bitwise equal"
        if self.never_rounds or self.n_nonfinite or self.candidate_error is None or self.baseline_error is None:
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
        """The verdict of a tensor; but equal gradients with NaN or infinity prove nothing, as NaN absorbs any error."""
        verdict = super().verdict
        return "not comparable" if verdict == "bitwise equal" and self.n_nonfinite else verdict


class BufferDiff(TensorDiff):
    """A buffer after one step; integers compare exactly."""


class ParameterDiff(TensorDiff):
    """A parameter after `Comparison.n_steps` steps, trained or not."""

    trained: bool = True
    gradients_round: bool = False
    """Its gradients of every step lie within rounding, and nothing but the optimizer moved it."""
    step_distance: float | None = None
    """|candidate - baseline| / |move of the baseline's last step|, L2. The three figures are None for equal tensors."""
    step_ratio: float | None = None
    """|move of the candidate's last step| / |move of the baseline's last step|."""
    step_cosine: float | None = None
    """Cosine between the two moves."""
    decay_cosine: float | None = None
    """Cosine between candidate - baseline and the parameter before the step: 1 or -1 if weight decay differs."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of a tensor; but a difference that an optimizer makes of rounded gradients is rounding.

        AdamW divides a gradient by its size: a gradient that is zero in exact arithmetic becomes a whole step.
        """
        verdict = super().verdict
        if verdict != "different" or self.presence != "both" or self.n_nonfinite or self.n_nonfinite_mismatch:
            return verdict
        return "rounding" if self.gradients_round else verdict


class StateDiff(TensorDiff, kw_only=True):
    """State that the model carries to its next step and that differs: the part with the largest difference."""

    block: str
    kind: Literal["parameter", "frozen parameter", "buffer", "attribute", "gradient"]
    """`gradient`: of a tensor that the model holds in an attribute. Parameters: moved by forward or backward."""
    step: Count
    """The step after which the state differs, from 1."""
    baseline_value: str = ""
    """Short form of the value."""
    candidate_value: str = ""

    @property
    def is_training(self) -> bool:
        """True for trained state, false for other state of the model."""
        return self.kind in ("parameter", "gradient")

    @property
    def place(self) -> str:
        """`cache.step of blocks.0`: the attribute of a block may contain dots."""
        name = self.name.removeprefix(f"{self.block}.")
        return f"{name} of {self.block}" if self.block else name


class RngDiff(Record):
    """The state of a random generator after the step."""

    generator: str
    """`torch cpu`, `torch cuda:0`, `python`, `numpy`, or the dotted path of a generator in the model."""
    equal: bool


class MaskDiff(Record):
    """Random numbers of a module, such as a dropout mask: numbers of forward against numbers of the recompute."""

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
    """Differences between a forward of each program, block by block."""

    n_calls: tuple[int, int]
    """Calls of the model in a step, of the baseline and of the candidate."""
    n_compared: int
    """Calls of blocks that both programs make."""
    order: tuple[str, ...]
    """Blocks in the order in which the baseline enters them."""
    same: bool
    """True if all compared calls return the same, to the last digit of norms and projections."""
    block: str | None = None
    """The first block with another output for the same input; the empty string is the model, None means no block."""
    laid_out: tuple[str, str, str] | None = None
    """The first block that gets a tensor in another order of memory; the strides in baseline and candidate."""
    in_baseline: str = ""
    """Kind, settings and mode of that block."""
    in_candidate: str = ""
    other_inputs: bool = False
    """Whether the programs call the model on different values; never where a block differs for the same input."""


class StateChange(Record):
    """A buffer or plain attribute of a module that the recompute changed a second time."""

    block: str
    name: str
    kind: Literal["buffer", "attribute"]
    after_forward: str
    """Short form of the value when forward ended."""
    after_backward: str


_NOISE = 1e-3
"""A gradient that is zero but for rounding is shorter than this share of the median norm."""


class Comparison(Record):
    """Two runs from identical state: the savings and costs of the candidate, and the equality of its results."""

    baseline: Measurement
    candidate: Measurement
    failure: Failure | None = None
    causes: tuple[str, ...] = ()
    """Likely causes of a difference, most likely first, each one sentence that names its blocks."""
    # Differences: how far the candidate's results are from the baseline's.
    gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every trained parameter, after one backward."""
    input_gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every tensor of the batch that got a gradient."""
    later_gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every trained parameter in the last step, which starts from the state after the first step."""
    buffers: tuple[BufferDiff, ...] = ()
    parameters: tuple[ParameterDiff, ...] = ()
    n_steps: Count = 0
    """Number of steps before `parameters` were compared; 0: no steps."""
    carried: tuple[StateDiff, ...] = ()
    """Differences in all other state of the model, after the first and after the last step."""
    trains_in_backward: bool = False
    """Trained parameters moved before the optimizer's step: an optimizer inside backward, perhaps without gradients."""
    n_carried: Count = 0
    """Number of values compared for `carried`: buffers, attributes, values in hooks and classes."""
    rng: tuple[RngDiff, ...] = ()
    eval_output: TensorDiff | None = None
    loss_equal: bool | None = None
    """Shown, never part of the verdict."""
    # Evidence: what the distances are judged by, and what is left out.
    reproducible: bool | None = None
    """True if the baseline equals its rerun bit by bit; None: not checked."""
    not_reproducible_because: str = ""
    reference: Literal["float64", "none"] = "none"
    """The scale of rounding. none: no bit differs, or no float64 run can be a reference."""
    no_reference_because: str = ""
    """Why the float64 run is no reference, if it was tried. Every difference then counts as different."""
    without_tf32: tuple[str, ...] = ()
    """Kinds of operators that were judged in full float32, where measured and timed steps may use TensorFloat-32."""
    unjudged: tuple[str, ...] = ()
    """Attributes left out of `carried`, because two runs of the baseline differ in them too."""
    not_walked: tuple[str, ...] = ()
    """Attributes with more objects than the limit of the comparison."""
    without_checkpoint: WithoutCheckpoint | None = None
    """The same step with the model's own checkpointing off; None: the model has none, or it cannot be turned off."""
    # Recompute: what the candidate's recomputes did beside making tensors again.
    masks: tuple[MaskDiff, ...] = ()
    masks_watched: bool = False
    """True if a run was watched for `masks` and `state_changes`; otherwise both are empty and mean nothing."""
    equal_without_early_stop: bool | None = None
    """True if all gradients equal the baseline's with early_stop off. None: not tried, all numbers were drawn again."""
    fails_without_early_stop: str = ""
    """The error of that run; empty if it ran to its end."""
    state_changes: tuple[StateChange, ...] = ()
    late_reads: tuple[LateRead, ...] = ()
    """Values that recomputes read and that differ from those of forward, in the second of two watched steps."""
    departures: tuple[Departure, ...] = ()
    """The first operator that departs from forward, of each block with one; in the order of backward."""
    hidden_state: tuple[str, ...] = ()
    """Units that change a later step if they are recomputed more often, by state that `carried` does not name."""
    n_probes: int = 0
    """Recomputes of each unit for `hidden_state`, but for `n_probed_twice`; 0: not probed."""
    n_probed_twice: int = 0
    not_probed_because: str = ""
    # Programs: where the code of two programs differs.
    forward: ForwardDiff | None = None
    """The first difference in forward of two programs whose gradients differ; None: not watched."""
    untied: tuple[str, ...] = ()
    """Names that share a parameter in only one of two programs."""
    optimizer_settings: tuple[tuple[str, str, str], ...] = ()
    """Settings in which the optimizers of two programs differ: name, value in the baseline, value in the candidate."""
    float64_distance: float | None = None
    """The largest |candidate - baseline| / |baseline| of a tensor in float64; None: not run, or one side lacks it."""

    @cached_property
    def verdict(self) -> Verdict:
        """The worst verdict of the trained tensors (gradients, parameters), then of the other state.

        Equal gradients with state that moved twice, or before the recompute, have the verdict `state moved`.
        """
        if self.failure or self.reproducible is False or not self.gradients:
            return "not comparable"
        trained = {diff.verdict for diff in self.of_training}
        if not self.n_gradients and not self.trains_in_backward:
            return "not comparable"
        if "different" in trained:
            return "different"
        if "not comparable" in trained or (self.without_checkpoint and self.without_checkpoint.lost):
            return "not comparable"
        if self.moved_twice or self.late_reads or any(mask.n_mismatched for mask in self.masks):
            return "different" if "rounding" in trained else "state moved"
        return "rounding" if any(diff.verdict == "rounding" for diff in self.all_diffs) else "bitwise equal"

    @property
    def comparable(self) -> bool:
        """True if both runs are complete. Only complete runs give savings, costs and evidence."""
        return self.failure is None and self.baseline.complete and self.candidate.complete

    @property
    def is_predicted(self) -> bool:
        """True if the candidate is a prediction: a prediction has no gradients and proves nothing."""
        return self.candidate.origin == "predicted"

    @cached_property
    def of_training(self) -> tuple[TensorDiff, ...]:
        """Diffs of gradients and trained parameters."""
        parameters = (diff for diff in self.parameters if diff.trained)
        moved = (diff for diff in self.carried if diff.is_training)
        return (*self.gradients, *self.input_gradients, *self.later_gradients, *parameters, *moved)

    @cached_property
    def of_state(self) -> tuple[TensorDiff, ...]:
        """Diffs of all other state: buffers, frozen parameters, attributes, and the output in eval mode."""
        frozen = (diff for diff in self.parameters if not diff.trained)
        beside = (diff for diff in self.carried if not diff.is_training)
        last = (self.eval_output,) if self.eval_output else ()
        return (*self.buffers, *frozen, *beside, *last)

    @cached_property
    def moved_twice(self) -> tuple[str, ...]:
        """Names of the state that differs, such as `step of blocks.0` or `generator python`; empty if all is equal."""
        wrong = [diff for diff in self.of_state if diff.verdict == "different"]
        named = [diff.place for diff in wrong if diff is not self.eval_output]
        named += [f"generator {diff.generator}" for diff in self.rng if not diff.equal]
        named += [f"state that no list names in {block}" for block in self.hidden_state]
        return tuple(dict.fromkeys(named)) or tuple(diff.name for diff in wrong)

    @cached_property
    def all_diffs(self) -> tuple[TensorDiff, ...]:
        return (*self.of_training, *self.of_state)

    @property
    def n_bitwise_equal(self) -> int:
        """Number of gradients that exist in both runs and agree in every bit, of `n_gradients`."""
        return sum(diff.verdict == "bitwise equal" and diff.presence == "both" for diff in self.gradients)

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """Trainable parameters without a gradient in the baseline; empty if an optimizer inside backward used them."""
        if self.trains_in_backward:
            return ()
        return tuple(diff.name for diff in self.gradients if diff.presence in ("neither", "candidate only"))

    @property
    def n_gradients(self) -> int:
        """Number of gradients that exist in at least one run."""
        return sum(diff.presence != "neither" for diff in self.gradients)

    @cached_property
    def worst(self) -> TensorDiff | None:
        """The tensor furthest from equal; None when all are bitwise equal."""
        return self.furthest_first[0] if self.furthest_first else None

    @cached_property
    def furthest_first(self) -> tuple[TensorDiff, ...]:
        """Diffs that are not bitwise equal, worst first. Results of the first backward precede later results."""
        first = {id(diff) for diff in (*self.gradients, *self.input_gradients)}
        wrong = [diff for diff in self.all_diffs if diff.verdict != "bitwise equal"]
        norms = [diff.baseline_norm for diff in self.gradients if diff.baseline_norm]
        scale = statistics.median(norms) if norms else 0.0
        return tuple(sorted(wrong, key=lambda diff: _badness(diff, scale, in_first=id(diff) in first), reverse=True))

    def headlines(self) -> dict[str, Any]:
        """The derived figures `--json` prints beside the record, under these very names."""
        base, cand = self.baseline, self.candidate
        times = (base.times, cand.times) if self.comparable else (None, None)
        time_ratio = ratio_with_spread(times[1].step, times[0].step) if times[0] and times[1] else None
        flops = (base.total_flops, cand.total_flops) if self.comparable else (None, None)
        return {
            "comparable": self.comparable,
            "n_baseline_recompute": len(base.spec.policy.blocks),
            "verdict": self.verdict,
            "n_bitwise_equal": self.n_bitwise_equal,
            "n_gradients": self.n_gradients,
            "moved_twice": list(self.moved_twice),
            "late_reads": [read.sentence for read in self.late_reads],
            "n_untrained": len(self.untrained),
            "worst": to_plain(self.worst) if self.worst else None,
            "baseline": base.headlines(),
            "candidate": cand.headlines(),
            "flop_ratio": flops[1] / flops[0] if flops[0] and flops[1] is not None else None,
            "time_ratio": time_ratio[0] if time_ratio else None,
            "time_ratio_spread": time_ratio[1] if time_ratio else None,
        }


def _badness(diff: TensorDiff, scale: float, *, in_first: bool) -> tuple[bool, bool, bool, bool, bool, float]:
    far = diff.relative_norm if diff.relative_norm is not None else (diff.max_abs or 0.0)
    kinds = diff.presence != "both", diff.n_nonfinite_mismatch > 0, diff.verdict == "different"
    return *kinds, not _is_noise(diff, scale), in_first, far


def _is_noise(diff: TensorDiff, scale: float) -> bool:
    """True if a gradient is zero except for rounding in both runs, such as the bias of a key or before a BatchNorm."""
    if not isinstance(diff, GradientDiff) or not diff.baseline_norm or diff.relative_norm is None:
        return False
    error = diff.baseline_norm if diff.baseline_error is None else diff.baseline_error
    return error > 0.5 * diff.baseline_norm and diff.baseline_norm * max(diff.relative_norm, 1.0) < _NOISE * scale
