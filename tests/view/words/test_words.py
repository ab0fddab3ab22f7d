"""Words and figures beside the graph: units, origins, unknowns, and nothing that becomes markup or a formula."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.changes import RNG_STATE_BYTES
from explorer.plan.forecast.forecast import Forecaster, inside
from explorer.plan.policy.presets import PRESETS, is_preset, preset_titles
from explorer.record import Comparison, Hazard, Measurement, Policy, RunSpec
from explorer.record.forecast import Forecast
from explorer.ui.explore.headline import Drawn, cells, figures
from explorer.ui.explore.shown import Shown
from explorer.ui.pipeline.plan_panel import fitting
from explorer.ui.session import backend
from explorer.ui.session.plain import plain
from explorer.ui.shared.charts import as_csv
from explorer.view.compare.safety import danger, doubt, in_file
from explorer.view.graph.labels import Facts, labels
from explorer.view.words import explore as glossary
from tests import graphs

GRAPH = graphs.gpt(6)
ALL = [f"blocks.{i}" for i in range(6)]
SPEC = RunSpec(model=GRAPH.model, policy=Policy.recompute(ALL))


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


def test_stale_figures_keep_the_old_value_beside_the_prediction() -> None:
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    drawn = Drawn(policy=Policy.recompute(ALL[:1]), forecast=Forecast(step_peak_bytes=50 * graphs.MIB))
    assert figures(known(both, base, stale=True), drawn)[0].origin == ("predicted",)
    assert cells(known(both, base, stale=True), drawn)[0].below == "before: 104.5 → 34.5 MiB"


def test_the_forecast_follows_the_replayed_baseline() -> None:
    forecaster = Forecaster(graphs.measured(GRAPH, RunSpec(model=GRAPH.model)))
    nothing, all_of_them = forecaster.forecast(Policy()), forecaster.forecast(SPEC.policy)
    truth = graphs.measured(GRAPH, SPEC)
    assert nothing.step_peak_bytes == graphs.measured(GRAPH, RunSpec(model=GRAPH.model)).step_peak_bytes
    assert all_of_them.step_peak_bytes is not None and truth.step_peak_bytes is not None
    # The made-up run keeps half a MiB of input that a forecast cannot see, and no generator's state.
    assert -graphs.MIB <= all_of_them.step_peak_bytes - truth.step_peak_bytes <= RNG_STATE_BYTES * len(ALL)
    assert all_of_them.flop_ratio == pytest.approx(1.2)
    assert nothing.flop_ratio == 1.0


def test_a_block_inside_a_recomputed_one_belongs_to_it() -> None:
    policy = Policy.recompute(["blocks.0", "blocks.0.mlp", "blocks.01"])
    outer, inner, other = policy.units
    assert inside(policy) == {outer: [inner], inner: [], other: []}


def test_a_block_says_what_it_keeps_frees_and_how_often_it_ran() -> None:
    base, candidate = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.measured(GRAPH, SPEC)
    hazard = Hazard(rule="r", severity="error", blocks=("head",), sentence="It breaks.", remedy="Do not.")
    facts = Facts(graph=GRAPH, policy=SPEC.policy, baseline=base, candidate=candidate, hazards=(hazard,))
    drawn = labels(facts)
    assert drawn["blocks.0"].bytes == "15.0 → 0.5 MiB"
    assert drawn["blocks.0"].note == "ran 2×"
    assert drawn["norm"].bytes == "0.5 MiB"
    assert drawn["head"].badges[0].text == "It breaks. Do not."
    unmeasured = labels(Facts(graph=GRAPH, policy=SPEC.policy))
    assert unmeasured["blocks.0"].bytes.endswith("?")


@pytest.mark.parametrize("text", ["**b** [x](http://e)", "<img src=x>", ":red[x] $y$", "`code` a_b_c", "\\"])
def test_no_markup_survives(text: str) -> None:
    escaped = plain(text)
    for i, character in enumerate(escaped):
        if character in "*[]<>$`_":
            assert escaped[i - 1] == "\\"


def test_a_spreadsheet_takes_no_cell_for_a_formula() -> None:
    lines = as_csv([{"name": "=cmd()", "n": -1}, {"name": "plain", "more": 2}]).splitlines()
    assert lines == ["name,n,more", "'=cmd(),-1,", "plain,,2"]


def test_models_come_from_the_command_line() -> None:
    assert backend.given_after("--model", ["--model", "a.py:f", "--model=b.py", "x"]) == ("a.py:f", "b.py")
    assert backend.given_after("--model", ["--weights", "a.pt"]) == ()


def test_a_block_around_a_hazard_shows_it_too() -> None:
    """A block folded away would not be seen: what stands around it shows its hazard."""
    hazard = Hazard(rule="r", severity="error", blocks=("blocks.2.mlp",), sentence="Something.", remedy="Do.")
    drawn = labels(Facts(graph=GRAPH, policy=Policy(), hazards=(hazard,)))
    assert drawn["blocks.2"].badges[0].text == "Inside: Something. Do."
    assert drawn["blocks"].badges[0].text == "1 of 6 blocks: Inside: Something. Do."
    assert drawn["blocks.1"].badges[0].sign != "✕"


def test_an_error_is_said_before_a_run() -> None:
    wrong = Hazard(rule="r", severity="error", blocks=("a",), sentence="It draws\nother numbers in *a*.", remedy="Do.")
    note = Hazard(rule="s", severity="note", blocks=("a",), sentence="By the way.", remedy="Nothing.")
    strip = figures(known(None, None), Drawn(policy=SPEC.policy, hazards=(wrong, note)))
    assert [(one.value, one.tone) for one in strip if one.key == "verdict"] == [("not safe", "bad")]
    assert danger((wrong, wrong, note)).endswith("Do. 1 more error in the tab Gradients.")
    assert danger((note,)) == in_file((note,)) == ""
    assert in_file((wrong,)).splitlines()[2] == "#   It draws other numbers in *a*. Do."
    assert "different" in doubt("different") and doubt("rounding") == doubt(None) == ""


def test_each_is_said_only_of_members_that_are_alike() -> None:
    """Two of six stay: what one member keeps is not what each keeps."""
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    every = Facts(graph=GRAPH, policy=SPEC.policy, baseline=base, candidate=both.candidate)
    assert labels(every)["blocks"].bytes == "15.0 → 0.5 MiB each"
    costs = tuple(
        msgspec.structs.replace(cost, saved_after_forward_bytes=2 * graphs.MIB) if cost.fqn == ALL[2] else cost
        for cost in both.candidate.blocks
    )
    segment = msgspec.structs.replace(both.candidate, blocks=costs)
    drawn = labels(msgspec.structs.replace(every, candidate=segment))["blocks"].bytes
    assert drawn == "90.0 → 4.5 MiB in all"
    some = Facts(graph=GRAPH, policy=Policy.recompute(ALL[:4]), baseline=base)
    freed = dict.fromkeys(ALL[:4], 14 * graphs.MIB)
    assert labels(msgspec.structs.replace(some, freed_bytes=freed))["blocks"].bytes == "90.0 → ≈ 34.0 MiB in all"
    assert labels(some)["blocks"].bytes == "90.0 MiB → ? in all"
    assert labels(Facts(graph=GRAPH, policy=Policy(), baseline=base))["blocks"].bytes == "15.0 MiB each"


def test_a_folded_run_shows_what_its_members_carry() -> None:
    hazard = Hazard(rule="r", severity="warning", blocks=(ALL[2],), sentence="Something.", remedy="Do.")
    run = labels(Facts(graph=GRAPH, policy=Policy(), hazards=(hazard,)))["blocks"]
    assert [(badge.sign, badge.text.split(":")[0]) for badge in run.badges] == [
        ("!", "1 of 6 blocks"),
        ("⚄", "6 of 6 blocks"),
    ]


def test_a_figure_that_nobody_measured_names_no_origin() -> None:
    base = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    origins = {one.key: one.origin for one in figures(known(None, base), Drawn(policy=Policy()))}
    assert origins == {
        "step_peak_bytes": ("measured",), "saved_after_forward_bytes": ("measured",), "flop_ratio": ("counted",),
        "time_ratio": ("measured",), "verdict": (), "n_recompute": (),
    }  # fmt: skip


def test_the_menu_offers_every_preset_and_nothing_else() -> None:
    assert set(PRESETS) <= set(preset_titles())
    assert all(is_preset(name) for name in preset_titles())


def test_the_oldest_record_makes_room() -> None:
    kept = backend.Records(limit=2)
    for key in ("a", "b"):
        kept.keep(key, key)
    assert kept.get("a") == "a"
    kept.keep("c", "c")
    assert kept.get("b") is None
    assert kept.get("a") == "a"


def test_a_block_inside_a_recomputed_one_does_not_say_that_it_keeps_its_bytes() -> None:
    base, candidate = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.measured(GRAPH, SPEC)
    before = labels(Facts(graph=GRAPH, policy=SPEC.policy, baseline=base))
    assert before["blocks.0.mlp"].bytes == "6.0 MiB with blocks.0"
    after = labels(Facts(graph=GRAPH, policy=SPEC.policy, baseline=base, candidate=candidate))
    assert after["blocks.0.mlp"].bytes.startswith("6.0 → ")


def test_what_a_block_keeps_is_one_figure_in_every_state_of_the_page() -> None:
    pinned = graphs.measured(GRAPH, SPEC)
    kept = {"": None, "measured": graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), "pinned": pinned}
    drawn = {state: labels(Facts(graph=GRAPH, policy=Policy(), baseline=base)) for state, base in kept.items()}
    for id in drawn[""]:
        assert len({labels[id].bytes for labels in drawn.values()}) == 1, id


@pytest.mark.parametrize(("n_rows", "wanted", "n"), [(2, 4, 2), (8, 4, 4), (6, 4, 3), (1, 4, 1)])
def test_a_first_plan_fits_the_batch(n_rows: int, wanted: int, n: int) -> None:
    graph = msgspec.structs.replace(graphs.gpt(2), input_shapes=((n_rows, 8),))
    assert fitting(wanted, graph) == n
