"""The strip: six figures in every state, each with its origin, unknown ones without a number."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.record import Comparison, Hazard, Measurement, Policy, RunSpec
from explorer.record.failure import Failure
from explorer.record.plan import Forecast
from explorer.ui.explore.headline import Drawn, cells, figures
from explorer.ui.explore.shown import Shown
from explorer.view.compare.headline import headlines
from explorer.view.text import explore as glossary
from tests import graphs
from tests.graphs import ALL, GRAPH, SPEC


def known(comparison: Comparison | None, baseline: Measurement | None, *, stale: bool = False) -> Shown:
    return Shown(comparison=comparison, baseline=baseline, baseline_key=None, stale=stale)


def test_the_strip_has_the_same_six_figures_in_every_state() -> None:
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    states = [(None, None), (None, base), (both, base)]
    for comparison, baseline in states:
        for stale in (False, True):
            strip = figures(known(comparison, baseline, stale=stale), Drawn(policy=SPEC.policy))
            assert [headline.key for headline in strip] == list(glossary.HEADLINES)
            for headline in strip:  # a figure means the same before and after a run
                assert headline.tooltip.startswith(glossary.HEADLINES[headline.key])


def test_an_unknown_forecast_is_not_a_number() -> None:
    peak = figures(known(None, None), Drawn(policy=SPEC.policy))[0]
    assert peak.value == "not measured"
    assert not any(character.isdigit() for character in peak.value)


def test_the_last_figure_says_how_much_was_chosen_of_what_could_be() -> None:
    worth = frozenset(ALL)
    both = graphs.compared(GRAPH, SPEC)
    for comparison, policy, value, delta in (
        (None, Policy(), "0 of 6 blocks", "none chosen"),
        (None, Policy.recompute(ALL[:2]), "2 of 6 blocks", "chosen"),
        (None, Policy.recompute([*ALL, "head"]), "7 of 7 blocks", "chosen"),
        (both, SPEC.policy, "6 of 6 blocks", "all ran again"),
    ):
        last = figures(known(comparison, None), Drawn(policy=policy, worth=worth))[-1]
        assert (last.value, last.delta) == (value, delta)
    assert figures(known(None, None), Drawn(policy=Policy()))[-1].value == "0 blocks", "the graph is not known yet"


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("n_again", [0, 1, 6])
def test_the_page_counts_the_recomputed_blocks_of_a_run_as_its_report_does(n_again: int, failed: bool) -> None:
    """Blocks that were chosen and did not run again are no recomputed blocks."""
    both = graphs.compared(GRAPH, SPEC)
    again = set(ALL[:n_again])
    blocks = tuple(replace(cost, n_recompute=int(cost.fqn in again)) for cost in both.candidate.blocks)
    failure = Failure(kind="model raised", sentence="It raised.") if failed else None
    both = replace(both, candidate=replace(both.candidate, blocks=blocks, failure=failure))
    shown = figures(known(both, None), Drawn(policy=SPEC.policy, worth=frozenset([*ALL, "head"])))[-1]
    reported = headlines(both)[-1]
    assert shown.key == reported.key == "n_recompute" and shown.origin == reported.origin == ("counted",)
    if n_again == len(ALL):
        assert (shown.value, shown.delta) == ("6 of 7 blocks", "all ran again")
    else:
        assert (shown.value, shown.delta) == (reported.value, reported.delta)
        assert shown.value == f"{n_again} of 6 blocks" and shown.delta


def test_stale_figures_keep_the_old_value_beside_the_prediction() -> None:
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    drawn = Drawn(policy=Policy.recompute(ALL[:1]), forecast=Forecast(step_peak_bytes=50 * graphs.MIB))
    assert figures(known(both, base, stale=True), drawn)[0].origin == ("predicted",)
    assert cells(known(both, base, stale=True), drawn)[0].below == "before: 104.5 → 34.5 MiB"


def test_an_error_is_said_before_a_run() -> None:
    wrong = Hazard(rule="r", severity="error", blocks=("a",), sentence="It draws other numbers.", remedy="Do.")
    strip = figures(known(None, None), Drawn(policy=SPEC.policy, hazards=(wrong,)))
    assert [(one.value, one.tone) for one in strip if one.key == "verdict"] == [("not safe", "bad")]


def test_a_figure_that_nobody_measured_names_no_origin() -> None:
    base = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    origins = {one.key: one.origin for one in figures(known(None, base), Drawn(policy=Policy()))}
    assert origins == {
        "step_peak_bytes": ("measured",), "saved_after_forward_bytes": ("measured",), "flop_ratio": ("counted",),
        "time_ratio": ("measured",), "verdict": (), "n_recompute": (),
    }  # fmt: skip
