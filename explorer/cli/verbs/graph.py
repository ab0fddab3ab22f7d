"""`python -m explorer graph MODEL`: the block graph of one observed run."""

from __future__ import annotations

import msgspec
from rich.markup import escape

from explorer.cli.command import Output, answer_console, table_of, verb
from explorer.cli.options import Model, ModelOptions, Out, Predict, describe
from explorer.cli.worker import check_writable, print_or_write, worker
from explorer.errors import BadInput
from explorer.record.base import to_plain
from explorer.record.graph import Block, ModelGraph
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib
from explorer.view.graph.geometry import BlockRow, layout
from explorer.view.graph.nesting import default_open
from explorer.view.text.plan import outside_blocks


@verb
def graph(
    model: Model,
    options: ModelOptions,
    output: Output,
    out: Out = None,
    predict: Predict = False,
) -> None:
    """The block graph of one observed run."""
    if out is not None and not output.json:
        raise BadInput("--out writes the document of --json, and the table was asked for.", hint="Add --json.")
    check_writable(out)
    with worker() as engine:
        model_graph = describe(engine, RunSpec(model=options.ref(model), seed=options.seed), without_data=predict)
    if output.json:
        text = msgspec.json.encode({**to_plain(model_graph), "fingerprint": model_graph.fingerprint}).decode() + "\n"
        print_or_write(text, out)
    else:
        print_graph(model_graph)


def print_graph(graph: ModelGraph) -> None:
    """Prints the block tree with the saved bytes of each block; runs of equal blocks are folded."""
    console = answer_console()
    root = graph.by_fqn[""]
    console.print(
        f"\n[bold]{escape(graph.model.target)}[/]  [dim]{escape(root.kind)}, {graph.n_parameters:,} parameters, ",
        end="",
    )
    console.print(f"[dim]saves {mib(root.saved_bytes)} for backward, fingerprint {graph.fingerprint}[/]")
    if graph.note:
        console.print(f"[yellow]{escape(graph.note)}[/]")
    rows = (_cells(row, graph) for row in layout(graph, default_open(graph)).rows)
    console.print(table_of(rows))
    if outside := outside_blocks(graph):
        console.print(outside)


def _cells(row: BlockRow, graph: ModelGraph) -> dict[str, str]:
    blocks = [graph.by_fqn[fqn] for fqn in (row.members or (row.id,)) if fqn in graph.by_fqn]
    times = f" ×{len(row.members)}" if row.members else ""
    kind = blocks[0].kind if row.members else row.kind
    return {
        "block": f"{'  ' * row.depth}{row.name}{times}",
        "kind": kind,
        "calls": str(sum(block.n_calls for block in blocks)) if blocks else "",
        "saved": mib(sum(block.saved_bytes for block in blocks)),
        "parameters": mib(sum(block.parameter_bytes for block in blocks)),
        "traits": _traits(blocks),
    }


def _traits(blocks: list[Block]) -> str:
    traits = [trait.replace("_", " ") for trait in dict.fromkeys(trait for block in blocks for trait in block.traits)]
    shared = ["shares parameters"] if any(block.shares_parameters_with for block in blocks) else []
    return ", ".join(traits + shared)
