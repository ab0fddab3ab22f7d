"""`python -m explorer models`: models that can be loaded."""

from __future__ import annotations

from explorer.cli.command import Output, answer_console, print_json, table_of, verb
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
    """Prints the sample models, and instructions to load a person's model."""
    console = answer_console()
    rows = (
        {"model": sample.target, "sizes": ", ".join(sample.sizes), "what it is": sample.title.partition(". ")[0]}
        for sample in samples
    )
    console.print(table_of(rows))
    console.print("  Models of your own: path/to/file.py:factory, package.module:factory, hf:CONFIG.")
    console.print(
        "  [dim]A factory returns the model, (model, inputs) or (model, (inputs, targets), loss_function).[/]\n"
    )
