"""No plan under a cap has a quicker step than the bound says, whatever its cuts and its policy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.plan.pipeline.cuts import atoms
from explorer.plan.pipeline.schedules import rows_of
from explorer.plan.pipeline.stage_costs import predict
from explorer.plan.planners.pipeline_bound import least_step_ms
from explorer.record import Policy
from explorer.record.run import PipelinePlan
from tests.plan.planners.test_joint import GRAPH, drawn

GROUPS = atoms(GRAPH)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("seed", range(3))
def test_every_cut_with_everything_kept_or_recomputed_takes_as_long(seed: int, schedule: str) -> None:
    profile = drawn(seed)
    shape = PipelinePlan(stages=((), ()), n_microbatches=2, schedule=schedule)
    bound = least_step_ms(profile, shape, rows_of(shape), [True] * len(GROUPS), 2**60)
    assert bound > 0
    for border in range(1, len(GROUPS)):
        parts = (GROUPS[:border], GROUPS[border:])
        plan = replace(shape, stages=tuple(tuple(fqn for group in part for fqn in group) for part in parts))
        for policy in (Policy(), Policy.recompute([fqn for group in GROUPS for fqn in group])):
            assert predict(profile, plan, policy).makespan_ms >= bound * (1 - 1e-9)


def test_a_tighter_cap_never_lowers_it_and_below_the_parameters_there_is_none() -> None:
    profile = drawn(1)
    shape = PipelinePlan(stages=((), ()), n_microbatches=2, schedule="1F1B")
    caps = [2**20 * n for n in (10_000, 60, 40, 20, 1)]
    bounds = [least_step_ms(profile, shape, rows_of(shape), [True] * len(GROUPS), cap) for cap in caps]
    assert bounds == sorted(bounds) and bounds[-1] == float("inf")
