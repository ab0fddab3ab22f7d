"""The strip: six figures in every state, each with its origin; measured figures are about one policy alfigure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy import file as policy_file
from explorer.plan.predict.baseline import keep_all_from
from explorer.record import KEEP_ALL, Comparison, Hazard, Measurement, ModelGraph, Policy, RunSpec, Unit
from explorer.record.failure import Failure
from explorer.record.measurement import Refused
from explorer.record.plan import Forecast
from explorer.ui.explore.files import policy_text, take_policy
from explorer.ui.explore.headline import Drawn, answer, cells, figures
from explorer.ui.explore.view import View
from explorer.view.compare.headline import headlines
from explorer.view.text import explore as glossary
from explorer.view.text.plan import export_sentences
from explorer.view.text.runs import did_not_fit
from tests import graphs
from tests.graphs import ALL, GRAPH, SPEC
from tests.ui import page_driver
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import App, graph_data, open_tab, press, say, settle, spec, texts, upload, widget
from tests.view.builders import MIB, measured


def view(comparison: Comparison | None, baseline: Measurement | None, *, stale: bool = False) -> View:
    return View(comparison=comparison, baseline=baseline, baseline_key=None, stale=stale)


def test_the_strip_has_the_same_six_figures_in_every_state() -> None:
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    states = [(None, None), (None, base), (both, base)]
    for comparison, baseline in states:
        for stale in (False, True):
            strip = figures(view(comparison, baseline, stale=stale), Drawn(policy=SPEC.policy))
            assert [headline.key for headline in strip] == list(glossary.HEADLINES)
            for headline in strip:  # a figure means the same before and after a run
                assert headline.tooltip.startswith(glossary.HEADLINES[headline.key])
    origins = {figure.key: figure.origin for figure in figures(view(None, base), Drawn(policy=Policy()))}
    assert origins == {
        "step_peak_bytes": ("measured",), "saved_after_forward_bytes": ("measured",), "flop_ratio": ("counted",),
        "time_ratio": ("measured",), "verdict": (), "n_recompute": (),
    }, "a figure that was not measured names no origin"  # fmt: skip
    unread = {figure.key: figure for figure in figures(view(None, None), Drawn(policy=Policy()))}
    assert unread["step_peak_bytes"].value == unread["flop_ratio"].value == "not measured"
    assert unread["flop_ratio"].origin == () and "press Run" not in [figure.delta for figure in unread.values()]
    wrong = Hazard(rule="r", severity="error", blocks=("a",), sentence="It draws other numbers.", remedy="Do.")
    strip = figures(view(None, None), Drawn(policy=SPEC.policy, hazards=(wrong,)))
    assert [(figure.value, figure.tone) for figure in strip if figure.key == "verdict"] == [("not safe", "bad")]
    opened = graphs.measured(GRAPH, SPEC)
    assert (view(None, base).baseline_policy, view(None, base).against) == (None, "")
    assert (view(None, opened).baseline_policy, view(None, opened).against) == (SPEC.policy, "the opened run")


def test_the_last_figure_says_how_much_was_chosen_of_what_could_be() -> None:
    worth = frozenset(ALL)
    both = graphs.compared(GRAPH, SPEC)
    for comparison, policy, value, delta in (
        (None, Policy(), "0 of 6 blocks", "none chosen"),
        (None, Policy.recompute(ALL[:2]), "2 of 6 blocks", "chosen"),
        (None, Policy.recompute([*ALL, "head"]), "6 of 6 blocks and 1 more", "chosen"),
        (None, Policy.recompute(["blocks"]), "6 of 6 blocks", "chosen"),
        (None, Policy.recompute([ALL[0], "blocks.1.mlp", "blocks.1.norm1"]), "2 of 6 blocks, 1 in part", "chosen"),
        (None, Policy.recompute([ALL[0], "blocks.0.mlp"]), "1 of 6 blocks", "chosen"),
        (both, SPEC.policy, "6 of 6 blocks", "all ran again"),
    ):
        last = figures(view(comparison, None), Drawn(policy=policy, worth=worth))[-1]
        assert (last.value, last.delta) == (value, delta)
    assert figures(view(None, None), Drawn(policy=Policy()))[-1].value == "0 blocks", "the graph is not known yet"


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("n_again", [0, 1, 6])
def test_the_page_counts_the_recomputed_blocks_of_a_run_as_its_report_does(n_again: int, failed: bool) -> None:
    """Blocks that were chosen and did not run again are no recomputed blocks."""
    both = graphs.compared(GRAPH, SPEC)
    again = set(ALL[:n_again])
    blocks = tuple(replace(cost, n_recompute=int(cost.fqn in again)) for cost in both.candidate.blocks)
    failure = Failure(kind="model raised", sentence="It raised.") if failed else None
    both = replace(both, candidate=replace(both.candidate, blocks=blocks, failure=failure))
    shown = figures(view(both, None), Drawn(policy=SPEC.policy, worth=frozenset([*ALL, "head"])))[-1]
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
    assert figures(view(both, base, stale=True), drawn)[0].origin == ("predicted",)
    assert cells(view(both, base, stale=True), drawn)[0].below == "before: 104.5 → 34.5 MiB"


def test_the_strip_of_an_offloading_policy_has_the_bytes_of_the_host() -> None:
    policy = Policy(units=(Unit(blocks=(ALL[0],), action="offload"),))
    forecast = Forecast(step_peak_bytes=50 * MIB, host_peak_bytes=12 * MIB, moved_bytes=24 * MIB)
    strip = {figure.key: figure for figure in figures(view(None, measured()), Drawn(policy=policy, forecast=forecast))}
    assert strip["step_peak_bytes"].delta.endswith(", 12.0 MiB on the host")
    assert strip["time_ratio"].delta.endswith("without copies")
    assert not any("host" in figure.delta for key, figure in strip.items() if key != "step_peak_bytes")


def test_blocks_that_are_offloaded_are_not_said_to_run_again() -> None:
    offloaded, again = [Unit(blocks=(fqn,), action="offload") for fqn in ALL[:2]], Unit(blocks=(ALL[2],))
    for units, said, recomputed in (
        ([*offloaded, again], "**Recompute 1 of 6 blocks, offload 2 of 6 blocks", ("1 of 6 blocks", "chosen")),
        (offloaded, "**Offload 2 of 6 blocks", ("0 of 6 blocks", "none chosen")),
        ([again], "**Recompute 1 of 6 blocks", ("1 of 6 blocks", "chosen")),
    ):
        forecast = Forecast(step_peak_bytes=50 * MIB, host_peak_bytes=12 * MIB, flop_ratio=1.1)
        drawn = Drawn(policy=Policy(units=tuple(units)), forecast=forecast, worth=frozenset(ALL))
        assert answer(view(None, measured()), drawn).startswith(f"{said}\\:")
        (figure,) = [each for each in figures(view(None, measured()), drawn) if each.key == "n_recompute"]
        assert (figure.value, figure.delta) == recomputed


def test_the_strip_says_predicted_of_a_baseline_that_did_not_run() -> None:
    refused = Refused(what="everything kept", policy=KEEP_ALL, held_peak_bytes=60 * MIB, failed_in="forward")
    run = replace(measured(recompute=range(6)), refused=(refused,))
    whole = keep_all_from(run)
    assert whole is not None
    line = did_not_fit(run, whole)
    assert "everything kept, at least 60.0 MiB, then refused" in line and line.endswith("MiB (predicted).")
    put_together = View(comparison=None, baseline=whole, baseline_key="complete 1", stale=False, did_not_fit=line)
    strip = {figure.key: figure for figure in figures(put_together, Drawn(policy=Policy()))}
    assert strip["step_peak_bytes"].origin == strip["saved_after_forward_bytes"].origin == ("predicted",)
    assert strip["time_ratio"].value == "not measured" and strip["time_ratio"].origin == ()
    real = figures(view(None, measured()), Drawn(policy=Policy()))
    assert real[0].origin == ("measured",) and real[0].value == strip["step_peak_bytes"].value


def test_the_reason_under_the_chart_is_about_the_runs_that_are_drawn(app: App) -> None:
    press(say(app(), on=ALL), "run")
    at = app()  # a second visitor: the baseline and the comparison are of one stored run
    alone = "The peak of 104.5 MiB lies"
    assert alone in texts(at) and "The peak moved from" not in texts(at)
    for _ in range(2):
        at = say(at, on=ALL)
        assert "The peak moved from" in texts(at) and alone not in texts(at)
        at = say(at, on=[])


def test_a_run_without_measurable_figures_says_not_measured() -> None:
    bare = replace(graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), allocations=None, times=None, phases=())
    strip = {cell.label: cell.value for cell in cells(view(None, bare), Drawn(policy=Policy()))}
    assert strip["Step peak"] == strip["Step time"] == "not measured"


def test_a_run_that_was_cut_short_is_never_a_win(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the strip, the graph, in the tabs, in the file and at the bottom."""
    whole = graphs.compared
    raised = Failure(kind="model raised", sentence="The model raised CheckpointError.")

    def cut(graph: ModelGraph, spec: RunSpec) -> Comparison:
        pair = whole(graph, spec)
        candidate = replace(pair.candidate, phases=pair.candidate.phases[:-1], failure=raised)
        return replace(pair, candidate=candidate, gradients=(), failure=raised)

    monkeypatch.setattr(graphs, "compared", cut)
    at = press(say(app(), on=ALL), "run")
    strip = page_driver.figures(at)
    assert strip["Step peak"] == "at least 34.5 MiB"
    assert strip["FLOPs"] == strip["Step time"] == strip["Saved after forward"] == "not measured"
    assert strip["Gradients"] == "not comparable"
    assert not any("→" in figure for figure in strip.values())
    assert "failed" in texts(at) and "Why" not in texts(at) and "Measured." not in texts(at)
    assert graph_data(at)["labels"]["blocks"][0].startswith("15.0 → ≈")
    assert "evidence" not in policy_text(at.session_state["explore"], graphs.gpt(6))
    for tab in ("Cost", "Gradients"):
        open_tab(at, tab)
    assert worker.store.list()[0].headlines["comparable"] is False


SOME = ["blocks.1", "blocks.3"]


def test_the_policy_file_carries_evidence_of_exactly_this_policy(app: App) -> None:
    at = press(say(app(), on=list(ALL)), "run")
    state = at.session_state["explore"]
    file = policy_file.loads(policy_text(state, GRAPH))
    assert file.policy == Policy.recompute(ALL)
    assert file.evidence is not None and file.evidence.verdict == "bitwise equal"
    say(at, on=list(ALL[:2]))
    file = policy_file.loads(policy_text(state, GRAPH))
    assert file.policy == Policy.recompute(ALL[:2]) and file.evidence is None


@pytest.mark.parametrize("target", FORMATS)
def test_every_target_answers_in_sentences(target: str) -> None:
    file = policy_file.file_of(Policy.recompute(SOME), GRAPH)
    if target == "stages":
        with pytest.raises(ExplorerError, match="holds no pipeline plan"):
            exported(file, target)
        return
    form = exported(file, target)
    assert export_sentences(form)[0].startswith("It recomputes ")
    assert export_sentences(replace(form, recomputed=("",)))[0] == "It recomputes the model."


def test_what_a_target_really_does_is_drawn_and_undone(app: App) -> None:
    """FSDP2's wrapper takes single blocks, so a segment is recomputed one by one there."""
    segment = b"version: 1\npolicy: {units: [[blocks.0, blocks.1]]}\n"
    at = upload(app(), segment)
    drawn = spec(at).policy
    at = settle(at.selectbox(key="export_target").set_value("stages").run())
    assert "holds no pipeline plan" in texts(at)
    at = settle(at.selectbox(key="export_target").set_value("fsdp2").run())
    assert "badge[approximated]" in texts(at)
    at = press(at, "draw_export")
    assert [unit.blocks for unit in spec(at).policy.units] == [("blocks.0",), ("blocks.1",)]
    assert spec(press(at, "undo")).policy == drawn


def test_a_file_that_is_wrong_changes_nothing_and_a_right_one_is_undone(app: App) -> None:
    at = say(app(), on=["head"])
    for data in (
        b"",
        b"\xff\xfe",
        b"version: 9\npolicy: {}",
        b"version: 1\npolicy: {unitz: []}",
        b"version: 1\npolicy: {units: [nope]}",
        b"a: !!python/object:os.system",
        b"gradient_checkpointing: true\n",
    ):
        at = upload(at, data)
        assert graph_data(at)["on"] == ["head"], data
        shown = texts(at)
        assert "This cannot be used" in shown and "This cannot run" not in shown and "The last run" not in shown
    at = upload(at, "version: 1\npolicy:\n  units: [blocks.0, blocks.4]\n")
    assert graph_data(at)["on"] == ["blocks.0", "blocks.4"]
    assert graph_data(press(at, "undo"))["on"] == ["head"]


def test_notes_on_a_policy_file_stay_until_read(app: App) -> None:
    at, other = app(), policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:1]), graphs.gpt(4)))
    for name, text, chosen, note in (
        ("policy.yaml", "version: 1\npolicy: {units: [blocks.*]}", ALL, "blocks.* stands for 6 units"),
        ("other.yaml", other, ALL[:1], "blocks.* are 6, and were 4"),
    ):
        at = upload(at, text, name)
        assert graph_data(at)["on"] == list(chosen)
        shown = texts(at)
        assert note in shown
        at = press(at, "read_understood")
        assert note not in texts(at) and graph_data(at)["on"] == list(chosen)
    at = upload(at, policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:2]), GRAPH)))
    assert graph_data(at)["on"] == list(ALL[:2]), "what fits needs no words"
    assert at.session_state["explore"].imported is None
    state = at.session_state["explore"]
    text = "version: 1\nmodel: {target: x, fingerprint: '0000000000000000'}\npolicy: {units: [blocks.0]}\n"
    take_policy(state, GRAPH, text.encode())
    assert state.job.failure is None and spec(at).policy == Policy.recompute(["blocks.0"])
    assert state.imported is not None and "has changed since or is another one" in state.imported.changed


def test_what_is_known_to_go_wrong_is_said_before_the_run(app: App) -> None:
    """In the strip, beside Run and in the file: without its generator put back, dropout draws other numbers."""
    at = say(app(), on=list(ALL))
    assert page_driver.figures(at)["Gradients"] == "not compared" and not at.error
    settle(widget(at, "toggle", "option_preserve_rng_state").set_value(False).run())
    assert page_driver.figures(at)["Gradients"] == "not safe"
    assert len(at.error) == 2 and all("preserve" in error.value for error in at.error)
    assert graph_data(at)["labels"]["blocks"][2][0][0] == "✕"
    written = policy_text(at.session_state["explore"], GRAPH)
    assert written.startswith("# WARNING") and "other random numbers" in written.splitlines()[2]
    at = press(at, "undo")
    assert page_driver.figures(at)["Gradients"] == "not compared" and not at.error
    at = upload(
        at, "version: 1\npolicy: {units: [blocks.0]}\nevidence: {device: a, torch_version: '2', verdict: different}"
    )
    assert graph_data(at)["on"] == ["blocks.0"]
    assert "evidence in this policy file says" in texts(at), "its own evidence speaks against it"
    assert "evidence in this policy file" not in texts(press(at, "run"))
