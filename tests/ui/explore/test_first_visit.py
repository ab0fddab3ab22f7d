"""What a visitor sees before this machine has measured: a recorded run, then the parts of the first run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from starlette.requests import Request
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Measure
from explorer.jobs.store import Store
from explorer.plan.catalogue import RecordedSample, recorded_sample
from explorer.record.failure import Failure
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.ui import navigation, server
from explorer.ui.components import BrowserStep
from explorer.ui.explore import page, work
from explorer.ui.explore.desk import AnswerRequest, answer_to
from explorer.ui.explore.preview import preview
from explorer.ui.session import address, backend, repository
from explorer.view.drawing.units import mib
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import (
    ROOT,
    WINDOW,
    App,
    component_data,
    drawn_before_plotly,
    figures,
    graph_data,
    say,
    slider,
    start_only,
    strip_cells,
    texts,
    widget,
)

MODEL = ModelRef(target="sample_models/gpt.py", size="small")


@pytest.fixture
def recorded() -> RecordedSample:
    bundled = recorded_sample(MODEL)
    assert bundled is not None
    return bundled


@pytest.fixture
def worker(recorded: RecordedSample) -> FakeWorker:
    """A worker that knows the graph of the sample, and finishes no measurement by itself."""
    assert recorded.run.graph is not None
    worker = FakeWorker(recorded.run.graph, store=Store())
    answer = worker.answer
    worker.answer = lambda job: None if isinstance(job.request, Measure) else answer(job)  # type: ignore[method-assign]
    return worker


@pytest.fixture
def visit(app: App) -> Callable[[], AppTest]:
    """A first visit, while the worker measures."""
    return start_only


def job_of(worker: FakeWorker) -> FakeJob:
    (job,) = worker.of(Measure)
    return job


def test_the_recorded_run_is_drawn_at_once_and_answers(
    visit: Callable[[], AppTest], worker: FakeWorker, recorded: RecordedSample
) -> None:
    at, peak = visit(), recorded.run.step_peak_bytes
    assert figures(at)["Step peak"] == mib(peak) and "recorded on another machine" in texts(at)
    assert "another machine" in str(component_data(at)) and at.button(key="tour_begin")
    assert at.get("plotly_chart") and len(slider(at)) > 3
    assert "blocks.0" in drawn_before_plotly(at), "the pyramid of blocks is the first picture"
    assert graph_data(at)["geometry"]["rows"]
    at = say(at, on=["blocks.0"])
    assert "≈" in figures(at)["Step peak"] and "≈ ×" in figures(at)["Step time"]
    at = widget(at, "text_input", "budget").set_value("60 %").run()
    blocks = at.session_state["draft"].spec.policy.blocks
    assert len(blocks) > 1 and not [job for job in worker.jobs.values() if job is not job_of(worker)]
    assert "No plan of the recorded run" in texts(widget(at, "text_input", "budget").set_value("1 KiB").run())


@pytest.mark.usefixtures("visit")
def test_the_own_run_begins_once_the_browser_has_drawn_the_recorded_one(worker: FakeWorker) -> None:
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60).run()
    assert "recorded on another machine" in texts(at) and not worker.of(Measure)
    at.session_state[at.session_state["draft"].widget] = {"window": WINDOW}
    assert not at.run().exception and job_of(worker).request.with_graph, "also if Plotly's report comes along"


@pytest.mark.usefixtures("visit")
def test_the_preview_is_what_the_page_draws_first(recorded: RecordedSample) -> None:
    early = preview({"job": "of a refresh"}, {})
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60).run()
    assert early is not None and early["origin"] == "recorded on another machine"
    assert (early["strip"]["cells"], early["chart"]) == (strip_cells(at), drawn_before_plotly(at))
    graph = json.loads(json.dumps(early["graph"]))
    clicked = AnswerRequest(graph=graph["desk"], steps=(BrowserStep(n=1, kind="on", ids=("blocks.0",)),))
    answer = answer_to(clicked)
    assert answer is not None and "1 of" in answer["cells"][-1]["value"], "the preview's graph answers"
    (version,) = [data["version"] for data in component_data(at) if "version" in data]
    assert early["slider"]["version"] == version, "a place of the preview's slider is a place of the page's"
    for kind, n in (("preset", 12), ("place", 12)):
        step = BrowserStep(n=1, kind=kind, ids=("all",), place=0, version=version)
        answer = answer_to(AnswerRequest(graph=graph["desk"], steps=(step,)))
        assert answer is not None and f"{n} of" in answer["cells"][-1]["value"], kind
    (page_tools,) = [data for data in component_data(at) if "presets" in data]
    assert page_tools.pop("about") != early["tools"].pop("about")
    assert json.loads(json.dumps(early["tools"])) == page_tools
    page_graph = graph_data(at)
    graph |= {name: page_graph[name] for name in ("join", "line")}  # the latter is over Plotly's chart
    assert graph.pop("early") and graph.pop("desk") != page_graph.pop("desk"), "another graph"
    assert (graph, early["slider"]["labels"]) == (page_graph, slider(at))
    high, dark = preview({}, {"window": "1000.0"}), preview({"dark": "1"}, {"window": "broken"})
    assert high is not None and dark is not None
    assert high["height"] - 200 == dark["height"] == early["height"]
    assert high["graph"]["window"] == {"height": 1000, "narrow": False, "known": False}
    assert len({run["chart"] for run in (early, high, dark)}) == 3, "another height, another theme"
    with_policy = replace(recorded.run.spec, policy=Policy.recompute(["blocks.0"]))
    assert preview(address.to_query(with_policy), {}) is None, "its chart shows a forecast"
    assert preview(address.to_query(replace(recorded.run.spec, seed=1)), {}) is None, "nothing is known of it"


@pytest.mark.usefixtures("app")
def test_the_preview_answers_what_an_earlier_run_answers() -> None:
    def status(query: bytes = b"") -> int:
        return server.answer_preview(Request({"type": "http", "headers": [], "query_string": query})).status_code

    assert (status(), status(b"model=sample_models/gpt.py&size=gpu")) == (200, 204)


@pytest.mark.usefixtures("app")
def test_visits_draw_one_at_a_time_until_tables_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "open_jobs", lambda worker: ())
    turn, alone, draw = Lock(), [], page.page
    monkeypatch.setattr(navigation, "_one_visit", turn)
    monkeypatch.setattr(navigation, "_tables_ready", Event())
    monkeypatch.setattr(page, "page", lambda: (alone.append(turn.locked()), draw()))
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    at.session_state["window"] = WINDOW
    at.run().run()
    assert alone == [True, False] and not turn.locked(), "the first run draws alone and loads pandas"


def test_the_request_for_the_page_begins_what_its_window_joins(app: App, worker: FakeWorker) -> None:
    window = {"type": "http", "path": "/", "query_string": b"model=sample_models%2Fgpt.py&size=gpu"}
    of_person = {**window, "headers": [(b"sec-fetch-dest", b"document")]}
    of_image = {**window, "headers": [(b"sec-fetch-dest", b"image")]}
    others = ({**of_person, "path": "/lab"}, {**of_person, "path": "/static/js/index.js"}, of_image)
    assert [address.visit_of(scope) for scope in others] == [None] * 3
    query = address.visit_of(of_person)
    assert query is not None
    work.begin(query)
    begun, at = job_of(worker), start_only(**query)
    assert at.session_state["explore"].job.id == begun.id and job_of(worker) is begun
    work.begin({**query, "size": "small"})
    assert job_of(worker) is begun, "a recorded run is drawn before its model is measured"
    work.begin({"model": "/etc/passwd.py"})
    begun.finish(failure=Failure(kind="crash", sentence="Gone."))
    work.begin({**query, "job": begun.id})
    assert job_of(worker) is begun, "a refresh finds its job again, and its failure"


def test_parts_of_the_own_run_take_its_place_and_clicks_stay(
    visit: Callable[[], AppTest], worker: FakeWorker, recorded: RecordedSample
) -> None:
    at, own = visit(), replace(graphs.measured(worker.graph, recorded.run.spec), graph=worker.graph)
    at = say(at, on=["blocks.0"])
    job = job_of(worker)
    assert job.request.with_graph and job.request.until_it_fits
    job.part = replace(own, allocations=None, phases=(), blocks=(), times=None)
    at = at.run()
    assert "recorded on another machine" in texts(at), "the graph alone has no figures"
    job.part = replace(own, times=None)
    at = at.run()
    assert "being timed" in texts(at) and "another machine" not in texts(at) and not drawn_before_plotly(at)
    assert "bytes held" in drawn_before_plotly(say(at, on=[])), "the own timeline before its chart"
    assert figures(at)["Step peak"].startswith(mib(own.step_peak_bytes).partition(" ")[0])
    assert figures(at)["Step time"] == "being timed" and len(slider(at)) > 1
    job.finish(own)
    at = at.run()
    assert "ms" in texts(at) or "≈ ×" in figures(at)["Step time"]
    assert not at.session_state["draft"].spec.policy.blocks
    again = preview({}, {})
    assert again is not None and (again["origin"], again["words"]) == ("", "Measured with everything kept.")


def test_a_stored_run_stands_in_for_a_changed_model_and_another_structure_ends_it(
    visit: Callable[[], AppTest], worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = replace(graphs.measured(worker.graph, RunSpec(model=MODEL)), graph=worker.graph)
    Store().save(stored)
    monkeypatch.setattr(backend, "store", Store)
    monkeypatch.setattr(repository, "is_current", lambda run, target: False)
    monkeypatch.setattr(work, "ran_here", lambda record: True)
    at = visit()
    assert "before the model's file changed, a moment ago" in texts(at)
    assert figures(at)["Step peak"] == mib(stored.step_peak_bytes)
    assert "file changed, a moment ago" in str(preview({}, {}))
    other = graphs.gpt(2)
    job_of(worker).part = replace(stored, graph=other, allocations=None, phases=(), blocks=(), times=None)
    at = at.run()
    assert figures(at)["Step peak"] == "not measured" and "moment ago" not in texts(at)
    assert len(graph_data(at)["geometry"]["rows"]) == len(other.children[""])


FIRST_PICTURE = """import sys
from streamlit.testing.v1 import AppTest
at = AppTest.from_file("app.py", default_timeout=60).run()
print(bool(at.get("bidi_component")), "pandas" in sys.modules)"""


def test_the_first_picture_is_drawn_without_pandas(tmp_path: Path) -> None:
    home = {**os.environ, "CHECKPOINT_EXPLORER_HOME": str(tmp_path)}
    drawn = subprocess.run([sys.executable, "-c", FIRST_PICTURE], cwd=ROOT, env=home, capture_output=True, text=True)
    assert drawn.stdout == "True False\n", drawn.stderr


def test_the_worker_of_a_new_server_waits_for_a_pause_between_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = iter([True, True, False])
    monkeypatch.setattr(server, "_visited", SimpleNamespace(wait=lambda seconds: next(visits), clear=lambda: None))
    server.wait_for_pause()
    assert not list(visits), "two visits, then none for PICTURE_S"
