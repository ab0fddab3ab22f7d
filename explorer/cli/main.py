"""The command line: `checkpoint-explorer FILE` or a verb. Progress goes to stderr, the answer to stdout.

A verb is a function with `@verb` in a file of verbs/. `--help` reads its docstring from the source, because only the
file of the verb that is asked for is imported.
"""

from __future__ import annotations

import ast
import codecs
import errno
import re
import shutil
import sys
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from explorer import __version__, slices
from explorer.cli import verbs
from explorer.cli.command import COULD_NOT_RUN, escaped, say

_SHOW = "show"
_OWN_OPTIONS = ("--help", "--version")
_ORDER = ("show", "models", "graph", "check", "export", "measure", "compare", "plan", "pipeline", "run", "lab")
"""Order of the verbs in `--help`: the order of use. Other verbs follow."""
_PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False}
_IN_ASCII = "explorer.in_ascii"
_SIGNS = {
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{MINUS SIGN}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{ALMOST EQUAL TO}": "~",
}
"""Signs of our own answers for a terminal whose encoding lacks them; other letters become escapes."""
_NARROW = 90
"""Columns below which rich's table of options cuts names: `VERB --help` is then plain text."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only output is encoded"
    letters = error.object[error.start : error.end]
    return "".join(_SIGNS.get(letter) or escaped(letter) for letter in letters), error.end


codecs.register_error(_IN_ASCII, _in_ascii)


class _Verbs(TyperGroup):
    """The verbs with their docstrings, for `--help`; options are read when a verb is run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=docstring) for name, (_, docstring) in listed_verbs().items()}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A first word that is no verb is a file: `train.py` means `show train.py`. `-m pkg.train` is a script too."""
        if args[:1] == ["-m"]:
            args = ["run", "--stop", *args]
        if args and args[0] not in self.commands and args[0] not in _OWN_OPTIONS and _is_file(args):
            args = [_SHOW, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        narrow = shutil.get_terminal_size().columns < _NARROW
        shell = typer.Typer(**_PLAIN, rich_markup_mode=None if narrow else "rich")
        module, _ = listed_verbs()[str(name)]
        shell.command(name)(getattr(import_module(module), str(name)))
        return name, typer.main.get_command(shell), _with_number_of_ranks(rest)


def _is_file(args: list[str]) -> bool:
    """Whether one of `args` looks like a file or a model's name: a mistyped verb has no dot, colon or slash."""
    return any(re.search(r"[./:]", arg) or Path(arg).exists() for arg in args)


def _with_number_of_ranks(args: list[str]) -> list[str]:
    """`--fsdp 64` as `--fsdp --ranks 64`, and `--ddp 8` alike: a flag of the shell takes no number."""
    after = (i for i, arg in enumerate(args) if i and arg.isdecimal() and args[i - 1] in ("--fsdp", "--ddp"))
    i = next(after, None)
    return args if i is None or "--ranks" in args else [*args[:i], "--ranks", *args[i:]]


app = typer.Typer(
    name="checkpoint-explorer",
    help="What activation checkpointing buys, what it costs, and whether the gradient is still the same.",
    no_args_is_help=True,
    cls=_Verbs,
    **_PLAIN,
)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """What activation checkpointing buys, what it costs, and whether the gradient is still the same."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def listed_verbs() -> dict[str, tuple[str, str]]:
    """The module and the docstring of each verb, in the order of `--help`."""
    listed: dict[str, tuple[str, str]] = {}
    for package in (verbs, *slices.parts("cli").values()):
        listed |= _verbs_in(package.__name__, tuple(package.__path__))
    return dict(sorted(listed.items(), key=lambda item: _ORDER.index(item[0]) if item[0] in _ORDER else len(_ORDER)))


@cache
def _verbs_in(package: str, folders: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    return {
        node.name: (f"{package}.{file.stem}", ast.get_docstring(node) or "")
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "verb" in map(ast.unparse, node.decorator_list)
    }


def main() -> None:
    """The entry point. A full disk behind stdout is one sentence as well."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_IN_ASCII)
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say("[bold red]Error:[/] The answer could not be written to stdout: No space left on device.")
        sys.stdout = None  # the interpreter would try to write the rest at its end
        sys.exit(COULD_NOT_RUN)
