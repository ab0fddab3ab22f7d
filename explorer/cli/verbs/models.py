"""`python -m explorer models`: what can be loaded."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import Output, answer_console, print_json, verb
from explorer.plan.catalogue import Sample, catalogue


@verb
def models(output: Output) -> None:
    """What can be loaded: the sample models, and how to load your own."""
    samples = catalogue()
    if output.json:
        print_json(samples)
    else:
        print_models(samples)


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
