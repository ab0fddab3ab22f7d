"""Is it still the same step? Baseline and candidate tensor by tensor; every verdict is derived, none is stored."""

from __future__ import annotations

import statistics
from functools import cached_property
from typing import Any, Literal

from explorer.record.base import Count, Record, to_plain
from explorer.record.diffs import (
    BufferDiff,
    ForwardDiff,
    GradientDiff,
    MaskDiff,
    ParameterDiff,
    RngDiff,
    StateChange,
    StateDiff,
    TensorDiff,
    Verdict,
)
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement
from explorer.record.times import ratio_with_spread

_NOISE = 1e-3
"""A gradient that is zero but for rounding is shorter than this share of the median norm."""


class Comparison(Record):
    """Two runs from identical state: what the candidate buys, what it costs, whether it is the same."""

    baseline: Measurement
    candidate: Measurement
    gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every trained parameter, after one backward."""
    input_gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every tensor of the batch that got one."""
    later_gradients: tuple[GradientDiff, ...] = ()
    """Gradients of every trained parameter in the last step, which starts from what the first one left behind."""
    buffers: tuple[BufferDiff, ...] = ()
    parameters: tuple[ParameterDiff, ...] = ()
    n_steps: Count = 0
    """Steps behind `parameters`; 0: not taken."""
    carried: tuple[StateDiff, ...] = ()
    """What is not equal of all else that the model carries on, after the first and after the last step."""
    trains_in_backward: bool = False
    """Trained parameters moved before the optimizer's step: an optimizer runs inside backward, and may leave no
    gradient behind."""
    n_carried: Count = 0
    """Values that were looked at for `carried`: buffers, attributes, what hooks and classes hold."""
    without_tf32: tuple[str, ...] = ()
    """Kinds of operators that were judged in full float32, where measured and timed steps may use TensorFloat-32."""
    unjudged: tuple[str, ...] = ()
    """Attributes left out of it: two runs of the baseline do not agree about them either."""
    hidden_state: tuple[str, ...] = ()
    """Blocks that leave another step behind where they run more often, though all known state was put back."""
    n_probes: int = 0
    """How often each block ran for `hidden_state`; 0: not probed."""
    not_probed_because: str = ""
    not_walked: tuple[str, ...] = ()
    """Attributes that hold more objects than are looked at."""
    rng: tuple[RngDiff, ...] = ()
    eval_output: TensorDiff | None = None
    masks: tuple[MaskDiff, ...] = ()
    masks_watched: bool = False
    """Whether a run was watched for `masks` and `state_changes`: without, both are empty and say nothing."""
    equal_without_early_stop: bool | None = None
    """Whether all gradients are the baseline's with early_stop off. None: not tried, because all was drawn again."""
    state_changes: tuple[StateChange, ...] = ()
    forward: ForwardDiff | None = None
    """Of two programs whose gradients differ, where forward parts; None: not watched."""
    untied: tuple[str, ...] = ()
    """Names that are one parameter in one of two programs alone."""
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
        """What is trained decides first (gradients, parameters), then what is remembered; the worst one counts.

        Equal gradients beside state that moved twice are a verdict of their own. A mask that was drawn anew, or state
        that moved, is never rounding.
        """
        if self.failure or self.reproducible is False or not self.gradients:
            return "not comparable"
        trained = {diff.verdict for diff in self.of_training}
        if all(diff.presence == "neither" for diff in self.gradients) and not self.trains_in_backward:
            return "not comparable"
        if "different" in trained:
            return "different"
        if "not comparable" in trained:
            return "not comparable"
        if self.moved_twice or any(mask.n_mismatched for mask in self.masks):
            return "different" if "rounding" in trained else "state moved"
        own = {diff.verdict for diff in self.all_diffs}
        return "rounding" if "rounding" in own else "bitwise equal"

    @property
    def comparable(self) -> bool:
        """Whether both runs went to their end: only then is there anything bought, any cost, any evidence."""
        return self.failure is None and self.baseline.complete and self.candidate.complete

    @property
    def is_predicted(self) -> bool:
        """Whether the candidate was played without data: then there are no gradients, and nothing is proven."""
        return self.candidate.origin == "predicted"

    @cached_property
    def of_training(self) -> tuple[TensorDiff, ...]:
        """What training computes: gradients and trained parameters."""
        parameters = (diff for diff in self.parameters if diff.trained)
        moved = (diff for diff in self.carried if diff.is_training)
        return (*self.gradients, *self.input_gradients, *self.later_gradients, *parameters, *moved)

    @cached_property
    def of_state(self) -> tuple[TensorDiff, ...]:
        """What the model remembers beside."""
        frozen = (diff for diff in self.parameters if not diff.trained)
        beside = (diff for diff in self.carried if not diff.is_training)
        last = (self.eval_output,) if self.eval_output else ()
        return (*self.buffers, *frozen, *beside, *last)

    @cached_property
    def moved_twice(self) -> tuple[str, ...]:
        """`step of blocks.0`, `generator python`: what of the state differs; empty where all of it is equal."""
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
        """Gradients that came in both runs and agree in every bit, of `n_gradients`."""
        return sum(diff.verdict == "bitwise equal" and diff.presence == "both" for diff in self.gradients)

    @property
    def n_gradients(self) -> int:
        """Gradients that came in at least one run: none on either side is nothing to be equal."""
        return sum(diff.presence != "neither" for diff in self.gradients)

    @cached_property
    def worst(self) -> TensorDiff | None:
        """The tensor furthest from equal; None when all are bitwise equal."""
        return self.furthest_first[0] if self.furthest_first else None

    @cached_property
    def furthest_first(self) -> tuple[TensorDiff, ...]:
        """Everything that is not bitwise equal. What the first backward left comes before what follows from it."""
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
            "worst": to_plain(self.worst) if self.worst else None,
            "baseline": base.headlines(),
            "candidate": cand.headlines(),
            "flop_ratio": flops[1] / flops[0] if flops[0] and flops[1] is not None else None,
            "time_ratio": time_ratio[0] if time_ratio else None,
            "time_ratio_spread": time_ratio[1] if time_ratio else None,
        }


def _badness(diff: TensorDiff, scale: float, *, in_first: bool) -> tuple[int, bool, bool, float]:
    rank = 3 if diff.presence != "both" else 2 if diff.n_nonfinite_mismatch else int(diff.verdict == "different")
    far = diff.relative_norm if diff.relative_norm is not None else (diff.max_abs or 0.0)
    return rank, not _is_noise(diff, scale), in_first, far


def _is_noise(diff: TensorDiff, scale: float) -> bool:
    """Whether a gradient is zero but for rounding in both runs: a key's bias, say, or a bias before a BatchNorm."""
    if not isinstance(diff, GradientDiff) or not diff.baseline_norm or diff.relative_norm is None:
        return False
    error = diff.baseline_norm if diff.baseline_error is None else diff.baseline_error
    return error > 0.5 * diff.baseline_norm and diff.baseline_norm * max(diff.relative_norm, 1.0) < _NOISE * scale
