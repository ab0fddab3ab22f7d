"""What would make a recorded step fit: policies, predicted from its record.

A recorded step cannot run again under another lever, because its script has the model. engine/compare/fit.py plays
every lever on a model with a factory; `summary.py` has the changes of a first look, without a card.
"""

from __future__ import annotations

from functools import cache

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
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import KEEP_ALL, Policy

NOT_JUDGED = "A recorded step is not run again here; explorer.judge compares two steps of your loop."
NOT_PLAYED = (
    "A record cannot tell: give `checkpoint-explorer fit` a factory of the model, which it can change and play."
)


def recorded_fit(run: Measurement, card: Card | None, budget_bytes: int | None = None) -> Fit:
    """The recorded step and the policies that lower its peak, on `card` if one is given.

    Raises BadInput for a step without a timeline or a graph, and options of the card that cannot be read.
    """
    if run.graph is None or not run.complete:
        raise BadInput("The step was cut short, so no change of it is predicted.", hint="Record a whole step.")
    step = next_step(run)
    first = None if step is run else run
    limit_bytes = levers.limit_of(step, card, budget_bytes)

    forecaster = Forecaster(step, run.graph)

    @cache
    def under(policy: Policy) -> tuple[Measurement, PlayedStep]:
        steps = [each if policy == KEEP_ALL else forecast_step(each, policy) for each in (step, first) if each]
        following, before = steps[0], steps[1] if first else None
        spec = replace(following.spec, policy=policy, card=card)
        memory = None if card is None else memory_on(card, following, before, others=())
        ratio = forecaster.forecast(policy).flop_ratio
        flops = None if ratio is None or run.total_flops is None else round(ratio * run.total_flops)
        following = replace(following, spec=spec, card=memory)
        return following, replace(levers.played_step(following, limit_bytes, before), total_flops=flops)

    _, as_is = under(KEEP_ALL)
    planner = Planner(step, run.graph, nested=not as_is.fits)

    def solve(planner: Planner) -> Plan:
        return planner.floor() if as_is.fits else planner.within(limit_bytes)

    def play(policy: Policy) -> Measurement:
        return under(policy)[0]

    try:
        tries = confirmed(planner, solve, play).tries
    except BadInput:  # no policy fits
        tries = confirmed(planner, Planner.floor, play).tries
    policies = [tries[-1][0].policy, *(change.policy for change in summarize(run, name="").changes)]
    judgement = Judgement(reason=NOT_JUDGED)
    rows = [
        LeverRow(levers=(levers.RECOMPUTE,), step=under(policy)[1], judgement=judgement)
        for policy in dict.fromkeys(policies)
    ]
    saving = [row for row in rows if row.step.needed_bytes < as_is.needed_bytes]
    others = ", ".join(lever.title for lever in levers.LEVERS)
    return Fit(
        as_is=as_is,
        budget_bytes=budget_bytes,
        batch=run.batch,
        rows=levers.ranked(saving, as_is),
        left_out=(LeftOut(lever=others, reason=NOT_PLAYED),),
        warnings=tuple(peak_caveats(run)),
    )
