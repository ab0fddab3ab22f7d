"""How long forward's code holds what its calls make, followed with a pencil."""

from __future__ import annotations

import numpy as np

from explorer.plan.forecast.python_holds import NEVER, Call, let_go

# tick 1: x, outside of blocks. outer runs from tick 1 to 9 and calls one (ticks 2 to 5) and two (ticks 6 to 8).
#   one makes h at 3 and returns y, made at 4; two is given y, makes z at 7 and returns it; outer returns z.
X, H, Y, Z = range(4)
BORN = np.array([1, 3, 4, 7], dtype=np.int64)
CALLS = {
    "outer": [Call(first=1, end=9, inputs=(X,), outputs=(Z,))],
    "outer.one": [Call(first=2, end=5, inputs=(X,), outputs=(Y,))],
    "outer.two": [Call(first=5, end=8, inputs=(Y,), outputs=(Z,))],
}
USED = {X: 9, Y: 8}


def test_what_is_made_is_gone_with_its_call_and_what_is_returned_with_the_call_around() -> None:
    x, h, y, z = let_go(CALLS, USED, BORN, ()).tolist()
    assert x == NEVER, "made outside of blocks"
    assert (h, y) == (5 + 1, 9 + 1)
    assert z == NEVER, "outer returns it to nobody that is known"


def test_in_a_chain_an_output_is_gone_when_the_block_that_alone_is_given_it_returns() -> None:
    assert let_go(CALLS, USED, BORN, ("outer.one",)).tolist() == [NEVER, 6, 8 + 1, NEVER]


def test_an_output_that_nobody_is_given_stays_to_the_end_of_the_call_around() -> None:
    assert let_go(CALLS, {}, BORN, ("outer.one",))[Y] == 9 + 1
