"""Time that units take to run again is their own forward's, on the scale of the whole steps."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.forecast.keep_all import keep_all_from
from explorer.plan.forecast.rerun_time import AMONG_KERNELS, N_SAVED, SWEPT_IN_MS
from explorer.record import Policy
from explorer.record.measurement import Samples
from explorer.record.plan import Forecast
from explorer.record.policy import Unit
from tests.view.builders import measured


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


def test_a_checkpoint_takes_its_own_time_a_call_and_widens_the_interval() -> None:
    run, policy = measured(), Policy.recompute(["layers.0", "layers.1"])
    assert run.times is not None and run.times.step.median_ms is not None

    def foretold(checkpoint_ms: float) -> Forecast:
        times = msgspec.structs.replace(run.times, checkpoint_ms=checkpoint_ms, saved_tensor_ms=0.0)
        return Forecaster(msgspec.structs.replace(run, times=times)).forecast(policy)

    without, dear = foretold(0.0), foretold(3.0)
    assert without.time_ratio and dear.time_ratio and without.time_ratio_spread and dear.time_ratio_spread
    assert dear.time_ratio - without.time_ratio == pytest.approx(AMONG_KERNELS * 2 * 3.0 / run.times.step.median_ms)
    assert dear.time_ratio_spread > without.time_ratio_spread > 0
    assert without.time_ratio_of_calls == 0
    assert dear.time_ratio_of_calls == pytest.approx(dear.time_ratio - without.time_ratio)


def test_each_saved_tensor_takes_its_own_time_and_uncounted_ones_that_of_many() -> None:
    run, policy = measured(), Policy.recompute(["layers.0"])
    assert run.times is not None and run.times.step.median_ms is not None

    def foretold(n_saved: int | None, saved_tensor_ms: float) -> float:
        times = msgspec.structs.replace(run.times, checkpoint_ms=0.0, saved_tensor_ms=saved_tensor_ms)
        blocks = tuple(msgspec.structs.replace(one, n_saved=n_saved) for one in run.blocks)
        calls = (
            Forecaster(msgspec.structs.replace(run, times=times, blocks=blocks)).forecast(policy).time_ratio_of_calls
        )
        assert calls is not None
        return calls * run.times.step.median_ms

    assert foretold(3, 0.5) == pytest.approx(AMONG_KERNELS * 1.5) and foretold(3, 0.0) == foretold(0, 0.5) == 0
    assert foretold(None, 0.5) == pytest.approx(AMONG_KERNELS * N_SAVED * 0.5)


def test_kept_operators_cost_a_look_at_every_operator_and_are_not_foretold_without_their_times() -> None:
    run = measured()
    keeping = Policy(units=(Unit(blocks=("layers.0",), action="save_ops", save_ops=("aten.mm.default",)),))
    assert run.times is not None and run.times.step.median_ms is not None
    assert Forecaster(run).forecast(keeping).time_ratio is None

    def foretold(kept_operator_ms: float) -> float:
        times = msgspec.structs.replace(
            run.times, checkpoint_ms=0.0, saved_tensor_ms=0.0, kept_operator_ms=kept_operator_ms
        )
        blocks = tuple(
            msgspec.structs.replace(one, operator_ms={"aten.mm.default": 1.0}, n_operators=7) for one in run.blocks
        )
        ratio = Forecaster(msgspec.structs.replace(run, times=times, blocks=blocks)).forecast(keeping).time_ratio
        assert ratio is not None
        return ratio

    assert foretold(0.0) == 1, "the one operator is kept"
    assert foretold(0.5) - 1 == pytest.approx(AMONG_KERNELS * 7 * 0.5 / run.times.step.median_ms)


def test_a_baseline_without_times_foretells_none() -> None:
    whole = keep_all_from(measured(recompute=(0, 2)))
    assert whole is not None
    assert Forecaster(whole).forecast(Policy.recompute(["layers.0"])).time_ratio is None


def test_calls_that_follow_each_other_closely_find_the_last_one_in_the_caches() -> None:
    run, policy = measured(), Policy.recompute(["layers.0"])
    assert run.times is not None and run.times.step.median_ms is not None

    def foretold(n_calls: int) -> float:
        times = msgspec.structs.replace(
            run.times,
            forward=Samples(ms=(4 * SWEPT_IN_MS,)), checkpoint_ms=3.0, close_checkpoint_ms=1.0, saved_tensor_ms=0.0,
        )  # fmt: skip
        blocks = tuple(msgspec.structs.replace(one, n_forward=n_calls) for one in run.blocks)
        calls = (
            Forecaster(msgspec.structs.replace(run, times=times, blocks=blocks)).forecast(policy).time_ratio_of_calls
        )
        assert calls is not None
        return calls * run.times.step.median_ms / AMONG_KERNELS / n_calls

    assert foretold(1) == foretold(4) == pytest.approx(3.0), "a forward of four sweeps lies between"
    assert foretold(8) == pytest.approx(2.0), "half of what the caches hold is gone"
    assert 1.0 < foretold(80) < 1.11
