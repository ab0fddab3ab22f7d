"""Which derivatives survive which checkpointing, found out by running every combination.

Reentrant checkpointing can end the interpreter (a segmentation fault inside backward), so its column runs in a process
of its own: see cell.py. A crash is then a cell like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from explorer.engine.compare.diffs import Tensors, Yardstick, differences, in_double
from explorer.engine.compare.reference import coarsest_epsilon
from explorer.engine.derivatives.cell_process import cells_apart
from explorer.engine.derivatives.ways import DERIVATIVES, Derivative
from explorer.engine.model.describe import describe
from explorer.engine.model.load import Loaded, load
from explorer.engine.step import left_as_found, prepare
from explorer.engine.world.determinism import deterministic_kernels
from explorer.errors import Cancelled
from explorer.record.comparison import GradientDiff
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, DerivativeMatrix, Variant
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

KEPT_OPS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
)  # fmt: skip
"""What the selective variant keeps: products, dear to compute; the rest is computed again."""

VARIANTS: tuple[Variant, ...] = ("keep", "recompute", "reentrant", "selective")


def derivative_matrix(spec: RunSpec, report: Report = silent) -> DerivativeMatrix:
    """Every derivative under every variant of the units that `spec.policy` names; all repeats where it names none.

    Raises what loading and describing the model raise.
    """
    spec = with_units(spec, report)
    total = len(DERIVATIVES) * len(VARIANTS)
    cells: list[DerivativeCell] = []
    with left_as_found():
        for cell in _cells(spec, report, cells):
            cells.append(cell)
            report(Progress(what=f"{cell.derivative}, {cell.variant}", done=len(cells), total=total))
    order = [(derivative, variant) for derivative in DERIVATIVES for variant in VARIANTS]
    cells.sort(key=lambda cell: order.index((cell.derivative, cell.variant)))
    return DerivativeMatrix(spec=spec, blocks=spec.policy.blocks, cells=tuple(cells))


def with_units(spec: RunSpec, report: Report) -> RunSpec:
    """`spec` with all repeats recomputed where its policy names nothing."""
    if spec.policy.units:
        return spec
    blocks = describe(spec.model, seed=spec.seed, report=report).repeats
    return replace(spec, policy=replace(spec.policy, units=Policy.recompute(blocks).units))


def _cells(spec: RunSpec, report: Report, done: list[DerivativeCell]) -> Iterator[DerivativeCell]:
    bench = Bench(spec, load(spec.model, seed=spec.seed))
    for derivative in DERIVATIVES:
        for variant in VARIANTS:
            if variant != "reentrant":
                yield bench.cell(derivative, variant)

    def alive() -> None:
        total = len(DERIVATIVES) * len(VARIANTS)
        report(Progress(what="reentrant, in a process of its own", done=len(done), total=total))

    yield from cells_apart(spec, "reentrant", tuple(DERIVATIVES), alive)


@dataclass
class Bench:
    """One loaded model; what `keep` yields is found once a derivative."""

    spec: RunSpec
    loaded: Loaded
    _kept: dict[DerivativeKind, Derivative | Exception] = field(default_factory=dict)
    _exact: dict[DerivativeKind, Derivative | Exception] = field(default_factory=dict)

    def cell(self, derivative: DerivativeKind, variant: Variant) -> DerivativeCell:
        """Runs one cell. What the model or torch raises is its outcome; Cancelled passes."""
        if derivative not in self._kept:
            self._kept[derivative] = self._run(derivative, _with(self.spec, "keep"))
        expected, found = self._kept[derivative], self._run(derivative, _with(self.spec, variant))
        cell = DerivativeCell(derivative=derivative, variant=variant, outcome="raises", sentence="")
        if isinstance(found, Exception):
            return replace(cell, sentence=in_one_line(found))
        if isinstance(expected, Exception):
            return replace(cell, outcome="not run", sentence=f"keep itself raises: {in_one_line(expected)}")
        return self._judged(cell, expected, found)

    def _judged(self, cell: DerivativeCell, expected: Derivative, found: Derivative) -> DerivativeCell:
        diffs = differences(GradientDiff, expected, found, Yardstick(epsilon=coarsest_epsilon(self.spec, expected)))
        if not all(diff.bitwise for diff in diffs):
            diffs = differences(GradientDiff, expected, found, self._yardstick(cell.derivative, expected))
        verdicts = {diff.verdict for diff in diffs}
        outcome: CellOutcome = "bitwise equal" if verdicts <= {"bitwise equal", "not comparable"} else "rounding"
        if "different" in verdicts:
            outcome = "different"
        wrong = [diff for diff in diffs if diff.verdict != "bitwise equal"]
        missing = [diff.name for diff in wrong if diff.presence == "baseline only"]
        worst = missing[0] if missing else max(wrong, key=lambda diff: diff.max_abs or 0.0).name if wrong else ""
        distance = distance_of(expected, found)
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
                found = DERIVATIVES[derivative](prepare(spec, self.loaded))
        except Cancelled:
            raise
        except Exception as error:  # the exception is what this cell was run for
            return error.with_traceback(None)  # its frames would hold the model
        return {name: None if tensor is None else tensor.detach().cpu() for name, tensor in found.items()}


def distance_of(expected: Tensors, found: Tensors) -> float | None:
    """|found - expected| / |expected| over all tensors, absent ones as zero; None where all of `expected` is zero."""
    gaps, scales = [0.0], [0.0]
    for name, tensor in expected.items():
        other = found.get(name)
        if tensor is not None:
            scales.append(float(in_double(tensor).norm()))
            gaps.append(float((in_double(tensor) - (0 if other is None else in_double(other))).norm()))
        elif other is not None:
            gaps.append(float(in_double(other).norm()))
    scale = math.hypot(*scales)
    distance = math.hypot(*gaps) / scale if scale else math.nan
    return distance if math.isfinite(distance) else None


def in_one_line(error: BaseException) -> str:
    """`RuntimeError: the first line of what torch said`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
