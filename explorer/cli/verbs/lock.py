"""`python -m explorer lock MODEL --out FILE`, and `lock MODEL --check FILE`: what moved, for continuous integration.

A file never decides which code is loaded: the model of a check and the function that splits it are named on the command
line, and the lock's must equal them. Policy and conditions of the step come from the lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, answer_console, print_json, say, verb
from explorer.cli.options import Model, Out, PolicyName, RankStepOptions, describe, file_on, in_output
from explorer.cli.worker import check_writable, print_or_write, run_of, worker
from explorer.errors import BadInput, bounded
from explorer.jobs.protocol import Measure
from explorer.plan.guard import lock as lock_file
from explorer.plan.guard.moves import moves, versions
from explorer.plan.sizes import mib
from explorer.record.files import Lock, LockedBlock, Move
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

Check = Annotated[Path | None, typer.Option("--check", metavar="FILE", help="The lock to hold the step against.")]
MarkdownOut = Annotated[
    Path | None, in_output("--markdown", metavar="FILE", help="With --check: also write a table for a pull request.")
]

_KEEP_ALL = "keep-all"


@verb
def lock(
    step: RankStepOptions,
    output: Output,
    model: Model,
    policy: PolicyName = _KEEP_ALL,
    out: Out = None,
    check: Check = None,
    markdown: MarkdownOut = None,
) -> None:
    """Predicted figures of a step as a file for a repository; --check says what moved. Exit 1: something did."""
    if markdown is not None and check is None:
        raise BadInput("--markdown writes what --check found.", hint="Add --check FILE.")
    check_writable(out, markdown)
    ref = step.ref(model)
    if check is not None:
        old = lock_file.load(check)
        if old.run.model != ref:
            raise BadInput(
                f"{check} is the lock of {_named(old.run.model)}; the command line names {_named(ref)}.",
                hint="Name the model, its --size and its --set as when the lock was written.",
            )
        function = old.run.ranks.parallelize if old.run.ranks else ""
        if function != step.parallelize:
            raise BadInput(
                f"{check} was split by {bounded(function) or 'no function'}; the command line names "
                f"{step.parallelize or 'none'}.",
                hint="Give --parallelize as when the lock was written.",
            )
        if policy != _KEEP_ALL:
            raise BadInput(
                f"--check reads the policy from {check}; the command line names {bounded(policy)}.",
                hint="Leave --policy out, or write the lock of this policy with --out.",
            )
        _check(old, markdown, output)
        return
    spec = dataclasses.replace(step, predict=True).spec(model)
    print_or_write(lock_file.dumps(_predicted(spec, policy)), out)


def _named(model: ModelRef) -> str:
    settings = [f"size {model.size}"] if model.size else []
    settings += [f"{name}={value}" for name, value in model.arguments.items()]
    return bounded(f"{model.target} ({', '.join(settings)})" if settings else model.target)


def _check(old: Lock, markdown_file: Path | None, output: Output) -> None:
    new = _predicted(old.run, old.policy)
    changes = moves(old, new)
    if output.json:
        print_json({"moved": bool(changes), "moves": changes, "versions": versions(old, new), "lock": new})
    else:
        sentences = [move.sentence for move in changes] or ["The training step is as its lock says."]
        answer_console().print(escape("\n".join(sentences)))
    if sentence := versions(old, new):
        say(escape(sentence))
    if markdown_file is not None:
        print_or_write(markdown_of(old, new, changes), markdown_file)
    if changes:
        raise typer.Exit(DIFFERENT)


def _predicted(spec: RunSpec, policy: str) -> Lock:
    """The lock of the step under a policy by name. Raises RunFailed, InvalidPolicy, UnreadableFile."""
    with worker() as engine:
        graph = describe(engine, spec, without_data=True)
        chosen = replace(spec, policy=file_on(policy, graph).policy)
        return lock_file.lock_of(run_of(engine, Measure(spec=chosen, without_data=True)), graph, policy)


def in_one_line(changes: Sequence[Move]) -> str:
    """The first cause, the first total, and the number of other causes."""
    causes = [move.sentence.rstrip(".") for move in changes if move.kind != "totals"]
    totals = [move.sentence.rstrip(".") for move in changes if move.kind == "totals"]
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return "; ".join((*causes[:1], *totals[:1])) + more


def markdown_of(old: Lock, new: Lock, changes: Sequence[Move]) -> str:
    """The moves as a list, and a table of the blocks whose figures differ: for the text of a pull request."""
    if not changes:
        return "The training step is as its lock says.\n"
    lines = [f"**{in_one_line(changes)}**", "", *(f"- {move.sentence}" for move in changes), ""]
    lines += ["| block | saved for backward | was | runs again | was |", "|---|---:|---:|---:|---:|"]
    rows = [*_table(old, new)]
    lines += rows[:_MOST_ROWS]
    if len(rows) > _MOST_ROWS:
        lines.append(f"| {len(rows) - _MOST_ROWS} more blocks | | | | |")
    if sentence := versions(old, new):
        lines += ["", sentence]
    return "\n".join(lines) + "\n"


_MOST_ROWS = 30


def _table(old: Lock, new: Lock) -> Iterator[str]:
    for fqn in dict.fromkeys((*old.blocks, *new.blocks)):
        older, newer = old.blocks.get(fqn, LockedBlock()), new.blocks.get(fqn, LockedBlock())
        if (older.saved_bytes, older.n_recompute) != (newer.saved_bytes, newer.n_recompute):
            name = f"`{fqn}`" if fqn else "the model"
            sizes = f"{mib(newer.saved_bytes)} | {mib(older.saved_bytes)}"
            yield f"| {name} | {sizes} | {newer.n_recompute} | {older.n_recompute} |"
