"""The Pipeline page with a worker that knows the answers: split, prediction, run, address, tabs, files, failure."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Describe
from explorer.pipeline.jobs import FindJointPlan, ProfileStages, RunPipeline
from explorer.pipeline.plan.cuts import CutRule, stages_by
from explorer.pipeline.plan.joint import joint_plan
from explorer.pipeline.ui import split_panel
from explorer.pipeline.ui import state as pipeline_state
from explorer.pipeline.ui.results import FOLDER, zipped
from explorer.pipeline.ui.split_panel import fitting
from explorer.pipeline.ui.state import PipelineState
from explorer.pipeline.view.text import BALANCE
from explorer.plan.catalogue import own_samples
from explorer.record import Failure, ModelRef, Policy, RunSpec
from explorer.ui.session import backend
from explorer.ui.shared.draft import Draft
from explorer.view.drawing.units import MIB
from tests import graphs
from tests.pipeline import driver, pipelines
from tests.ui.page_driver import address, figures, graph_data, strip_cells, texts, widget


def offered(at: AppTest) -> list[str]:
    return [button.label for button in driver.open_tab(at, "Files").get("download_button")]


POLICY, REPORT = "Policy file with the plan (YAML)", "Report (HTML)"
SCRIPT_ZIP = "torchrun script, plan and schedule (zip)"


def test_what_is_offered_and_said_follows_the_plan(visit: driver.Open) -> None:
    at = visit()
    (balance,) = at.get("menu_button")
    assert list(balance.proto.options) == list(BALANCE.values())
    assert offered(at) == [POLICY, SCRIPT_ZIP]
    at = driver.run(at)
    assert offered(at) == [REPORT, POLICY, SCRIPT_ZIP]
    at = driver.say(driver.open_tab(at, "Schedule"), on=["blocks.1"])
    assert driver.policy(at) == Policy.recompute(["blocks.1"]) and "leaves out" not in texts(at)
    assert REPORT not in offered(at), "that run was of another plan"
    answer = texts(driver.say(at, on=["blocks.1", "blocks.2.mlp"]))
    assert "leaves out what is recomputed inside one (blocks.2.mlp)" in answer
    with zipfile.ZipFile(io.BytesIO(zipped({"plan.yaml": "a: 1\n", "run.py": "print()\n"}))) as archive:
        assert archive.namelist() == [f"{FOLDER}/plan.yaml", f"{FOLDER}/run.py"]
        assert archive.read(f"{FOLDER}/plan.yaml") == b"a: 1\n"


def test_a_schedule_says_what_it_needs_and_what_it_costs(visit: driver.Open) -> None:
    """Every block of the made-up profile takes the same time."""
    at = driver.say(visit(), on=["blocks.1"])
    at = driver.settled(widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    assert len(driver.stages_at(at)) == 4 and widget(at, "selectbox", "pipeline_n_ranks").value == 2, "the ranks stay"
    at = driver.settled(widget(at, "number_input", "pipeline_stages").set_value(2).run())
    assert "All stages are on one rank" in at.info[0].value
    at = driver.press(at, "pipeline_four")
    assert (
        len(driver.stages_at(at)) == 4
        and "pipeline_four" not in [button.key for button in at.button]
        and not at.warning
    )
    splitting = driver.settled(widget(at, "selectbox", "pipeline_schedule").set_value("ZBVZeroBubble").run())
    assert "splits backward" in splitting.warning[0].value
    assert "not predicted" in texts(splitting) and not splitting.button(key="pipeline_run").disabled
    at = driver.settled(widget(splitting, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    at = driver.settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert driver.stages_at(at) == [2] * 5 and figures(at)["Plan"] == "5 stages"
    assert "5 stages" in at.error[0].value
    assert at.button(key="pipeline_run").disabled
    assert offered(at) == [POLICY] and "These files need a plan that can run." in texts(at)


def test_the_address_restores_the_plan(visit: driver.Open) -> None:
    at = driver.say(visit(), cuts=driver.CUT, on=["blocks.2"])
    widget(at, "selectbox", "pipeline_schedule").set_value("GPipe")
    widget(at, "number_input", "pipeline_microbatches").set_value(8)
    widget(at, "selectbox", "pipeline_checkpoint").set_value("except_last")
    at = driver.settled(widget(at, "toggle", "pipeline_keyed_rng").set_value(False).run())
    again = visit(**address(at))
    assert sorted(graph_data(again)["cuts"]) == driver.CUT
    assert driver.policy(again) == driver.policy(at)
    assert again.session_state["pipeline"].choices == at.session_state["pipeline"].choices
    assert driver.chosen(again, "schedule") == "GPipe"


@pytest.mark.parametrize(
    ("query", "answer"), [({"cuts": "3", "schedule": "2F2B"}, "2F2B"), ({"cuts": "40"}, "behind block 40")]
)
def test_a_broken_plan_in_a_link_says_so_and_the_page_works(
    visit: driver.Open, query: dict[str, str], answer: str
) -> None:
    at = visit(model="sample_models/gpt.py", **query)
    assert answer in texts(at)
    assert figures(at)["Plan"] == "2 stages"


def test_a_rank_that_ends_is_named_in_every_tab(visit: driver.Open, pipeline_worker: driver.PipelineWorker) -> None:
    pipeline_worker.ended = Failure(kind="out of memory", sentence="Rank 1 failed in 1F2: out of memory."), 1
    at = driver.run(visit())
    assert "rank 1" in texts(at) and figures(at)["Gradients"] == "not compared"
    for name in ("Schedule", "Memory", "Gradients", "Calls", "Files"):
        assert "Rank 1 failed in 1F2" in texts(driver.open_tab(at, name))
    assert "failed in 1F2" not in texts(driver.press(at, "close_pipeline_run_failed"))


def test_the_batch_of_a_transformers_model_can_be_changed(visit: driver.Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "samples", lambda: own_samples(["hf:GPT2Config"]))
    at = visit()
    widget(at, "number_input", "argument_batch").set_value(8)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    assert driver.settled(at).session_state["draft"].spec.model.arguments == {"batch": 8}
    assert not at.session_state["pipeline"].job.failure


def test_what_is_known_to_go_wrong_stands_beside_run(visit: driver.Open) -> None:
    at = visit(cuts="3", microbatches="1")
    assert "Known before any run" in texts(at)
    assert "needs at least as many microbatches as stages" in texts(at)
    assert "Known before any run" not in texts(visit())


def test_a_model_is_priced_cut_in_two_and_run_and_an_older_run_is_never_shown_as_this_plan(
    visit: driver.Open, pipeline_worker: driver.PipelineWorker
) -> None:
    at, n = visit(), len(driver.GRAPH.chain)
    assert [type(job.request) for job in pipeline_worker.jobs.values()] == [Describe, ProfileStages]
    assert figures(at)["Plan"] == "2 stages" and figures(at)["Gradients"] == "not compared"
    assert "predicted" in texts(at)
    at = driver.run(driver.say(at, cuts=driver.CUT))
    assert figures(at)["Gradients"] == f"{n} of {n}" and "measured" in texts(at)
    (job,) = pipeline_worker.of(RunPipeline)
    assert [len(stage) for stage in job.request.spec.plan.stages] == [3, 3, 4]
    assert job.request.profile is not None
    measured = figures(at)["Step"]
    at = driver.say(at, cuts=driver.CUT[:1])
    assert figures(at)["Gradients"] == "not compared"
    assert f"an earlier plan: {measured}" in [cell["delta"] for cell in strip_cells(at)]
    assert figures(driver.say(at, cuts=driver.CUT))["Gradients"] == f"{n} of {n}"
    assert len(pipeline_worker.of(RunPipeline)) == 1


def test_a_model_that_is_only_predicted_is_not_split(
    visit: driver.Open, pipeline_worker: driver.PipelineWorker
) -> None:
    at = visit(predict="1")
    assert not pipeline_worker.jobs and at.button(key="pipeline_run").disabled
    assert "Stages are priced by real steps" in at.info[0].value and address(at)["predict"] == "1"
    at = driver.settled(widget(at, "toggle", "option_predict").set_value(False).run())
    assert pipeline_worker.of(ProfileStages) and not at.info and not at.button(key="pipeline_run").disabled


def alts(at: AppTest) -> list[str]:
    return [chart.proto.alt for chart in at.get("plotly_chart")]


def test_a_tab_has_its_charts_before_and_after_a_run(visit: driver.Open) -> None:
    charts = {
        "Schedule": (["One row a rank"], ["One row a rank"]),
        "Memory": (["Held bytes", "Stacked bars"], ["Held bytes", "Stacked bars"]),
        "Gradients": ([], ["Bars of the gradients"]),
        "Calls": ([], ["Bars of the runs per forward call"]),
    }
    at = visit()
    for has_run in (False, True):
        at = driver.run(at) if has_run else at
        for name, starts in charts.items():
            shown = alts(driver.open_tab(at, name))
            assert [alt for alt, start in zip(shown, starts[has_run], strict=True) if not alt.startswith(start)] == []


def test_why_the_blocks_have_no_price_stays_until_it_is_closed(
    visit: driver.Open, pipeline_worker: driver.PipelineWorker
) -> None:
    pipeline_worker.prices = False
    at = visit(waiting=True)
    (job,) = pipeline_worker.of(ProfileStages)
    job.finish(failure=Failure(kind="crash", sentence="The worker ended."))
    at = driver.settled(at.run())
    assert "The worker ended." in texts(at) and "The worker ended." in texts(driver.settled(at.run()))
    assert len(pipeline_worker.of(ProfileStages)) == 1, "one attempt while the card stands"
    pipeline_worker.prices = True
    at = driver.settled(at.button(key="close_pipeline").click().run())
    assert "The worker ended." not in texts(at)


SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py"))
PROFILE = pipelines.priced(driver.GRAPH, SPEC)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Messages of the browser."""
    state: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", state)
    yield state


@pytest.fixture
def split(session: dict[str, Any]) -> PipelineState:
    one = PipelineState(draft=Draft(spec=SPEC))
    pipeline_state.cut_at(one, driver.GRAPH, stages_by("by-parameters", driver.GRAPH, 3))
    return one


@pytest.mark.parametrize("rule", BALANCE)
def test_a_rule_cuts_into_all_stages(split: PipelineState, session: dict[str, Any], rule: CutRule) -> None:
    uneven = (driver.GRAPH.chain[:1], driver.GRAPH.chain[1:2], driver.GRAPH.chain[2:])
    pipeline_state.cut_at(split, driver.GRAPH, uneven)
    session["pipeline_balance"] = rule
    split_panel._balance(split, driver.GRAPH, PROFILE)
    stages = pipeline_state.stages_of(split, driver.GRAPH)
    assert len(stages) == 3 and stages != uneven and sum(stages, ()) == driver.GRAPH.chain
    pipeline_state.undo(split, driver.GRAPH)
    assert pipeline_state.stages_of(split, driver.GRAPH) == uneven, "one step of undo"
    split_panel.take_stages(split, driver.GRAPH, None, 99)
    assert split.job.failure is not None and "99" in split.job.failure.sentence
    assert pipeline_state.stages_of(split, driver.GRAPH) == uneven, "more stages than places change nothing"


@pytest.mark.parametrize(("n_rows", "wanted", "n"), [(2, 4, 2), (8, 4, 4), (6, 4, 3), (1, 4, 1)])
def test_a_first_plan_fits_the_batch(n_rows: int, wanted: int, n: int) -> None:
    graph = msgspec.structs.replace(graphs.gpt(2), input_shapes=((n_rows, 8),))
    assert fitting(wanted, graph) == n


def test_the_rows_of_a_stored_run_go_when_a_schedule_is_chosen_by_name(split: PipelineState) -> None:
    pipeline_state.choose(split, "actions", (("0F0", "0B0"),))
    assert split_panel.plan_of(split, (("a",),)).schedule_name == "own schedule"
    split_panel._choose_schedule(split, "GPipe")
    assert split_panel.plan_of(split, (("a",),)).schedule_name == "GPipe"


def test_ranks_are_chosen_where_the_schedule_leaves_them_open(visit: driver.Open) -> None:
    at = visit(cuts="1.2.3")
    assert widget(at, "selectbox", "pipeline_n_ranks").disabled
    at = driver.settled(widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    ranks = widget(at, "selectbox", "pipeline_n_ranks")
    assert (ranks.options, ranks.value) == (["1", "2", "4"], 4), "the four ranks of 1F1B stay"
    at = driver.settled(ranks.set_value(1).run())
    assert "one rank" in at.info[0].value
    assert address(at)["ranks"] == "1"
    again = visit(**address(at))
    assert widget(again, "selectbox", "pipeline_n_ranks").value == 1
    at = driver.settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert widget(at, "selectbox", "pipeline_n_ranks").value == 1


def test_cuts_microbatches_and_policy_are_planned_below_a_cap_that_a_run_keeps(
    visit: driver.Open, pipeline_worker: driver.PipelineWorker
) -> None:
    at = visit()
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at = driver.press(at, "pipeline_plan_button")
    assert driver.policy(at).blocks
    assert "Planned below 45" in texts(at)
    shown = at.session_state["pipeline"].planned
    assert max(shown.rank_bytes) <= 45 * 2**20
    assert driver.chosen(at, "n_microbatches") == shown.plan.n_microbatches
    assert set(graph_data(at)["on"]) == set(driver.policy(at).blocks)
    assert not pipeline_worker.of(RunPipeline)
    assert "Cap 45" not in texts(at)
    at = driver.run(at)
    assert "Cap 45.0 MiB kept: the fullest rank holds" in texts(at)
    at.session_state["pipeline"].planned = msgspec.structs.replace(shown, cap_bytes=MIB)
    assert "Cap 1.0 MiB missed: rank" in texts(at.run())
    at = driver.press(at, "pipeline_undo")
    assert not driver.policy(at).units
    assert "Planned below" not in texts(at) and "Cap 1" not in texts(at)
    widget(at, "text_input", "pipeline_cap").set_value("1 MiB")
    at = driver.press(at, "pipeline_plan_button")
    assert "No plan was found that keeps every rank below 1" in texts(at) and not driver.policy(at).units


def test_a_plan_below_a_cap_can_be_cancelled_and_is_dropped_where_the_page_went_on(
    visit: driver.Open, pipeline_worker: driver.PipelineWorker
) -> None:
    at, pipeline_worker.waits = visit(), True
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at.button(key="pipeline_plan_button").click().run()
    assert at.session_state["pipeline"].job.what == "FindJointPlan"
    at.run()
    at = driver.press(at, "pipeline_cancel")
    assert "The run was cancelled" in texts(at)
    assert not driver.policy(at).units
    at.button(key="pipeline_plan_button").click().run()
    widget(at, "selectbox", "pipeline_schedule").set_value("GPipe").run()
    job = pipeline_worker.of(FindJointPlan)[-1]
    pipeline_worker.plan(job, lambda: joint_plan(job.request.profile, job.request.graph, job.request.wish))
    at = driver.settled(at.run())
    assert "changed while another was sought" in texts(at)
    assert not driver.policy(at).units
