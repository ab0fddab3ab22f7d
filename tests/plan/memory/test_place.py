"""A moment of a step in words: where it lies, and who holds most there."""

from __future__ import annotations

import pytest

from explorer.plan.memory.ledger import holders, in_place, place
from explorer.record.allocations import Ledger, LedgerCell, Phase, Role
from tests.view.builders import MIB


def at(phase: Phase | None, share: float | None = 0.5, *cells: tuple[Role, str, int], block: str = "head") -> Ledger:
    rows = tuple(
        LedgerCell(role=role, block=fqn, n_bytes=size * MIB, n_allocations=1, largest_op="")
        for role, fqn, size in cells
    )
    again = "layers.0" if phase == "recompute" else ""
    return Ledger(
        tick=1, phase=phase, phase_block=again, phase_share=share, at_block=block, is_peak=True, cells=rows
    )  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (at("forward", 0.95), "at the end of forward in head"),
        (at("forward", 0.05), "at the start of forward in head"),
        (at("backward", 0.5, block=""), "in the middle of backward"),
        (at("recompute"), "in the recompute of layers.0"),
        (at("optimizer"), "in the optimizer step"),
        (at("between"), "in the loop's own code between the phases"),
        (at(None, None), "in the time before the step"),
    ],
)
def test_where_a_moment_lies(moment: Ledger, words: str) -> None:
    assert in_place(moment) == words and words.endswith(place(moment))


def test_the_roles_that_hold_most_and_the_block_of_each() -> None:
    moment = at(
        "forward", 0.5, ("saved activation", "layers.0", 6), ("gradient", "head", 5),
        ("saved activation", "layers.1", 3), ("input", "", 2), ("parameter", "head", 1),
    )  # fmt: skip
    assert holders(moment) == "saved activation 9.0 MiB (most in layers.0), gradient 5.0 MiB (in head), input 2.0 MiB"
    assert holders(moment, 1) == "saved activation 9.0 MiB (most in layers.0)"
