"""`python -m explorer matrix MODEL`: which derivatives survive which kind of checkpointing."""

from __future__ import annotations

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import Output, answer_console, print_json, verb
from explorer.cli.options import Model, ModelOptions, PolicyName, StepOptions, chosen_policy
from explorer.cli.report import in_short
from explorer.cli.worker import ask, worker
from explorer.jobs.protocol import DeriveMatrix
from explorer.record.matrix import DerivativeMatrix
from explorer.record.policy import KEEP_ALL

_OUTCOMES = {"bitwise equal": "green", "rounding": "yellow", "not run": "dim"}


@verb
def matrix(
    model: Model,
    options: ModelOptions,
    step: StepOptions,
    output: Output,
    policy: PolicyName = "all",
) -> None:
    """Which derivatives survive which kind of checkpointing; every cell is a run."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    with worker() as engine:
        chosen = chosen_policy(engine, policy, spec)
        derived = ask(engine, DeriveMatrix(spec=msgspec.structs.replace(spec, policy=chosen)))
    if output.json:
        print_json(derived)
    else:
        print_matrix(derived)


def print_matrix(matrix: DerivativeMatrix) -> None:
    """Rows: derivatives; columns: ways to checkpoint; each cell is a run."""
    console = answer_console()
    variants = list(dict.fromkeys(cell.variant for cell in matrix.cells))
    console.print(f"\n[bold]{escape(matrix.spec.model.target)}[/]  [dim]recompute {escape(in_short(matrix.blocks))}[/]")
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in ("derivative", *variants):
        table.add_column(name)
    for derivative in dict.fromkeys(cell.derivative for cell in matrix.cells):
        cells = [matrix.cell(derivative, variant) for variant in variants]
        table.add_row(derivative, *(f"[{_OUTCOMES.get(cell.outcome, 'red')}]{cell.outcome}[/]" for cell in cells))
    console.print(table)
    for cell in matrix.cells:
        if cell.outcome not in _OUTCOMES:
            console.print(f"  [dim]{cell.derivative}, {cell.variant}:[/] {escape(cell.sentence)}")
    console.print()
