"""Decisions on the Pipeline page: clicks count in their order, and a link brings back what was chosen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.pipeline.jobs import ProfileStages, RunPipeline
from explorer.pipeline.plan.cuts import stages_by
from explorer.pipeline.plan.schedules import USUAL
from explorer.pipeline.ui import state as pipeline_state
from explorer.pipeline.ui.state import MOST_MICROBATCHES, SWITCHES, WORDS, cuts_at, plan_from_query, plan_to_query
from explorer.record import PipelinePlan, Policy
from tests import graphs
from tests.pipeline import pipelines
from tests.pipeline.driver import CUT, GRAPH, Open, PipelineWorker, policy, press, say, settled, stages_at
from tests.ui.page_driver import address, figures, graph_data, message, texts, widget


def test_cuts_and_toggles_are_drawn_take_effect_and_are_undone(visit: Open, pipeline_worker: PipelineWorker) -> None:
    at = visit()
    data, before = graph_data(at), figures(at)["Step"]
    assert set(GRAPH.chain) <= {row[0] for row in data["geometry"]["rows"]}
    stages = [data["labels"][fqn][5] for fqn in GRAPH.chain]
    assert stages == sorted(stages) and set(stages) == {0, 1}
    assert len(data["geometry"]["cuts"]) == len(GRAPH.cuts)
    assert {cut[4] for cut in data["geometry"]["cuts"]} == {"cut: 128.0 KiB a microbatch"}
    at = say(at, cuts=CUT)
    assert figures(at)["Plan"] == "3 stages" and figures(at)["Step"] != before
    assert widget(at, "number_input", "pipeline_stages").value == 3 and address(at)["cuts"] == "3.6"
    assert not pipeline_worker.of(RunPipeline)
    at = say(at, on=["head"])
    assert policy(at) == Policy.recompute(["head"]) and "1 block recomputed" in texts(at)
    at = press(at, "pipeline_undo")
    assert (graph_data(at)["on"], policy(at), sorted(graph_data(at)["cuts"])) == ([], Policy(), CUT)
    at = press(at, "pipeline_undo")
    assert len(graph_data(at)["cuts"]) == 1 and not can_undo(at)
    at = press(press(at, "pipeline_redo"), "pipeline_redo")
    assert graph_data(at)["on"] == ["head"] and sorted(graph_data(at)["cuts"]) == CUT
    at = say(at, on=["head", "blocks.2"])
    assert policy(at) == Policy.recompute(["blocks.2", "head"]), "in the order of the model"


def can_undo(at: Any) -> bool:
    return "pipeline_undo" in [button.key for button in at.button]


@pytest.mark.parametrize("touched", [False, True])
def test_an_untouched_split_is_evened_out(visit: Open, pipeline_worker: PipelineWorker, touched: bool) -> None:
    pipeline_worker.prices = False
    at = visit(waiting=True)
    assert stages_at(at) == [len(stage) for stage in stages_by("by-parameters", GRAPH, 2)] == [5, 5]
    if touched:
        at.session_state[pipeline_state.WIDGET] = message(at, cuts=CUT[:1])
        at.run()
    (job,) = pipeline_worker.of(ProfileStages)
    even = pipelines.priced(GRAPH, job.request.spec)
    slow = msgspec.structs.replace(even.blocks[0], kept=msgspec.structs.replace(even.blocks[0].kept, forward_ms=6.0))
    job.finish(msgspec.structs.replace(even, blocks=(slow, *even.blocks[1:])))
    at = settled(at.run())
    assert stages_at(at) == ([3, 7] if touched else [4, 6])
    assert can_undo(at) == touched


def test_a_policy_from_elsewhere_is_drawn_and_keeps_the_click_under_way(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    answer = message(at, on=["blocks.1", "blocks.3"])
    draft = at.session_state["draft"]
    draft.spec = msgspec.structs.replace(draft.spec, policy=Policy.recompute(["head"]))
    at.session_state[pipeline_state.WIDGET] = answer
    at = settled(at.run())
    assert graph_data(at)["on"] == ["blocks.3", "head"]
    assert set(policy(at).blocks) == {"blocks.3", "head"}


@pytest.mark.parametrize(
    ("pressed", "cuts"), [(False, ["blocks.0>blocks.1", "blocks.4>blocks.5"]), (True, ["blocks.0>blocks.1"])]
)
def test_a_cut_during_a_redo_counts_in_order(visit: Open, pressed: bool, cuts: list[str]) -> None:
    at = say(visit(), cuts=["blocks.0>blocks.1"])
    at = say(at, cuts=CUT)
    before = graph_data(at)["cuts"]
    if pressed:
        at = press(at, "pipeline_undo")
        at.session_state[pipeline_state.WIDGET] = message(at, pressed=True, cuts=CUT)
    else:
        at.session_state[pipeline_state.WIDGET] = message(at, cuts=[*before, "blocks.4>blocks.5"])
    at = press(at, "pipeline_undo")
    assert sorted(graph_data(at)["cuts"]) == cuts
    at.session_state[pipeline_state.WIDGET] = message(at, cuts=[*graph_data(at)["cuts"], "norm>head"])
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(2).run())
    assert "norm>head" in graph_data(at)["cuts"]
    assert widget(at, "number_input", "pipeline_stages").value == len(graph_data(at)["cuts"]) + 1


UNET = graphs.unet(3)
choices = st.builds(
    PipelinePlan,
    stages=st.just(()),
    n_microbatches=st.integers(1, MOST_MICROBATCHES),
    schedule=st.sampled_from(WORDS["schedule"]),
    checkpoint=st.sampled_from(WORDS["checkpoint"]),
    n_ranks=st.none() | st.integers(1, 9),
    **{name: st.booleans() for name in SWITCHES},
)


@given(choices, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_link_restores_choices_and_cuts(chosen: PipelinePlan, sizes: list[int]) -> None:
    stages = tuple(tuple(f"b{stage}.{i}" for i in range(size)) for stage, size in enumerate(sizes))
    again, places = plan_from_query(plan_to_query(chosen, stages))
    assert again == chosen
    assert places == [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]


def test_all_faults_are_told_at_once() -> None:
    query = {"microbatches": "0", "ranks": "two", "schedule": "1F2B", "keyed": "yes", "cuts": "3.3"}
    with pytest.raises(UnreadableFile) as told:
        plan_from_query(query)
    assert all(f"{name}={text}" in told.value.sentence for name, text in query.items())
    assert "1F1B" in told.value.sentence, "what was meant, perhaps"
    assert plan_to_query(USUAL, (("a",), ("b", "c"))) == {"cuts": "1"} and plan_from_query({}) == (USUAL, None)
    uncut = plan_from_query(plan_to_query(USUAL, (("a", "b"),)))
    assert uncut == (USUAL, []), "one stage is a cut nowhere, and said so"


def test_a_cut_stands_where_the_model_allows_one() -> None:
    first, second, third = UNET.chain[:3]
    assert cuts_at([2], UNET) == [f"{second}>{third}"]
    with pytest.raises(UnreadableFile) as told:
        cuts_at([1, len(UNET.chain)], UNET)
    assert f"no cut behind {first}: the skip from down0 crosses" in told.value.sentence
    assert f"no place behind block {len(UNET.chain)} of {len(UNET.chain)}" in told.value.sentence
