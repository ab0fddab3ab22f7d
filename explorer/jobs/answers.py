"""The functions that answer requests, one a row of protocol.ROWS, each called as `function(request, report)`.

They import engine and planners when they are called, and turn fields of a request into arguments.
"""

from __future__ import annotations

from contextlib import nullcontext

from msgspec.structs import replace

from explorer.jobs.on_card import CardCount, CountOnCard
from explorer.jobs.protocol import Compare, Describe, DrawAutograd, FindFit, FindPlans, Measure, MeasureRanks
from explorer.record.base import Record
from explorer.record.measurement import Measurement
from explorer.record.plan import Report
from explorer.record.policy import Policy


def describe(request: Describe, report: Report) -> Record:
    from explorer.engine.device.without_data import fake_group, without_data
    from explorer.engine.model import describe as describing

    group = fake_group(0, request.n_ranks) if request.n_ranks > 1 else nullcontext()
    with group, without_data() if request.without_data else nullcontext():
        return describing.describe(
            request.model, seed=request.seed, device=request.device, conditions=request.conditions, report=report
        )


def measure(request: Measure, report: Report) -> Record:
    from explorer.engine.bench import measure as ways

    if request.own_optimizer:
        from explorer.engine.bench.step import step_with_optimizer

        return ways.measure_without_data(request.spec, report, step_with_optimizer(request.own_optimizer))
    if request.without_data:
        return ways.measure_without_data(request.spec, report)
    if request.beside_keep_all:
        return ways.measure_beside_keep_all(request.spec, report)
    if request.until_it_fits:
        return ways.measure_what_fits(request.spec, report, with_graph=request.with_graph)
    return ways.measure(request.spec, report)


def find_plans(request: FindPlans, report: Report) -> Record:
    from explorer.plan.planners import front
    from explorer.plan.why.worth import with_reasons

    def played(policy: Policy) -> Measurement:
        from explorer.engine.bench.measure import measure_without_data

        spec = replace(request.run.spec, policy=policy)
        if spec == request.run.spec:
            return request.run
        if spec.ranks is not None:
            from explorer.engine.ranks.predict import predict_ranks

            return predict_ranks(spec, report).fullest
        return measure_without_data(spec, report)

    plans = front.find_plans(request.run, request.graph, request.wish, report, played)
    return with_reasons(plans, request.run, request.graph)


def measure_ranks(request: MeasureRanks, report: Report) -> Record:
    if request.without_data:
        from explorer.engine.ranks.predict import predict_ranks

        return predict_ranks(request.spec, report)
    from explorer.engine.ranks import real

    return real.measure_ranks(request.spec, report)


def compare(request: Compare, report: Report) -> Record:
    if request.candidate.ranks is not None:
        from explorer.engine.ranks.compare import compare_ranks

        return compare_ranks(request.candidate, report)
    from explorer.engine.compare import compare as comparing

    return comparing.compare(request.baseline, request.candidate, full=request.full, report=report)


def count_on_card(request: CountOnCard, report: Report) -> Record:
    from explorer.engine.bench.counted import counted_on_card

    return CardCount(spec=request.spec, figures=counted_on_card(request.spec))


def find_fit(request: FindFit, report: Report) -> Record:
    from explorer.engine.compare.fit import fit

    return fit(request.spec, request.budget, report)


def draw_autograd(request: DrawAutograd, report: Report) -> Record:
    from explorer.engine.bench import other_tools

    return other_tools.draw_autograd(request.spec, request.block, report)
