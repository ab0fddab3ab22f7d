"""What was measured is shown for what it is about, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.record import Comparison, Failure, ModelGraph, RunSpec
from explorer.ui.explore.files import policy_text
from explorer.ui.explore.shown import Freshness
from explorer.view.text.explore import FRESHNESS
from tests import graphs
from tests.ui.explore.visits import ALL, App, in_session, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle, texts, widget


def test_each_freshness_has_a_sentence_and_no_sentence_is_left_over() -> None:
    assert set(FRESHNESS) == set(Freshness)


def test_figures_of_an_older_policy_are_never_silently_wrong(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    at = say(at, on=ALL[:3])
    assert "≈" in figures(at)["Step peak"]
    assert "before: 104.5 → 34.5 MiB" in texts(at)
    assert "for the previous policy" in texts(at)
    assert figures(at)["Gradients"] == "not compared"
    back = say(at, on=ALL)
    assert figures(back)["Step peak"] == "104.5 → 34.5 MiB"
    assert "previous policy" not in texts(back)


def test_a_run_without_measurable_figures_says_not_measured(
    app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = graphs.measured

    def bare(graph: object, spec: RunSpec) -> object:
        return msgspec.structs.replace(whole(graph, spec), allocations=None, times=None, phases=())  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "measured", bare)
    at = app()
    assert figures(at)["Step peak"] == "not measured"
    assert figures(at)["Step time"] == "not measured"


def test_a_baseline_from_before_the_options_changed_says_so(app: Callable[..., AppTest]) -> None:
    at = app()
    assert "for other options" not in texts(at)
    widget(at, "selectbox", "option_dtype").set_value("float64").run()
    assert "for other options" in texts(at)


def test_a_run_that_was_cut_short_is_never_a_win(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the strip, the graph, in the tabs, in the file and at the bottom."""
    whole = graphs.compared
    raised = Failure(kind="model raised", sentence="The model raised CheckpointError.")

    def cut(graph: ModelGraph, spec: RunSpec) -> Comparison:
        pair = whole(graph, spec)
        candidate = msgspec.structs.replace(pair.candidate, phases=pair.candidate.phases[:-1], failure=raised)
        return msgspec.structs.replace(pair, candidate=candidate, gradients=(), failure=raised)

    monkeypatch.setattr(graphs, "compared", cut)
    at = press(say(app(), on=ALL), "run")
    strip = figures(at)
    assert strip["Step peak"] == "at least 34.5 MiB"
    assert strip["FLOPs"] == strip["Step time"] == strip["Saved after forward"] == "not measured"
    assert strip["Gradients"] == "not comparable"
    assert not any("→" in figure for figure in strip.values())
    assert "failed" in texts(at) and "Why" not in texts(at) and "Measured." not in texts(at)
    assert graph_data(at)["labels"]["blocks"][0].startswith("15.0 → ≈")
    text = in_session(at, lambda: policy_text(at.session_state["explore"], graphs.gpt(6)))
    assert isinstance(text, str) and "evidence" not in text
    for tab in ("Cost", "Gradients", "Blocks"):
        at.session_state["tabs"] = tab
        settle(at.run())
    assert worker.store.list()[0].headlines["comparable"] is False
