"""`python -m explorer lock MODEL --out FILE`, and `lock MODEL --check FILE`: what moved, for continuous integration.

A file never decides which code is loaded: the model of a check and the function that splits it are named on the command
line, and the lock's must equal them. Policy and conditions of the step come from the lock.
"""

from __future__ import annotations

import dataclasses
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
from explorer.plan.guard.moves import markdown as table
from explorer.plan.guard.moves import moves, versions
from explorer.record.files import Lock
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

Check = Annotated[Path | None, typer.Option("--check", metavar="FILE", help="The lock to hold the step against.")]
MarkdownOut = Annotated[
    Path | None, in_output("--markdown", metavar="FILE", help="With --check: also write a table for a pull request.")
]


@verb
def lock(
    step: RankStepOptions,
    output: Output,
    model: Model,
    policy: PolicyName = "keep-all",
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
        print_or_write(table(old, new, changes), markdown_file)
    if changes:
        raise typer.Exit(DIFFERENT)


def _predicted(spec: RunSpec, policy: str) -> Lock:
    """The lock of the step under a policy by name. Raises RunFailed, InvalidPolicy, UnreadableFile."""
    with worker() as engine:
        graph = describe(engine, spec, without_data=True)
        chosen = replace(spec, policy=file_on(policy, graph).policy)
        return lock_file.lock_of(run_of(engine, Measure(spec=chosen, without_data=True)), graph, policy)
