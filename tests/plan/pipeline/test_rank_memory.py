"""Memory of a rank, action by action, as a pencil gets it."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.pipeline.clock import forecast
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.record.pipeline_cost import SplitCost
from explorer.record.run import PipelinePlan
from tests.plan.pipeline.stage_cost import cost


def test_memory_of_one_stage_by_hand() -> None:
    plan = PipelinePlan(stages=(("x",),), n_microbatches=2, schedule="GPipe", checkpoint="never")
    (memory,) = forecast(plan, (cost(0),)).memory
    # 7 parameters; F0 +100, F1 +100; B0 from 207 up by 30; then 7 gradients more and 100 less.
    assert list(memory.held_bytes) == [7, 117, 107, 217, 207, 237, 114, 134, 14]
    assert (memory.peak_bytes, memory.peak_action) == (237, "0B0")


def test_memory_of_a_split_backward_by_hand() -> None:
    """Two stages of one rank: what the second sends stays in the rank, and takes the place of a buffer."""
    split = SplitCost(input_ms=1.0, weight_ms=3.0, weight_recompute_ms=2.0, input_extra_bytes=40, owed_bytes=15,
                      weight_extra_bytes=60, first_weight_extra_bytes=80)  # fmt: skip
    first, second = cost(0, gradient_receive_bytes=5), cost(1, receive_bytes=5)
    again = msgspec.structs.replace(second.recomputed, sent_gradient_bytes=6, split=split)
    none = SplitCost(input_ms=0.0, weight_ms=2.0, weight_extra_bytes=20, first_weight_extra_bytes=30)
    costs = (
        msgspec.structs.replace(first, recomputed=msgspec.structs.replace(first.recomputed, split=none)),
        msgspec.structs.replace(second, recomputed=again),
    )
    rows = (("0F0", "1F0", "1I0", "0I0", "1W0", "0W0"),)
    plan = PipelinePlan(stages=(("x",), ("y",)), n_microbatches=1, schedule="ZBVZeroBubble", actions=rows)
    played = forecast(plan, costs)
    (memory,) = played.memory
    # 14 parameters, 10 buffers. 0F0 +10 -5, 1F0 +10. 1I0 owes 15 and sends 6 for a buffer of 5. 0I0 nothing.
    # 1W0 -10 -15 and 7 gradients. 0W0 -10, 7 gradients, and its output stays with whoever received it: 5.
    after = [24, 29, 39, 55, 55, 37, 39]
    high = [24 + 110, 29 + 110, 39 + 40, 55, 55 + 80, 37 + 30]
    assert list(memory.held_bytes) == [after[0], *(held for pair in zip(high, after[1:]) for held in pair)]
    by_name = {time.name: (time.duration_ms, time.recompute_ms) for time in played.actions}
    assert (by_name["1I0"], by_name["0I0"], by_name["1W0"]) == ((1.0, 0.0), (0.0, 0.0), (3.0, 2.0))


def test_what_passes_through_a_stage_is_held_once() -> None:
    """Stage 1 of three ranks receives 5 and sends 5, of which 2 are the very bytes it received."""
    ends = []
    for passed in (0, 2):
        middle = msgspec.structs.replace(cost(1, receive_bytes=5, gradient_receive_bytes=5), passed_bytes=passed)
        costs = (cost(0, gradient_receive_bytes=5), middle, cost(2, receive_bytes=5))
        for kinds in ("B", "IW"):
            rows = tuple(tuple(f"{j}{kind}0" for kind in f"F{kinds}") for j in range(3))
            plan = PipelinePlan(stages=(("x",),) * 3, n_microbatches=1, checkpoint="never", actions=rows)
            ends.append(forecast(plan, costs).memory[1].held_bytes[-1])
    whole, split, whole_passed, split_passed = ends
    assert whole == split == 14 + 10 + 5 + 5  # parameters and gradients, buffers, output and gradient sent
    assert whole - whole_passed == 2  # the output; the gradient of what passes is a copy
    assert split - split_passed == 4  # the output, and I sends on the very gradient that came


def test_except_last_keeps_the_last_microbatch_only() -> None:
    plan = PipelinePlan(stages=(("x",),), n_microbatches=3, schedule="GPipe", checkpoint="except_last")
    played = forecast(plan, (cost(0),))
    by_name = {time.name: time.duration_ms for time in played.actions}
    assert [by_name[f"0B{i}"] for i in range(3)] == [3.0, 3.0, 2.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_with_parameters_buffers_gradients_and_held_sends(schedule: str) -> None:
    n_stages = 2 if schedule in ("GPipe", "1F1B") else 4
    stages = tuple(
        cost(j, receive_bytes=5 if j else 0, gradient_receive_bytes=5 if j < n_stages - 1 else 0)
        for j in range(n_stages)
    )
    plan = PipelinePlan(stages=(("x",),) * n_stages, n_microbatches=4, schedule=schedule)
    for memory in forecast(plan, stages).memory:
        rest = memory.held_bytes[-1] - memory.parameter_bytes * 2 - memory.receive_bytes
        assert rest >= 0
        assert rest % 5 == 0  # whole boundary tensors, whose sends torch has not let go
        assert rest <= 5 * 4 * 4
