"""What each way of wrapping keeps."""

from __future__ import annotations

from explorer.lab.wrap_in_place import QUESTIONS
from tests.lab.running import run


def test_only_the_in_place_way_keeps_everything() -> None:
    outcome = run("wrap-in-place", printed="wrapper")
    kept = {row.label: [row.value(question) for question in QUESTIONS] for row in outcome.rows[1:]}
    assert kept["forward replaced in place"] == [1, 1, 1, 1]
    assert kept["wrapper module"] == [0, 0, 0, 1]
    assert kept["closure over forward"] == [1, 1, 1, 0]
    assert "inner" in outcome.printed and {row.outcome for row in outcome.rows[1:]} == {"bitwise equal"}
