"""The same verbs without a browser: `python -m explorer VERB`. Progress goes to stderr, the answer to stdout.

A verb is a file in verbs/ with a function of the file's name, found by listing the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

import typer

from explorer import __version__
from explorer.cli import verbs

_ORDER = ("models", "graph", "check", "export", "measure", "compare", "plan", "pipeline", "run", "lab")
"""Order of the verbs in `--help`: the order of use. Other verbs follow."""

app = typer.Typer(
    name="explorer",
    help="What activation checkpointing buys, what it costs, and whether the gradient is still the same.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """What activation checkpointing buys, what it costs, and whether the gradient is still the same."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def all_verbs() -> tuple[Callable[..., None], ...]:
    """The function of every file in verbs/."""
    names = sorted(module.name for module in iter_modules(verbs.__path__))
    names.sort(key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return tuple(getattr(import_module(f"{verbs.__name__}.{name}"), name) for name in names)


for _verb in all_verbs():
    app.command()(_verb)


def main() -> None:
    """The entry point."""
    app()
