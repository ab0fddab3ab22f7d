"""Shared by all commands: options as records, one sentence for every error, and exit codes for scripts.

0  it ran (compare: bitwise equal or rounding; check: nothing wrong)
1  it ran, and the answer is no (compare: different; check: stale, or a hazard that is an error)
2  it could not run: bad input, out of memory, crash, time-out, cancelled, not comparable
3  compare: gradients are equal, but state moved twice, or between forward and recompute
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, get_type_hints

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from explorer.errors import ExplorerError, NotSaved
from explorer.record.base import to_json
from explorer.record.failure import Failure, failure_of

EQUAL, DIFFERENT, COULD_NOT_RUN, STATE_MOVED = 0, 1, 2, 3
_PIPE_WIDTH = 120
_FIGURE = re.compile(r"[+×≈\N{MINUS SIGN}-]?[\d,.]+(e[+-]?\d+)?( |$)|(not measured|none known)$")
_LONGEST_WORD = 14
"""Letters of a word that a narrow terminal does not break."""
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
"""Letters that a terminal obeys or does not show."""
_in_output = functools.partial(typer.Option, rich_help_panel="Output")
FIT_COLOURS = {"exact": "green", "approximated": "yellow"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Form of a command's answer."""

    json: Annotated[bool, _in_output("--json", help="One JSON document on stdout and nothing else there.")] = False
    traceback: Annotated[bool, _in_output("--traceback", help="After an error, show where it was raised.")] = False


class RunFailed(ExplorerError):
    """A job ended without a result; the failure holds the worker's traceback."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence, hint=failure.hint)
        self.failure = failure


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A command: fields of dataclass parameters become options, and errors become exit code 2."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        parameter = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        if dataclasses.is_dataclass(hints[name]):
            records[name] = hints[name]
            of_fields = get_type_hints(hints[name], include_extras=True)
            parameters += [
                parameter.replace(name=field.name, default=field.default, annotation=of_fields[field.name])
                for field in dataclasses.fields(hints[name])
            ]
        else:
            parameters.append(parameter)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, record in records.items():
            values[name] = record(**{field.name: values.pop(field.name) for field in dataclasses.fields(record)})
        output = values.get("output", Output())
        try:
            function(**values)
        except ExplorerError as error:
            answer_failure(_failure(error), output)
        except KeyboardInterrupt:
            answer_failure(Failure(kind="cancelled", sentence="Cancelled."), output)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:  # exit 1 is an answer, and Python would end with 1
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            answer_failure(_failure(error), dataclasses.replace(output, json=False))

    setattr(command, "__signature__", inspect.Signature(parameters))  # noqa: B010 (functions have no such attribute)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def answer_failure(failure: Failure, output: Output) -> None:
    """The sentence and the hint on stderr, with `--json` the failure as the document; exit code 2."""
    if output.json:
        print_json({"failure": failure})
    say(f"[bold red]Error:[/] {escape(failure.sentence)}")
    if failure.hint:
        say(f"       [dim]{escape(failure.hint)}[/]")
    if failure.traceback and output.traceback:
        say(escape(failure.traceback))
    elif failure.traceback:
        say("       [dim]--traceback shows where it was raised.[/]")
    raise typer.Exit(COULD_NOT_RUN)


def _failure(error: Exception) -> Failure:
    return error.failure if isinstance(error, RunFailed) else failure_of(error, in_step=False)


@contextmanager
def errors_to_stderr(output: Output) -> Iterator[None]:
    """The answer is on stdout already, as far as the run went: a later failure goes to stderr alone."""
    try:
        yield
    except (RunFailed, NotSaved) as error:
        answer_failure(_failure(error), dataclasses.replace(output, json=False))


class CleanConsole(Console):
    """The one printer. Names in a stranger's file may move the cursor, clear the screen or turn the text around."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments with every control character of their text written out."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


def clean(text: str) -> str:
    """`text` with control characters, invisible letters and halves of letters escaped; line ends and tabs stay."""
    return _UNSAFE.sub(lambda letter: escaped(letter[0]), text)


def escaped(letter: str) -> str:
    """`\\u202e`, as Python, JSON and YAML all write it inside of quotes."""
    code = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[i : i + 4]}" for i in range(0, len(code), 4))


def say(text: str) -> None:
    """To stderr, for a person; `text` is rich markup."""
    CleanConsole(stderr=True, highlight=False).print(text, soft_wrap=True)


def echo(text: str) -> None:
    """A whole text to stdout: a policy, a lock, an export. Escapes mean the same letters; --out writes the bytes."""
    typer.echo(clean(text), nl=False)


def answer_console() -> Console:
    """stdout, for a person: lines are never broken, and a pipe is as wide as a table needs."""
    console = CleanConsole(highlight=False, soft_wrap=True)
    return console if console.is_terminal else CleanConsole(highlight=False, soft_wrap=True, width=_PIPE_WIDTH)


def table_of(rows: Iterable[Mapping[str, object]]) -> Table:
    """A table of plain cells with a column for each key. Columns of figures are aligned to the right and not broken."""
    cells = [{name: "" if cell is None else str(cell) for name, cell in row.items()} for row in rows]
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in dict.fromkeys(name for row in cells for name in row):
        column = [row.get(name, "") for row in cells]
        figures = any(column) and all(_FIGURE.match(cell) for cell in column if cell)
        longest = max(map(len, column)) if figures else 0
        words = max(map(len, " ".join((name, *column)).split()), default=0)
        table.add_column(
            escape(name),
            justify="right" if figures else "left",
            overflow="fold",
            min_width=max(longest, min(_LONGEST_WORD, words)),
        )
    for row in cells:
        table.add_row(*(escape(row.get(str(column.header), "")) for column in table.columns))
    return table


def print_json(document: object) -> None:
    """Prints the document, which is all of stdout."""
    typer.echo(clean(to_json(document).decode()))
