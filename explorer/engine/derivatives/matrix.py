"""Which derivatives survive which checkpointing, found out by running every combination.

Reentrant checkpointing can end the interpreter (a segmentation fault inside backward), so its column runs in a process
of its own: see cell.py. A crash is then a cell like any other.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from explorer.engine.derivatives.bench import CellBench
from explorer.engine.derivatives.cell_process import cells_apart
from explorer.engine.derivatives.ways import DERIVATIVES
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.world.as_found import left_as_found
from explorer.record.matrix import DerivativeCell, DerivativeMatrix, Variant
from explorer.record.policy import Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

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
    blocks = describe(spec.model, seed=spec.seed, device=spec.device, report=report).repeats
    return replace(spec, policy=replace(spec.policy, units=Policy.recompute(blocks).units))


def _cells(spec: RunSpec, report: Report, done: list[DerivativeCell]) -> Iterator[DerivativeCell]:
    bench = CellBench(spec, load_for(spec))
    for derivative in DERIVATIVES:
        for variant in VARIANTS:
            if variant != "reentrant":
                yield bench.cell(derivative, variant)

    def alive() -> None:
        total = len(DERIVATIVES) * len(VARIANTS)
        report(Progress(what="reentrant, in a process of its own", done=len(done), total=total))

    yield from cells_apart(spec, "reentrant", tuple(DERIVATIVES), alive)
