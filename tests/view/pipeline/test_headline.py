"""Five figures in every state of the page, each with its origin, and none that looks measured before it was."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.record import RunSpec
from explorer.record.pipeline_run import PipelineRun
from explorer.view.pipeline.headline import figures, fullest
from tests import graphs
from tests.pipelines import planned, ran

GRAPH = graphs.gpt(4)
PLAN = planned(GRAPH)


def run_of(**changes: object) -> PipelineRun:
    return replace(ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN)), **changes)


def test_nothing_is_known_before_a_price() -> None:
    step, bubble, peak, gradients, plan = figures(None, None, None, before=None)
    assert {one.value for one in (step, bubble, peak)} == {"not measured"}
    assert {one.origin for one in (step, bubble, peak, gradients, plan)} == {""}
    assert (gradients.value, plan.value) == ("not compared", "none yet")


def test_a_prediction_says_so_and_what_the_ranks_gain() -> None:
    predicted = run_of().predicted
    assert predicted is not None
    step, bubble, peak, *_, plan = figures(None, predicted, PLAN, before=None)
    assert {one.origin for one in (step, bubble, peak)} == {"predicted"}
    work = sum(use.busy_ms for use in predicted.ranks)
    assert step.delta == f"{work / predicted.makespan_ms:.2f}× as fast as one rank"
    assert (plan.value, plan.delta) == ("2 stages", "4 microbatches, 2 ranks")


def test_a_run_is_held_against_its_prediction() -> None:
    run = run_of()
    step, bubble, peak, gradients, _ = figures(run, None, PLAN, before=None)
    assert {one.origin for one in (step, bubble, peak, gradients)} == {"measured"}
    assert step.delta.startswith(f"predicted {step.value}, off by") and bubble.delta == f"predicted {bubble.value}"
    worst = fullest(run.memory)
    assert worst is not None and peak.label == f"Peak of rank {worst.rank}"
    assert peak.delta.startswith(f"predicted {peak.value}, + ") and peak.delta.endswith("optimizer")
    at_once = run_of(wall=run.composed)
    assert figures(at_once, None, PLAN, before=None)[0].delta.endswith("with free links")


@pytest.mark.parametrize(("n_moved", "words"), [(0, "bitwise equal to unsplit"), (2, "bitwise equal; 2 different")])
def test_gradients_are_counted(n_moved: int, words: str) -> None:
    run = ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN), n_moved=n_moved)
    gradients = figures(run, None, PLAN, before=None)[3]
    n = len(run.gradients)
    assert (gradients.value, gradients.delta) == (f"{n - n_moved} of {n}", words)


def test_an_earlier_plan_stands_beside_the_prediction_of_this_one() -> None:
    before = run_of()
    step, bubble, *_ = figures(None, before.predicted, PLAN, before=before)
    assert step.delta.startswith("an earlier plan: ") and bubble.delta.startswith("an earlier plan: ")


def test_the_fullest_rank_counts_the_optimizer() -> None:
    first, second = run_of().memory
    assert fullest((first, replace(second, optimizer_bytes=10**12))).rank == second.rank
    assert fullest(()) is None
