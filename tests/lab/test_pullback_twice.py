"""Two backward calls through one forward."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes, run


@pytest.mark.parametrize("dropout", ["yes", "no"])
def test_second_pullback_is_equal_if_the_graph_was_kept(dropout: str) -> None:
    kept = outcomes("pullback-twice", retain_graph="yes", dropout=dropout)
    assert {kept[f"{engine}, second call"] for engine in ("keep", "non-reentrant", "reentrant")} == {"bitwise equal"}
    dropped = outcomes("pullback-twice", retain_graph="no", dropout=dropout)
    assert {dropped[f"{engine}, second call"] for engine in ("keep", "non-reentrant", "reentrant")} == {"raised"}


def test_each_pullback_of_a_recomputed_block_runs_it_again() -> None:
    outcome = run("pullback-twice", retain_graph="yes", dropout="yes")
    runs = {series.name: series.y for series in outcome.chart.series}
    assert runs == {"keep": (1, 1, 1), "non-reentrant": (1, 2, 3), "reentrant": (1, 2, 3)}
