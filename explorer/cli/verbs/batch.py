"""`python -m explorer batch MODEL --budget 8GiB`: the largest batch that fits, from two small runs and a third."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from explorer.cli.command import Output, RunFailed, answer_console, print_json, say, verb
from explorer.cli.options import Model, ModelOptions, PolicyName, StepOptions, chosen_policy
from explorer.cli.worker import ask, worker
from explorer.errors import BadInput
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.plan.predict.baseline import Sized, at_size, largest
from explorer.plan.sizes import parse_bytes
from explorer.record.measurement import Measurement
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib

Budget = Annotated[str, typer.Option("--budget", metavar="SIZE", help="The peak must not be above, such as 1.5GiB.")]
Argument = Annotated[str, typer.Option("--argument", metavar="NAME", help="The factory's argument that is varied.")]
SMALL = (2, 4)
"""Batches that are run: one of 1 may take other kernels than every larger one."""


@verb
def batch(
    model: Model,
    budget: Budget,
    options: ModelOptions,
    step: StepOptions,
    output: Output,
    policy: PolicyName = "keep-all",
    argument: Argument = "batch",
) -> None:
    """The largest batch that fits under a policy: predicted from two small runs, confirmed by one. None is timed."""
    limit, ref = parse_bytes(budget), options.ref(model)
    with worker() as engine:
        small = msgspec.structs.replace(ref, arguments={**ref.arguments, argument: SMALL[0]})
        spec = step.spec(small, KEEP_ALL, seed=options.seed)
        chosen = chosen_policy(engine, policy, spec)
        spec = msgspec.structs.replace(spec, policy=chosen, n_repeats=0)
        runs = {size: _run(engine, spec, argument, size) for size in SMALL}
        size = largest(lambda n: at_size(runs, n, spec).step_peak_bytes <= limit)
        if not size:
            least = at_size(runs, 1, spec).step_peak_bytes
            raise BadInput(
                f"Not even a {argument} of 1 fits in {mib(limit)}: it needs {mib(least)} (predicted).",
                hint="Recompute more (`--policy all`), or raise the budget.",
            )
        predicted = at_size(runs, size, spec)
        confirmed = _run(engine, spec, argument, size)
    if output.json:
        print_json(_document(argument, limit, predicted, confirmed))
    else:
        answer_console().print(
            f"The largest {argument} that fits in {mib(limit)} is [bold]{size}[/]: "
            f"{mib(predicted.step_peak_bytes)} predicted, {mib(confirmed.step_peak_bytes)} measured."
        )
    if not predicted.event_by_event:
        say("[yellow]The small runs differ in their allocations: this is a line through their peaks, and rougher.[/]")
    if (confirmed.step_peak_bytes or 0) > limit:
        say(f"[yellow]The run that should confirm it needs more than {mib(limit)}: take a smaller {argument}.[/]")


def _document(
    argument: str, limit: int, predicted: Sized, confirmed: Measurement
) -> dict[str, str | int | bool | None]:
    return {
        "argument": argument,
        "largest": predicted.size,
        "budget_bytes": limit,
        "predicted_peak_bytes": predicted.step_peak_bytes,
        "step_peak_bytes": confirmed.step_peak_bytes,
        "event_by_event": predicted.event_by_event,
    }


def _run(engine: Worker, spec: RunSpec, argument: str, size: int) -> Measurement:
    """A run with `argument` set to `size`. Raises RunFailed if the run was cut short."""
    model = msgspec.structs.replace(spec.model, arguments={**spec.model.arguments, argument: size})
    run: Measurement = ask(engine, Measure(spec=msgspec.structs.replace(spec, model=model)))
    if run.failure is not None:
        raise RunFailed(run.failure)
    return run
