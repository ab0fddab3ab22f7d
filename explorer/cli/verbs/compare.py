"""`python -m explorer compare MODEL --policy P`: the step with and without a policy; `grade` marks a policy by it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import (
    COULD_NOT_RUN,
    DIFFERENT,
    EQUAL,
    STATE_MOVED,
    Output,
    RunFailed,
    answer_console,
    errors_to_stderr,
    print_json,
    table_of,
    verb,
)
from explorer.cli.options import (
    KeepOptions,
    Model,
    PolicyName,
    PolicyOut,
    RankStepOptions,
    bounded,
    describe,
    file_on,
    recorded_step,
)
from explorer.cli.report import answer_forecast, document, labelled, print_lines, print_record
from explorer.cli.worker import ask, check_writable, finish, print_or_write, run_of, worker
from explorer.errors import BadInput, nearest
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Compare, Measure
from explorer.plan.challenges import CHALLENGES, marks
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.plan.why.peak import explain
from explorer.record.comparison import Comparison, Verdict
from explorer.record.measurement import Measurement
from explorer.record.run import N_PROBES, RunSpec

_CODES: dict[Verdict, int] = {
    "bitwise equal": EQUAL,
    "rounding": EQUAL,
    "state moved": STATE_MOVED,
    "different": DIFFERENT,
    "not comparable": COULD_NOT_RUN,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of comparisons alone."""

    out: PolicyOut = None
    quick: Annotated[bool, typer.Option("--quick", help="Gradients and buffers only, without a reference.")] = False
    n_probes: Annotated[
        int | None,
        bounded(
            RunSpec,
            "n_probes",
            "--probe",
            metavar="N",
            help=f"Recomputes of each unit in search of hidden state, each a forward of the units; {N_PROBES}.",
        ),
    ] = None


@verb
def compare(
    model: Model,
    step: RankStepOptions,
    keep: KeepOptions,
    only: CompareOptions,
    output: Output,
    policy: PolicyName = "",
) -> None:
    """The step with and without a policy. Exit 0: bitwise equal or rounding, or predicted; 1: different; 2: could not
    run; 3: gradients equal, state moved."""
    spec = step.spec(model)
    if not policy and spec.ranks is None:
        raise BadInput("A comparison needs a policy, or ranks that share the step.", hint="--policy all, or --ranks 2.")
    if spec.ranks is not None and (step.predict or only.quick or only.n_probes is not None):
        raise BadInput(
            "Ranks are compared in whole and on real processes.", hint="Leave --predict, --quick and --probe out."
        )
    if step.predict and (only.quick or only.n_probes is not None):
        raise BadInput("--predict runs nothing, so there is nothing to probe.", hint="Leave --quick and --probe out.")
    check_writable(keep.save, only.out)
    if (recorded := recorded_step(model, step)) is not None:
        _answer_recorded(recorded, policy, only, output)
        return
    spec = replace(spec, n_probes=N_PROBES if only.n_probes is None else only.n_probes)
    baseline = replace(spec, ranks=None)
    with worker() as engine:
        graph = describe(engine, baseline, without_data=step.predict)
        candidate = step.with_policy(spec, file_on(policy or "keep-all", graph))
        if step.predict:
            compared = _predicted(engine, baseline, candidate)
        else:
            request = Compare(baseline=baseline, candidate=candidate, full=not only.quick)
            compared = ask(engine, request, keep=not keep.no_store)
    why = explain(compared, graph) if compared.comparable else ()
    if output.json:
        print_json({**document(compared), "why": list(why)})
    else:
        print_record(compared)
        print_lines(labelled("Why", why))
    with errors_to_stderr(output):
        if only.out is not None:
            evidence, ranks = evidence_of(compared, graph), compared.candidate.spec.ranks
            file = policy_file.file_of(candidate.policy, graph, ranks=ranks, evidence=evidence)
            print_or_write(policy_file.dumps(file), only.out)
    finish(compared.candidate if step.predict else compared, compared.failure, keep.save, output)
    raise typer.Exit(EQUAL if step.predict else _CODES[compared.verdict])


def _answer_recorded(step: Measurement, policy: str, only: CompareOptions, output: Output) -> None:
    assert step.graph is not None, "step_in refuses other runs"
    chosen = file_on(policy, step.graph).policy
    answer_forecast(step, chosen, output)
    if only.out is not None:
        print_or_write(policy_file.dumps(policy_file.file_of(chosen, step.graph)), only.out)


def _predicted(engine: Worker, baseline: RunSpec, candidate: RunSpec) -> Comparison:
    """Both steps played without data: memory and FLOPs, and no gradients."""
    runs = [run_of(engine, Measure(spec=spec, without_data=True)) for spec in (baseline, candidate)]
    return Comparison(baseline=runs[0], candidate=runs[1])


ChallengeName = Annotated[str | None, typer.Argument(metavar="[CHALLENGE]", help="Without it they are listed.")]
_SIGNS = {True: "[green]met[/]     ", False: "[bold red]not met[/] ", None: "[yellow]unknown[/] "}


@verb
def grade(output: Output, name: ChallengeName = None, policy: PolicyName = "keep-all") -> None:
    """Challenges: a model, a peak and a price. Marks a policy by a real run. Exit 0: solved; 1: not solved."""
    if name is None:
        if output.json:
            print_json(tuple(CHALLENGES.values()))
        else:
            rows = ({"challenge": challenge.name, "task": challenge.task} for challenge in CHALLENGES.values())
            answer_console().print(table_of(rows))
        return
    if name not in CHALLENGES:
        names = f"There are {', '.join(CHALLENGES)}."
        raise BadInput(f"There is no challenge {name}.", hint=nearest(name, CHALLENGES) or names)
    challenge = CHALLENGES[name]
    with worker() as engine:
        graph = describe(engine, challenge.baseline)
        candidate = replace(challenge.baseline, policy=file_on(policy, graph).policy)
        run = ask(engine, Compare(baseline=challenge.baseline, candidate=candidate), keep=True)
    if run.failure is not None:
        raise RunFailed(run.failure)
    marked = marks(challenge, run)
    solved = all(mark.met for mark in marked)
    if output.json:
        print_json({"challenge": challenge, "solved": solved, "marks": marked})
    else:
        console = answer_console()
        console.print(f"\n{escape(challenge.task)}\n")
        for mark in marked:
            console.print(f"  {_SIGNS[mark.met]} {escape(mark.asked)}: {escape(mark.found)}")
        console.print("\n  [bold green]Solved.[/]\n" if solved else f"\n  Not solved yet. {escape(challenge.hint)}\n")
    if not solved:
        raise typer.Exit(DIFFERENT)
