"""Baselines that were not measured, policies that are not predicted, and runs that contradict a forecast."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.memory.ledger import alive, array_of, belongs, held, peak_tick
from explorer.plan.predict.baseline import at_size, keep_all_from, largest, with_bytes
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.not_predicted import contradiction, no_baseline, not_predicted
from explorer.plan.why.caveats import why_not_predicted
from explorer.record import KEEP_ALL, Failure, Measurement, ModelGraph, Policy, Unit
from explorer.record.base import column
from explorer.record.plan import Forecast
from explorer.record.sound import unsound
from tests import graphs
from tests.graphs import GRAPH, SPEC, alive_at
from tests.graphs import block as graph_block
from tests.plan.why.test_peak import graph
from tests.view.builders import Chain, chains, measured, two_blocks


def under(run: Measurement, policy: Policy) -> Measurement:
    return msgspec.structs.replace(run, spec=msgspec.structs.replace(run.spec, policy=policy))


@settings(max_examples=30, deadline=None)
@given(chains, st.data())
def test_any_policy_of_the_textbook_chain_gives_its_baseline_back(chain: Chain, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, chain.n_blocks - 1), min_size=1))
    real, told = measured(chain), keep_all_from(measured(chain, chosen))
    assert told is not None and told.allocations is not None and real.allocations is not None
    assert told.spec == real.spec and told.phases == real.phases
    assert held(told.allocations).tolist() == held(real.allocations).tolist()
    assert told.saved_after_forward_bytes == real.saved_after_forward_bytes
    assert told.total_flops == real.total_flops
    assert [cost.n_recompute for cost in told.blocks] == [0] * len(told.blocks)
    assert unsound(told) == ""


def test_what_nobody_measured_is_predicted_and_has_no_times() -> None:
    told = keep_all_from(measured(recompute=(0, 2)))
    assert told is not None and (told.origin, told.times, told.spec.policy) == ("predicted", None, KEEP_ALL)
    kept = measured()
    assert keep_all_from(kept) is kept and kept.origin == "measured"


def test_any_run_is_a_baseline_to_forecast_from() -> None:
    policy = Policy.recompute(["layers.1", "layers.3"])
    foretold = Forecaster(measured()).forecast(policy)
    assert foretold.step_peak_bytes is not None
    timeless = msgspec.structs.replace(foretold, time_ratio=None, time_ratio_spread=None, time_ratio_of_calls=None)
    assert Forecaster(measured(recompute=range(6))).forecast(policy) == timeless


def test_nothing_is_put_together_from_what_does_not_repeat_forward() -> None:
    run = measured(recompute=(0, 2))
    policy = run.spec.policy
    other = Unit(blocks=("layers.0",), action="offload")
    broken = {
        "cut short": msgspec.structs.replace(run, failure=Failure(kind="out of memory", sentence="It was refused.")),
        "offloaded": under(run, msgspec.structs.replace(policy, units=(other, *policy.units[1:]))),
        "reentrant": under(run, msgspec.structs.replace(policy, use_reentrant=True)),
        "another block's": under(run, Policy.recompute(["layers.1", "layers.3"])),
        "no timeline": msgspec.structs.replace(run, allocations=None),
    }
    assert {name: keep_all_from(one) for name, one in broken.items()} == dict.fromkeys(broken)
    for one in broken.values():
        assert Forecaster(one).forecast(policy) == Forecast()
    reasons = {name: no_baseline(one) for name, one in broken.items()}
    assert {name for name, because in reasons.items() if because} == broken.keys() - {"another block's"}
    assert "layers.0 keep chosen operators or offload" in reasons["offloaded"]
    assert why_not_predicted(policy, None, Forecast(), broken["reentrant"]) == reasons["reentrant"] != ""
    assert no_baseline(run) == no_baseline(measured()) == ""


def test_a_recompute_that_makes_something_else_is_not_taken_for_forward() -> None:
    """Forward of one chain with the recompute of another, whose blocks save more."""
    run, larger = measured(Chain(), {2}), measured(Chain(saved=20 * 1024**2), {2})
    assert run.allocations is not None and larger.allocations is not None
    span = next(span for span in run.phases if span.phase == "recompute")
    born, n_bytes = run.allocations.born, list(run.allocations.n_bytes)
    for entry, tick in enumerate(born):
        if span.first_tick <= tick < span.end_tick:
            n_bytes[entry] = larger.allocations.n_bytes[entry]
    log = msgspec.structs.replace(run.allocations, n_bytes=type(born)("q", n_bytes))
    other = msgspec.structs.replace(run, allocations=log)
    assert keep_all_from(other) is None
    policy = Policy.recompute(["layers.0"])
    assert "made other tensors than its forward" in why_not_predicted(
        policy, None, Forecaster(other).forecast(policy), other
    )
    assert why_not_predicted(policy, None, Forecaster(run).forecast(policy), run) == ""


@pytest.mark.parametrize(("more", "is_told"), [(0, True), (1, False)])
def test_a_hundredth_of_the_peak_may_come_back_in_another_form(more: int, *, is_told: bool) -> None:
    """A recompute of layers.2 makes one tensor that forward did not: to the byte."""
    run = measured(recompute={2})
    log, span = run.allocations, next(span for span in run.phases if span.phase == "recompute")
    assert log is not None
    n_bytes = list(log.n_bytes)
    n_bytes[log.born.index(span.end_tick - 2)] = (run.step_peak_bytes or 0) // 100 + more
    other = replace(run, allocations=replace(log, n_bytes=column(n_bytes)))
    assert other.step_peak_bytes == run.step_peak_bytes and (keep_all_from(other) is not None) == is_told


def test_a_block_has_what_lies_in_it_and_below() -> None:
    run = graphs.measured(GRAPH, SPEC)
    log = run.allocations
    assert log is not None
    blank = tuple(replace(cost, saved_after_forward_bytes=-1, at_peak_bytes=-1) for cost in run.blocks)
    by_fqn = {cost.fqn: cost for cost in with_bytes(run, blank)}
    assert by_fqn[""].at_peak_bytes == run.step_peak_bytes
    assert by_fqn[""].saved_after_forward_bytes == run.saved_after_forward_bytes
    there = alive_at(log, log.peak_tick)
    assert there == alive(log, peak_tick(log)).tolist()
    for fqn, cost in by_fqn.items():
        inside = belongs(log, fqn)
        assert cost.at_peak_bytes == sum(int(array_of(log.n_bytes)[i]) for i in there if inside[i])


def at_batch(batch: int, chosen: frozenset[int] = frozenset(), *, squared: int = 0) -> Measurement:
    """Bytes grow with the batch, parameters do not; `squared` bytes of what is saved grow with its square."""
    saved = 40_000 * batch + squared * batch**2
    chain = Chain(saved=saved, output=3_000 * batch, scratch=9_000 * batch, parameters=500_000, flops=10**6 * batch)
    return measured(chain, chosen)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 6), min_size=2, max_size=3), st.integers(1, 500), st.frozensets(st.integers(0, 5)))
def test_any_batch_of_the_textbook_chain_under_any_policy(sizes: set[int], batch: int, chosen: frozenset[int]) -> None:
    real = at_batch(batch, chosen)
    foretold = at_size({size: at_batch(size, chosen) for size in sizes}, batch, real.spec)
    assert foretold.event_by_event and foretold.step_peak_bytes == real.step_peak_bytes
    told = foretold.measurement
    assert told is not None and (told.origin, told.times) == ("predicted", None)
    assert told.saved_after_forward_bytes == real.saved_after_forward_bytes
    assert told.total_flops == real.total_flops


def test_what_grows_with_the_square_takes_three_runs() -> None:
    real = at_batch(50, squared=7)
    runs = {size: at_batch(size, squared=7) for size in (2, 3, 5)}
    assert at_size(runs, 50, real.spec).step_peak_bytes == real.step_peak_bytes
    del runs[5]
    assert at_size(runs, 50, real.spec).step_peak_bytes != real.step_peak_bytes


def test_runs_that_differ_in_their_events_give_a_rougher_figure_and_no_timeline() -> None:
    runs = {2: at_batch(2), 4: at_batch(4, frozenset({0}))}
    foretold = at_size(runs, 6, runs[2].spec)
    peaks = [run.step_peak_bytes for run in runs.values()]
    assert peaks[0] is not None and peaks[1] is not None
    assert (foretold.event_by_event, foretold.measurement) == (False, None)
    assert foretold.step_peak_bytes == 2 * peaks[1] - peaks[0]


def test_one_run_tells_no_size_nor_does_one_that_was_cut_short() -> None:
    run = at_batch(2)
    cut = msgspec.structs.replace(at_batch(4), failure=Failure(kind="out of memory", sentence="It was refused."))
    for runs in ({2: run}, {2: run, 4: cut}):
        with pytest.raises(BadInput, match="from two finished runs"):
            at_size(runs, 8, run.spec)


def test_no_size_is_the_largest_of_a_step_whose_memory_does_not_depend_on_it() -> None:
    with pytest.raises(BadInput, match="the same bytes at sizes 2, 4"):
        at_size({2: at_batch(3), 4: at_batch(3)}, 8, at_batch(3).spec)


@given(st.integers(0, 10_000), st.integers(1, 5_000))
def test_the_largest_size_that_fits(limit: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    assert largest(fits, most=most) == min(limit, most)
    assert len(asked) <= 2 * (limit + 1).bit_length() + 1


OFFLOADED = Unit(blocks=("layers.1",), action="offload")
KEEPING = Unit(blocks=("layers",), action="save_ops", save_ops=("aten.mm.default",))
KEEPING_INSIDE = msgspec.structs.replace(KEEPING, blocks=("layers.1",))
INNER, OUTER = Unit(blocks=("layers.1",)), Unit(blocks=("layers",))


@pytest.mark.parametrize(("policy", "parts"), [
    (Policy(units=(OUTER, OFFLOADED)), "offload inside or around another unit"),
    (Policy(units=(INNER,), use_reentrant=True), "reentrant checkpointing"),
    (Policy(units=(KEEPING, INNER)), "kept operators inside or around another unit"),
    (Policy(units=(OUTER, KEEPING_INSIDE)), "kept operators inside or around another unit"),
    (Policy(units=(INNER, OUTER)), ""),
    (Policy(units=(KEEPING_INSIDE, Unit(blocks=("layers.2",)))), ""),
    (Policy(use_reentrant=True), ""),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_policy_outside_the_forecast_has_no_figure_and_one_sentence(policy: Policy, parts: str, device: str) -> None:
    run = measured()
    run = msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, device=device))
    forecaster = Forecaster(run, graph())
    assert not_predicted(policy, graph()) == (f"The forecast does not cover {parts}: press Run." if parts else "")
    assert (forecaster.forecast(policy) == Forecast()) == bool(parts)
    assert (forecaster.line(policy) is None) == (forecaster.at_peak(policy) is None) == bool(parts)


def test_a_result_that_is_written_in_place_is_not_foretold() -> None:
    known = graphs.graph_of(graph_block("a", "B", rewritten_ops=("aten.exp.default",)), graph_block("b", "B"))
    forecaster = Forecaster(two_blocks(), known)

    def why(*ops: str, block: str = "a") -> str:
        policy = Policy(units=(Unit(blocks=(block,), action="save_ops", save_ops=ops),))
        foretold = forecaster.forecast(policy).step_peak_bytes
        assert foretold == forecaster.peak_bytes(policy)
        sentence = not_predicted(policy, known)
        assert (foretold is None) == bool(sentence)
        return sentence

    assert "torch refuses to keep what aten.exp.default returns" in why("aten.mm.default", "aten.exp.default")
    assert "torch refuses to keep what aten.add_.Tensor returns" in why("aten.add_.Tensor")
    assert not why("aten.mm.default") and not why("aten.exp.default", block="b")


def graph_of(**of_first: object) -> ModelGraph:
    first = graph_block("layers.0", str(of_first.pop("kind", "B")), **of_first)
    return graphs.graph_of(graph_block("", "M"), first, graph_block("layers.1", "B"))


RECOMPUTED = under(measured(Chain(), [0]), Policy.recompute(["layers.0"]))


def off(share: float, told: Measurement, of: ModelGraph, baseline: Measurement | None = None) -> str:
    return contradiction(round((1 + share) * (told.step_peak_bytes or 0)), told, of, baseline)


def test_a_forecast_that_comes_true_contradicts_nothing() -> None:
    assert not off(0.009, RECOMPUTED, graph_of(kind="LSTM")) and not off(-0.009, RECOMPUTED, graph_of(kind="LSTM"))
    assert not contradiction(None, RECOMPUTED, graph_of())


@pytest.mark.parametrize(("told", "of", "reason"), [
    (RECOMPUTED, graph_of(kind="LSTM"), "layers.0 is recurrent"),
    (RECOMPUTED, graph_of(traits=("keeps_cache",)), "layers.0 is handed a cache"),
    (RECOMPUTED, graph_of(n_calls=2), "layers.0 is called more than once"),
    (RECOMPUTED, graph_of(), "no known limit"),
])  # fmt: skip
def test_the_reason_is_what_is_known_of_the_recomputed_blocks(told: Measurement, of: ModelGraph, reason: str) -> None:
    sentence = off(-0.05, told, of, measured(Chain()))
    assert sentence.startswith("The forecast of ") and "5.0% below" in sentence and reason in sentence
    assert "above" in off(0.05, told, of)


def test_forwards_that_make_other_tensors_are_distinct_texts() -> None:
    other = measured(dataclasses.replace(Chain(), n_parts=3))
    assert "did not make the same tensors" in off(0.05, RECOMPUTED, graph_of(), other)
    assert "no known limit" in off(0.05, RECOMPUTED, graph_of(), measured(Chain()))
