"""Blocks that ran again without an order are named, the outermost alone."""

from __future__ import annotations

import msgspec

from explorer.plan.why.caveats import in_words, own_reruns, reruns_beside
from explorer.record.measurement import MeasuredBlock
from explorer.record.policy import Policy
from tests.view.builders import measured

RUN = measured(recompute=[0, 1])
UNORDERED = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy()))


def cost(fqn: str, n_forward: int, n_recompute: int) -> MeasuredBlock:
    return msgspec.structs.replace(RUN.blocks[0], fqn=fqn, n_forward=n_forward, n_recompute=n_recompute)


def test_what_a_policy_ordered_is_no_news() -> None:
    assert own_reruns(RUN) == {"layers": 1.0}, "the list around them was ordered by nobody"
    ordered = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy.recompute(["layers"])))
    assert own_reruns(ordered) == {} and in_words(ordered) == ""


def test_the_outermost_is_named_with_how_often_it_ran_again() -> None:
    costs = [cost("a", 2, 4), cost("a.b", 2, 4), cost("c", 1, 0)]
    assert reruns_beside(costs, ()) == {"a": 2.0}
    assert reruns_beside(costs, ("a",)) == {}


def test_a_block_whose_hooks_stayed_silent_ran_again_where_all_inside_did() -> None:
    assert reruns_beside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 2)], ()) == {"a": 1.0}
    assert reruns_beside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 0)], ()) == {"a.b": 1.0}


def test_it_is_said_in_one_clause() -> None:
    assert in_words(UNORDERED) == "layers ran again ×1, by the model itself"
