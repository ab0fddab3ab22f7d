"""Kept results of operators on a timeline that a pencil can follow."""

from __future__ import annotations

import pytest

from explorer.plan.forecast.actions import results_of_views
from explorer.plan.forecast.forecast import Forecaster
from explorer.record import ModelGraph, Policy, Unit
from explorer.record.plan import Forecast
from tests.graphs import block as graph_block
from tests.plan.forecast.two_blocks import two_blocks
from tests.plan.why.test_peak import graph
from tests.view.builders import MIB, measured


def told(units: list[Unit]) -> Forecast:
    return Forecaster(two_blocks()).forecast(Policy(units=tuple(units), preserve_rng_state=False))


def keeping(*ops: str) -> list[Unit]:
    return [Unit(blocks=(name,), action="save_ops", save_ops=ops) for name in "ab"]


ALL = [Unit(blocks=("a",)), Unit(blocks=("b",))]
KEPT = 1 + 2 * (8 + 2 + 1)


def test_results_that_backward_needs_stay_and_the_rest_comes_back() -> None:
    """Of each block 2 MiB (s) leave instead of 10."""
    assert told(ALL).saved_after_forward_bytes == (KEPT - 20) * MIB
    foretold = told(keeping("aten.mm.default"))
    assert foretold.saved_after_forward_bytes == (KEPT - 4) * MIB
    assert foretold.freed_bytes == {"a": 2 * MIB, "b": 2 * MIB}


def test_results_that_nobody_needs_stay_as_well() -> None:
    """t was gone when its block returned; now it waits for the rerun, which it was kept for."""
    foretold = told(keeping("aten.sin.default"))
    assert foretold.saved_after_forward_bytes == (KEPT - 20 + 8) * MIB
    assert foretold.freed_bytes == {"a": 6 * MIB, "b": 6 * MIB}


def test_a_rerun_makes_nothing_of_what_was_kept() -> None:
    """The peak is b running again with the gradient there: without h, 1 + 1 + 1 + 1 kept and 8 + 4 + 2 made again."""
    plain = told(ALL)
    assert plain.step_peak_bytes == (1 + 1 + 1 + 8 + 4 + 2) * MIB
    # Everything of both blocks is there from forward on, t included, when the first gradient comes on top.
    kept = keeping("aten.mm.default", "aten.sin.default", "aten.exp.default")
    assert told(kept).step_peak_bytes == (1 + 2 * 15 + 1) * MIB
    # h and s of both, x and y, y of b or its gradient; of b the 4 MiB of t come once more.
    assert told(keeping("aten.mm.default", "aten.exp.default")).step_peak_bytes == (KEPT + 4) * MIB


def test_an_operator_that_never_ran_changes_nothing_and_a_view_is_not_foretold() -> None:
    assert told(keeping("aten.bmm.default")).step_peak_bytes == told(ALL).step_peak_bytes
    assert told(keeping("aten.view.default")).step_peak_bytes is None
    assert results_of_views(("aten.view.default", "aten.mm.default")) == ("aten.view.default",)


def test_flops_of_kept_results_are_not_spent_again() -> None:
    """Half of the block's FLOPs are mm, of which half lie behind the last saved tensor."""
    known = graph_block(
        "layers.0", "B", forward_flops=100, rerun_flops=75, op_flops={"aten.mm.default": 50, "aten.bmm.default": 50},
        late_op_flops={"aten.mm.default": 25},
    )  # fmt: skip
    of = ModelGraph(model=graph().model, blocks=(known,), edges=())
    share = 1 / 18

    def ratio(*ops: str, of: ModelGraph | None = of, **options: bool) -> float | None:
        unit = Unit(blocks=("layers.0",), action="save_ops", save_ops=ops)
        return Forecaster(measured(), of).forecast(Policy(units=(unit,), **options)).flop_ratio

    assert ratio("aten.mm.default") == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.mm.default", early_stop=False) == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.bmm.default") == pytest.approx(1 + 0.25 * share)
    assert ratio("aten.mm.default", of=None) is None
