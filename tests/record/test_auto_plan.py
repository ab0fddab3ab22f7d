"""Whether a plan was kept is what the measured peak says, not the predicted one; a miss is said first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.record.plan import AutoPlan
from tests.record.test_plan import PLAN


@pytest.mark.parametrize(
    ("budget", "measured", "kept"), [(100, 100, True), (100, 101, False), (100, None, False), (None, 10**12, True)]
)
def test_kept_is_measured(budget: int | None, measured: int | None, kept: bool) -> None:
    auto = AutoPlan(plan=replace(PLAN, budget_bytes=budget), measured_peak_bytes=measured, n_steps=3)
    assert auto.kept == kept
    first = str(auto).splitlines()[0]
    if kept:
        assert auto.require() is auto and "budget" not in str(auto)
    else:
        assert "budget of 100 bytes" in first and ("no peak" in first if measured is None else "101, 1 more" in first)
        with pytest.raises(BadInput, match="budget of 100 bytes"):
            auto.require()
    assert (auto.policy, auto.certificate) == (PLAN.policy, PLAN.certificate)
    assert (auto.predicted_peak_bytes, auto.predicted_time_ratio) == (80, 1.25)
