"""FLOPs and time of reruns, calibration by timed steps, and equal times of equal siblings."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.step_cost import (
    AMONG_KERNELS,
    N_SAVED,
    TimedStep,
    calibrated,
    kin_of,
    rerun_flops,
    rerun_share,
    stops_inside,
    unit_flops,
    unit_ms,
    with_equal_times,
)
from explorer.record import Block, Measurement, Policy, RunSpec, Unit
from explorer.record.measurement import MeasuredBlock, Samples
from explorer.record.plan import Forecast
from tests import graphs
from tests.graphs import block, graph_of, with_costs
from tests.view.builders import Chain, measured

FLOPS = Chain().flops
RUN = measured()
PLAIN, WHOLE = Policy(), Policy(early_stop=False)


HALF = graph_of(block("layers.1", "B", forward_flops=200, rerun_flops=100, last_saved_in="layers.1.inner"))


def test_only_the_last_block_of_a_segment_stops_early() -> None:
    assert rerun_flops(RUN, HALF, ("layers.0", "layers.1"), PLAIN) == FLOPS + FLOPS // 2
    assert rerun_flops(RUN, HALF, ("layers.1", "layers.0"), PLAIN) == 2 * FLOPS
    assert rerun_flops(RUN, HALF, ("layers.0", "layers.1"), WHOLE) == 2 * FLOPS
    assert rerun_flops(RUN, None, ("layers.1",), PLAIN) == FLOPS


def test_a_segment_stops_in_its_last_block_that_saves_and_a_unit_that_saves_nothing_never_runs_again() -> None:
    graph = graph_of(*HALF.blocks, block("layers.2", "Dropout"))
    assert rerun_flops(RUN, graph, ("layers.0", "layers.1", "layers.2"), PLAIN) == FLOPS + FLOPS // 2
    assert rerun_flops(RUN, graph, ("layers.0", "layers.1", "layers.2"), WHOLE) == 3 * FLOPS
    assert rerun_flops(RUN, graph, ("layers.2",), PLAIN) == rerun_flops(RUN, graph, ("layers.2",), WHOLE) == 0
    assert rerun_flops(RUN, graph, ("layers.2",), Policy(use_reentrant=True)) == FLOPS
    assert stops_inside(graph, Unit(blocks=("layers.1", "layers.2")), Unit(blocks=("layers.1.inner",)))


def test_a_rerun_that_ends_in_a_unit_inside_leaves_that_to_it() -> None:
    outer, inner = Unit(blocks=("layers.1",)), Unit(blocks=("layers.1.inner",))
    other = Unit(blocks=("layers.1.other",))
    assert stops_inside(HALF, outer, inner) and not stops_inside(HALF, outer, other)
    assert not stops_inside(None, outer, inner)
    alone = unit_flops(RUN, HALF, outer, [], PLAIN)
    assert alone == unit_flops(RUN, HALF, outer, [other], PLAIN) == FLOPS // 2
    within = unit_flops(RUN, HALF, outer, [inner], PLAIN)
    assert within is not None and within < alone
    assert unit_flops(RUN, HALF, outer, [inner], WHOLE) == FLOPS


MM, GELU, ADD = "aten.mm.default", "aten.gelu.default", "aten.add.Tensor"


def observed_block(**given: object) -> Block:
    sizes = {"n_calls": 1, "parameter_bytes": 0, "buffer_bytes": 0, "output_bytes": 0, "saved_bytes": 1}
    return Block(fqn="b", kind="B", **sizes, forward_flops=100, rerun_flops=50, **given)  # type: ignore[arg-type]


def cost(**operator_ms: float) -> MeasuredBlock:
    names = {"mm": MM, "gelu": GELU, "add": ADD}
    return MeasuredBlock(
        fqn="b", n_forward=1, n_recompute=0, saved_after_forward_bytes=0, at_peak_bytes=0, forward_flops=100,
        recompute_flops=0, backward_flops=0, forward=Samples(ms=(10.0,)),
        operator_ms={names[name]: ms for name, ms in operator_ms.items()},
    )  # fmt: skip


def test_early_stop_leaves_out_its_share_of_the_operators_not_of_the_flops() -> None:
    two_products = observed_block(op_flops={MM: 100}, late_op_flops={MM: 50})
    assert rerun_share(cost(mm=2, gelu=6), two_products) == pytest.approx(7 / 8)
    assert rerun_share(cost(mm=2, gelu=6), None) == 1
    assert rerun_share(cost(), two_products) == 0.5, "nobody timed the operators: by the FLOPs"


def test_operators_whose_results_are_kept_do_not_run_again() -> None:
    assert rerun_share(cost(mm=2, gelu=6, add=2), None, save_ops=(MM,)) == pytest.approx(0.8)
    one_late = observed_block(op_flops={MM: 100}, late_op_flops={MM: 50})
    assert rerun_share(cost(mm=2, gelu=6, add=2), one_late, save_ops=(MM,)) == pytest.approx(0.8), "kept: late or not"
    assert rerun_share(cost(), None, save_ops=(MM,)) is None, "nobody knows"


def with_operators(**operator_ms: float) -> Measurement:
    names = {"mm": MM, "gelu": GELU}
    run = with_costs(measured(), operator_ms={names[name]: ms for name, ms in operator_ms.items()}, n_operators=5)
    return msgspec.structs.replace(run, times=msgspec.structs.replace(run.times, kept_operator_ms=0.1))


def test_a_unit_is_its_blocks_and_says_nothing_where_one_is_not_known() -> None:
    run = with_operators(mm=3, gelu=1)
    ms = run.by_fqn["layers.0"].forward.median_ms
    assert ms
    segment = Unit(blocks=("layers.0", "layers.1"), action="save_ops", save_ops=(MM,))
    assert unit_ms(run, None, segment, (), Policy(units=(segment,))) == pytest.approx(2 * ms / 4)
    assert unit_ms(measured(), None, segment, (), Policy(units=(segment,))) is None
    unlooked = msgspec.structs.replace(run, times=measured().times)
    assert unit_ms(unlooked, None, segment, (), Policy(units=(segment,))) is None


def test_a_rerun_that_ends_where_a_unit_inside_is_entered_is_spared_what_that_one_keeps_as_well() -> None:
    """Counted: of three products in a row the last two, kept by a unit inside, run in no rerun, the first in one."""
    run = with_operators(mm=3, gelu=1)
    inner = msgspec.structs.replace(run.by_fqn["layers.1"], fqn="layers.1.inner", forward=Samples(ms=(0.1,)))
    run = msgspec.structs.replace(run, blocks=(*run.blocks, inner))
    outer, within = Unit(blocks=("layers.1",)), Unit(blocks=("layers.1.inner",))
    keeping = msgspec.structs.replace(within, action="save_ops", save_ops=(MM,))
    alone, plain, kept = (unit_ms(run, HALF, outer, inside, Policy()) for inside in ((), (within,), (keeping,)))
    assert alone and plain == kept == pytest.approx(alone - 0.1)


def test_each_unit_adds_its_own_forward_and_one_inside_runs_twice() -> None:
    run = measured()
    ratios = [
        Forecaster(run).forecast(Policy.recompute(blocks)).time_ratio
        for blocks in (["layers.0"], ["layers.0", "layers.1"], ["layers.0", "layers.0.inner"])
    ]
    one, two, nested = ratios
    assert one is not None and two is not None and nested is not None and one > 1
    assert two - 1 == pytest.approx(2 * (one - 1))
    own, inner = (run.by_fqn[fqn].forward.median_ms for fqn in ("layers.0", "layers.0.inner"))
    assert own and inner and nested - 1 == pytest.approx((one - 1) * (1 + inner / own))


def priced(policy: Policy, *, times: dict[str, object], blocks: dict[str, object] | None = None) -> Forecast:
    """The forecast from a run whose checkpoints cost `times`, the others nothing, and whose blocks are changed."""
    run = with_costs(measured(), **(blocks or {}))
    of_run = msgspec.structs.replace(run.times, **{"checkpoint_ms": 0.0, "saved_tensor_ms": 0.0, **times})
    return Forecaster(msgspec.structs.replace(run, times=of_run)).forecast(policy)


STEP_MS = RUN.times.step.median_ms
ONE = Policy.recompute(["layers.0"])


def calls_ms(*, times: dict[str, object], blocks: dict[str, object]) -> float:
    """Milliseconds of checkpoints themselves, measured alone, of one recomputed block."""
    calls = priced(ONE, times=times, blocks=blocks).time_ratio_of_calls
    assert calls is not None
    return calls * STEP_MS / AMONG_KERNELS


def test_a_checkpoint_takes_its_own_time_a_call_and_widens_the_interval() -> None:
    two = Policy.recompute(["layers.0", "layers.1"])
    without, dear = (priced(two, times={"checkpoint_ms": ms}) for ms in (0.0, 3.0))
    assert dear.time_ratio - without.time_ratio == pytest.approx(AMONG_KERNELS * 2 * 3.0 / STEP_MS)
    assert dear.time_ratio_spread > without.time_ratio_spread > 0
    assert without.time_ratio_of_calls == 0
    assert dear.time_ratio_of_calls == pytest.approx(dear.time_ratio - without.time_ratio)


def test_each_saved_tensor_takes_its_own_time_and_uncounted_ones_that_of_many() -> None:
    half = {"saved_tensor_ms": 0.5}
    assert calls_ms(times=half, blocks={"n_saved": 3}) == pytest.approx(1.5)
    assert calls_ms(times={}, blocks={"n_saved": 3}) == calls_ms(times=half, blocks={"n_saved": 0}) == 0
    assert calls_ms(times=half, blocks={"n_saved": None}) == pytest.approx(N_SAVED * 0.5)


def test_kept_operators_cost_a_look_at_every_operator_and_are_not_foretold_without_their_times() -> None:
    keeping = Policy(units=(Unit(blocks=("layers.0",), action="save_ops", save_ops=(MM,)),))
    assert Forecaster(measured()).forecast(keeping).time_ratio is None
    blocks = {"operator_ms": {MM: 1.0}, "n_operators": 7}
    free, dear = (priced(keeping, times={"kept_operator_ms": ms}, blocks=blocks).time_ratio for ms in (0.0, 0.5))
    assert free == 1, "the one operator is kept"
    assert dear - 1 == pytest.approx(AMONG_KERNELS * 7 * 0.5 / STEP_MS)


def test_calls_that_follow_each_other_closely_find_the_last_one_in_the_caches() -> None:
    times = {"forward": Samples(ms=(8.0,)), "checkpoint_ms": 3.0, "close_checkpoint_ms": 1.0}
    once, four, eight, many = (calls_ms(times=times, blocks={"n_forward": n}) / n for n in (1, 4, 8, 80))
    assert once == four == pytest.approx(3.0), "at least 2 ms of forward lie between"
    assert eight == pytest.approx(2.0), "half of what the caches hold is gone"
    assert 1.0 < many < 1.11


def test_a_baseline_without_times_foretells_none() -> None:
    whole = keep_all_from(measured(recompute=(0, 2)))
    assert whole is not None
    assert Forecaster(whole).forecast(Policy.recompute(["layers.0"])).time_ratio is None


FORETOLD = Forecast(time_ratio=1.2, time_ratio_spread=0.1)


def told(*seen: TimedStep, foretold: Forecast = FORETOLD) -> tuple[float, float]:
    one = calibrated(foretold, seen)
    assert one.time_ratio is not None and one.time_ratio_spread is not None
    return one.time_ratio, one.time_ratio_spread


def test_steps_that_took_twice_as_much_again_say_that_others_will() -> None:
    sure, shaky = (told(TimedStep(1.4, 1.8, error))[0] for error in (0.001, 0.5))
    assert 1.35 < sure <= 1.4 and 1.2 < shaky < 1.25
    assert told(*[TimedStep(1.4, 1.8, 0.02)] * 3)[1] < told(TimedStep(1.4, 1.8, 0.02))[1], (
        "three runs draw it in further"
    )


def test_a_step_that_came_true_leaves_the_interval_of_what_policies_and_models_differ_by() -> None:
    """1.64 standard errors of a fifth of hypot(0.1, 1 / sqrt(1 / 0.1² + 1 / 0.25²))."""
    assert told(TimedStep(1.5, 1.5, 0.0)) == (pytest.approx(1.2), pytest.approx(0.044758, rel=1e-4))


def test_what_says_nothing_moves_nothing() -> None:
    assert told() == told(TimedStep(1.0, 1.1, 0.01)) == (1.2, 0.1)
    assert calibrated(Forecast(), [TimedStep(1.4, 1.8, 0.01)]) == Forecast()


def test_many_small_units_are_less_known_by_a_step_of_few_large_ones() -> None:
    """Experts: 24 calls where the step that was seen had 6. The same share of calls says as much as none on both."""
    few, many = (msgspec.structs.replace(FORETOLD, time_ratio_of_calls=calls) for calls in (0.01, 0.08))
    large, small = TimedStep(1.4, 1.4, 0.01, calls=0.02), TimedStep(1.4, 1.4, 0.01, calls=0.16)
    assert told(large, foretold=few)[0] == told(large, foretold=many)[0], "the middle stays"
    assert told(large, foretold=many)[1] > 1.5 * told(large, foretold=few)[1]
    assert told(small, foretold=many) == told(large, foretold=few) == told(TimedStep(1.4, 1.4, 0.01))


def test_steps_that_lie_apart_say_that_others_will() -> None:
    alike = told(TimedStep(1.4, 1.6, 0.01), TimedStep(1.2, 1.3, 0.01))
    apart = told(TimedStep(1.4, 1.8, 0.01), TimedStep(1.2, 1.2, 0.01))
    assert apart[1] > 1.5 * alike[1]


SEEN = st.builds(TimedStep, st.floats(1.01, 3), st.floats(0.9, 4), st.floats(0, 0.3), st.floats(0, 1))


@given(st.lists(SEEN, min_size=1, max_size=4))
def test_no_policy_is_foretold_to_be_faster_than_keeping_everything(seen: list[TimedStep]) -> None:
    ratio, spread = told(*seen)
    assert ratio >= 1 and spread > 0


GRAPH = graphs.gpt(3)


def timed(**ms: float) -> Measurement:
    """With these forward times by the last part of a block's name, twice as long in its operators."""
    run = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    blocks = tuple(
        msgspec.structs.replace(one, forward=Samples(ms=(ms[name],)), operator_ms={MM: 2 * ms[name]})
        if (name := one.fqn.replace("blocks.", "b")) in ms
        else one
        for one in run.blocks
    )
    return msgspec.structs.replace(run, blocks=blocks)


def test_kin_are_the_same_place_in_repeated_blocks() -> None:
    assert kin_of(GRAPH, "blocks.2.attention") == kin_of(GRAPH, "blocks.0.attention")
    assert len({kin_of(GRAPH, fqn) for fqn in ("blocks.1", "blocks.1.attention", "blocks.1.mlp", "norm", "head")}) == 5


def test_kin_take_the_mean_and_others_keep_their_own() -> None:
    before = timed(b0=3, b1=5, b2=1, norm=7)
    after = with_equal_times(before, GRAPH)
    assert [after.by_fqn[f"blocks.{i}"].forward.median_ms for i in range(3)] == [3, 3, 3]
    assert [after.by_fqn[f"blocks.{i}"].operator_ms for i in range(3)] == [{MM: 6}] * 3
    assert after.by_fqn["norm"] == before.by_fqn["norm"] and after.by_fqn[""] == before.by_fqn[""]
    assert after.blocks[0].fqn == before.blocks[0].fqn and len(after.blocks) == len(before.blocks)


def test_a_forecast_takes_equal_blocks_for_equal() -> None:
    run = timed(b0=3, b1=5, b2=1)
    ratios = [Forecaster(run, GRAPH).forecast(Policy.recompute([f"blocks.{i}"])).time_ratio for i in range(3)]
    assert ratios[0] is not None and ratios == [pytest.approx(ratios[0])] * 3
    alone = [Forecaster(run).forecast(Policy.recompute([f"blocks.{i}"])).time_ratio for i in range(3)]
    assert len(set(alone)) == 3, "without the graph nobody knows which are equal"
