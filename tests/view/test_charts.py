"""Every chart is a value: a picture, words of its own, and the same numbers as a table."""

from __future__ import annotations

from collections import Counter

from explorer.plan.memory.ledger import ledger
from explorer.record import Comparison, ModelRef, RunSpec
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.front import front_chart
from explorer.view.compare.gradients import gradient_chart
from explorer.view.drawing.chart import Chart
from explorer.view.memory.blocks import saved_bytes_chart
from explorer.view.memory.ledger import ledger_chart
from explorer.view.memory.roles import roles
from explorer.view.memory.timeline import timeline
from explorer.view.pipeline.gantt import gantt
from explorer.view.pipeline.ranks import against_chart, bands_chart, memory_chart, rank_chart
from explorer.view.pipeline.shares import calls_chart, truth_chart
from tests import graphs, pipelines
from tests.view.builders import compared
from tests.view.compare.test_front import MARKS


def of_a_comparison(pair: Comparison) -> list[Chart]:
    base, candidate = pair.baseline, pair.candidate
    return [
        timeline(base),
        timeline(candidate),
        timeline(base, candidate),
        roles(base),
        roles(candidate),
        roles(candidate, block="layers.2"),
        ledger_chart(ledger(base)),
        ledger_chart(ledger(candidate)),
        ledger_chart(ledger(candidate, 7)),
        saved_bytes_chart(base),
        saved_bytes_chart(pair),
        recompute_cost(pair),
        recompute_time(pair),
        step_time(pair),
        gradient_chart(pair),
    ]


def of_a_pipeline() -> list[Chart]:
    graph = graphs.gpt(4)
    run = pipelines.ran(graph, RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(graph)))
    assert run.timing is not None and run.predicted is not None
    return [
        gantt(run.timing, run.predicted),
        gantt(run.predicted),
        memory_chart(run.memory),
        memory_chart(run.memory[:1]),
        *(rank_chart(one) for one in run.memory),
        bands_chart(run.memory),
        against_chart(run),
        truth_chart(run),
        calls_chart(run),
    ]


def all_charts() -> list[Chart]:
    return [*of_a_comparison(compared(recompute=range(6))), *of_a_pipeline(), front_chart(MARKS)]


def test_no_two_charts_share_their_words() -> None:
    n_by_words = Counter(chart.alt for chart in all_charts())
    assert not [alt for alt, n in n_by_words.items() if n > 1]


def test_every_chart_has_a_table_and_a_name_for_it() -> None:
    for chart in all_charts():
        rows = chart.rows()
        assert rows and all(isinstance(row, dict) for row in rows), chart.alt
        assert chart.name and chart.figure.layout.title.text


def test_charts_that_stand_together_name_their_tables_differently() -> None:
    """Two folded tables of one name, one below the other, tell nobody what is in them."""
    pair = compared()
    memory = [timeline(pair.baseline, pair.candidate), ledger_chart(ledger(pair.candidate))]
    cost = [recompute_cost(pair), recompute_time(pair), step_time(pair)]
    for together in (memory, cost, of_a_pipeline()[-4:]):
        assert len({chart.name for chart in together}) == len(together)
