"""Figures of a stored run as a person reads them; what is unknown is no figure."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from explorer.record import Failure, RunSpec
from explorer.view.text.runs import figures_of, stored_flops, stored_time
from tests import graphs
from tests.graphs import GRAPH

RUN = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))


def test_every_figure_has_its_unit() -> None:
    figures = figures_of(RUN)
    assert figures["Saved after forward"].endswith("MiB") and "MiB" in figures["Step peak"]
    assert figures["Phase of the peak"] == RUN.peak_phase
    assert figures["Forward"].endswith("FLOP")


def test_a_run_that_was_cut_short_has_no_time_and_no_phase() -> None:
    short = figures_of(replace(RUN, failure=Failure(kind="out of memory", sentence="full")))
    assert short["Phase of the peak"] == short["Step time"] == short["Forward"] == "not measured"
    assert short["Step peak"].startswith("at least")


@pytest.mark.parametrize(
    ("headlines", "flops", "time"),
    [
        ({"flop_ratio": 1.333, "time_ratio": 1.25, "time_ratio_spread": 0.02}, "+33 %", "×1.25 ± 0.02"),
        ({"step_ms": 12.3}, "", "12 ms"),
        ({"step_ms": 1.234}, "", "1.23 ms"),
        ({}, "", ""),
    ],
)
def test_of_stored_headlines(headlines: dict[str, Any], flops: str, time: str) -> None:
    assert (stored_flops(headlines), stored_time(headlines)) == (flops, time)


def test_flops_of_a_run_by_itself_are_summed_over_what_is_known() -> None:
    alone = stored_flops({"forward_flops": 2 * 10**9, "backward_flops": 4 * 10**9, "recompute_flops": None})
    assert alone == stored_flops({"forward_flops": 6 * 10**9}) != ""
