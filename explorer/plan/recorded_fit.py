"""What would make a recorded step fit: policies, predicted from its record.

A recorded step cannot run again under another lever, because its script has the model. engine/compare/fit.py plays
every lever on a model with a factory; `summary.py` has the changes of a first look, without a card.
"""

from __future__ import annotations

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan import levers
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.next_step import next_step
from explorer.plan.planners.confirm import confirmed
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.summary import forecast_step, summarize
from explorer.plan.why.caveats import peak_caveats
from explorer.record.card import Card
from explorer.record.fit import Fit, Judgement, LeftOut, LeverRow, PlayedStep
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import KEEP_ALL, Policy

NOT_JUDGED = "A recorded step is not run again here; explorer.judge compares two steps of your loop."
NOT_PLAYED = (
    "A record cannot tell: give `checkpoint-explorer fit` a factory of the model, which it can change and play."
)


class _Steps:
    """The step after a recorded one, under policies."""

    def __init__(self, run: Measurement, card: Card | None, budget: str | int | None) -> None:
        self.step = next_step(run)
        self._first = None if self.step is run else run
        self._card = card
        self.budget_bytes = levers.budget_bytes_of(budget, self.step, card)
        self.limit_bytes = levers.limit_of(self.step, card, self.budget_bytes)
        self._forecaster = Forecaster(self.step, run.graph)
        self._played: dict[Policy, tuple[Measurement, PlayedStep]] = {}

    def under(self, policy: Policy) -> tuple[Measurement, PlayedStep]:
        """The predicted step under `policy`, and its figures. Raises BadInput if the policy has no forecast."""
        if policy not in self._played:
            self._played[policy] = self._play(policy)
        return self._played[policy]

    def _play(self, policy: Policy) -> tuple[Measurement, PlayedStep]:
        step, first = self.step, self._first
        if policy.units:
            step, first = forecast_step(step, policy), first and forecast_step(first, policy)
        spec = replace(step.spec, policy=policy, card=self._card)
        memory = None if self._card is None else memory_on(self._card, step, first, others=())
        step = replace(step, spec=spec, card=memory)
        ratio, total = self._forecaster.forecast(policy).flop_ratio, self.step.total_flops
        flops = None if ratio is None or total is None else round(ratio * total)
        return step, replace(levers.played_step(step, self.limit_bytes, first), total_flops=flops)


def recorded_fit(run: Measurement, card: Card | None, budget: str | int | None = None) -> Fit:
    """The recorded step and the policies that lower its peak, on `card` if one is given.

    Raises BadInput for a step that was cut short, another budget than `levers.budget_bytes_of` reads, and options of
    the card that cannot be read.
    """
    if run.graph is None or not run.complete:
        raise BadInput("The step was cut short, so no change of it is predicted.", hint="Record a whole step.")
    steps = _Steps(run, card, budget)
    _, as_is = steps.under(KEEP_ALL)
    policies = (_cheapest(steps, run.graph), *(change.policy for change in summarize(run, name="").changes))
    judgement = Judgement(reason=NOT_JUDGED)
    rows = [
        LeverRow(levers=(levers.RECOMPUTE,), step=steps.under(policy)[1], judgement=judgement)
        for policy in dict.fromkeys(policies)
    ]
    saving = [row for row in rows if row.step.needed_bytes < as_is.needed_bytes]
    others = ", ".join(lever.title for lever in levers.LEVERS)
    return Fit(
        as_is=as_is,
        budget_bytes=steps.budget_bytes,
        batch=run.batch,
        rows=levers.ranked(saving, as_is),
        left_out=(LeftOut(lever=others, reason=NOT_PLAYED),),
        warnings=tuple(peak_caveats(run)),
    )


def _cheapest(steps: _Steps, graph: ModelGraph) -> Policy:
    """The cheapest policy within the limit; the least peak if the step fits already, or no policy does."""
    fits = steps.under(KEEP_ALL)[1].fits
    planner = Planner(steps.step, graph, nested=not fits)

    def solve(planner: Planner) -> Plan:
        return planner.floor() if fits else planner.within(steps.limit_bytes)

    def play(policy: Policy) -> Measurement:
        return steps.under(policy)[0]

    try:
        tries = confirmed(planner, solve, play).tries
    except BadInput:  # no policy fits
        tries = confirmed(planner, Planner.floor, play).tries
    return tries[-1][0].policy
