"""A price is what a real toggle costs: checked against the textbook chain, run with the toggle."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.forecast.price import prices
from explorer.record import Allocations, Calls, Measurement, Policy
from tests.view.builders import MIB, Chain, chains, measured


@settings(max_examples=60, deadline=None)
@given(chains, st.data())
def test_the_predicted_peak_is_that_of_the_toggled_run(chain: Chain, data: st.DataObject) -> None:
    """Up to one block output and one gradient: those live across the moment at which a block's backward begins."""
    chosen = data.draw(st.sets(st.integers(0, chain.n_blocks - 1)))
    run = measured(chain, chosen)
    for price in prices(run, [f"layers.{i}" for i in range(chain.n_blocks)]):
        i = int(price.blocks[0].removeprefix("layers."))
        real = measured(chain, chosen ^ {i}).step_peak_bytes
        assert price.toggle == ("keep" if i in chosen else "recompute")
        assert abs(price.peak_bytes - real) <= 2 * chain.output + chain.parameters
        assert price.peak_change_bytes == price.peak_bytes - run.step_peak_bytes


def test_a_block_at_the_peak_frees_its_saved_bytes_exactly() -> None:
    run = measured()
    (price,) = prices(run, ["layers.1"])
    assert price.peak_bytes == measured(recompute=[1]).step_peak_bytes
    assert price.peak_change_bytes == -14 * MIB
    assert price.share_of_step_flops == pytest.approx(1 / 18)
    assert price.mib_per_percent == pytest.approx(14 / (100 / 18))


def test_the_last_block_buys_nothing() -> None:
    (price,) = prices(measured(), ["layers.5"])
    assert price.peak_change_bytes == 0
    assert price.mib_per_percent == 0


def test_keeping_a_recomputed_block_gives_the_bytes_back() -> None:
    run = measured(recompute=range(6))
    by_block = {price.blocks[0]: price for price in prices(run, ())}
    for i in range(6):
        assert by_block[f"layers.{i}"].peak_bytes == measured(recompute=set(range(6)) - {i}).step_peak_bytes
    assert by_block["layers.5"].peak_change_bytes == 0


def test_blocks_inside_a_unit_have_no_price_of_their_own() -> None:
    run = measured(recompute=[2])
    priced = {price.blocks[0] for price in prices(run)}
    assert "layers.2" in priced and "layers.2.inner" not in priced and "layers" not in priced
    assert {"layers.1", "layers.1.inner"} <= priced


def test_a_peak_in_the_optimizer_cannot_be_bought() -> None:
    run = measured(Chain(parameters=60 * MIB))
    assert run.peak_phase == "optimizer"
    assert all(price.peak_change_bytes == 0 for price in prices(run))


def test_a_segment_is_one_price() -> None:
    run = measured(recompute=[1])
    segment = msgspec.structs.replace(run.spec, policy=Policy.recompute([("layers.1", "layers.2")]))
    (price,) = prices(msgspec.structs.replace(run, spec=segment), ())
    assert price.blocks == ("layers.1", "layers.2")


def test_a_shared_block_is_priced_call_by_call() -> None:
    """Three calls of one block: each call's bytes are away between its own forward and its own backward."""
    run = measured(Chain(n_blocks=3))
    log = run.allocations
    shared = msgspec.structs.replace(log, blocks=tuple(re.sub(r"layers\.\d", "cell", fqn) for fqn in log.blocks))
    cost = msgspec.structs.replace(run.by_fqn["layers.0"], fqn="cell", n_forward=3)
    (price,) = prices(msgspec.structs.replace(run, allocations=shared, blocks=(run.by_fqn[""], cost)))
    all_three = measured(Chain(n_blocks=3), range(3))
    assert abs(price.peak_bytes - all_three.step_peak_bytes) <= MIB
    assert price.peak_change_bytes == -23 * MIB


def without_calls(run: Measurement) -> Allocations:
    """As a run file from before calls were recorded."""
    assert run.allocations is not None
    return msgspec.structs.replace(run.allocations, calls=Calls())


def test_without_a_timeline_there_is_no_price() -> None:
    assert prices(msgspec.structs.replace(measured(), allocations=None)) == ()
    assert prices(msgspec.structs.replace(measured(), phases=())) == ()
    assert prices(msgspec.structs.replace(measured(), allocations=without_calls(measured()))) == ()
