"""The graph with its tools: clicks, presets, patterns, search, and undo through all of them in their order."""

from __future__ import annotations

import pytest

from explorer.record import Policy
from explorer.ui.explore.blocks import take_matching
from explorer.ui.shared import draft as drafts
from tests import graphs
from tests.ui.explore.visits import ALL, App, press, spec
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import graph_data, message, say, settle, texts


def test_undo_and_redo_walk_through_clicks_and_presets(app: App) -> None:
    at = say(app(), on=["head"])
    at.session_state["presets"] = "all"
    graph = graphs.gpt(6)
    drafts.set_policy(at.session_state["draft"], Policy.recompute(ALL), graph)
    at.run()
    assert spec(at).policy == Policy.recompute(ALL)
    at = press(at, "undo")
    assert graph_data(at)["on"] == ["head"]
    at = press(at, "undo")
    assert graph_data(at)["on"] == []
    at = press(press(at, "redo"), "redo")
    assert graph_data(at)["on"] == ALL
    assert graph_data(at)["revision"] > 0


@pytest.mark.parametrize(
    ("pressed", "marked", "undone"), [(False, ["blocks.1", "head"], ["head"]), (True, ["head"], [])]
)
def test_a_click_in_the_rerun_of_undo_counts_in_its_order(
    app: App, pressed: bool, marked: list[str], undone: list[str]
) -> None:
    """Undo and a click on blocks.1 at once: undo takes back what was before it, or the click if that came first."""
    at = say(app(), on=["head"])
    if not pressed:
        at = say(at, on=["head", "norm"])
    on = [*graph_data(at)["on"], "blocks.1"]
    at.session_state[at.session_state["draft"].widget] = message(at, pressed=pressed, on=on)
    at = press(at, "undo")
    assert graph_data(at)["on"] == marked
    assert graph_data(press(at, "undo"))["on"] == undone


def test_a_policy_file_and_a_click_in_one_rerun_both_count(app: App) -> None:
    at = say(app(), on=["head"])
    at.session_state[at.session_state["draft"].widget] = message(at, on=["head", "norm"])
    at.file_uploader(key="upload_policy").upload("policy.yaml", b"version: 1\npolicy:\n  units: [blocks.0]\n")
    at = settle(at.run())
    assert graph_data(at)["on"] == ["blocks.0", "norm"]


def test_a_selected_block_and_search(app: App) -> None:
    at = say(app(), selected="norm")
    assert graph_data(at)["selected"] == "norm"
    at.selectbox(key="search").select("blocks.3.mlp").run()
    at = settle(at)
    assert {"blocks", "blocks.3"} <= set(graph_data(at)["open"])
    assert graph_data(at)["jump"]["id"] == "blocks.3.mlp"


def test_a_pattern_recomputes_all_that_it_matches(app: App, worker: FakeWorker) -> None:
    """Typed into the search box: AppTest itself can only choose what a box offers."""
    at = app()
    assert at.selectbox(key="search").placeholder == "Search, or blocks.*.mlp"
    take_matching(at.session_state["explore"], worker.graph, "blocks.*")
    at = settle(at.run())
    assert spec(at).policy.blocks == tuple(ALL)
    take_matching(at.session_state["explore"], worker.graph, "blocks.*.nothing")
    at = settle(at.run())
    assert "No block matches" in texts(at) and spec(at).policy.blocks == tuple(ALL)
