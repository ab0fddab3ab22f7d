"""The baseline put together from a run with recompute is the baseline: on the textbook chain, entry by entry."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.forecast.keep_all import keep_all_from
from explorer.plan.forecast.unforeseen import no_baseline
from explorer.plan.memory.ledger import held
from explorer.plan.why.caveats import not_foretold
from explorer.record import KEEP_ALL, Failure, Measurement, Policy, Unit
from explorer.record.plan import Forecast
from explorer.record.sound import unsound
from tests.view.builders import Chain, chains, measured


def under(run: Measurement, policy: Policy) -> Measurement:
    return msgspec.structs.replace(run, spec=msgspec.structs.replace(run.spec, policy=policy))


@settings(max_examples=60, deadline=None)
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
    assert not_foretold(policy, None, Forecast(), broken["reentrant"]) == reasons["reentrant"] != ""
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
    assert "made other tensors than its forward" in not_foretold(
        policy, None, Forecaster(other).forecast(policy), other
    )
    assert not_foretold(policy, None, Forecaster(run).forecast(policy), run) == ""


def test_a_run_that_was_cut_short_is_no_baseline() -> None:
    """A baseline that runs out of memory has a timeline up to there: nothing may be foreseen from it."""
    cut = msgspec.structs.replace(measured(), failure=Failure(kind="out of memory", sentence="It was refused."))
    assert keep_all_from(cut) is None
    assert Forecaster(cut).forecast(Policy.recompute(["layers.0"])) == Forecast()
