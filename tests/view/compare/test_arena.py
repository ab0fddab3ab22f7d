"""The arena's picture says by its data who ran, who is wrong, and where the budgets lie."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.record.arena import Arena, Bout
from explorer.record.failure import Failure
from explorer.record.times import Samples
from explorer.view.compare.arena import arena_chart, beaten_sentence, outcome_in_words
from tests.engine.arena.test_run import arena, bout


def sample() -> Arena:
    return arena(
        bout("explorer", 1.30),
        bout("greedy", 1.10, verdict="different", worst="w: 9.7e-01 of its norm away"),
        Bout(rival="rotor", share=0.5, budget_bytes=50, why="It plans chains."),
        Bout(rival="compile-budget", share=0.5, failure=Failure(kind="crash", sentence="It ended.")),
    )


def test_a_mark_a_bout_that_ran_and_a_row_for_each() -> None:
    chart = arena_chart(sample())
    drawn = {trace.name: trace for trace in chart.figure.data}
    assert set(drawn) == {"This explorer", "Greedy"}
    assert drawn["Greedy"].text == ("wrong",) and drawn["This explorer"].text == ("",)
    assert list(drawn["Greedy"].marker.color) != list(drawn["This explorer"].marker.color)
    rows = list(chart.rows())
    assert [row["gradients"] for row in rows] == ["bitwise equal", "different", None, None]
    assert rows[2]["peak measured, MiB"] is None and "It plans chains." in rows[2]["what happened"]
    assert "1 with wrong gradients" in chart.alt


def test_words_for_each_outcome() -> None:
    ours, wrong, absent, crashed = sample().bouts
    assert outcome_in_words(ours) == ""
    assert outcome_in_words(wrong) == "different, w: 9.7e-01 of its norm away."
    assert outcome_in_words(absent) == "did not run: It plans chains."
    assert outcome_in_words(crashed) == "failed: It ended."
    assert "Over its budget" in outcome_in_words(bout("greedy", 1.0, peak=60))
    assert beaten_sentence(sample()).startswith("Nobody was faster beyond doubt than this explorer's planner")
    assert "Greedy at 50 %" in beaten_sentence(arena(bout("explorer", 1.3), bout("greedy", 1.1)))
    few = (replace(one, step=Samples(ms=one.step.ms[:7])) for one in (bout("explorer", 1.3), bout("greedy", 1.1)))
    assert beaten_sentence(arena(*few)).endswith("Undecided, more repeats would tell: Greedy at 50 %.")
    missed = beaten_sentence(arena(bout("explorer", 1.1, peak=60), bout("greedy", 1.3)))
    assert missed.endswith("Within a budget that this explorer's planner missed: Greedy at 50 %.")
    assert missed.startswith("Nobody was faster"), "it took longer"
    assert "did not take part" in beaten_sentence(arena())


def test_without_any_time_there_is_a_sentence_instead_of_an_empty_plot() -> None:
    chart = arena_chart(arena(Bout(rival="rotor", why="It plans chains.")))
    assert not chart.figure.data and chart.figure.layout.annotations[0].text.startswith("No planner ran")
