"""Greedy takes the fewest of its order."""

from __future__ import annotations

from explorer.record import Policy
from tests.plan.arena.situations import choice, situation


def test_greedy_takes_the_fewest_of_its_order() -> None:
    case = situation("gpt")
    policy = choice("greedy", "gpt", 0.8)
    assert policy is not None and policy.units
    order = sorted(case.units, key=lambda unit: case.saved_bytes(unit) / case.forward_ms(unit), reverse=True)
    taken = {unit.blocks for unit in policy.units}
    assert taken == set(order[: len(taken)])
    less = Policy.recompute(unit[0] for unit in order[: len(taken) - 1])
    assert (case.peak_of(less) or 0) > 0.8 * case.keep_all_bytes
