"""What is foreseen of a peak is what a run finds there: when it is, who holds it, to the byte."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.measure.measure import measure
from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.memory.ledger import in_place, ledger
from explorer.record import Measurement, Policy, RunSpec
from tests.engine.tiny_nets import ref
from tests.view.builders import Chain, measured


@settings(max_examples=30, deadline=None)
@given(st.builds(Chain, n_blocks=st.integers(1, 5), scratch=st.integers(0, 2**22)), st.sets(st.integers(0, 4)))
def test_the_cells_add_up_to_the_foreseen_peak(chain: Chain, taken: set[int]) -> None:
    forecaster = Forecaster(measured(chain))
    policy = Policy.recompute([f"layers.{i}" for i in sorted(taken) if i < chain.n_blocks])
    at = forecaster.at_peak(policy)
    assert at is not None and at.total_bytes == forecaster.forecast(policy).step_peak_bytes
    assert at.phase != "recompute" or at.phase_block in policy.blocks


@pytest.fixture(scope="module")
def kept() -> Measurement:
    return measure(RunSpec(model=ref("gpt", depth=2, batch=16), n_repeats=0))


@pytest.mark.parametrize("blocks", [["blocks.0", "blocks.1"], ["blocks.0.mlp"]])
def test_a_run_holds_its_peak_where_it_was_foreseen(kept: Measurement, blocks: list[str]) -> None:
    policy = Policy.recompute(blocks)
    at = Forecaster(kept).at_peak(policy)
    real = ledger(measure(msgspec.structs.replace(kept.spec, policy=policy)))
    assert at is not None and in_place(at) == in_place(real)
    fixed = ("parameter", "optimizer state", "gradient", "input")
    assert {role: at.by_role[role] for role in fixed} == {role: real.by_role[role] for role in fixed}
