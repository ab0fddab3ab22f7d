"""What is known to go wrong, in words for strip, Run and download."""

from __future__ import annotations

from explorer.record import Hazard
from explorer.view.compare.headline import danger, doubt, errors, in_file


def test_what_goes_wrong_is_said_where_a_policy_is_run_or_taken_away() -> None:
    wrong = Hazard(rule="r", severity="error", blocks=("a",), sentence="It draws\nother numbers in *a*.", remedy="Do.")
    note = Hazard(rule="s", severity="note", blocks=("a",), sentence="By the way.", remedy="Nothing.")
    assert errors((note, wrong)) == (wrong,)
    assert danger((wrong, wrong, note)).endswith("Do. 1 more error in the tab Gradients.")
    assert danger((note,)) == in_file((note,)) == ""
    assert in_file((wrong,)).splitlines()[2] == "#   It draws other numbers in *a*. Do."
    assert "different" in doubt("different") and doubt("rounding") == doubt(None) == ""
