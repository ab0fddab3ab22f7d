"""Models, graphs, hazards and derivatives for a terminal."""

from __future__ import annotations

import textwrap

from rich import box
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import answer_console
from explorer.plan.catalogue import Sample
from explorer.record.graph import Block, ModelGraph
from explorer.record.hazard import Hazard
from explorer.record.matrix import DerivativeMatrix
from explorer.view.drawing.units import count, mib
from explorer.view.graph.geometry import Row, layout
from explorer.view.graph.nesting import default_open

_SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_OUTCOMES = {"bitwise equal": "green", "rounding": "yellow", "not run": "dim"}


def print_models(samples: tuple[Sample, ...]) -> None:
    """The samples, and how to load a model of one's own."""
    console = answer_console()
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in ("model", "sizes", "what it is"):
        table.add_column(name)
    for sample in samples:
        table.add_row(
            f"[bold]{escape(sample.target)}[/]", ", ".join(sample.sizes), escape(sample.title.partition(". ")[0])
        )
    console.print(table)
    console.print("  Models of your own: path/to/file.py:factory, package.module:factory, hf:CONFIG.")
    console.print(
        "  [dim]A factory returns the model, (model, inputs) or (model, (inputs, targets), loss_function).[/]\n"
    )


def print_graph(graph: ModelGraph) -> None:
    """The block tree, runs of equal blocks folded, with what each saves for backward."""
    console = answer_console()
    root = graph.by_fqn[""]
    console.print(
        f"\n[bold]{escape(graph.model.target)}[/]  [dim]{escape(root.kind)}, {graph.n_parameters:,} parameters, ",
        end="",
    )
    console.print(f"[dim]saves {mib(root.saved_bytes)} for backward, fingerprint {graph.fingerprint}[/]")
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    table.add_column("block")
    table.add_column("kind")
    for name in ("calls", "saved", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("traits")
    for row in layout(graph, default_open(graph)).rows:
        table.add_row(*_cells(row, graph))
    console.print(table)


def print_hazards(policy_path: str, graph: ModelGraph, stale: str, hazards: tuple[Hazard, ...]) -> None:
    """Every rule that fired, or that none did."""
    console = answer_console()
    console.print(f"\n[bold]{escape(policy_path)}[/] on [bold]{escape(graph.model.target)}[/]\n")
    if stale:
        console.print(f"  [bold red]stale[/]    {escape(stale)}\n")
    for hazard in hazards:
        colour = _SEVERITIES[hazard.severity]
        console.print(
            f"  [{colour}]{hazard.severity:<8}[/] [bold]{escape(hazard.rule)}[/]  "
            f"[dim]{escape(_named(hazard.blocks))}[/]"
        )
        for line in textwrap.wrap(hazard.sentence, 96) + textwrap.wrap(hazard.remedy, 96):
            console.print(f"           {escape(line)}")
        console.print()
    if not hazards and not stale:
        console.print("  [green]Nothing known goes wrong: the policy fits the model and no hazard was found.[/]\n")


def print_matrix(matrix: DerivativeMatrix) -> None:
    """Rows: derivatives; columns: ways to checkpoint; each cell is a run."""
    console = answer_console()
    variants = list(dict.fromkeys(cell.variant for cell in matrix.cells))
    console.print(f"\n[bold]{escape(matrix.spec.model.target)}[/]  [dim]recompute {escape(_named(matrix.blocks))}[/]")
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


def _cells(row: Row, graph: ModelGraph) -> tuple[str, ...]:
    blocks = [graph.by_fqn[fqn] for fqn in (row.members or (row.id,)) if fqn in graph.by_fqn]
    times = f" [cyan]×{len(row.members)}[/]" if row.members else ""
    kind = blocks[0].kind if row.members else row.kind
    return (
        f"{'  ' * row.depth}{escape(row.name)}{times}",
        escape(kind),
        str(sum(block.n_calls for block in blocks)) if blocks else "",
        mib(sum(block.saved_bytes for block in blocks)),
        mib(sum(block.parameter_bytes for block in blocks)),
        f"[dim]{escape(_traits(blocks))}[/]",
    )


def _traits(blocks: list[Block]) -> str:
    traits = [trait.replace("_", " ") for trait in dict.fromkeys(trait for block in blocks for trait in block.traits)]
    shared = ["shares parameters"] if any(block.shares_parameters_with for block in blocks) else []
    return ", ".join(traits + shared)


def _named(blocks: tuple[str, ...]) -> str:
    return ", ".join(blocks) if len(blocks) <= 4 else f"{blocks[0]} ... {blocks[-1]} ({count(len(blocks), 'block')})"
