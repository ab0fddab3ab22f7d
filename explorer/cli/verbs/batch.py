"""`python -m explorer batch MODEL --budget 8GiB`: the largest batch that fits, from two small runs and a third.

With `--predict --card b200` the budget is the card: its allocator has to be able to reserve what the step needs.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import Output, RunFailed, answer_console, print_json, say, verb
from explorer.cli.options import CardStepOptions, Model, PolicyName, chosen_file, size_limit
from explorer.cli.report import card_figures, print_card
from explorer.cli.worker import run_of, worker
from explorer.errors import BadInput
from explorer.jobs.protocol import Measure
from explorer.plan.card.cards import capacity_bytes
from explorer.plan.card.step_on_card import is_granted, reserved_bytes
from explorer.plan.planners.confirm import within_bytes
from explorer.plan.predict.baseline import Sized, at_size, largest
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib
from explorer.view.text.runs import card_name

SMALL = (2, 4)
"""Batches that are run: one of 1 may take other kernels than every larger one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The varied argument and its budget: memory or a card."""

    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of the peak, such as 1.5GiB.")] = None
    argument: Annotated[str, typer.Option(metavar="NAME", help="The factory's argument that is varied.")] = "batch"


@verb
def batch(
    model: Model,
    step: CardStepOptions,
    wish: BatchOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """The largest batch that fits under a policy: predicted from two small runs, confirmed by one. None is timed."""
    spec, argument = step.spec(model), wish.argument
    if wish.budget is None and spec.card is None:
        raise BadInput("A batch needs a budget.", hint="Give --budget 8GiB, or --predict --card b200.")
    limit = None if wish.budget is None else size_limit(wish.budget)
    with worker() as engine:
        small = _at(spec, argument, SMALL[0])
        chosen = chosen_file(engine, policy, small, without_data=step.predict).policy
        spec = replace(small, policy=chosen, n_repeats=0)

        def run(size: int) -> Measurement:
            measured = run_of(engine, Measure(spec=_at(spec, argument, size), without_data=step.predict))
            if measured.failure is not None:
                raise RunFailed(measured.failure)
            return measured

        runs = {size: run(size) for size in SMALL}
        size = largest(lambda n: _fits(at_size(runs, n, spec), spec, limit))
        if not size:
            raise _not_even_one(at_size(runs, 1, spec), spec, argument, limit)
        predicted = at_size(runs, size, spec)
        confirmed = run(size)
    if output.json:
        print_json(_document(argument, limit, predicted, confirmed))
    else:
        _print(argument, limit, predicted, confirmed)
    if not predicted.event_by_event:
        say("[yellow]The small runs differ in their allocations: this is a line through their peaks, and rougher.[/]")
    if not within_bytes(confirmed, limit):
        say(f"[yellow]The run that should confirm it needs more than there is: take a smaller {argument}.[/]")


def _fits(sized: Sized, spec: RunSpec, limit: int | None) -> bool:
    """Whether the step stays within the budget, and the card refuses none of its requests.

    Raises BadInput for a card without a timeline to fill it from.
    """
    if limit is not None and sized.step_peak_bytes > limit:
        return False
    if spec.card is None:
        return True
    if sized.measurement is None:
        raise BadInput(
            "The small steps differ in their allocations, so no larger one can be put on a card.",
            hint="Play single sizes: measure --predict --card, with --set batch=8.",
        )
    return is_granted(spec.card, sized.measurement)


def _not_even_one(least: Sized, spec: RunSpec, argument: str, limit: int | None) -> BadInput:
    needed, room = mib(least.step_peak_bytes), mib(limit)
    if spec.card is not None and least.measurement is not None:
        needed = f"{mib(reserved_bytes(spec.card, least.measurement))} reserved"
        room = f"the {mib(capacity_bytes(spec.card))} that {spec.card.name} can reserve"
    return BadInput(
        f"Not even a {argument} of 1 fits in {room}: it needs {needed} (predicted).",
        hint="Recompute more (`--policy all`), or raise the budget.",
    )


def _print(argument: str, limit: int | None, predicted: Sized, confirmed: Measurement) -> None:
    console, memory = answer_console(), confirmed.card
    room = [] if limit is None else [mib(limit)]
    if memory is not None:
        room.append(card_name(memory.card))
    how = "played without data" if confirmed.origin == "predicted" else "measured"
    console.print(
        f"The largest {argument} that fits in {escape(' and '.join(room))} is [bold]{predicted.size}[/]: "
        f"{mib(predicted.step_peak_bytes)} predicted, {mib(confirmed.step_peak_bytes)} {how}."
    )
    if confirmed.batch:
        console.print(f"[dim]It was run with {escape(confirmed.batch)}.[/]")
    if memory is not None:
        print_card(console, memory)


def _document(argument: str, limit: int | None, predicted: Sized, confirmed: Measurement) -> dict[str, object]:
    return {
        "argument": argument,
        "largest": predicted.size,
        "budget_bytes": limit,
        "predicted_peak_bytes": predicted.step_peak_bytes,
        "step_peak_bytes": confirmed.step_peak_bytes,
        "batch": confirmed.batch,
        "event_by_event": predicted.event_by_event,
        **card_figures(confirmed),
    }


def _at(spec: RunSpec, argument: str, size: int) -> RunSpec:
    """The spec with one argument of the factory set to `size`."""
    model = replace(spec.model, arguments={**spec.model.arguments, argument: size})
    return replace(spec, model=model)
