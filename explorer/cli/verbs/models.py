"""`python -m explorer models` lists what can be loaded; `python -m explorer graph MODEL` prints its block graph."""

from __future__ import annotations

import msgspec
from rich.markup import escape

from explorer.cli.command import Output, answer_console, print_json, table_of, verb
from explorer.cli.options import Model, ModelOptions, Out, Predict, describe
from explorer.cli.worker import check_writable, print_or_write, worker
from explorer.errors import BadInput
from explorer.plan.catalogue import catalogue
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib
from explorer.view.graph.geometry import BlockRow, layout
from explorer.view.graph.nesting import default_open
from explorer.view.text.plan import outside_blocks


@verb
def models(output: Output) -> None:
    """What can be loaded: the sample models, and how to load your own."""
    samples = catalogue()
    if output.json:
        print_json(samples)
        return
    console = answer_console()
    rows = (
        {"model": sample.target, "sizes": ", ".join(sample.sizes), "what it is": sample.title.partition(". ")[0]}
        for sample in samples
    )
    console.print(table_of(rows))
    console.print("  Models of your own: path/to/file.py:factory, package.module:factory, hf:CONFIG.")
    console.print("  A factory returns the model, (model, inputs) or (model, (inputs, targets), loss_function).\n")


@verb
def graph(model: Model, options: ModelOptions, output: Output, out: Out = None, predict: Predict = False) -> None:
    """The block graph of one observed run."""
    if out is not None and not output.json:
        raise BadInput("--out writes the document of --json, and the table was asked for.", hint="Add --json.")
    check_writable(out)
    with worker() as engine:
        graph = describe(engine, RunSpec(model=options.ref(model), seed=options.seed), without_data=predict)
    if output.json:
        text = msgspec.json.encode({**to_plain(graph), "fingerprint": graph.fingerprint}).decode() + "\n"
        print_or_write(text, out)
        return
    console, root = answer_console(), graph.by_fqn[""]
    console.print(
        f"\n[bold]{escape(graph.model.target)}[/]  [dim]{escape(f'batch {graph.batch}, ' if graph.batch else '')}"
        f"{escape(root.kind)}, {graph.n_parameters:,} parameters, "
        f"saves {mib(root.saved_bytes)} for backward, fingerprint {graph.fingerprint}[/]"
    )
    console.print(table_of(_cells(row, graph) for row in layout(graph, default_open(graph)).rows))
    for note in filter(None, (graph.note, outside_blocks(graph))):
        console.print(escape(note))


def _cells(row: BlockRow, graph: ModelGraph) -> dict[str, str]:
    """The figures of a block, or the sums of equal blocks that share a row."""
    blocks = [graph.by_fqn[fqn] for fqn in (row.members or (row.id,)) if fqn in graph.by_fqn]
    times = f" ×{len(row.members)}" if row.members else ""
    traits = [trait.replace("_", " ") for trait in dict.fromkeys(trait for block in blocks for trait in block.traits)]
    traits += ["shares parameters"] if any(block.shares_parameters_with for block in blocks) else []
    return {
        "block": f"{'  ' * row.depth}{row.name}{times}",
        "kind": blocks[0].kind if row.members else row.kind,
        "calls": str(sum(block.n_calls for block in blocks)) if blocks else "",
        "saved": mib(sum(block.saved_bytes for block in blocks)),
        "parameters": mib(sum(block.parameter_bytes for block in blocks)),
        "traits": ", ".join(traits),
    }
