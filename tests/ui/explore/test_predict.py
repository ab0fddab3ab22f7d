"""Predictions: what a toggle would do, and a model of which nothing is allocated or run."""

from __future__ import annotations

import json
import re
import sys

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.jobs.on_card import CountOnCard
from explorer.jobs.protocol import Compare, Describe, FindPlans, Measure, MeasureRanks
from explorer.plan.card.cards import CARDS
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.policy.file import evidence_of
from explorer.record import Failure
from explorer.record.run import Ranks
from explorer.ui.explore.memory import OF_BASELINE, OF_CANDIDATE, picked_event
from explorer.ui.session import backend, repository
from explorer.ui.session.address import to_query
from explorer.ui.shared import draft as drafts
from explorer.view.drawing.units import mib
from tests.ui.fake_worker import COUNTED, UNSAFE, FakeJob, FakeWorker
from tests.ui.page_driver import (
    App,
    address,
    figures,
    graph_data,
    open_tab,
    press,
    say,
    settle,
    spec,
    strip_cells,
    texts,
    tools,
    widget,
)

ALL = [f"blocks.{i}" for i in range(6)]
NOTHING_RUNS = "Nothing of this model is allocated, so nothing can be run"


def switch(at: AppTest, *, on: bool) -> AppTest:
    return settle(widget(at, "toggle", "option_predict").set_value(on).run())


def origins(at: AppTest) -> set[str]:
    """Where the figures come from, below those of the strip."""
    return {cell["below"] for cell in strip_cells(at) if cell["below"]}


def test_a_toggle_and_every_preset_say_at_once_what_they_would_take(app: App, worker: FakeWorker) -> None:
    at = app()
    assert figures(at)["Step time"] == "102 ms"
    offered = [title for _, title in tools(at)["presets"]]
    assert "Keep all" in offered
    assert [title for title in offered if title.startswith("Recompute all: ≈ −67 % peak, ×2.0")], offered
    at = say(at, on=ALL)
    assert figures(at)["Step peak"] == "104.5 → ≈ 34.5 MiB" and "predicted" in texts(at)
    assert figures(at)["FLOPs"].startswith("≈ +") and not worker.of(Compare)
    assert re.fullmatch(r"≈ ×2\.0\d ± 0\.\d\d", figures(at)["Step time"]), "predicted, with its interval"
    at = press(at, "run")
    assert figures(at)["Step time"].startswith("×1.") and "±" in figures(at)["Step time"]
    shorter = figures(say(at, on=ALL[:5]))["Step time"]
    assert float(shorter.split()[1][1:]) < 1.6, "a whole step that was measured says what the next policy will take"


def test_nothing_is_allocated_and_every_figure_is_predicted(app: App, worker: FakeWorker) -> None:
    at = app()
    assert {"measured", "counted"} <= origins(at)
    before = len(worker.jobs)
    assert not worker.of(Measure)[0].request.without_data
    at = switch(at, on=True)
    asked = [job.request for job in list(worker.jobs.values())[before:]]
    assert all(request.without_data for request in asked if isinstance(request, Describe | Measure))
    assert {type(request) for request in asked} == {Describe, Measure, FindPlans}
    assert strip_cells(at)[0]["value"] == "104.5 MiB" and figures(at)["Step time"] == "not measured"
    assert "Nothing is allocated and nothing runs" in texts(at)
    assert "every figure is predicted" in texts(at) and UNSAFE in texts(at)
    assert "changed options] predict on" in texts(at) and origins(at) == {"predicted"}
    job = worker.of(Measure)[-1]
    assert not job.keep and job.run_id is None
    assert len(backend.store().list()) == 1, "the measured baseline of the first look"
    at = say(at, on=ALL)
    assert "→ ≈" in figures(at)["Step peak"]
    assert not worker.of(Compare)
    repository.runs().add("predicted", job.result)
    at = switch(at, on=False)
    run = repository.runs().measured(worker.of(Measure)[0].request.spec)
    assert run is not None and run.key != "predicted" and run.run.origin == "measured"
    assert "for the previous policy" not in texts(at) and not at.button(key="run").disabled
    at.session_state[repository.OPENED] = ["explore", backend.store().save(job.result, "predicted")]
    at = settle(at.run())
    assert at.session_state["draft"].predict and origins(at) == {"predicted"}, "opened, and not taken for measured"


def test_the_drawn_policy_is_played_by_the_button_in_place_of_run(app: App, worker: FakeWorker) -> None:
    at = say(switch(app(), on=True), on=ALL[:2])
    assert at.button(key="run").label.endswith("Predict") and "≈" in figures(at)["Step peak"]
    n = len(worker.of(Measure))
    at = settle(at.button(key="run").click().run())
    (job,) = worker.of(Measure)[n:]
    assert job.request.without_data and not job.keep and job.request.spec.policy.blocks == tuple(ALL[:2])
    assert not worker.of(Compare) and len(backend.store().list()) == 1
    played, strip = job.result, figures(at)
    assert strip["Step peak"] == f"104.5 → {mib(played.step_peak_bytes)}", "no ≈: it was played, not forecast"
    assert strip["Gradients"] == "not compared" and strip["Step time"] == "not measured"
    assert strip["Recomputed"].startswith("2 of") and origins(at) == {"predicted"}
    assert strip_cells(at)[5]["delta"] == "all would run again", "nothing ran"
    assert "Everything that was played without data" in texts(at)
    assert "Nothing ran." in texts(at)
    assert "Candidate" in at.segmented_control[0].options
    at = settle(widget(at, "text_input", "budget").set_value("500 MiB").run())
    at = say(at, on=ALL[:2])
    assert f"{mib(played.step_peak_bytes)} predicted: within 500.0 MiB" in texts(at) and figures(at) == strip
    at = say(at, on=ALL)
    assert "Press **Predict** to play it" in texts(at) and "before: 104.5" in texts(at)
    at = say(at, on=ALL[:2])
    assert figures(at) == strip and len(worker.of(Measure)) == n + 1, "it was played already"
    pair = repository.runs().record(at.session_state["explore"].shown)
    assert pair.is_predicted and pair.comparable
    repository.runs().add("pair", pair)
    assert repository.runs().measured(pair.candidate.spec) is None and not repository.runs().points(pair.baseline.spec)
    assert evidence_of(pair, worker.graph) is None, "what was played proves nothing"
    at = open_tab(at, "Cost")
    assert "no clock ran" in texts(at) and not [one for one in at.dataframe if "step time" in one.value]
    assert ["FLOPs by block", "Saved bytes"] in [list(control.options) for control in at.segmented_control]
    assert NOTHING_RUNS in texts(open_tab(at, "Gradients"))


def test_every_tab_stands_offers_no_run_and_a_changed_option_is_played_again(app: App, worker: FakeWorker) -> None:
    at = switch(app(), on=True)
    for tab in ("Memory", "Budget", "Cost", "Gradients", "Autograd"):
        at = open_tab(at, tab)
        running = ("draw", "measure_points")
        assert not [button.key for button in at.button if button.key in running and not button.disabled]
        if tab == "Cost":
            assert "Nothing has been played yet" in texts(at)
        if tab in ("Gradients", "Autograd"):
            assert NOTHING_RUNS in texts(at)
        if tab == "Memory":
            assert at.toggle(key="memory_time").disabled, "the player's clock is not the step's"
    n = len(worker.of(Measure))
    for dtype in ("float64", "own"):
        at = settle(widget(at, "selectbox", "option_dtype").set_value(dtype).run())
        assert len(worker.of(Measure)) == n + 1, "what was played already is not played again"
    assert worker.of(Measure)[-1].request.spec.dtype == "float64"
    assert "option_device" not in [one.key for one in at.selectbox], "it is played on the CPU"


def test_the_policy_stays_and_a_link_and_the_command_line_bring_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    at = switch(say(app(), on=ALL[:2]), on=True)
    assert graph_data(at)["on"] == ALL[:2]
    query = address(at)
    assert query["predict"] == "1"
    again = app(**query)
    assert again.session_state["draft"].predict and graph_data(again)["on"] == ALL[:2]
    monkeypatch.setattr(sys, "argv", ["app.py", "--predict"])
    at = app()
    assert at.session_state["draft"].predict and "predict" not in address(at)
    at = switch(at, on=False)
    assert address(at)["predict"] == "0" and not app(**address(at)).session_state["draft"].predict


@pytest.fixture(autouse=True)
def default_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of the page takes CUBLAS_WORKSPACE_CONFIG, which tests/conftest.py sets for CUDA."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def typed(at: AppTest, text: str) -> AppTest:
    """A card that is typed: AppTest chooses among the options alone, so this is the box's callback."""
    drafts.set_card(at.session_state["draft"], text)
    return settle(at.run())


def rows_on_card(at: AppTest) -> list[dict[str, str]]:
    (table,) = [one.value for one in at.dataframe if "stranded" in one.value]
    return table.to_dict("records")


def test_a_card_by_name_is_predicted_for_and_its_figures_stand_in_the_memory_view(app: App, worker: FakeWorker) -> None:
    at = settle(widget(app(), "selectbox", "option_card").set_value("b200").run())
    assert at.session_state["draft"].predict and worker.of(Measure)[-1].request.without_data
    run = worker.of(Measure)[-1].result
    assert run.spec.card == CARDS["b200"] and run.card.requested_bytes > run.step_peak_bytes, "cuBLAS has workspaces"
    (row,) = rows_on_card(at)
    figures = ("requested", "allocated", "reserved", "stranded", "headroom")
    assert [row[name] for name in figures] == [mib(getattr(run.card, f"{name}_bytes")) for name in figures]
    assert "changed options] predict on, for B200" in texts(at)
    assert re.search(r"(less|more|as much) reserved with .*expandable_segments:True", texts(at))
    again = app(**address(at))
    assert again.session_state["draft"].spec.card == CARDS["b200"] and rows_on_card(again) == [row]
    assert switch(again, on=False).session_state["draft"].spec.card is None and "stranded" not in texts(again)
    at = typed(at, "880 MiB")
    assert "Refused" in texts(at) and rows_on_card(at)[0]["headroom"].startswith("refused ")
    at = press(say(at, on=ALL), "run")
    assert [row["headroom"].startswith("refused ") for row in rows_on_card(at)] == [True, False]
    card = at.session_state["draft"].spec.card
    at = typed(at, "b201")
    assert "neither a card that is listed here nor a size" in texts(at)
    assert at.session_state["draft"].spec.card == card


def test_the_budget_may_be_the_card(app: App, worker: FakeWorker) -> None:
    """The plan is drawn with the step that was played to confirm it: nothing is left to press."""
    at = typed(app(), "880 MiB")
    n = len(worker.of(Measure))
    at = settle(widget(at, "text_input", "budget").set_value("Card").run())
    drawn = at.session_state["draft"].spec
    assert drawn.policy.units and at.session_state["explore"].budget.plan.bounded == "reserved"
    (row,) = [row for row in rows_on_card(at) if row["run"] == "candidate"]
    assert f"{row['reserved']} reserved, predicted: within 80.0 MiB" in texts(at)
    assert not row["headroom"].startswith("refused") and len(worker.of(Measure)) == n
    assert memory_on(drawn.card, worker.played(drawn)).reserved_bytes <= 80 * 2**20
    at = typed(at, "810 MiB")
    at = settle(widget(at, "text_input", "budget").set_value("card ").run())
    assert "o policy brings this step below 10.0 MiB" in texts(at) or "No plan that was tried keeps" in texts(at)
    at = settle(widget(switch(at, on=False), "text_input", "budget").set_value("card").run())
    assert "not predicted for a card" in texts(at)


def test_an_unpredictable_model_is_one_sentence(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "gpt.py cannot be predicted without its data: it decides by values that it computes."

    def answer(job: FakeJob) -> None:
        if isinstance(job.request, Measure) and job.request.without_data:
            job.finish(failure=Failure(kind="model raised", sentence=fault, hint="Measure a smaller build."))
        else:
            FakeWorker.answer(worker, job)

    monkeypatch.setattr(worker, "answer", answer)
    at = switch(app(), on=True)
    assert [one.value for one in at.text if "predicted" in one.value] == [fault]
    assert len([job for job in worker.of(Measure) if job.request.without_data]) == 1, "one attempt"
    assert figures(at)["Step peak"] == "not measured"


def with_ranks(at: AppTest, n_ranks: int) -> AppTest:
    return settle(widget(at, "number_input", "option_ranks").set_value(n_ranks).run())


def test_the_fullest_of_the_predicted_ranks_is_drawn_and_all_stand_below(app: App, worker: FakeWorker) -> None:
    at = with_ranks(app(), 8)
    (job,) = worker.of(MeasureRanks)
    assert job.request.without_data and not job.keep and spec(at).ranks == Ranks(n_ranks=8)
    assert figures(at)["Step peak"] == mib(job.result.fullest.step_peak_bytes)
    assert "changed options] predict on, 8 ranks, FSDP2 x 8" in texts(at)
    collectives, bars = (json.loads(chart.proto.spec) for chart in at.get("plotly_chart")[:2])
    (marks,) = [trace for trace in collectives["data"] if trace["name"] == "all-gather (6)"]
    assert picked_event(marks["customdata"][0], OF_BASELINE) is None, "a click on a collective picks no event"
    assert picked_event(["run", 7], OF_CANDIDATE) == ("candidate", 7) and picked_event(None, OF_BASELINE) is None
    assert len(marks["x"]) == 6 and marks["customdata"][3] == ["1.0 MiB", "forward of blocks.3", "896.0 KiB"]
    assert bars["data"][0]["y"] == ["ranks 0 to 6", "rank 7"]
    (calls,) = [table.value for table in at.dataframe if "collective" in table.value]
    assert calls.to_dict("records")[0]["calls"] == 6
    at = say(at, on=ALL)
    assert "→ ≈" in figures(at)["Step peak"] and len(worker.of(MeasureRanks)) == 1, "a toggle is answered at once"
    at = press(at, "run")
    played = worker.of(MeasureRanks)[-1].result.fullest
    assert figures(at)["Step peak"].endswith(f"→ {mib(played.step_peak_bytes)}") and not worker.of(Compare)
    again = app(**address(at))
    assert spec(again) == spec(at) and again.session_state["draft"].predict
    n = len(worker.of(MeasureRanks))
    own = app(**to_query(replace(spec(at), ranks=Ranks(n_ranks=2, data="none", parallelize="os:system"))))
    assert len(worker.of(MeasureRanks)) == n and "os:system, which the page does not load" in texts(own)
    at = settle(widget(at, "selectbox", "option_split").set_value("DDP").run())
    assert spec(at).ranks == Ranks(n_ranks=8, data="ddp") == worker.of(MeasureRanks)[-1].request.spec.ranks
    at = settle(widget(at, "selectbox", "option_split").set_value("tensor parallel").run())
    assert spec(at).ranks == Ranks(n_ranks=8, data="none", n_tensor=8)
    assert spec(with_ranks(at, 1)).ranks is None
    assert spec(switch(with_ranks(at, 4), on=False)).ranks is None


def test_torchs_own_code_counts_the_predicted_step_beside_the_card(app: App, worker: FakeWorker) -> None:
    at = app()
    assert not [button for button in at.button if button.key == "count_on_card"], "no card is chosen"
    at = press(settle(widget(at, "selectbox", "option_card").set_value("b200").run()), "count_on_card")
    (job,) = worker.of(CountOnCard)
    assert job.request.spec == at.session_state["draft"].spec and job.request.spec.card == CARDS["b200"]
    memory = worker.of(Measure)[-1].result.card
    both = [*COUNTED, memory.allocated_bytes, memory.reserved_bytes]
    assert all(f"{n_bytes:,}" in texts(at) for n_bytes in both) and "imaginary B200" in texts(at)
    at = settle(widget(at, "selectbox", "option_card").set_value("h100").run())
    assert f"{COUNTED[0]:,}" not in texts(at), "another card was counted"
    worker.build_failure = Failure(kind="bad input", sentence="torch is built without CUDA.", hint="pip install torch")
    at = press(at, "count_on_card")
    assert "torch is built without CUDA." in texts(at) and "pip install torch" in texts(at)
