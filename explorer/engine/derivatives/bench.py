"""One cell of the derivative matrix: one way to differentiate under one checkpointing, judged against `keep`."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from explorer.engine.compare.diffs import Yardstick, differences, relative_distance
from explorer.engine.compare.reference import coarsest_epsilon
from explorer.engine.derivatives.ways import DERIVATIVES, Derivative
from explorer.engine.model.loaded import Loaded
from explorer.engine.step import prepare
from explorer.engine.world.determinism import deterministic_kernels
from explorer.errors import Cancelled, said_by
from explorer.record.diffs import GradientDiff
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, Variant
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

KEPT_OPS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
)  # fmt: skip
"""What the selective variant keeps: products, dear to compute; the rest is computed again."""


@dataclass
class CellBench:
    """One loaded model; what `keep` yields is found once a derivative."""

    spec: RunSpec
    loaded: Loaded
    _kept: dict[DerivativeKind, Derivative | Exception] = field(default_factory=dict)
    _exact: dict[DerivativeKind, Derivative | Exception] = field(default_factory=dict)

    def cell(self, derivative: DerivativeKind, variant: Variant) -> DerivativeCell:
        """Runs one cell. What the model or torch raises is its outcome; Cancelled passes."""
        if derivative not in self._kept:
            self._kept[derivative] = self._run(derivative, _with(self.spec, "keep"))
        expected, actual = self._kept[derivative], self._run(derivative, _with(self.spec, variant))
        cell = DerivativeCell(derivative=derivative, variant=variant, outcome="raises", sentence="")
        if isinstance(actual, Exception):
            return replace(cell, sentence=said_by(actual))
        if isinstance(expected, Exception):
            return replace(cell, outcome="not run", sentence=f"keep itself raises: {said_by(expected)}")
        return self._judged(cell, expected, actual)

    def _judged(self, cell: DerivativeCell, expected: Derivative, actual: Derivative) -> DerivativeCell:
        diffs = differences(GradientDiff, expected, actual, Yardstick(epsilon=coarsest_epsilon(self.spec, expected)))
        if not all(diff.bitwise for diff in diffs):
            diffs = differences(GradientDiff, expected, actual, self._yardstick(cell.derivative, expected))
        verdicts = {diff.verdict for diff in diffs}
        outcome: CellOutcome = "bitwise equal" if verdicts <= {"bitwise equal", "not comparable"} else "rounding"
        if "different" in verdicts:
            outcome = "different"
        wrong = [diff for diff in diffs if diff.verdict != "bitwise equal"]
        missing = [diff.name for diff in wrong if diff.presence == "baseline only"]
        worst = missing[0] if missing else max(wrong, key=lambda diff: diff.max_abs or 0.0).name if wrong else ""
        distance = relative_distance(expected, actual)
        return replace(
            cell, outcome=outcome, n_tensors=len(diffs), n_equal=len(diffs) - len(wrong), worst=worst,
            relative_norm=distance, sentence=_sentence(outcome, distance, len(missing), len(diffs)),
        )  # fmt: skip

    def _yardstick(self, derivative: DerivativeKind, expected: Derivative) -> Yardstick:
        if derivative not in self._exact:
            exact = replace(_with(self.spec, "keep"), dtype="float64", autocast="none")
            self._exact[derivative] = self._run(derivative, exact)
        reference = self._exact[derivative]
        known: Derivative = {} if isinstance(reference, Exception) else reference
        return Yardstick(reference=known, epsilon=coarsest_epsilon(self.spec, expected))

    def _run(self, derivative: DerivativeKind, spec: RunSpec) -> Derivative | Exception:
        try:
            with deterministic_kernels():
                gradients = DERIVATIVES[derivative](prepare(spec, self.loaded))
        except Cancelled:
            raise
        except Exception as error:  # the exception is what this cell was run for
            return error.with_traceback(None)  # its frames would hold the model
        return {name: None if tensor is None else tensor.detach().cpu() for name, tensor in gradients.items()}


def _with(spec: RunSpec, variant: Variant) -> RunSpec:
    policy = spec.policy
    if variant == "keep":
        policy = KEEP_ALL
    elif variant == "selective":
        units = tuple(replace(unit, action="save_ops", save_ops=unit.save_ops or KEPT_OPS) for unit in policy.units)
        policy = replace(policy, units=units, use_reentrant=False)
    else:
        units = tuple(replace(unit, action="recompute", save_ops=()) for unit in policy.units)
        policy = replace(policy, units=units, use_reentrant=variant == "reentrant")
    return replace(spec, policy=policy, plan=None)


def _sentence(outcome: CellOutcome, distance: float | None, n_missing: int, n_tensors: int) -> str:
    if outcome == "bitwise equal":
        return f"all {n_tensors} gradients equal bit by bit"
    far = "not finite" if distance is None else f"{distance:.2g} of the norm away from keep"
    return f"{n_missing} of {n_tensors} gradients missing, {far}" if n_missing else far
