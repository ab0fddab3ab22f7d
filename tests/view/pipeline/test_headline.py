"""Five figures in every state of the page, each with its origin, and none that looks measured before it was."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.record import RunSpec
from explorer.record.pipeline_run import PipelineRun
from explorer.view.pipeline.headline import figures, fullest, prices_held
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


@pytest.mark.parametrize(("scale", "words"), [(1.0, ""), (0.6, "less busy"), (1.6, "busier")])
def test_a_price_that_was_taken_at_another_load_is_named(scale: float, words: str) -> None:
    run = run_of()
    assert run.composed is not None and run.predicted is not None
    price = tuple(replace(one, end_ms=one.start_ms + 10.0) for one in run.composed.actions)
    times = [10 * scale * (1.05 if one.kind == "B" else 1.0) for one in price]
    took = tuple(replace(one, end_ms=one.start_ms + ms) for one, ms in zip(price, times, strict=True))
    run = replace(run, composed=replace(run.composed, actions=took), predicted=replace(run.predicted, actions=price))
    sentence = prices_held(run)
    assert f"×{scale:.2f} to ×{1.05 * scale:.2f}" in sentence
    assert ("than when the price was taken" in sentence) == bool(words) and words in sentence
    assert prices_held(replace(run, predicted=None)) == ""


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
