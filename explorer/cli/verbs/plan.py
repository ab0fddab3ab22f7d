"""`python -m explorer plan MODEL --budget 1.5GiB`: the cheapest policy whose step fits, confirmed by a real run.

With `--predict --card b200` the budget is the card: its allocator has to be able to reserve what the step needs.
With `--predict --ranks 64 --fsdp` the plan is that of the fullest rank, and the run is a play of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, RunFailed, answer_console, errors_to_stderr, print_json, say, verb
from explorer.cli.options import Model, PolicyOut, RankStepOptions, describe, recorded_step, say_how_read
from explorer.cli.report import figures, labelled, print_card, print_lines, print_model, print_warnings, print_worth
from explorer.cli.worker import check_writable, print_or_write, run_of, worker
from explorer.errors import BadInput, InvalidPolicy
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.plan.budget_text import check_budget, parse_budget
from explorer.plan.card.cards import capacity_bytes
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.outside import outside_policies
from explorer.plan.planners.confirm import Confirmation, confirmed, within_budget
from explorer.plan.planners.front import RankOffer, offers_on_ranks, splits_of
from explorer.plan.planners.planner import Planner
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.not_predicted import approximate, contradiction
from explorer.plan.sizes import parse_share
from explorer.plan.summary import Line, forecast_step
from explorer.plan.why.collectives import repeated, sent_bytes
from explorer.plan.why.worth import sentences, worth_recomputing
from explorer.record.base import to_plain
from explorer.record.card import Card
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import PCIE_4, CostUnit, Plan, Wish
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib, percent
from explorer.view.text.plan import certificate, host_sentences, in_words, time_verdict
from explorer.view.text.runs import did_not_fit

FROM: dict[CostUnit, str] = {"ms": "measured times", "FLOPs": "counted FLOPs"}
"""The source of a plan's predicted cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The budget to plan for: memory, time or a card."""

    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET", help="1.5GiB, 60% of the peak with everything kept, '+10% time', both, device or card."
        ),
    ] = None
    time: Annotated[str | None, typer.Option(metavar="SHARE", help="+10%: the least memory in this time.")] = None
    offload: Annotated[bool, typer.Option("--offload", help="Blocks may also wait on the host, in its memory.")] = False
    host_bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Between device and host, such as 25GB/s (10^9 bytes a second).")
    ] = f"{PCIE_4 / 1e9:g}GB/s"
    out: PolicyOut = None

    def check(self, spec: RunSpec) -> None:
        """Says how a budget is read that leaves room for doubt. Raises BadInput, before a step is measured."""
        if self.budget is None and self.time is None and spec.card is None:
            raise BadInput(
                "A plan needs one of --budget and --time.",
                hint="--budget 60%, --time +10% for the least memory, or --predict --card b200.",
            )
        parse_share(self.time or "0%")
        if self.budget is None:
            return
        wish = check_budget(self.budget)
        if wish.more_time is not None and self.time is not None:
            raise BadInput("--budget and --time both limit the time.", hint="Leave --time out.")
        if wish.card and spec.card is None:
            raise BadInput("The budget is a card, and none is named.", hint="Add --predict --card b200.")
        say_how_read(self.budget, wish)

    @property
    def bytes_a_second(self) -> float:
        """The bandwidth between device and host; 0 without --offload. Raises BadInput."""
        rate = self.host_bandwidth.removesuffix("/s").removesuffix("GB")
        try:
            gigabytes = float(rate)
        except ValueError:
            gigabytes = 0.0
        if not 0 < gigabytes < math.inf:
            raise BadInput(f"--host-bandwidth {self.host_bandwidth} is no rate.", hint="Write 25GB/s, for example.")
        return 1e9 * gigabytes * self.offload

    def resolved(self, spec: RunSpec, keep_all_bytes: int, first: Measurement) -> Wish:
        """The wish of both options and of the card. Time alone is the least memory in this time, on a card too."""
        wish = Wish() if self.budget is None else parse_budget(self.budget, keep_all_bytes, first)
        more_time = wish.more_time if self.time is None else parse_share(self.time)
        budgets = [] if wish.budget_bytes is None else [wish.budget_bytes]
        if spec.card is not None and (budgets or more_time is None):
            budgets.append(capacity_bytes(spec.card))
        return replace(wish, budget_bytes=min(budgets, default=None), more_time=more_time, card=False)


@verb
def plan(
    model: Model,
    step: RankStepOptions,
    wish: BudgetOptions,
    output: Output,
) -> None:
    """The cheapest policy under a memory budget, with a proof, confirmed by a run. Exit 1: the run missed it."""
    if (recorded := recorded_step(model, step, "card", "allocator", "torch", "n_steps")) is not None:
        step = dataclasses.replace(step, predict=True)  # a record is planned on any card, and nothing is run
    spec = step.spec(model)
    wish.check(spec)
    if spec.ranks is not None and (recorded is not None or not step.predict):
        raise BadInput("A plan for ranks is made of a model's prediction.", hint="Name a model, and add --predict.")
    if wish.bytes_a_second:
        _refuse_offload(on_ranks=spec.ranks is not None, is_recorded=recorded is not None)
    check_writable(wish.out)
    others: list[RankOffer] = []
    if recorded is not None:
        first, last = recorded, _forecast(recorded, spec.card, _solve(wish, spec, recorded))
    else:
        first, last, others = _planned(spec, wish, step)
    graph = last.planner.graph
    chosen, run = last.tries[-1]
    met = within_budget(chosen, run)
    against, doubt = contradiction(chosen.step_peak_bytes, run, graph, first), approximate(chosen.policy, graph, run)
    if output.json:
        on_ranks = {} if spec.ranks is None else _ranks_document(run, others)
        print_json({**_document(last, first, met=met), **on_ranks, "approximate": doubt, "contradiction": against})
    else:
        print_model(spec.model.target, first.batch)
        console = answer_console()
        console.print(f"[bold]{escape(in_words(chosen.policy))}[/]")
        lines = [*_plan_lines(chosen, run, first, met=met), *_rank_lines(run, others)]
        print_lines(lines, console, {"Budget": "green" if met else "bold red"})
        if run.card is not None:
            print_card(console, run.card)
        of_first = first.warnings if first.origin == "predicted" else ()
        print_warnings([*of_first, *repeated(run), *filter(None, (doubt, against))])
        print_worth(first, graph)
    with errors_to_stderr(output):
        if wish.out is not None:
            print_or_write(_policy_text(chosen, first, run, graph), wish.out)
    if not met:
        raise typer.Exit(DIFFERENT)


def _refuse_offload(*, on_ranks: bool, is_recorded: bool) -> None:
    if on_ranks:
        raise BadInput("Offload is planned for one process, not for ranks.", hint="Leave --offload or --ranks out.")
    if is_recorded:
        raise BadInput(
            "A recorded step does not say what autograd saves, from which offload is planned.",
            hint="Leave --offload out, name a model, or call explorer.auto_policy(..., offload=True) in the script.",
        )


def _planned(
    spec: RunSpec, wish: BudgetOptions, step: RankStepOptions
) -> tuple[Measurement, Confirmation, list[RankOffer]]:
    """The first run, the plan with its run, and offers for other splits over ranks."""
    with worker() as engine:
        graph = describe(engine, spec, without_data=step.predict)
        say(escape(f"batch {graph.batch}"))  # before a refusal, too
        if spec.ranks is not None:
            return _on_ranks(engine, spec, graph, wish, step.reshard)
        first = _first_run(engine, spec, graph, predict=step.predict)
        planner = Planner(first, graph)
        if wish.bytes_a_second:
            planner = planner.with_offload(wish.bytes_a_second)
        last = _confirmed(engine, first, planner, _solve(wish, spec, first), predict=step.predict)
        return first, last, []


def _forecast(step: Measurement, card: Card | None, solve: Callable[[Planner], Plan]) -> Confirmation:
    """The plan for a recorded step, which only its own script could run: the forecast takes the place of a run.

    A `card` grants or refuses what the forecast requests.
    """
    assert step.graph is not None, "step_in refuses other runs"

    def forecast(policy: Policy) -> Measurement:
        run = forecast_step(step, policy)
        if card is not None:
            run = replace(run, card=memory_on(card, run))
        return run

    return confirmed(Planner(step, step.graph), solve, forecast)


def _first_run(engine: Worker, spec: RunSpec, graph: ModelGraph, *, predict: bool) -> Measurement:
    """The run that keeps everything, else the first run that fits. Raises RunFailed if no run fits."""
    request = Measure(spec=spec, until_it_fits=not predict, without_data=predict)
    run = run_of(engine, request, keep=not predict)
    if run.refused:
        say(f"[yellow]{escape(did_not_fit(run, keep_all_from(run, graph)))}[/]")
    if run.failure is not None:
        raise RunFailed(run.failure)
    return run


def _on_ranks(
    engine: Worker, spec: RunSpec, graph: ModelGraph, wish: BudgetOptions, reshard: bool | None
) -> tuple[Measurement, Confirmation, list[RankOffer]]:
    """The first offer whose play keeps the budget, else the last: its keep-all play, its plan, and the other offers."""
    assert spec.ranks is not None
    splits = [replace(spec, ranks=split) for split in splits_of(spec.ranks, reshard)]
    firsts = [run_of(engine, Measure(spec=split, without_data=True)) for split in splits]
    solve = _solve(wish, spec, firsts[0])
    offers = offers_on_ranks(firsts, graph, solve)
    if offers[0].refusal is not None:  # no split has a plan
        raise offers[0].refusal
    for offer in (offer for offer in offers if offer.refusal is None):
        last = _confirmed(engine, offer.first, offer.planner, solve, predict=True)
        if within_budget(*last.tries[-1]):
            break
    return offer.first, last, [other for other in offers if other is not offer]


def _solve(wish: BudgetOptions, spec: RunSpec, first: Measurement) -> Callable[[Planner], Plan]:
    """The plan for the wish. A share of the memory is a share of the peak of the `first` run."""

    def solve(planner: Planner) -> Plan:
        whole = planner.keep_all_bytes if spec.ranks is None else first.step_peak_bytes or 0
        try:
            return planner.fulfil(wish.resolved(spec, whole, first))
        except BadInput:
            for sentence in sentences(first, planner.graph):
                say(escape(sentence))
            raise

    return solve


def _confirmed(
    engine: Worker,
    first_run: Measurement,
    planner: Planner,
    solve: Callable[[Planner], Plan],
    *,
    predict: bool,
) -> Confirmation:
    """The plan and its run. The planner plans again if the run exceeds the budget or the model refuses a segment."""

    def run(policy: Policy) -> Measurement:
        beside = not predict and not first_run.spec.policy.units  # in turns with everything kept, if that fits
        spec = replace(first_run.spec, policy=policy)
        try:
            request = Measure(spec=spec, without_data=predict, beside_keep_all=beside)
            chosen = run_of(engine, request, keep=not predict)
            if chosen.failure is not None and chosen.failure.kind != "out of memory":
                raise RunFailed(chosen.failure)
        except RunFailed as error:
            failure = error.failure
            if failure.neighbours:
                raise InvalidPolicy(failure.sentence, hint=failure.hint, neighbours=failure.neighbours) from None
            raise
        return chosen

    last = confirmed(planner, solve, run, lambda text: say(escape(text)))
    if last.tries[-1][1].failure is not None:
        raise RunFailed(last.tries[-1][1].failure)
    return last


def _document(last: Confirmation, first: Measurement, *, met: bool) -> dict[str, object]:
    def part(chosen: Plan, run: Measurement) -> dict[str, object]:
        plain = {**to_plain(chosen), "cost_ratio": chosen.cost_ratio, "proven": chosen.proven}
        document: dict[str, object] = {"plan": plain, "measured": figures(run)}
        if run.card is None:
            return document
        document["card"] = {
            **to_plain(run.card),
            **run.card.headlines(),
            "bounded": None if chosen.budget_bytes is None else "reserved_bytes",
            "capacity_bytes": capacity_bytes(run.card.card),
        }
        return document

    *missed, chosen = [part(*pair) for pair in last.tries]
    return {
        **chosen,
        "met": met,
        "first_run": figures(first),
        "missed": missed,
        "refused_segments": last.refused,
        "batch": first.batch,
        "worth_recomputing": worth_recomputing(first, last.planner.graph),
    }


def _plan_lines(chosen: Plan, run: Measurement, first: Measurement, *, met: bool) -> list[Line]:
    lines = []
    if bounds := _bounds(chosen, run):
        lines.append(("Budget", f"{', '.join(bounds)}, {'kept' if met else 'missed'}"))
    if chosen.time_budget is not None and chosen.cost_ratio is not None:
        measured = _measured_ratio(run)
        ran = "" if measured is None else f"; measured: {time_verdict(measured, chosen.time_budget)}"
        lines.append(("Time limit", f"predicted: {time_verdict(chosen.cost_ratio, chosen.time_budget)}{ran}"))
    origin = "predicted" if first.spec.policy.units else _origin(first)
    lines += [
        ("Peak", f"{mib(chosen.step_peak_bytes)} predicted, {mib(run.step_peak_bytes)} {_origin(run)}"),
        ("Kept all", f"{mib(chosen.baseline_step_peak_bytes)} {origin}"),
    ]
    if chosen.cost_ratio is not None:
        spread = "" if chosen.cost_ratio_spread is None else f" ± {percent(chosen.cost_ratio_spread)}"
        least = f"{percent(chosen.least_cost_ratio - 1, signed=True)} to " * bool(chosen.copies_ms)
        predicted = f"{least}{percent(chosen.cost_ratio - 1, signed=True)}{spread} predicted"
        lines.append(("Time", f"{predicted} from {FROM[chosen.cost_unit]}{_ran(run)}"))
    proof = f"{certificate(chosen)[0]} The proof is about the forecast; the run is what holds."
    lines += labelled("Host", host_sentences(chosen, run))
    return [*lines, ("Certificate", proof), *labelled("Outside", outside_policies(run))]


def _bounds(chosen: Plan, run: Measurement) -> list[str]:
    """The budgets of the plan, on a card its capacity first."""
    card, budget_bytes = None if run.card is None else run.card.card, chosen.budget_bytes
    bounds = [] if card is None else [f"{mib(capacity_bytes(card))} for the reserved memory on {card.name}"]
    if budget_bytes is not None and (card is None or budget_bytes < capacity_bytes(card)):
        over = (run.step_peak_bytes or 0) - budget_bytes
        bounds.append(f"{mib(budget_bytes)} for the peak, {mib(abs(over))} {'over' if over > 0 else 'to spare'}")
    return bounds


def _ranks_document(run: Measurement, others: Sequence[RankOffer]) -> dict[str, object]:
    def communicated(run: Measurement) -> dict[str, object]:
        ranks = {"ranks": to_plain(run.spec.ranks), "fullest_rank": run.rank}
        return {**ranks, "gathered_bytes": run.gathered_bytes, "sent_bytes": sent_bytes(run)}

    instead = [
        {
            **communicated(offer.first),
            "plan": None if offer.plan is None else to_plain(offer.plan),
            "refusal": "" if offer.refusal is None else offer.refusal.sentence,
        }
        for offer in others
    ]
    return {**communicated(run), "repeated": list(repeated(run)), "instead": instead}


def _rank_lines(run: Measurement, others: Sequence[RankOffer]) -> list[Line]:
    """The communication of the chosen plan, and what the other split would take."""
    lines = []
    if run.spec.ranks is not None:
        moved = f"gathers {mib(run.gathered_bytes)} and sends {mib(sent_bytes(run))} a step"
        lines.append(("Ranks", f"{run.spec.ranks.in_words}; rank {run.rank} is the fullest, {moved}"))
    for offer in others:
        assert offer.first.spec.ranks is not None
        lines.append(("Instead", f"{offer.first.spec.ranks.in_words}: {_instead(offer)}"))
    return lines


def _instead(offer: RankOffer) -> str:
    if offer.plan is None:
        return f"no plan. {offer.refusal.sentence if offer.refusal else ''}"
    more = "" if offer.plan.cost_ratio is None else f"{percent(offer.plan.cost_ratio - 1, signed=True)} FLOPs, "
    return f"{more}{mib(offer.plan.step_peak_bytes)}, {mib(offer.first.gathered_bytes)} gathered"


def _origin(run: Measurement) -> str:
    if run.spec.model.is_recorded:
        return "recorded" if run.origin == "recorded" else "by the forecast's own timeline"
    return "measured" if run.origin == "measured" else "played without data"


def _measured_ratio(run: Measurement) -> float | None:
    """The step's time over that of keeping everything, run in turns."""
    before, after = (run.times.beside.median_ms, run.times.step.median_ms) if run.times else (None, None)
    return after / before if before and after is not None else None


def _ran(run: Measurement) -> str:
    ratio = _measured_ratio(run)
    return "" if ratio is None else f"; {percent(ratio - 1, signed=True)} measured, in turns"


def _policy_text(chosen: Plan, first: Measurement, run: Measurement, graph: ModelGraph) -> str:
    """The policy file. Its evidence is the memory of both runs, if they were measured."""
    evidence = evidence_of(Comparison(baseline=first, candidate=run), graph)
    if evidence is not None:
        evidence = replace(evidence, time_ratio=None, time_ratio_spread=None, flop_ratio=None, verdict=None)
    return policy_file.dumps(policy_file.file_of(chosen.policy, graph, ranks=run.spec.ranks, evidence=evidence))
