"""How a visitor looks at what was measured: a selected block by role, and another model starts afresh."""

from __future__ import annotations

from explorer.record import ModelRef
from explorer.ui.explore.state import BY_ROLE
from tests import graphs
from tests.ui.explore.visits import ALL, App, press, spec
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import graph_data, say, settle, widget


def test_a_block_selected_in_the_graph_is_looked_at_by_role(app: App) -> None:
    at = say(app(), selected="blocks.1")
    state = at.session_state["explore"]
    assert (state.looked_at, state.view) == ("blocks.1", BY_ROLE)
    state = say(at, selected="").session_state["explore"]
    assert (state.looked_at, state.view) == ("", None)


def test_another_model_starts_afresh(app: App, worker: FakeWorker) -> None:
    at = press(say(app(), on=ALL), "run")
    worker.graph = graphs.unet()
    widget(at, "selectbox", "model").select("sample_models/unet.py").run()
    at = settle(at)
    assert spec(at).model == ModelRef(target="sample_models/unet.py", size="small")
    assert not spec(at).policy.units
    assert graph_data(at)["on"] == []
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]][:2] == ["down0", "down1"]
