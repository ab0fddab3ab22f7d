"""The cells of a moment add up by role and by block to the same bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.record.allocations import ROLES, Ledger, LedgerCell

CELLS = st.builds(
    LedgerCell,
    role=st.sampled_from(ROLES),
    block=st.sampled_from(["", "a", "b"]),
    n_bytes=st.integers(1, 99),
    n_allocations=st.just(1),
    largest_op=st.just(""),
)


@given(st.lists(CELLS, max_size=8))
def test_both_ways_add_up(cells: list[LedgerCell]) -> None:
    ledger = Ledger(
        tick=1, phase=None, phase_block="", phase_share=None, at_block="", is_peak=False, cells=tuple(cells)
    )
    total = sum(cell.n_bytes for cell in cells)
    assert ledger.total_bytes == sum(ledger.by_role.values()) == sum(ledger.by_block.values()) == total
    assert tuple(ledger.by_role) == ROLES
    assert list(ledger.by_block.values()) == sorted(ledger.by_block.values(), reverse=True)
    assert set(ledger.by_block) == {cell.block for cell in cells}
